"""ZImageTransformer2DModel: Z-Image and Z-Image Turbo."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from toma_diffusion.engine.arguments import Given
from toma_diffusion.errors import UsageError
from toma_diffusion.families.base import Family, Stack, adds_residuals
from toma_diffusion.families.builders import sequence_block
from toma_diffusion.families.grids import grid_of_patches
from toma_diffusion.merge.sites import PerToken
from toma_diffusion.merge.state import Call

ROTARY = PerToken("freqs_cis", dims=(1,))
"""Every sample has a table of its own."""
MASKS = (PerToken("attn_mask", dims=(1,)), PerToken("attention_mask", dims=(1,)))
"""A block calls it otherwise than its attention."""
MULTIPLE = 32
"""The image and every caption are padded to a multiple of so many tokens."""


def _before(module: Any, given: Given) -> Tensor:
    scale = module.adaLN_modulation(given["adaln_input"]).chunk(4, dim=1)[0]
    tokens: Tensor = module.attention_norm1(given.tokens) * (1 + scale.unsqueeze(1))
    return tokens


class ZImage(Family):
    """One stack of blocks on one sequence: the image, then the caption. The refiners before it are left alone."""

    model_class = "ZImageTransformer2DModel"
    supports = "ZImageTransformer2DModel (Z-Image, Z-Image Turbo)"
    untraceable = "Z-Image makes its positions in the call, in a way that torch.compile cannot trace"
    stacks = (
        Stack(
            "layers",
            "block",
            sequence_block(_before, ROTARY, *MASKS, attention="attention", feed_forward="feed_forward"),
            left_whole=1 / 8,
        ),
    )

    def read_call(self, model: Any, given: Given) -> Call:
        """The samples come as a list, and so do the captions, which may be of different lengths."""
        samples, captions = given["x"], given["cap_feats"]
        if isinstance(samples[0], (list, tuple)):
            raise UsageError("Z-Image with given images (omni mode) is not supported: call handle.remove() for it.")
        if any(sample.shape != samples[0].shape for sample in samples):
            sizes = ", ".join(str(list(sample.shape)) for sample in samples)
            raise UsageError(f"a batch of images of different sizes ({sizes}) cannot be merged: make one at a time.")
        frames, height, width = samples[0].shape[-3:]
        if frames > (given["f_patch_size"] or 1):
            raise UsageError(f"a sample of {frames} frames cannot be merged: only images can.")
        grid = grid_of_patches((height, width), 2 * [given["patch_size"] or 2])
        longest = max(_padded(len(caption)) for caption in captions)
        return self.call(
            model,
            given,
            grid,
            sample=samples[0],
            conditioning=captions[0],
            timestep=given["t"],
            image_at=0,
            lengths={"block": _padded(grid.num_tokens) + longest},
            batch=len(samples),
            block_by_block=adds_residuals(given, "controlnet_block_samples"),
        )


def _padded(length: int) -> int:
    return -(-length // MULTIPLE) * MULTIPLE
