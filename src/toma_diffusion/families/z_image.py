"""ZImageTransformer2DModel: Z-Image and Z-Image Turbo."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from toma_diffusion.engine.arguments import Given
from toma_diffusion.errors import UsageError
from toma_diffusion.families.base import Adapter, Before, Block, SiteSpec, Stack, adds_residuals, around
from toma_diffusion.merge import Grid
from toma_diffusion.merge.sites import PerToken
from toma_diffusion.merge.state import Call

ROTARY = PerToken("freqs_cis", dims=(1,))
"""Every sample has a table of its own."""
MULTIPLE = 32
"""The image and every caption are padded to a multiple of so many tokens."""


class ZImageAdapter(Adapter):
    """One stack of blocks on one sequence: the image, then the caption. The refiners before it are left alone."""

    model_class = "ZImageTransformer2DModel"
    supports = "ZImageTransformer2DModel (Z-Image, Z-Image Turbo)"
    untraceable = "Z-Image makes its positions in the call, in a way that torch.compile cannot trace"

    def is_joint(self, model: nn.Module) -> bool:
        """Every sample has its own table of positions."""
        return False

    def stacks(self, model: Any) -> list[Stack]:
        """One."""
        return [Stack("layers", _describe, left_whole=1 / 8)]

    def read_call(self, model: Any, given: Given) -> Call:
        """The samples come as a list, and so do the captions, which may be of different lengths."""
        samples, captions = given["x"], given["cap_feats"]
        if isinstance(samples[0], (list, tuple)):
            raise UsageError("Z-Image with given images (omni mode) is not supported: use remove_toma for it.")
        if any(sample.shape != samples[0].shape for sample in samples):
            sizes = ", ".join(str(list(sample.shape)) for sample in samples)
            raise UsageError(f"a batch of images of different sizes ({sizes}) cannot be merged: make one at a time.")
        frames, height, width = samples[0].shape[-3:]
        if frames > (given["f_patch_size"] or 1):
            raise UsageError(f"a sample of {frames} frames cannot be merged: only images can.")
        patch = given["patch_size"] or 2
        grid = Grid(height // patch, width // patch)
        return Call(
            sample=samples[0],
            conditioning=captions[0],
            timestep=given["t"],
            grids={"block": grid},
            image_at=0,
            lengths={"block": _padded(grid.num_tokens) + max(_padded(len(caption)) for caption in captions)},
            batch=len(samples),
            block_by_block=adds_residuals(given, "controlnet_block_samples"),
        )


def _padded(length: int) -> int:
    return -(-length // MULTIPLE) * MULTIPLE


def _describe(module: Any, name: str) -> Block:
    mask, mask_of_attention = PerToken("attn_mask", dims=(1,)), PerToken("attention_mask", dims=(1,))
    return Block(
        name=name,
        module=module,
        kind="block",
        width=module.dim,
        sites=(
            SiteSpec("attention", frozenset({"attn"}), around("attention", ROTARY, mask_of_attention)),
            SiteSpec("feed_forward", frozenset({"ff"}), around("feed_forward")),
        ),
        normalize=Before(_before),
        per_token=(ROTARY, mask),
    )


def _before(module: Any, given: Given) -> Tensor:
    scale = module.adaLN_modulation(given["adaln_input"]).chunk(4, dim=1)[0]
    tokens: Tensor = module.attention_norm1(given.tokens) * (1 + scale.unsqueeze(1))
    return tokens
