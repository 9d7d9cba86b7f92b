"""AuraFlowTransformer2DModel: AuraFlow."""

from __future__ import annotations

from typing import Any

from toma_diffusion.engine.arguments import Given
from toma_diffusion.families.base import Family, Stack
from toma_diffusion.families.builders import joint_block, sequence_block
from toma_diffusion.families.grids import grid_of_patches
from toma_diffusion.families.modulation import modulating_norm
from toma_diffusion.merge.state import Call


class AuraFlow(Family):
    """Joint blocks, then single blocks on one sequence of text and image. Positions are added before the first."""

    model_class = "AuraFlowTransformer2DModel"
    supports = "AuraFlowTransformer2DModel (AuraFlow)"
    stacks = (
        Stack("joint_transformer_blocks", "joint", joint_block(modulating_norm("norm1")), left_whole=1 / 4),
        Stack("single_transformer_blocks", "single", sequence_block(modulating_norm("norm1")), left_whole=1 / 8),
    )

    def read_call(self, model: Any, given: Given) -> Call:
        """A token is a patch of the latent. The model adds tokens of its own to the text."""
        grid = grid_of_patches(given["hidden_states"].shape[-2:], 2 * [model.config.patch_size])
        text_tokens = given["encoder_hidden_states"].shape[1] + model.register_tokens.shape[1]
        return self.call(model, given, grid, lengths={"single": text_tokens + grid.num_tokens})
