"""Settings of ToMA, and its named presets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

from toma_diffusion.config.base import SITES, Config, check_integer, check_number, check_one_of, hint, listed
from toma_diffusion.errors import UsageError

SELECTIONS = ("facility-location", "random", "strided", "none", "slice")
REGIONS = ("tile", "stripe", "global")
ASSIGNMENTS = ("local", "global")
UNMERGES = ("transpose", "pseudo-inverse")
SCOPES = ("module", "block", "stage")
BACKENDS = ("auto", "torch", "triton")
BOUNDS = ("lower-bound", "floor")
"""Were presets once. They make noise of a picture: only `toma bench` needs them."""


@dataclass(frozen=True, kw_only=True)
class ToMAConfig(Config):
    """All settings of token merging by ToMA. Immutable; a wrong value raises `UsageError` at once.

    Example:

    ```python
    >>> from toma_diffusion import ToMAConfig
    >>> config = ToMAConfig(ratio=0.5, region="tile", num_regions=64)
    >>> ToMAConfig.from_json(config.to_json()) == config
    True
    >>> ToMAConfig.from_preset("toma-tile", ratio=0.75).num_regions
    256
    ```
    """

    label: ClassVar[str] = "ToMA"

    selection: str = "facility-location"
    """How destinations are chosen: `facility-location` (the paper's), `random` or `strided` (fixed, to compare
    against), `none`: neither destinations nor weights are computed, a fixed random projection stands in for them, or
    `slice`: nothing is merged at all, the first tokens are taken and the others dropped. The last two make noise of a
    picture; their time is the bound that no selection (`none`) and no merging whatever (`slice`) can beat."""

    region: str = "tile"
    """Shape of the regions inside which destinations are chosen: `tile` (rectangles, best quality), `stripe` (runs of
    the row-major sequence, no reshuffle) or `global` (one region, slowest to select in)."""

    num_regions: int = 64
    """How many regions to ask for. More is faster and keeps destinations closer to their tokens. The nearest number
    that divides the grid evenly is taken. `global` always has one."""

    assign: str = "local"
    """Which destinations a token may merge into: `local` (those of its own region; block-diagonal weights, cheap) or
    `global` (all of them; a full matrix, dearer)."""

    scale: float = 1000.0
    """Sharpness 1/τ of the softmax over destinations. Higher is closer to a hard assignment, lower blends more.
    `math.inf` (or `"inf"`) is the hard assignment: every token goes to its nearest destination alone. An index then
    takes the place of the weight matrix, which is faster, most of all with `assign="global"`."""

    unmerge: str = "transpose"
    """How the result is spread back: `transpose` (fast) or `pseudo-inverse` (least-squares exact, much slower)."""

    scope: str = "module"
    """Where to merge and unmerge: around each `module` (the paper's ToMA), around each `block` (ToMA*), or around a
    run of blocks, a `stage`. Wider is faster and loses more detail."""

    sites: tuple[str, ...] = SITES
    """Which modules to merge in `module` scope, out of `attn`, `cross_attn` and `ff`. More is faster."""

    min_tokens: int = 0
    """Grids of fewer tokens are left whole. In a small grid every token counts for much of the picture, and merging it
    saves little."""

    select_every: int = 10
    """Steps between two selections of destinations. Higher is faster; 1 selects in every step."""

    reweigh_every: int = 5
    """Steps between two computations of the merge weights. Higher is faster; a selection always reweighs."""

    num_plans: int = 1
    """How many plans the blocks of one kind (in `stage` scope: the runs of blocks) take in turn. With one, the paper's,
    a token that is merged away is merged away everywhere; with more, and `rotation` above 0, other tokens are
    destinations in the next block. Each plan is selected and weighed on its own, which costs time and memory."""

    rotation: float = 0.0
    """How strongly tokens are favoured that were not chosen lately: a token's gain is damped by exp(−rotation) for
    every time it was a destination before in this generation, in any plan of its kind. 0 looks at the tokens alone, as
    the paper does. `random` destinations are drawn anew for every plan and `strided` ones shifted by one token,
    whatever the rotation."""

    backend: str = "auto"
    """Which implementation of the operators runs: `torch`, `triton` (fused kernels, NVIDIA GPUs), or `auto` for the
    fastest one that the machine offers. Where `triton` cannot run, `torch` does, with a warning."""

    def __post_init__(self) -> None:
        super().__post_init__()
        scale: object = self.scale
        scale = math.inf if scale == "inf" else scale
        self._set("scale", check_number("scale", scale, "a number above 0, or math.inf", lambda x: x > 0))
        self._set("rotation", check_number("rotation", self.rotation, "0 or more, and finite", _is_damping))
        for name in ("num_regions", "select_every", "reweigh_every", "num_plans"):
            self._set(name, check_integer(name, getattr(self, name), minimum=1))
        self._set("min_tokens", check_integer("min_tokens", self.min_tokens, minimum=0))
        for name, allowed in (
            ("selection", SELECTIONS),
            ("region", REGIONS),
            ("assign", ASSIGNMENTS),
            ("unmerge", UNMERGES),
            ("scope", SCOPES),
            ("backend", BACKENDS),
        ):
            check_one_of(name, getattr(self, name), allowed)
        self._set("sites", self._valid_sites())

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> ToMAConfig:
        """The preset `name` of `PRESETS`, with single fields replaced by `overrides`."""
        cls.check_not_a_bound(name)
        if name not in PRESETS:
            raise UsageError(f"preset={name!r} is not known: {listed(PRESETS)}.{hint(name, PRESETS)}")
        cls._reject_unknown_fields(overrides)
        return replace(PRESETS[name], **overrides)

    @staticmethod
    def check_not_a_bound(name: str) -> None:
        """Raise for the two names that are presets no longer."""
        if name in BOUNDS:
            raise UsageError(
                f"{name!r} is not a preset any more: it turns pictures into noise and only bounds the time of others. "
                f"Use `toma bench --bounds {name}` to measure it."
            )

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, in the types that JSON knows (tuples become lists, infinity "inf")."""
        plain = super().to_dict()
        return plain | {"scale": "inf"} if self.is_hard else plain

    @property
    def is_hard(self) -> bool:
        """Whether every token goes to one destination alone."""
        return math.isinf(self.scale)


def _is_damping(value: float) -> bool:
    return 0 <= value < math.inf


PRESETS: Mapping[str, ToMAConfig] = MappingProxyType(
    {
        "toma": ToMAConfig(region="tile", num_regions=64, assign="global", scale=math.inf, scope="module"),
        "toma-stripe": ToMAConfig(region="stripe", num_regions=64, assign="local", scope="module"),
        "toma-tile": ToMAConfig(region="tile", num_regions=256, assign="local", scope="module"),
        "toma-once": ToMAConfig(region="tile", num_regions=64, assign="local", scope="block"),
        "fast": ToMAConfig(region="tile", num_regions=64, assign="local", scope="stage"),
        "balanced": ToMAConfig(
            region="tile",
            num_regions=64,
            assign="local",
            scope="block",
            select_every=1,
            reweigh_every=1,
            window=(0.5, 1.0),
            min_tokens=512,
        ),
    }
)
"""The paper's variants by name, and ours: `fast`, and `balanced`, which stays nearest to the picture without merging.

`balanced` leaves the first half of the steps whole, where the picture takes its shape, and small grids, and chooses
anew in every step, which small regions make cheap: on the bundled model the three that help most (docs/quality.md).

`toma` takes the limit of the paper's sharp softmax, a hard assignment: the patches of a photograph come back nearer to
themselves (40.9 against 37.2 dB at ratio 0.25, benchmarks/results/assignment.csv), and an index is faster than a matrix
over all tokens. The paper's own is `scale=1000`."""
