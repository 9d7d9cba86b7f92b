"""Merging together with the rest of diffusers: LoRA, IP-Adapter, ControlNet, fused projections, chunks, caches."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from adapters import add_lora, load_unet_ip_adapter
from diffusers import ControlNetModel
from diffusers.hooks import FirstBlockCacheConfig
from merging import call, merged, remove, steady, steady_call
from observe import AttentionLengths, attention_lengths, bookkeeping, our_hooks, same_picture
from pairs import in_turn, named
from peft import get_peft_model_state_dict
from tiny import SCOPES, TODAY, flux_transformer, one, sd3_transformer, sd15_unet
from tiny_pipelines import flux_pipeline, sd15_pipeline
from torch import nn

SD15, SDXL, FLUX, SD3, PIXART = (one(name) for name in ("sd15", "sdxl", "flux", "sd3", "pixart"))
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
LORA_TARGETS = {
    "sd15": [*ATTENTION, "proj_in", "proj_out", "ff.net.0.proj", "ff.net.2"],
    "sdxl": [*ATTENTION, "proj_in", "proj_out", "ff.net.0.proj", "ff.net.2"],
    # What loaders of Flux LoRAs find in files: also modulation, and the output projection of single blocks.
    "flux": [
        *ATTENTION,
        "add_q_proj",
        "ff.net.0.proj",
        "ff.net.2",
        "norm.linear",
        "norm1.linear",
        "proj_mlp",
        "proj_out",
    ],
    "sd3": [*ATTENTION, "add_q_proj", "ff.net.0.proj", "ff.net.2", "norm1.linear"],
    "pixart": [*ATTENTION, "ff.net.0.proj", "ff.net.2", "linear"],
    "flux2": [*ATTENTION, "add_q_proj", "to_qkv_mlp_proj", "ff.linear_in", "ff.linear_out"],
    "flux3": [*ATTENTION, "ff.linear_in", "ff.linear_out"],
    "qwen-image": [*ATTENTION, "add_q_proj", "img_mlp.net.2", "img_mod.1"],
    "qwen-image-21": [*ATTENTION, "img_mlp.out", "modulation.1"],
    "z-image": [*ATTENTION, "feed_forward.w1", "feed_forward.w2"],
    "krea2": [*ATTENTION, "to_gate", "ff.down"],
    "chroma": [*ATTENTION, "add_q_proj", "ff.net.2", "proj_mlp", "proj_out"],
    "auraflow": [*ATTENTION, "add_q_proj", "ff.out_projection", "norm1.linear"],
}

scopes = pytest.mark.parametrize("scope", SCOPES)


@pytest.fixture
def attended():
    """The lengths of queries and keys of every attention in this test."""
    with AttentionLengths() as lengths:
        yield lengths.seen


def lengths_of(family, model, **inputs) -> list[tuple[int, int]]:
    return attention_lengths(lambda: call(family, model, **inputs))


class TestLora:
    @pytest.mark.parametrize(("family", "scope"), in_turn([SD15, SDXL, SD3, FLUX, *TODAY], SCOPES), ids=named)
    def test_order_does_not_matter(self, family, scope, attended):
        """Added before merging, or after it; and removed in either order."""
        targets = LORA_TARGETS[family.name]
        lora_first, merged_first = family.build(), family.build()
        plain = call(family, lora_first)
        add_lora(lora_first, targets)
        only_lora = call(family, lora_first)
        steady(lora_first, scope=scope)
        steady(merged_first, scope=scope)
        without, lengths = call(family, merged_first), lengths_of(family, merged_first)
        add_lora(merged_first, targets)
        assert lengths_of(family, merged_first) == lengths
        assert not torch.equal(call(family, merged_first), without)
        same_picture(call(family, lora_first), call(family, merged_first))
        remove(lora_first)
        assert torch.equal(call(family, lora_first), only_lora)
        merged_first.delete_adapters("one")
        same_picture(call(family, merged_first), without)
        remove(merged_first)
        assert torch.equal(call(family, merged_first), plain)
        assert not our_hooks(merged_first)

    @pytest.mark.parametrize("family", [SD15, FLUX], ids=named)
    def test_switching_between_adapters(self, family):
        model = family.build()
        steady(model)
        without = call(family, model)
        add_lora(model, LORA_TARGETS[family.name], "one", seed=1)
        one = call(family, model)
        add_lora(model, LORA_TARGETS[family.name], "two", seed=2)
        model.set_adapter("two")
        two = call(family, model)
        assert not torch.equal(one, two)
        model.set_adapters(["one", "two"], [0.5, 0.5])
        assert not torch.equal(call(family, model), one)
        model.set_adapters(["one"], [1.0])
        same_picture(call(family, model), one)
        model.disable_adapters()
        same_picture(call(family, model), without)
        model.enable_adapters()
        model.set_adapters(["two"], [1.0])
        same_picture(call(family, model), two)
        model.delete_adapters(["one", "two"])
        same_picture(call(family, model), without)

    @pytest.mark.parametrize("family", [SD15, FLUX], ids=named)
    def test_fused_into_the_weights(self, family):
        model = family.build()
        steady(model)
        add_lora(model, LORA_TARGETS[family.name])
        separate = call(family, model)
        model.fuse_lora()
        torch.testing.assert_close(call(family, model), separate, atol=1e-3, rtol=1e-3)
        model.unfuse_lora()
        model.unload_lora()
        torch.testing.assert_close(call(family, model), steady_call(family, "module"), atol=1e-3, rtol=1e-3)

    @pytest.mark.parametrize(
        ("family", "pipeline", "name", "scope"),
        [(SD15, sd15_pipeline, "unet", "module"), (FLUX, flux_pipeline, "transformer", "stage")],
        ids=["sd15", "flux"],
    )
    def test_loaded_into_a_pipeline(self, family, pipeline, name, scope):
        trained = family.build()
        add_lora(trained, LORA_TARGETS[family.name])
        weights = {
            f"{name}.{key}": value for key, value in get_peft_model_state_dict(trained, adapter_name="one").items()
        }
        steady(trained, scope=scope)
        pipe = pipeline()
        model = getattr(pipe, name)
        plain = call(family, model)
        steady(model, scope=scope)  # by itself: each call is then a generation
        without = call(family, model)
        pipe.load_lora_weights(weights)
        same_picture(call(family, model), call(family, trained))
        assert not torch.equal(call(family, model), without)
        pipe.unload_lora_weights()
        same_picture(call(family, model), without)
        remove(pipe)
        assert torch.equal(call(family, model), plain)
        assert not our_hooks(model)


def unload_ip_adapter(model: nn.Module, processors: dict) -> None:
    model.encoder_hid_proj = None
    model.config.encoder_hid_dim_type = None
    model.set_attn_processor(dict(processors))


def load_flux_ip_adapter(transformer: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    width, hidden = transformer.config.joint_attention_dim, transformer.inner_dim
    weights = {}
    for index in range(len(transformer.transformer_blocks)):
        for part in ("k", "v"):
            weights[f"{index}.to_{part}_ip.weight"] = random(hidden, width)
            weights[f"{index}.to_{part}_ip.bias"] = random(hidden)
    projection = {
        "proj.weight": random(4 * width, 16),
        "proj.bias": random(4 * width),
        "norm.weight": torch.ones(width),
        "norm.bias": torch.zeros(width),
    }
    transformer._load_ip_adapter_weights([{"image_proj": projection, "ip_adapter": weights}], low_cpu_mem_usage=False)
    transformer.requires_grad_(False)


IMAGE = [torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(4))]
MASK = torch.zeros(1, 1, 16, 16)
MASK[..., :8] = 1


class TestIPAdapter:
    @pytest.mark.parametrize(("scope", "load_first"), in_turn(SCOPES, [True, False]))
    def test_unet(self, scope, load_first, attended):
        unet = sd15_unet()
        plain, processors = call(SD15, unet), unet.attn_processors
        if load_first:
            load_unet_ip_adapter(unet)
        steady(unet, scope=scope)
        if not load_first:
            load_unet_ip_adapter(unet)
        attended.clear()
        with_image = call(SD15, unet, added_cond_kwargs={"image_embeds": IMAGE})
        queries = {length for length, _ in attended}
        assert queries == {128, 32}
        assert (128, 7) in attended
        assert (128, 4) in attended  # the image's four tokens
        unload_ip_adapter(unet, processors)
        same_picture(call(SD15, unet), steady_call(SD15, scope))
        assert not torch.equal(with_image, steady_call(SD15, scope))
        remove(unet)
        assert torch.equal(call(SD15, unet), plain)

    def test_masks_leave_cross_attention_whole_in_module_scope(self, attended):
        unet = sd15_unet()
        load_unet_ip_adapter(unet)
        handle = steady(unet)
        inputs = {"added_cond_kwargs": {"image_embeds": IMAGE}}
        free = call(SD15, unet, **inputs)
        attended.clear()
        masked = call(SD15, unet, **inputs, cross_attention_kwargs={"ip_adapter_masks": [MASK]})
        assert set(attended) == {(128, 128), (256, 7), (256, 4), (32, 32), (64, 7), (64, 4)}
        assert not torch.equal(masked, free)
        assert any(note.startswith("single modules were left whole: IP-Adapter") for note in handle.summary().notes)
        same_picture(call(SD15, unet, **inputs), free)  # and the next call is merged again

    @pytest.mark.parametrize("scope", ["block", "stage"])
    def test_masks_leave_blocks_whole(self, scope):
        unet = sd15_unet()
        load_unet_ip_adapter(unet)
        inputs = {"added_cond_kwargs": {"image_embeds": IMAGE}}
        masked = inputs | {"cross_attention_kwargs": {"ip_adapter_masks": [MASK]}}
        plain = call(SD15, unet, **masked)
        handle = steady(unet, scope=scope)
        free = call(SD15, unet, **inputs)
        assert not handle.summary().notes
        same_picture(call(SD15, unet, **masked), plain)
        assert any("IP-Adapter masks" in note for note in handle.summary().notes)
        assert "IP-Adapter masks" in str(handle.summary())
        same_picture(call(SD15, unet, **inputs), free)

    @pytest.mark.parametrize(("scope", "load_first"), in_turn(SCOPES, [True, False]))
    def test_flux(self, scope, load_first, attended):
        def inputs():  # the model takes the embeddings out of the dictionary
            return {"joint_attention_kwargs": {"ip_adapter_image_embeds": IMAGE}}

        model = flux_transformer()
        plain, processors = call(FLUX, model), model.attn_processors
        if load_first:
            load_flux_ip_adapter(model)
        steady(model, scope=scope)
        if not load_first:
            load_flux_ip_adapter(model)
        attended.clear()
        with_image = call(FLUX, model, **inputs())
        assert set(attended) == {(6 + 32, 6 + 32), (32, 4)}
        unload_ip_adapter(model, processors)
        same_picture(call(FLUX, model), steady_call(FLUX, scope))
        assert not torch.equal(with_image, steady_call(FLUX, scope))
        remove(model)
        assert torch.equal(call(FLUX, model), plain)


def unet_residuals() -> dict:
    """Of a real ControlNet, whose zero convolutions were trained a little."""
    unet = SDXL.build()
    torch.manual_seed(5)
    net = ControlNetModel.from_unet(unet, conditioning_channels=3).eval()
    for parameter in [*net.controlnet_down_blocks.parameters(), *net.controlnet_mid_block.parameters()]:
        nn.init.normal_(parameter, std=0.1)
    with torch.no_grad():
        down, middle = net(**SDXL.inputs(), controlnet_cond=torch.rand(2, 3, 128, 128), return_dict=False)
    return {"down_block_additional_residuals": down, "mid_block_additional_residual": middle}


def random_residuals(count: int, width: int, seed: int, tokens: int = 64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, tokens, width, generator=generator) * 0.3 for _ in range(count)]


CONTROLLED = [
    (FLUX, {"controlnet_block_samples": random_residuals(2, 32, 6)}),
    (FLUX, {"controlnet_single_block_samples": random_residuals(3, 32, 7)}),
    (
        FLUX,
        {
            "controlnet_block_samples": random_residuals(1, 32, 6),
            "controlnet_single_block_samples": random_residuals(3, 32, 7),
        },
    ),
    (SD3, {"block_controlnet_hidden_states": random_residuals(4, 32, 8)}),
    (SD3, {"block_controlnet_hidden_states": random_residuals(2, 32, 8)}),
    (one("chroma"), {"controlnet_block_samples": random_residuals(2, 32, 6)}),
    (one("chroma"), {"controlnet_single_block_samples": random_residuals(3, 32, 7)}),  # written in place by the model
    (one("qwen-image"), {"controlnet_block_samples": random_residuals(3, 32, 9)}),
    (one("z-image"), {"controlnet_block_samples": dict(enumerate(random_residuals(3, 32, 9, tokens=128)))}),
]


class TestControlNet:
    @scopes
    def test_unet(self, scope, attended):
        model = SDXL.build()
        plain, residuals = call(SDXL, model), unet_residuals()
        handle = merged(model, scope=scope)
        free = lengths_of(SDXL, model)
        assert lengths_of(SDXL, model, **residuals) == free
        assert {query for query, _ in free} == {32}
        assert not torch.equal(call(SDXL, model, **residuals), call(SDXL, model))
        assert not handle.summary().notes  # residuals go to skip connections, outside of any run
        remove(model)
        assert torch.equal(call(SDXL, model), plain)

    @pytest.mark.parametrize(("family", "residuals"), CONTROLLED, ids=lambda value: getattr(value, "name", "+"))
    def test_stage_scope_goes_block_by_block(self, family, residuals):
        model = family.build()
        whole = call(family, model, **residuals)
        handle = steady(model, scope="stage")
        free = call(family, model)
        assert not handle.summary().notes
        controlled = call(family, model, **residuals)
        same_picture(controlled, steady_call(family, "block", **residuals))
        assert not torch.equal(controlled, free)
        assert any("block by block" in note and "ControlNet" in note for note in handle.summary().notes)
        assert "block by block" in str(handle.summary())
        same_picture(call(family, model), free)  # the next call without it stays merged again
        remove(model)
        assert torch.equal(call(family, model, **residuals), whole)

    @pytest.mark.parametrize(
        ("family", "residuals", "scope"),
        [(*each, scope) for each, scope in in_turn(CONTROLLED, ("module", "block"))],
        ids=lambda value: getattr(value, "name", "+"),
    )
    def test_transformers(self, family, residuals, scope, attended):
        model = family.build()
        plain = call(family, model, **residuals)
        whole = list(attended)
        handle = merged(model, scope=scope)
        lengths = lengths_of(family, model, **residuals)
        assert max(query for query, _ in lengths) == max(query for query, _ in whole) - 32
        assert not torch.equal(call(family, model, **residuals), call(family, model))
        assert not handle.summary().notes
        remove(model)
        assert torch.equal(call(family, model, **residuals), plain)


# Merged or not, diffusers cannot fuse SD3's second attention, whose processor then wants text, and then drops qk_norm.
SD3_ONE_ATTENTION = replace(SD3, build=lambda: sd3_transformer(dual_attention_layers=(), qk_norm=None))
FUSABLE_TODAY = [family for family in TODAY if family.name != "z-image"]


class TestFusedProjections:
    @pytest.mark.parametrize(
        ("family", "scope"),
        in_turn([SD15, SDXL, FLUX, SD3_ONE_ATTENTION, PIXART, *FUSABLE_TODAY], SCOPES),
        ids=named,
    )
    def test_fused_after(self, family, scope, attended):
        model = family.build()
        plain = call(family, model)
        steady(model, scope=scope)
        separate = call(family, model)
        lengths = lengths_of(family, model)
        model.fuse_qkv_projections()
        assert lengths_of(family, model) == lengths
        torch.testing.assert_close(call(family, model), separate, atol=1e-4, rtol=1e-4)
        model.unfuse_qkv_projections()
        same_picture(call(family, model), separate)
        remove(model)
        assert torch.equal(call(family, model), plain)


def chunk(model: nn.Module, dim: int) -> None:
    for module in model.modules():
        if hasattr(module, "set_chunk_feed_forward"):
            module.set_chunk_feed_forward(chunk_size=1 if dim == 0 else 2, dim=dim)


@pytest.mark.parametrize("family", [SD15, SD3], ids=named)
class TestChunkedFeedForward:
    def test_pieces_of_the_sequence_are_refused(self, family):
        model = family.build()
        chunk(model, dim=1)
        before = bookkeeping(model)
        with pytest.raises(ValueError, match=r"set_chunk_feed_forward, dim=1.*leave 'ff' out"):
            merged(model)
        assert bookkeeping(model) == before

    def test_pieces_of_the_sequence_without_the_feed_forward_site(self, family):
        model, whole = family.build(), family.build()
        chunk(model, dim=1)
        for each in (model, whole):
            steady(each, sites=("attn",))
        torch.testing.assert_close(call(family, model), call(family, whole), atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("scope", ["block", "stage"])
    def test_whole_blocks_may_feed_pieces(self, family, scope):
        model = family.build()
        chunk(model, dim=1)
        steady(model, scope=scope)
        torch.testing.assert_close(call(family, model), steady_call(family, scope), atol=1e-5, rtol=1e-5)

    def test_pieces_of_the_batch_are_refused(self, family):
        """A plan is for the whole batch. This is what `enable_forward_chunking()` does unless told otherwise."""
        model = family.build()
        chunk(model, dim=0)
        with pytest.raises(ValueError, match="set_chunk_feed_forward"):
            merged(model)
        steady(model, scope="block")
        torch.testing.assert_close(call(family, model), steady_call(family, "block"), atol=1e-5, rtol=1e-5)


CACHE = FirstBlockCacheConfig(threshold=0.05)


def cached_call(family, model, seed: int = 0, noise: float = 0.0) -> torch.Tensor:
    inputs = family.inputs(seed=seed)
    inputs["hidden_states"] = inputs["hidden_states"] + noise
    with torch.no_grad(), model.cache_context("cond") if model.is_cache_enabled else nullcontext():
        return model(**inputs, return_dict=False)[0]


class TestFirstBlockCache:
    @pytest.mark.parametrize(("cache_first", "remove_cache_first"), [(True, True), (False, False)])
    def test_module_scope_in_any_order(self, cache_first, remove_cache_first, attended):
        model = flux_transformer()
        plain = call(FLUX, model)
        if cache_first:
            model.enable_cache(CACHE)
        handle = steady(model)
        if not cache_first:
            call(FLUX, model)
            model.enable_cache(CACHE)
        first = cached_call(FLUX, model)
        same_picture(first, steady_call(FLUX, "module"))
        attended.clear()
        second = cached_call(FLUX, model, noise=1e-4)
        assert attended == [(38, 38)]  # only the first block ran, merged
        torch.testing.assert_close(second, first, atol=1e-2, rtol=1e-2)
        attended.clear()
        cached_call(FLUX, model, seed=1)
        assert attended == [(38, 38)] * 5
        assert not handle.summary().merge.left_whole
        if remove_cache_first:
            model.disable_cache()
            same_picture(call(FLUX, model), steady_call(FLUX, "module"))
            remove(model)
        else:
            remove(model)
            attended.clear()
            cached_call(FLUX, model, seed=2)
            assert attended == [(70, 70)] * 5
            model.disable_cache()
        assert torch.equal(call(FLUX, model), plain)
        assert not our_hooks(model)

    @pytest.mark.parametrize(("scope", "remove_cache_first"), [("block", True), ("stage", False)])
    def test_whole_blocks_with_the_cache_on(self, scope, remove_cache_first, attended):
        model = flux_transformer()
        plain = call(FLUX, model)
        model.enable_cache(CACHE)
        handle = steady(model, scope=scope)
        left_whole = dict(handle.summary().merge.left_whole)
        assert set(left_whole) == {"transformer_blocks.0", "single_transformer_blocks.2"}
        assert all("cache" in reason for reason in left_whole.values())
        attended.clear()
        first = cached_call(FLUX, model)
        assert attended == [(70, 70), *[(38, 38)] * 3, (70, 70)]
        attended.clear()
        second = cached_call(FLUX, model, noise=1e-4)
        assert attended == [(70, 70)]
        torch.testing.assert_close(second, first, atol=1e-2, rtol=1e-2)
        without = flux_transformer()
        steady(without, skip_blocks=(0, 4), scope=scope)
        same_picture(first, call(FLUX, without))
        for undo in [model.disable_cache, handle.remove][:: 1 if remove_cache_first else -1]:
            undo()
        assert torch.equal(call(FLUX, model), plain)
        assert not our_hooks(model)

    @pytest.mark.parametrize("scope", ["block", "stage"])
    def test_cache_enabled_later_is_refused(self, scope):
        model = flux_transformer()
        plain = call(FLUX, model)
        handle = steady(model, scope=scope)
        ours = call(FLUX, model)
        model.enable_cache(CACHE)
        with pytest.raises(RuntimeError, match="speed_up again with the cache on"):
            cached_call(FLUX, model)
        handle.enabled = False
        assert torch.equal(cached_call(FLUX, model), plain)
        handle.enabled = True
        model.disable_cache()
        same_picture(call(FLUX, model), ours)
        remove(model)
        assert torch.equal(call(FLUX, model), plain)
