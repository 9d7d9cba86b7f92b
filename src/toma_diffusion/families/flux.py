"""FluxTransformer2DModel: Flux.1 dev, schnell, Fill, Control and Kontext (only the generated image is merged)."""

from __future__ import annotations

from typing import Any

from toma_diffusion.engine.arguments import Given
from toma_diffusion.engine.hooks import Hook
from toma_diffusion.families.base import Adapter, AfterModulatingNorm, Block, SiteSpec, Stack, adds_residuals, around
from toma_diffusion.families.ids import IdReader
from toma_diffusion.merge.sites import GatherRows, KeyBias, MergeOutput, PerToken, Site, UnmergeOutput
from toma_diffusion.merge.state import Call

ROTARY = PerToken("image_rotary_emb")
KEY_BIAS = KeyBias("joint_attention_kwargs.attention_mask", dims=4, text="encoder_hidden_states")
"""Of a block. Its attention takes `attention_mask` itself."""
KEY_BIAS_OF_ATTENTION = KeyBias("attention_mask", dims=4, text="encoder_hidden_states")
LEFT_WHOLE = 5
"""The paper does not merge the first 10 of 57 blocks, in which text and image are combined: 5 joint, 5 single ones."""


class FluxAdapter(Adapter):
    """Joint blocks, then single blocks. A merged token has the RoPE row of its destination. Text is never merged."""

    model_class = "FluxTransformer2DModel"
    supports = "FluxTransformer2DModel (Flux.1 dev, schnell, Fill, Control, Kontext)"

    def __init__(self) -> None:
        self._ids = IdReader()

    def defaults(self, model: Any) -> dict[str, Any]:
        """As in the paper: select in every step, do not merge the first joint and single blocks."""
        joint, single = len(model.transformer_blocks), len(model.single_transformer_blocks)
        skipped = [*range(min(LEFT_WHOLE, joint)), *range(joint, joint + min(LEFT_WHOLE, single))]
        return {"select_every": 1, "reweigh_every": 1, "skip_blocks": tuple(skipped)}

    def stacks(self, model: Any) -> list[Stack]:
        """Joint, then single."""
        return [
            Stack("transformer_blocks", _describe_joint),
            Stack("single_transformer_blocks", _describe_single),
        ]

    def read_call(self, model: Any, given: Given) -> Call:
        """Latents are packed, so the grid is read from the position ids, once per generation."""
        sample = given["hidden_states"]
        grid = self._ids.grid(given["img_ids"], sample.shape[1])
        return Call(
            sample=sample,
            conditioning=given["encoder_hidden_states"],
            timestep=given["timestep"],
            grids={"joint": grid, "single": grid},
            image_at=-sample.shape[1],
            joint=True,
            block_by_block=adds_residuals(given, "controlnet_block_samples", "controlnet_single_block_samples"),
        )


def _describe_joint(module: Any, name: str) -> Block:
    # Attention returns image, text and, with an IP-Adapter, its contribution to the image.
    around_attention = around("attn", ROTARY, key_bias=KEY_BIAS_OF_ATTENTION, streams=(0, 2))
    return Block(
        name=name,
        module=module,
        kind="joint",
        width=module.attn.query_dim,
        sites=(
            SiteSpec("attn", frozenset({"attn"}), around_attention),
            SiteSpec("ff", frozenset({"ff"}), around("ff")),
        ),
        normalize=AfterModulatingNorm("norm1"),
        per_token=(ROTARY,),
        key_bias=KEY_BIAS,
        stream=1,
    )


def _describe_single(module: Any, name: str) -> Block:
    return Block(
        name=name,
        module=module,
        kind="single",
        width=module.attn.query_dim,
        sites=(SiteSpec("norm…proj_out", frozenset({"attn", "ff"}), _between_norm_and_projection),),
        normalize=AfterModulatingNorm("norm"),
        per_token=(ROTARY,),
        key_bias=KEY_BIAS,
        stream=1,
    )


def _between_norm_and_projection(site: Site) -> list[tuple[str, Hook]]:
    """Attention and MLP run in parallel between norm and output projection; gate and residual are not merged."""
    rows = GatherRows(site, (ROTARY,), KEY_BIAS_OF_ATTENTION)
    return [("norm", MergeOutput(site)), ("attn", rows), ("proj_out", UnmergeOutput(site))]
