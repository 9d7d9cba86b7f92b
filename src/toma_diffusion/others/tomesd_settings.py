"""Settings of ToMeSD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from toma_diffusion.checks import check_integer, check_sequence
from toma_diffusion.errors import UsageError
from toma_diffusion.merge.base import Merging


@dataclass(frozen=True, kw_only=True)
class ToMeSDConfig(Merging):
    """Settings of ToMeSD. Immutable; a wrong value raises `UsageError` at once.

    In every block, one token of each small cell is a destination. The most similar other tokens are averaged into their
    destinations before self-attention, and get a copy of the result after it.

    It was made for UNets. SD3 and PixArt need no changes; all of their blocks are merged. On Flux a merged token gets
    the RoPE row of its destination, a batch shares one matching (by the mean of its similarities, because it shares
    one RoPE table), and single blocks merge their MLP together with their attention, because both run in parallel.

    Example:

    ```python
    >>> from toma_diffusion import ToMeSDConfig
    >>> ToMeSDConfig(ratio=0.75).ratio
    0.75
    >>> ToMeSDConfig(ratio=0.8)
    Traceback (most recent call last):
    toma_diffusion.errors.UsageError: ratio=0.8 is not allowed: cells of 2×2 tokens leave one in each, ...
    ```
    """

    label: ClassVar[str] = "ToMeSD"

    sites: tuple[str, ...] = ("attn",)
    """Which modules to merge, out of `attn`, `cross_attn` and `ff`. More is faster; the authors recommend `attn`."""

    max_downsample: int = 1
    """Merge down to this downsampling: 1, 2, 4 or 8. Higher merges in more blocks. Counted from the first level that
    has attention, so that 1 is the highest resolution with attention on every model. (The authors count from the
    latent, where SDXL has no attention: there their default does nothing.)"""

    cell: tuple[int, int] = (2, 2)
    """Height and width of the cells that have one destination each. Larger allows a higher ratio."""

    random: bool = True
    """Whether the destination of a cell is random in every block and step, or always the top left token. Odd batches
    always use the top left token, as in the authors' code: the two halves of guidance are then in different calls, and
    different destinations for them cause artifacts."""

    seed: int | None = None
    """Seed of the random destinations, with which each generation starts. None: start from a copy of torch's random
    state. The random state itself is never changed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("sites", self._valid_sites(self.sites))
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

    @property
    def merged_sites(self) -> tuple[str, ...]:
        return self.sites
