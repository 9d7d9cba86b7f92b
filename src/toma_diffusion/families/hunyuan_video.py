"""HunyuanVideoTransformer3DModel: HunyuanVideo, text to video and image to video."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from toma_diffusion.engine.arguments import Given
from toma_diffusion.engine.hooks import Hook
from toma_diffusion.families.base import Adapter, Before, Block, SiteSpec, Stack, around
from toma_diffusion.families.frames import grid_of_patches, without_first_frame
from toma_diffusion.merge.sites import GatherRows, MergeOutput, PerToken, Site, UnmergeOutput
from toma_diffusion.merge.state import Call

ROTARY, ROTARY_OF_JOINT = PerToken("image_rotary_emb"), PerToken("freqs_cis")
MASK = PerToken("attention_mask", dims=(3,))
"""[batch, 1, 1, tokens]: of the video, then of the text."""


class HunyuanVideoAdapter(Adapter):
    """Joint blocks, then single blocks, which run on the video and the text after it.

    Models that replace the tokens of the first frame by a given one (`token_replace`) modulate so many first tokens
    otherwise. That frame stays whole.
    """

    model_class = "HunyuanVideoTransformer3DModel"
    supports = "HunyuanVideoTransformer3DModel (HunyuanVideo)"

    def stacks(self, model: Any) -> list[Stack]:
        """Joint, then single."""
        return [
            Stack("transformer_blocks", _describe_joint, left_whole=1 / 4),
            Stack("single_transformer_blocks", _describe_single, left_whole=1 / 8),
        ]

    def read_call(self, model: Any, given: Given) -> Call:
        """A token is a patch of one or more latent frames."""
        sample, config = given["hidden_states"], model.config
        whole = grid_of_patches(sample.shape[-3:], (config.patch_size_t, config.patch_size, config.patch_size))
        grid = without_first_frame(whole) if config.image_condition_type == "token_replace" else whole
        return Call(
            sample=sample,
            conditioning=given["encoder_hidden_states"],
            timestep=given["timestep"],
            grids={"joint": grid, "single": grid},
            image_at=whole.num_tokens - grid.num_tokens,
            lengths={"joint": whole.num_tokens, "single": whole.num_tokens},
            first_frame_apart=grid == whole,
            joint=True,
        )


def _describe_joint(module: Any, name: str) -> Block:
    return Block(
        name=name,
        module=module,
        kind="joint",
        width=module.attn.query_dim,
        sites=(
            SiteSpec("attn", frozenset({"attn"}), around("attn", ROTARY, MASK)),
            SiteSpec("ff", frozenset({"ff"}), around("ff")),
        ),
        normalize=Before(partial(_after_norm, "norm1")),
        per_token=(ROTARY_OF_JOINT, MASK),
        stream=0,
    )


def _describe_single(module: Any, name: str) -> Block:
    return Block(
        name=name,
        module=module,
        kind="single",
        width=module.attn.query_dim,
        sites=(SiteSpec("norm…proj_out", frozenset({"attn", "ff"}), _between_norm_and_projection),),
        normalize=Before(partial(_after_norm, "norm")),
        per_token=(ROTARY, MASK),
        stream=0,
    )


def _between_norm_and_projection(site: Site) -> list[tuple[str, Hook]]:
    """Attention and MLP run in parallel between norm and output projection; gate and residual are not merged."""
    return [
        ("norm", MergeOutput(site)),
        ("attn", GatherRows(site, (ROTARY, MASK))),
        ("proj_out", UnmergeOutput(site)),
    ]


def _after_norm(name: str, module: Any, given: Given) -> Tensor:
    replaced = {}
    if given["token_replace_emb"] is not None:
        replaced = {"token_replace_emb": given["token_replace_emb"], "first_frame_num_tokens": given["num_tokens"]}
    tokens: Tensor = getattr(module, name)(given.tokens, emb=given["temb"], **replaced)[0]
    return tokens
