"""Flux of ComfyUI: Flux.1 dev, schnell, Fill and Kontext, and FLUX.2. Reference images stay whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from toma_diffusion.comfyui.families.base import ComfyAdapter, patches, replaced_blocks, rounded_up
from toma_diffusion.engine.arguments import Arguments, Given, Keywords
from toma_diffusion.engine.hooks import Hook
from toma_diffusion.families import (
    Call,
    Grid,
    MergeInput,
    PerToken,
    UnmergeOutput,
    adds_residuals,
    around,
    first_blocks,
)
from toma_diffusion.merge.block import Block, SiteSpec
from toma_diffusion.merge.sites import Site, gather_rows

POSITIONS = PerToken("pe", dims=(2,))
"""[batch, 1, tokens, channels / 2, 2, 2], for text, image and references."""


class FluxAdapter(ComfyAdapter):
    """Double blocks, then single blocks on one sequence of text, image and references."""

    model_class = "Flux"
    module_name = "comfy.ldm.flux.model"
    supports = "Flux (Flux.1 dev, schnell, Fill, Kontext; FLUX.2)"

    def skip_blocks(self, model: Any) -> tuple[int, ...]:
        """As in the paper: select in every step, leave the first 1/4 of the double and 1/8 of the single blocks."""
        return first_blocks((len(model.double_blocks), 1 / 4), (len(model.single_blocks), 1 / 8))

    def blocks(self, model: Any) -> list[Block]:
        """Double, then single."""
        double = [_describe_double(block, index) for index, block in enumerate(model.double_blocks)]
        single = [_describe_single(block, index) for index, block in enumerate(model.single_blocks)]
        return double + single

    def read_call(self, model: Any, given: Given) -> Call:
        """The image comes after the text and before its references."""
        sample, text, patch = given["x"], given["context"], model.patch_size
        grid = Grid(*(rounded_up(side, patch) for side in sample.shape[-2:]))
        references = sum(
            rounded_up(each.shape[-2], patch) * rounded_up(each.shape[-1], patch) for each in given["ref_latents"] or ()
        )
        tokens = grid.num_tokens + references
        replaced = replaced_blocks(given)
        return Call(
            sample=sample,
            conditioning=text,
            timestep=given["timestep"],
            grids={"double": grid, "single": grid},
            image_at=-tokens,
            lengths={"single": text.shape[1] + tokens},
            joint=True,
            block_by_block=adds_residuals(given, "control") or replaced,
            left_alone=_reason_to_leave_alone(given),
        )


def _reason_to_leave_alone(given: Given) -> str | None:
    if given["attention_mask"] is not None:
        return "attention has a mask over the whole sequence"
    if patches(given, "post_input"):
        return "another node may add tokens to the sequence (post_input)"
    return None


def _describe_double(module: Any, index: int) -> Block:
    return Block(
        name=f"double_blocks.{index}",
        module=module,
        kind="double",
        width=module.hidden_size,
        sites=(
            SiteSpec("img_attn", frozenset({"attn"}), _between("img_attn.qkv", "img_attn.proj", _before_double)),
            SiteSpec("img_mlp", frozenset({"ff"}), around("img_mlp")),
        ),
        normalize=_before_double,
        per_token=(POSITIONS,),
        stream=0,
        writes_in_place=True,
    )


def _describe_single(module: Any, index: int) -> Block:
    return Block(
        name=f"single_blocks.{index}",
        module=module,
        kind="single",
        width=module.hidden_size,
        sites=(SiteSpec("linear1…linear2", frozenset({"attn", "ff"}), _between("linear1", "linear2", _before_single)),),
        normalize=_before_single,
        per_token=(POSITIONS,),
        writes_in_place=True,
    )


def _before_double(module: Any, given: Given) -> Tensor:
    modulation = module.img_mod(given["vec"])[0] if module.modulation else given["vec"][0][0]
    tokens: Tensor = module.img_norm1(given.tokens) * (1 + modulation.scale) + modulation.shift
    return tokens


def _before_single(module: Any, given: Given) -> Tensor:
    modulation = module.modulation(given["vec"])[0] if module.modulation else given["vec"]
    tokens: Tensor = module.pre_norm(given.tokens) * (1 + modulation.scale) + modulation.shift
    return tokens


def _between(
    first: str, last: str, normalize: Callable[[Any, Given], Tensor]
) -> Callable[[Site], list[tuple[str, Hook]]]:
    """Attention is no module here: tokens are merged before the `first` layer and unmerged after the `last`, and the
    positions are those of the destinations in the whole block."""
    return lambda site: [
        ("", EnterAttention(site, normalize)),
        (first, MergeInput(site)),
        (last, UnmergeOutput(site)),
    ]


@dataclass(eq=False)
class EnterAttention(Hook):
    """Forward pre-hook of a block: updates the plan, and reduces the positions to those of the destinations."""

    site: Site
    normalize: Callable[[Any, Given], Tensor]

    def __call__(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords] | None:
        """Before the block."""
        given = Given(self.names, args, kwargs)
        plan = self.site.plan(given)
        if plan is None:
            return None
        self.site.update(plan, lambda: self.site.image(plan, self.normalize(module, given)))
        given = gather_rows(self.site, plan, (POSITIONS,), given)
        return given.args, given.kwargs
