"""Settings of ToMA."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from toma_diffusion.checks import check_flag, check_integer, check_number, check_one_of
from toma_diffusion.errors import UsageError
from toma_diffusion.merge.base import SITES, Merging

REGIONS = ("tile", "stripe", "global")
ASSIGNMENTS = ("local", "global")
SCOPES = ("module", "block", "stage")
BACKENDS = ("auto", "torch", "triton")
REGION_TOKENS, SELECTION_TOKENS, REGION_FRAMES = 256, 64, 4


@dataclass(frozen=True, kw_only=True)
class Merge(Merging):
    """How tokens are merged by ToMA. The defaults are its fastest form, the variant `toma-stage`. Immutable.

    A wrong value raises `UsageError` at once, and so does one that would have no effect beside the others.

    Example:

    ```python
    >>> from toma_diffusion import Merge
    >>> Merge(ratio=0.75, scope="block").ratio
    0.75
    >>> Merge(sites=("attn",))
    Traceback (most recent call last):
    toma_diffusion.errors.UsageError: sites=('attn',) counts only in scope 'module', ...
    ```
    """

    label: ClassVar[str] = "ToMA"

    scope: str = "stage"
    """Where to merge and unmerge: around each `module` (the paper's ToMA), each `block` (the paper's ToMA*), or a
    `stage`, which is a run of consecutive blocks. Wider is faster and may lose more detail."""

    sites: tuple[str, ...] | None = None
    """Which modules to merge in scope `module`, out of `attn`, `cross_attn` and `ff`. More is faster. None: all."""

    min_tokens: int = 0
    """Grids with fewer tokens are not merged. There every token represents a large part of the image, and merging
    saves little. Higher is slower and keeps more detail."""

    region: str = "tile"
    """Shape of the regions in which destinations are selected: `tile` (rectangles, best quality), `stripe` (runs of
    the row-major sequence, which need no reordering) or `global` (one region, slowest)."""

    region_tokens: int | None = None
    """Requested number of tokens in a region. Tokens merge only inside their region, with `assign="local"`. The nearest
    shape that divides the grid evenly is used. Larger regions offer more destinations. None: 256."""

    selection_tokens: int | None = None
    """Requested number of tokens in the parts of a region in which destinations are selected. Each part selects its
    share. Smaller is faster; as large as a region, the whole region selects at once. None: 64."""

    num_regions: int | None = None
    """Requested number of regions, in place of `region_tokens` and `selection_tokens`. This is how the paper counts:
    the same number then means small regions on a small grid and large ones on a large grid."""

    region_frames: int | None = None
    """Requested frames of a region, for tiles in a video: with 256 tokens, 4 frames of 8×8. The nearest number that
    divides the frames is taken: of 21 frames 3. If none does, as with 31, the first frame is left whole where the other
    30 can be divided. 1 merges within each frame alone. None: 4."""

    distance_weight: float = 0.3
    """How much nearness counts: the similarity of two tokens is their cosine minus this times the square of their
    distance, where the distance is measured in sides of a region, and in a video also in its frames. 0, as in the
    paper, ignores where tokens are. Then, in large regions, a token may merge with its mirror image on the other side
    of an object."""

    assign: str = "local"
    """Which destinations a token may merge into: `local` (those of its own region; block-diagonal weights, fast) or
    `global` (all of them; a full matrix, slower)."""

    scale: float = 1000.0
    """Sharpness 1/τ of the softmax over destinations. Higher is closer to a hard assignment, lower blends more.
    `math.inf` (or `"inf"`) is the hard assignment: every token goes to its nearest destination alone. An index then
    replaces the weight matrix, which is faster, most of all with `assign="global"`."""

    select_every: int = 1
    """Steps between two selections of destinations. Higher is faster; 1 selects in every step."""

    reweigh_every: int | None = None
    """Steps between two computations of the merge weights; a selection always computes them. Lower is slower and more
    exact. None: with every selection."""

    share_plan: bool = False
    """Whether stages of the same kind share one plan, as in the paper, such as the `Transformer2DModel`s of one
    level of a U-Net. Faster; but tokens before and after the middle differ much, and the weights of one do not fit the
    other. Blocks of one stage always share a plan."""

    guidance_parts: int | str = "auto"
    """Which samples share one plan because they are the same picture with another prompt, as in classifier-free
    guidance. They then choose destinations together, by the mean of their similarities. `auto` reads from the running
    pipeline how many parts the batch of a call has; several calls in one step with the same sample share one plan in
    any model. For a model without a pipeline, a number: the batch of every call is that many parts of equal size, one
    after another. 1: every sample and every call for itself."""

    backend: str = "auto"
    """Which implementation of the operators runs: `torch`, `triton` (fused kernels, NVIDIA GPUs), or `auto` for the
    fastest one available. Where `triton` cannot run, `torch` is used, with a warning."""

    def __post_init__(self) -> None:
        super().__post_init__()
        scale: object = self.scale
        scale = math.inf if scale == "inf" else scale
        self._set("scale", check_number("scale", scale, "a number above 0, or math.inf", lambda x: x > 0))
        self._set(
            "distance_weight",
            check_number("distance_weight", self.distance_weight, "0 or more, and finite", lambda x: 0 <= x < math.inf),
        )
        self._set("select_every", check_integer("select_every", self.select_every, minimum=1))
        self._set("min_tokens", check_integer("min_tokens", self.min_tokens, minimum=0))
        for name in ("region_tokens", "selection_tokens", "num_regions", "region_frames", "reweigh_every"):
            if getattr(self, name) is not None:
                self._set(name, check_integer(name, getattr(self, name), minimum=1))
        if self.guidance_parts != "auto":
            self._set("guidance_parts", self._valid_guidance_parts())
        check_flag("share_plan", self.share_plan)
        for name, allowed in (("region", REGIONS), ("assign", ASSIGNMENTS), ("scope", SCOPES), ("backend", BACKENDS)):
            check_one_of(name, getattr(self, name), allowed)
        if self.sites is not None:
            self._set("sites", self._valid_sites(self.sites))
        self._refuse_settings_without_effect()

    def _valid_guidance_parts(self) -> int:
        parts: object = self.guidance_parts
        if isinstance(parts, str):
            raise UsageError(
                f"guidance_parts={parts!r} is not allowed: it must be 'auto', or a whole number of 1 or more."
            )
        return check_integer("guidance_parts", parts, minimum=1)

    def _refuse_settings_without_effect(self) -> None:
        """Raise for a field that the others leave no effect."""
        of_tiles = f"region={self.region!r}"
        reasons = (
            ("sites", self.scope != "module", f"in scope 'module', and scope={self.scope!r} merges whole blocks"),
            ("region_tokens", self.region == "global", f"for regions, and {of_tiles} is the whole grid"),
            ("region_tokens", self.num_regions is not None, "without num_regions, which says how many there are"),
            ("selection_tokens", self.num_regions is not None, "without num_regions, whose regions select at once"),
            ("num_regions", self.region == "global", f"for several regions, and {of_tiles} is one"),
            ("region_frames", self.region != "tile", f"for tiles, and not with {of_tiles}"),
            (
                "reweigh_every",
                self.reweigh_every is not None and self.reweigh_every > self.select_every,
                f"below select_every={self.select_every}: a selection always computes weights",
            ),
        )
        for name, has_no_effect, rule in reasons:
            if has_no_effect and getattr(self, name) is not None:
                raise UsageError(f"{name}={getattr(self, name)!r} counts only {rule}: leave it out, or change that.")

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, in types that JSON has: tuples become lists, infinity becomes "inf"."""
        plain = super().to_dict()
        return plain | {"scale": "inf"} if self.is_hard else plain

    @property
    def is_hard(self) -> bool:
        return math.isinf(self.scale)

    @property
    def merged_sites(self) -> tuple[str, ...]:
        return SITES if self.sites is None else self.sites

    @property
    def region_size(self) -> int:
        """Requested tokens of a region."""
        return self.region_tokens or REGION_TOKENS

    @property
    def selection_size(self) -> int:
        """Requested tokens of the parts in which destinations are selected."""
        return self.selection_tokens or SELECTION_TOKENS

    @property
    def frames_of_region(self) -> int:
        return self.region_frames or REGION_FRAMES

    @property
    def reweighed_every(self) -> int:
        return self.reweigh_every or self.select_every

    @property
    def skips_last_block(self) -> bool:
        """In a stage the change of the last one is not smoothed by another."""
        return self.scope == "stage"
