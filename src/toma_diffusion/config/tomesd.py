"""Settings of ToMeSD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from toma_diffusion.config.base import Config, check_integer, check_sequence
from toma_diffusion.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class ToMeSDConfig(Config):
    """Settings of ToMeSD. Immutable; a wrong value raises `UsageError` at once.

    In every block one token of each small cell is a destination. The sources most similar to one merge into it, as a
    mean, before self-attention; after it every source gets a copy of its destination's result.

    It was made for UNets. Elsewhere it is carried over so: SD3 and PixArt as they are, all of their blocks; on Flux a
    merged token takes the RoPE row of its destination, a batch shares one matching (by the mean of its similarities,
    since it shares one RoPE table), and single blocks merge their MLP together with their attention, as both run side
    by side.

    Example:

    ```python
    >>> from toma_diffusion import ToMeSDConfig
    >>> ToMeSDConfig(ratio=0.75).ratio
    0.75
    >>> ToMeSDConfig(ratio=0.8)
    Traceback (most recent call last):
    UsageError: ratio=0.8 is not allowed: cells of 2×2 tokens leave one in each, so it can be 0.75 at most.
    ```
    """

    label: ClassVar[str] = "ToMeSD"

    sites: tuple[str, ...] = ("attn",)
    """Which modules to merge, out of `attn`, `cross_attn` and `ff`. More is faster; the authors advise against more."""

    max_downsample: int = 1
    """Act down to this downsampling: 1, 2, 4 or 8. Higher acts in more blocks. Counted from the first level that has
    attention, so that 1 is the highest resolution of SD 1.5 and of SDXL alike. (The authors count from the latent;
    SDXL has no attention there, so that their default does nothing on it.)"""

    cell: tuple[int, int] = (2, 2)
    """Height and width of the cells that have one destination each. Larger allows a higher ratio."""

    random: bool = True
    """Whether the destination of a cell is drawn at random in every block and step; else it is the top left token.
    Odd batches always take the top left token, as the authors do: the two halves of guidance are then in different
    calls, and different draws for them make artifacts."""

    seed: int | None = None
    """Of the draws, which come from a generator of their own: the user's random state is never touched. Each
    generation starts with this seed; None starts it with a copy of torch's random state, as the authors do once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("sites", self._valid_sites())
        cell = check_sequence("cell", self.cell, "height and width")
        if len(cell) != 2:
            raise UsageError(f"cell={self.cell!r} is not allowed: it must be height and width.")
        self._set("cell", tuple(check_integer("cell", side, minimum=1) for side in cell))
        if self.max_downsample not in (1, 2, 4, 8):
            raise UsageError(f"max_downsample={self.max_downsample!r} is not allowed: it must be 1, 2, 4 or 8.")
        if not isinstance(self.random, bool):
            raise UsageError(f"random={self.random!r} is not allowed: it must be True or False.")
        if self.seed is not None:
            self._set("seed", check_integer("seed", self.seed, minimum=0))
        height, width = self.cell
        most = 1 - 1 / (height * width)
        if self.ratio > most:
            raise UsageError(
                f"ratio={self.ratio:g} is not allowed: cells of {height}×{width} tokens leave one in each, so it can "
                f"be {most:.4g} at most."
            )
