"""Flux2Transformer2DModel: FLUX.2 dev and klein. Reference images stay whole."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from toma_diffusion.engine.arguments import Given
from toma_diffusion.engine.clock import running_pipeline
from toma_diffusion.errors import UsageError
from toma_diffusion.families.base import Family, Stack
from toma_diffusion.families.builders import joint_block, sequence_block
from toma_diffusion.families.modulation import shift_and_scale
from toma_diffusion.merge.sites import PerToken
from toma_diffusion.merge.state import Call

ROTARY = PerToken("image_rotary_emb")


class Flux2(Family):
    """Joint blocks, then single blocks on one sequence of text and image. All blocks of a kind share a modulation."""

    model_class = "Flux2Transformer2DModel"
    supports = "Flux2Transformer2DModel (FLUX.2 dev, klein)"
    one_table = True
    stacks = (
        Stack(
            "transformer_blocks",
            "joint",
            joint_block(shift_and_scale("norm1", "temb_mod_img"), ROTARY),
            left_whole=1 / 4,
        ),
        Stack(
            "single_transformer_blocks",
            "single",
            # Attention and MLP share their projections.
            sequence_block(shift_and_scale("norm", "temb_mod"), ROTARY, feed_forward=None),
            left_whole=1 / 8,
        ),
    )

    def read_call(self, model: Any, given: Given) -> Call:
        """The grid is read from the position ids. The image comes before its references."""
        if given["kv_cache_mode"] == "extract" and given["num_ref_tokens"]:
            raise UsageError(
                "FLUX.2 klein with a KV cache puts reference images before the image in the step that fills the cache, "
                "which cannot be merged: leave the cache out, or call handle.remove() for it."
            )
        image_tokens = given["hidden_states"].shape[1]
        return self.call(
            model,
            given,
            self.ids.grid(given["img_ids"], image_tokens, made_from=_ids_of_the_image(model)),
            image_at=-image_tokens,
            lengths={"single": given["encoder_hidden_states"].shape[1] + image_tokens},
        )


def _ids_of_the_image(model: Any) -> Tensor | None:
    """The pipelines of diffusers join the ids of references to them in every step."""
    found = running_pipeline(model)
    ids = None if found is None else found.variables.get("latent_ids")
    return ids if isinstance(ids, Tensor) else None
