"""Settings of ToMA, and its named presets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from toma_diffusion.checks import check_flag, check_integer, check_number, check_one_of, hint, listed
from toma_diffusion.errors import UsageError
from toma_diffusion.merge.base import SITES, Config
from toma_diffusion.skip.config import Skip

SELECTIONS = ("facility-location", "random", "strided", "none", "slice")
REGIONS = ("tile", "stripe", "global")
ASSIGNMENTS = ("local", "global")
UNMERGES = ("transpose", "pseudo-inverse")
SCOPES = ("module", "block", "stage")
SHARES = ("plan", "destinations", "nothing")
BACKENDS = ("auto", "torch", "triton")
BOUNDS = ("lower-bound", "floor")
"""Former presets. They turn images into noise; only `toma bench` uses them, as bounds of the time."""


@dataclass(frozen=True, kw_only=True)
class ToMAConfig(Config):
    """All settings of token merging by ToMA. Immutable; a wrong value raises `UsageError` at once.

    Example:

    ```python
    >>> from toma_diffusion import ToMAConfig
    >>> config = ToMAConfig(ratio=0.5, region="tile", region_tokens=64)
    >>> ToMAConfig.from_json(config.to_json()) == config
    True
    >>> ToMAConfig.from_preset("toma-tile", ratio=0.75).num_regions
    256
    ```
    """

    label: ClassVar[str] = "ToMA"

    selection: str = "facility-location"
    """How destinations are selected: `facility-location` (the paper's), or `random` or `strided` (fixed, for
    comparison). `none` computes neither destinations nor weights, and uses a fixed random projection. `slice` keeps
    the first tokens and drops the others. These two turn images into noise. Their time is a lower bound: `none` for
    any selection, `slice` for any merging."""

    region: str = "tile"
    """Shape of the regions in which destinations are selected: `tile` (rectangles, best quality), `stripe` (runs of
    the row-major sequence, which need no reordering) or `global` (one region, slowest)."""

    region_tokens: int = 256
    """Requested number of tokens in a region. Tokens merge only inside their region, with `assign="local"`. The nearest
    shape that divides the grid evenly is used. Larger regions offer more destinations. `global` takes the whole
    grid."""

    selection_tokens: int = 64
    """Requested number of tokens in the parts of a region in which destinations are selected. Each part selects its
    share. Smaller is faster; as large as `region_tokens`, the whole region selects at once."""

    num_regions: int | None = None
    """Requested number of regions, in place of `region_tokens` and `selection_tokens`. This is how the paper counts:
    the same number then means small regions on a small grid and large ones on a large grid."""

    distance_weight: float = 0.3
    """How much nearness in the image counts: the similarity of two tokens is their cosine minus this times the square
    of their distance, where the distance is measured in sides of a region. 0, as in the paper, ignores where tokens
    are. Then, in large regions, a token may merge with its mirror image on the other side of an object."""

    region_frames: int = 4
    """Requested frames of a region, for tiles in a video: with 256 tokens, 4 frames of 8×8. The nearest number that
    divides the frames is taken: of 21 frames 3. If none does, as with 31, the first frame is left whole where the other
    30 can be divided. 1 merges within each frame alone. Images have one frame."""

    frame_weight: float | None = None
    """How much nearness in time counts in a video: times the square of the distance in frames, measured in frames of a
    region. None: as much as `distance_weight`."""

    guidance_parts: int | str = "auto"
    """Which samples share one plan because they are the same picture with another prompt, as in classifier-free
    guidance. They then choose destinations together, by the mean of their similarities. `auto` reads from the running
    pipeline how many parts the batch of a call has; several calls in one step with the same sample share one plan in
    any model. For a model without a pipeline, a number: the batch of every call is that many parts of equal size, one
    after another. 1: every sample and every call for itself."""

    assign: str = "local"
    """Which destinations a token may merge into: `local` (those of its own region; block-diagonal weights, fast) or
    `global` (all of them; a full matrix, slower)."""

    scale: float = 1000.0
    """Sharpness 1/τ of the softmax over destinations. Higher is closer to a hard assignment, lower blends more.
    `math.inf` (or `"inf"`) is the hard assignment: every token goes to its nearest destination alone. An index then
    replaces the weight matrix, which is faster, most of all with `assign="global"`."""

    unmerge: str = "transpose"
    """How results are spread back to all tokens: `transpose` (fast) or `pseudo-inverse` (the least-squares solution,
    much slower)."""

    scope: str = "module"
    """Where to merge and unmerge: around each `module` (the paper's ToMA), each `block` (the paper's ToMA*), or a
    `stage`, which is a run of blocks. Wider is faster and may lose more detail."""

    sites: tuple[str, ...] = SITES
    """Which modules to merge in `module` scope, out of `attn`, `cross_attn` and `ff`. More is faster."""

    min_tokens: int = 0
    """Grids with fewer tokens are not merged. There every token represents a large part of the image, and merging
    saves little. Higher is slower and keeps more detail."""

    select_every: int = 10
    """Steps between two selections of destinations. Higher is faster; 1 selects in every step."""

    reweigh_every: int = 5
    """Steps between two computations of the merge weights. Higher is faster; a selection always reweighs."""

    share: str = "nothing"
    """What runs of blocks of the same kind share, such as the `Transformer2DModel`s of one level of a UNet: the whole
    `plan`, as in the paper; its `destinations`, with weights for every run; or `nothing`. In a UNet, tokens before and
    after the middle differ much, and weights of one do not fit the other. Blocks of one run always share a plan."""

    size_aware_attention: bool = False
    """Whether a merged token counts in self-attention as often as the tokens it stands for: the logarithm of their
    number is added to the logit of its key. Closer to the original; attention with a bias is slower on most GPUs."""

    norm_preserving: bool = False
    """Whether a merged token has the mean length of its tokens, not the length of their mean, which is shorter."""

    backend: str = "auto"
    """Which implementation of the operators runs: `torch`, `triton` (fused kernels, NVIDIA GPUs), or `auto` for the
    fastest one available. Where `triton` cannot run, `torch` is used, with a warning."""

    def __post_init__(self) -> None:
        super().__post_init__()
        scale: object = self.scale
        scale = math.inf if scale == "inf" else scale
        self._set("scale", check_number("scale", scale, "a number above 0, or math.inf", lambda x: x > 0))
        for name in ("distance_weight", "frame_weight") if self.frame_weight is not None else ("distance_weight",):
            self._set(name, check_number(name, getattr(self, name), "0 or more, and finite", _is_finite))
        for name in ("region_tokens", "selection_tokens", "region_frames", "select_every", "reweigh_every"):
            self._set(name, check_integer(name, getattr(self, name), minimum=1))
        if self.num_regions is not None:
            self._set("num_regions", check_integer("num_regions", self.num_regions, minimum=1))
        if self.guidance_parts != "auto":
            self._set("guidance_parts", self._valid_guidance_parts())
        for name in ("size_aware_attention", "norm_preserving"):
            check_flag(name, getattr(self, name))
        self._set("min_tokens", check_integer("min_tokens", self.min_tokens, minimum=0))
        for name, allowed in (
            ("selection", SELECTIONS),
            ("region", REGIONS),
            ("assign", ASSIGNMENTS),
            ("unmerge", UNMERGES),
            ("scope", SCOPES),
            ("share", SHARES),
            ("backend", BACKENDS),
        ):
            check_one_of(name, getattr(self, name), allowed)
        self._set("sites", self._valid_sites())

    def _valid_guidance_parts(self) -> int:
        parts: object = self.guidance_parts
        if isinstance(parts, str):
            raise UsageError(
                f"guidance_parts={parts!r} is not allowed: it must be 'auto', or a whole number of 1 or more."
            )
        return check_integer("guidance_parts", parts, minimum=1)

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> ToMAConfig:
        """The preset `name` of `PRESETS`, with single fields replaced by `overrides`."""
        cls.check_not_a_bound(name)
        if name not in PRESETS:
            raise UsageError(f"preset={name!r} is not known: {listed(PRESETS)}.{hint(name, PRESETS)}")
        return PRESETS[name].changed(overrides)

    @staticmethod
    def check_not_a_bound(name: str) -> None:
        """Raise for the two former presets."""
        if name in BOUNDS:
            raise UsageError(
                f"{name!r} is not a preset any more: it turns pictures into noise and only bounds the time of others. "
                f"Use `toma bench --bounds {name}` to measure it."
            )

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, in types that JSON has (tuples become lists, infinity becomes "inf")."""
        plain = super().to_dict()
        return plain | {"scale": "inf"} if self.is_hard else plain

    @property
    def is_hard(self) -> bool:
        """Whether every token goes to one destination alone."""
        return math.isinf(self.scale)


def _is_finite(value: float) -> bool:
    return 0 <= value < math.inf


_PAPER: Mapping[str, Any] = MappingProxyType({"distance_weight": 0.0, "share": "plan"})
"""The paper does not look at distances, and has one plan for all blocks of a kind."""
_EVERY_STEP: Mapping[str, Any] = MappingProxyType({"select_every": 1, "reweigh_every": 1})
_LATE: Mapping[str, Any] = MappingProxyType({"scope": "block", "window": (0.5, 1.0), "min_tokens": 512, **_EVERY_STEP})

_SKIP_ALONE: Mapping[str, Any] = MappingProxyType({"ratio": 0.0, "scope": "stage", **_EVERY_STEP})

PRESETS: Mapping[str, ToMAConfig] = MappingProxyType(
    {
        "toma": ToMAConfig(num_regions=64, assign="global", scale=math.inf, scope="module", **_PAPER),
        "toma-stripe": ToMAConfig(region="stripe", num_regions=64, scope="module", **_PAPER),
        "toma-tile": ToMAConfig(num_regions=256, scope="module", **_PAPER),
        "toma-once": ToMAConfig(num_regions=64, scope="block", **_PAPER),
        "toma-stage": ToMAConfig(scope="stage", **_EVERY_STEP, skip_blocks=(-1,)),
        "toma-late": ToMAConfig(**_LATE),
        "balanced": ToMAConfig(**_LATE, max_steps=4, skip=Skip(computed=0.6, fewest=6, min_steps=5)),
        "fast": ToMAConfig(**_SKIP_ALONE, skip=Skip(computed=0.4, fewest=5, min_steps=4)),
        "faster": ToMAConfig(**_SKIP_ALONE, skip=Skip(computed=0.3, fewest=4, min_steps=4)),
    }
)
"""The paper's variants by name, and ours.

Three are made to be used as they are. `balanced` keeps images closest to the original: it computes 12 of 20 steps and
predicts the others; with 4 steps or fewer it merges tokens, in the second half of the steps and not on small grids.
`fast` computes 8 of 20 steps, `faster` 6. A larger share is computed where there are few steps.

The others are made to be changed and compared. `toma-stage` merges tokens around runs of blocks: of what merges alone
it is the fastest. `toma-late` merges in the second half of the steps only, and not on small grids: closest to the
original of what merges alone. Both choose in every step and for every run of blocks, in regions of 256 tokens, with a
mild preference for near tokens. All figures are in docs/quality.md.

`toma` uses a hard assignment, the limit of the paper's sharp softmax. It loses less of an image (40.9 instead of 37.2
dB at ratio 0.25, benchmarks/results/assignment.csv), and an index is faster than a matrix over all tokens. The paper's
own setting is `scale=1000`."""
