"""Flux2Transformer2DModel: FLUX.2 dev and klein. Reference images stay whole."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from toma_diffusion.engine.arguments import Given
from toma_diffusion.engine.clock import running_pipeline
from toma_diffusion.errors import UsageError
from toma_diffusion.families.base import Adapter, Before, Block, SiteSpec, Stack, around
from toma_diffusion.families.ids import IdReader
from toma_diffusion.merge.sites import KeyBias, PerToken
from toma_diffusion.merge.state import Call

ROTARY = PerToken("image_rotary_emb")
KEY_BIAS = KeyBias("joint_attention_kwargs.attention_mask", dims=4, text="encoder_hidden_states")
KEY_BIAS_OF_ATTENTION = KeyBias("attention_mask", dims=4, text="encoder_hidden_states")


class Flux2Adapter(Adapter):
    """Joint blocks, then single blocks on one sequence of text and image. All blocks of a kind share a modulation."""

    model_class = "Flux2Transformer2DModel"
    supports = "Flux2Transformer2DModel (FLUX.2 dev, klein)"

    def __init__(self) -> None:
        self._ids = IdReader()

    def stacks(self, model: Any) -> list[Stack]:
        """Joint, then single."""
        return [
            Stack("transformer_blocks", _describe_joint, left_whole=1 / 4),
            Stack("single_transformer_blocks", _describe_single, left_whole=1 / 8),
        ]

    def read_call(self, model: Any, given: Given) -> Call:
        """The grid is read from the position ids. The image comes before its references."""
        if given["kv_cache_mode"] == "extract" and given["num_ref_tokens"]:
            raise UsageError(
                "FLUX.2 klein with a KV cache puts reference images before the image in the step that fills the cache, "
                "which cannot be merged: leave the cache out, or use remove_toma for it."
            )
        sample, text = given["hidden_states"], given["encoder_hidden_states"]
        grid = self._ids.grid(given["img_ids"], sample.shape[1], made_from=_ids_of_the_image(model))
        return Call(
            sample=sample,
            conditioning=text,
            timestep=given["timestep"],
            grids={"joint": grid, "single": grid},
            image_at=-sample.shape[1],
            lengths={"single": text.shape[1] + sample.shape[1]},
            joint=True,
        )


def _ids_of_the_image(model: Any) -> Tensor | None:
    """The pipelines of diffusers join the ids of references to them in every step."""
    found = running_pipeline(model)
    ids = None if found is None else found.variables.get("latent_ids")
    return ids if isinstance(ids, Tensor) else None


def _describe_joint(module: Any, name: str) -> Block:
    return Block(
        name=name,
        module=module,
        kind="joint",
        width=module.attn.query_dim,
        sites=(
            SiteSpec("attn", frozenset({"attn"}), around("attn", ROTARY, key_bias=KEY_BIAS_OF_ATTENTION)),
            SiteSpec("ff", frozenset({"ff"}), around("ff")),
        ),
        normalize=Before(_before_joint),
        per_token=(ROTARY,),
        key_bias=KEY_BIAS,
        stream=1,
    )


def _describe_single(module: Any, name: str) -> Block:
    """The MLP is in the attention module: both share their projections."""
    return Block(
        name=name,
        module=module,
        kind="single",
        width=module.attn.query_dim,
        sites=(SiteSpec("attn", frozenset({"attn", "ff"}), around("attn", ROTARY, key_bias=KEY_BIAS_OF_ATTENTION)),),
        normalize=Before(_before_single),
        per_token=(ROTARY,),
        key_bias=KEY_BIAS,
    )


def _before_joint(module: Any, given: Given) -> Tensor:
    return _modulate(module.norm1(given.tokens), given["temb_mod_img"], 6)


def _before_single(module: Any, given: Given) -> Tensor:
    return _modulate(module.norm(given.tokens), given["temb_mod"], 3)


def _modulate(tokens: Tensor, modulation: Tensor, chunks: int) -> Tensor:
    """Shift and scale are the first two of so many chunks."""
    modulation = modulation.unsqueeze(1) if modulation.ndim == 2 else modulation
    shift, scale, *_ = modulation.chunk(chunks, dim=-1)
    return (1 + scale) * tokens + shift
