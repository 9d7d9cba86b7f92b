"""Flux of ComfyUI: Flux.1 dev, schnell, Fill and Kontext, and FLUX.2. Reference images stay whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from toma_diffusion.comfyui.families.base import (
    ComfyFamily,
    block_builder,
    patches,
    replaced_blocks,
    rounded_up,
)
from toma_diffusion.families import (
    Arguments,
    Call,
    Given,
    Grid,
    Hook,
    Keywords,
    MergeInput,
    PerToken,
    Site,
    SiteSpec,
    Stack,
    UnmergeOutput,
    adds_residuals,
    site,
)
from toma_diffusion.merge.sites import gather_rows

POSITIONS = PerToken("pe", dims=(2,))
"""[batch, 1, tokens, channels / 2, 2, 2], for text, image and references."""


def _before_double(module: Any, given: Given) -> Tensor:
    modulation = module.img_mod(given["vec"])[0] if module.modulation else given["vec"][0][0]
    tokens: Tensor = module.img_norm1(given.tokens) * (1 + modulation.scale) + modulation.shift
    return tokens


def _before_single(module: Any, given: Given) -> Tensor:
    modulation = module.modulation(given["vec"])[0] if module.modulation else given["vec"]
    tokens: Tensor = module.pre_norm(given.tokens) * (1 + modulation.scale) + modulation.shift
    return tokens


@dataclass(eq=False)
class EnterAttention(Hook):
    """Forward pre-hook of a block: updates the plan, and reduces the positions to those of the destinations."""

    site: Site
    normalize: Callable[[Any, Given], Tensor]

    def __call__(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords] | None:
        given = Given(self.names, args, kwargs)
        plan = self.site.plan(given)
        if plan is None:
            return None
        self.site.update(plan, lambda: self.site.image(plan, self.normalize(module, given)))
        given = gather_rows(self.site, plan, (POSITIONS,), given)
        return given.args, given.kwargs


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


ATTENTION = SiteSpec("img_attn", frozenset({"attn"}), _between("img_attn.qkv", "img_attn.proj", _before_double))
BOTH = SiteSpec("linear1…linear2", frozenset({"attn", "ff"}), _between("linear1", "linear2", _before_single))


class Flux(ComfyFamily):
    """Double blocks, then single blocks on one sequence of text, image and references.

    As in the paper, the first quarter of the double and the first eighth of the single blocks are left whole.
    """

    model_class = "Flux"
    module_name = "comfy.ldm.flux.model"
    supports = "Flux (Flux.1 dev, schnell, Fill, Kontext; FLUX.2)"
    one_table = True
    stacks = (
        Stack(
            "double_blocks",
            "double",
            block_builder(
                "hidden_size",
                sites=(ATTENTION, site("ff", "img_mlp")),
                normalize=_before_double,
                per_token=(POSITIONS,),
                stream=0,
                writes_in_place=True,
            ),
            left_whole=1 / 4,
        ),
        Stack(
            "single_blocks",
            "single",
            block_builder(
                "hidden_size", sites=(BOTH,), normalize=_before_single, per_token=(POSITIONS,), writes_in_place=True
            ),
            left_whole=1 / 8,
        ),
    )

    def read_call(self, model: Any, given: Given) -> Call:
        """The image comes after the text and before its references."""
        patch = model.patch_size
        grid, *references = (
            Grid(rounded_up(latent.shape[-2], patch), rounded_up(latent.shape[-1], patch))
            for latent in (given["x"], *(given["ref_latents"] or ()))
        )
        tokens = grid.num_tokens + sum(each.num_tokens for each in references)
        return self.call(
            model,
            given,
            grid,
            image_at=-tokens,
            lengths={"single": given["context"].shape[1] + tokens},
            block_by_block=adds_residuals(given, "control") or replaced_blocks(given),
            left_whole=_reason_to_leave_whole(given),
        )


def _reason_to_leave_whole(given: Given) -> str | None:
    if given["attention_mask"] is not None:
        return "attention has a mask over the whole sequence"
    if patches(given, "post_input"):
        return "another node may add tokens to the sequence (post_input)"
    return None
