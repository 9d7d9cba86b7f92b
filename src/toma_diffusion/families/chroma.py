"""ChromaTransformer2DModel: Chroma1."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from toma_diffusion.engine.arguments import Given
from toma_diffusion.engine.hooks import Hook
from toma_diffusion.families.base import (
    Adapter,
    AfterModulatingNorm,
    Before,
    Block,
    SiteSpec,
    Stack,
    adds_residuals,
    around,
)
from toma_diffusion.families.ids import IdReader
from toma_diffusion.merge.sites import GatherRows, MergeOutput, PerToken, Site, UnmergeOutput
from toma_diffusion.merge.state import Call

ROTARY, MASK = PerToken("image_rotary_emb"), PerToken("attention_mask", dims=(1,))
MASK_OF_ATTENTION = PerToken("attention_mask", dims=(2, 3))
"""The block has made a mask of queries and keys of it."""


class ChromaAdapter(Adapter):
    """As Flux.1, from which Chroma was made, but with a mask over text and image, and single blocks on one sequence."""

    model_class = "ChromaTransformer2DModel"
    supports = "ChromaTransformer2DModel (Chroma1)"

    def __init__(self) -> None:
        self._ids = IdReader()

    def stacks(self, model: Any) -> list[Stack]:
        """Joint, then single."""
        return [
            Stack("transformer_blocks", _describe_joint, left_whole=1 / 4),
            Stack("single_transformer_blocks", _describe_single, left_whole=1 / 8),
        ]

    def read_call(self, model: Any, given: Given) -> Call:
        """Latents are packed, so the grid is read from the position ids, once per generation."""
        sample, text = given["hidden_states"], given["encoder_hidden_states"]
        grid = self._ids.grid(given["img_ids"], sample.shape[1])
        return Call(
            sample=sample,
            conditioning=text,
            timestep=given["timestep"],
            grids={"joint": grid, "single": grid},
            image_at=-sample.shape[1],
            lengths={"single": text.shape[1] + sample.shape[1]},
            joint=True,
            block_by_block=adds_residuals(given, "controlnet_block_samples", "controlnet_single_block_samples"),
        )


def _describe_joint(module: Any, name: str) -> Block:
    around_attention = around("attn", ROTARY, MASK_OF_ATTENTION, streams=(0, 2))
    return Block(
        name=name,
        module=module,
        kind="joint",
        width=module.attn.query_dim,
        sites=(
            SiteSpec("attn", frozenset({"attn"}), around_attention),
            SiteSpec("ff", frozenset({"ff"}), around("ff")),
        ),
        normalize=Before(_before_joint),
        per_token=(ROTARY, MASK),
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
        per_token=(ROTARY, MASK),
        writes_in_place=True,  # a ControlNet's residuals, by the model
    )


def _before_joint(module: Any, given: Given) -> Tensor:
    tokens: Tensor = module.norm1(given.tokens, emb=given["temb"][:, :6])[0]
    return tokens


def _between_norm_and_projection(site: Site) -> list[tuple[str, Hook]]:
    """Attention and MLP run in parallel between norm and output projection; gate and residual are not merged."""
    rows = GatherRows(site, (ROTARY, MASK_OF_ATTENTION))
    return [("norm", MergeOutput(site)), ("attn", rows), ("proj_out", UnmergeOutput(site))]
