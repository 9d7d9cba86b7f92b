"""WanTransformer3DModel: Wan 2.1 and 2.2, text to video and image to video."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from toma_diffusion.engine.arguments import Given
from toma_diffusion.families.base import Adapter, Before, Block, SiteSpec, Stack, around
from toma_diffusion.families.frames import grid_of_patches, without_first_frame
from toma_diffusion.merge.sites import PerToken
from toma_diffusion.merge.state import Call

ROTARY = PerToken("rotary_emb", dims=(1,))
MODULATION = PerToken("temb", dims=(1,), ndim=4)
"""Of models that give every token a time of its own (TI2V). In the others it has three dimensions."""


class WanAdapter(Adapter):
    """One stack of blocks with self-attention, cross-attention and MLP on the tokens of all frames.

    Models with a time for every token may be given the first frame, whose time is 0. It stays whole, so that it never
    merges with others.
    """

    model_class = "WanTransformer3DModel"
    supports = "WanTransformer3DModel (Wan 2.1, 2.2)"

    def is_joint(self, model: nn.Module) -> bool:
        """The table of positions has a dimension for samples."""
        return False

    def stacks(self, model: Any) -> list[Stack]:
        """One."""
        return [Stack("blocks", _describe, left_whole=1 / 8)]

    def read_call(self, model: Any, given: Given) -> Call:
        """A token is a patch of one or more latent frames."""
        sample, timestep = given["hidden_states"], given["timestep"]
        whole = grid_of_patches(sample.shape[-3:], model.config.patch_size)
        may_be_given = timestep.ndim == 2 and whole.frames > 1
        return Call(
            sample=sample,
            conditioning=given["encoder_hidden_states"],
            timestep=timestep,
            grids={"block": without_first_frame(whole) if may_be_given else whole},
            lengths={"block": whole.num_tokens},
            first_frame_apart=not may_be_given,
        )


def _describe(module: Any, name: str) -> Block:
    return Block(
        name=name,
        module=module,
        kind="block",
        width=module.norm1.normalized_shape[0],
        sites=(
            SiteSpec("attn1", frozenset({"attn"}), around("attn1", ROTARY)),
            SiteSpec("attn2", frozenset({"cross_attn"}), around("attn2")),
            SiteSpec("ffn", frozenset({"ff"}), around("ffn")),
        ),
        normalize=Before(_before),
        per_token=(ROTARY, MODULATION),
    )


def _before(module: Any, given: Given) -> Tensor:
    tokens, modulation = given.tokens, given["temb"].float()
    shift, scale, *_ = (module.scale_shift_table + modulation).unbind(-2)
    if modulation.ndim == 3:  # one for all tokens of a sample
        shift, scale = shift.unsqueeze(1), scale.unsqueeze(1)
    normalized: Tensor = module.norm1(tokens.float()) * (1 + scale) + shift
    return normalized.type_as(tokens)
