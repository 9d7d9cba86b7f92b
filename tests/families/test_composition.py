"""Token merging together with the rest of diffusers: adapters, control, caches, offloading, copies, hooks of others."""

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import accelerate
import diffusers
import pytest
import torch
from diffusers import ControlNetModel
from diffusers.hooks import FirstBlockCacheConfig
from observe import same_picture
from packaging.version import Version
from pairs import named, pairwise
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from tiny import (
    FAMILIES,
    PLAIN,
    SCOPES,
    SETTINGS,
    STRIDED,
    flux_ids,
    flux_transformer,
    in_dtype,
    output_of,
    sd3_transformer,
    sd15_unet,
)
from tiny_pipelines import flux_pipeline, run, sd3_pipeline, sd15_pipeline
from tiny_today import EVERY_FAMILY, TODAY
from torch import nn

from toma_diffusion import apply_toma, remove_toma

BY_NAME = {family.name: family for family in FAMILIES}
SD15, SDXL, FLUX, SD3 = (BY_NAME[name] for name in ("sd15", "sdxl", "flux", "sd3"))
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

families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
scopes = pytest.mark.parametrize("scope", SCOPES)


@pytest.fixture
def attended(monkeypatch):
    """The lengths of queries and keys of every attention, as the kernel sees them."""
    lengths = []
    kernel = torch.nn.functional.scaled_dot_product_attention

    def record(query, key, *args, **kwargs):
        lengths.append((query.shape[-2], key.shape[-2]))
        return kernel(query, key, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    return lengths


def lengths_of(attended, family, model, **inputs) -> list[tuple[int, int]]:
    attended.clear()
    call(family, model, **inputs)
    return list(attended)


def call(family, model, **extra) -> torch.Tensor:
    """`extra` goes to the model, on top of the family's inputs."""
    return output_of(model, family.inputs() | extra)


def merged_call(family, scope, **extra) -> torch.Tensor:
    """From a fresh model, merged and called once."""
    model = family.build()
    apply_toma(model, **STRIDED, scope=scope)
    return call(family, model, **extra)


def hooks_of(model: nn.Module) -> dict:
    return {
        (name, kind): list(getattr(module, kind).items())
        for name, module in model.named_modules()
        for kind in (
            "_forward_pre_hooks",
            "_forward_hooks",
            "_forward_pre_hooks_with_kwargs",
            "_forward_hooks_with_kwargs",
            "_forward_hooks_always_called",
        )
        if getattr(module, kind)
    }


def add_lora(model: nn.Module, targets: list[str], name: str = "one", seed: int = 0) -> None:
    config = LoraConfig(r=2, lora_alpha=2, target_modules=targets, init_lora_weights=False)
    if hasattr(model, "add_adapter"):
        model.add_adapter(config, adapter_name=name)
    else:
        inject_adapter_in_model(config, model, name)
    generator = torch.Generator().manual_seed(seed)
    for key, parameter in model.named_parameters():
        if "lora_" in key and f".{name}." in key:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    model.requires_grad_(False)


with_adapters = pytest.mark.parametrize("family", [SD15, SDXL, FLUX, SD3], ids=lambda family: family.name)


class TestLora:
    @with_adapters
    @scopes
    def test_added_after(self, family, scope, attended):
        model = family.build()
        plain, whole = call(family, model), list(attended)
        apply_toma(model, **STRIDED, scope=scope)
        without = call(family, model)
        lengths = lengths_of(attended, family, model)
        add_lora(model, LORA_TARGETS[family.name])
        assert lengths_of(attended, family, model) == lengths != whole
        assert not torch.equal(call(family, model), without)
        model.delete_adapters("one")
        same_picture(call(family, model), without)
        remove_toma(model)
        assert torch.equal(call(family, model), plain)

    @pytest.mark.parametrize(("family", "scope"), pairwise([SD15, SDXL, FLUX, SD3, *TODAY], SCOPES), ids=named)
    def test_order_does_not_matter(self, family, scope):
        targets = LORA_TARGETS[family.name]
        lora_first, merged_first = family.build(), family.build()
        plain = call(family, lora_first)
        add_lora(lora_first, targets)
        only_lora = call(family, lora_first)
        apply_toma(lora_first, **STRIDED, scope=scope)
        apply_toma(merged_first, **STRIDED, scope=scope)
        add_lora(merged_first, targets)
        same_picture(call(family, lora_first), call(family, merged_first))
        remove_toma(lora_first)
        assert torch.equal(call(family, lora_first), only_lora)
        remove_toma(merged_first)
        same_picture(call(family, merged_first), only_lora)
        for model in (lora_first, merged_first):
            model.delete_adapters("one")
            same_picture(call(family, model), plain)
            assert not hooks_of(model)

    @with_adapters
    @scopes
    def test_lora_added_before_and_removed_while_merged(self, family, scope):
        model = family.build()
        plain = call(family, model)
        add_lora(model, LORA_TARGETS[family.name])
        apply_toma(model, **STRIDED, scope=scope)
        call(family, model)
        model.delete_adapters("one")
        same_picture(call(family, model), merged_call(family, scope))
        model.unload_lora()
        same_picture(call(family, model), merged_call(family, scope))
        remove_toma(model)
        assert torch.equal(call(family, model), plain)
        assert not hooks_of(model)

    @with_adapters
    def test_switching_between_adapters(self, family):
        model = family.build()
        apply_toma(model, **STRIDED)
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

    @with_adapters
    def test_fused_into_the_weights(self, family):
        model = family.build()
        apply_toma(model, **STRIDED)
        add_lora(model, LORA_TARGETS[family.name])
        separate = call(family, model)
        model.fuse_lora()
        torch.testing.assert_close(call(family, model), separate, atol=1e-3, rtol=1e-3)
        model.unfuse_lora()
        model.unload_lora()
        torch.testing.assert_close(call(family, model), merged_call(family, "module"), atol=1e-3, rtol=1e-3)

    @scopes
    @pytest.mark.parametrize(
        ("family", "pipeline", "name"),
        [(SD15, sd15_pipeline, "unet"), (FLUX, flux_pipeline, "transformer"), (SD3, sd3_pipeline, "transformer")],
        ids=["sd15", "flux", "sd3"],
    )
    def test_loaded_into_a_pipeline(self, family, pipeline, name, scope):
        trained = family.build()
        add_lora(trained, LORA_TARGETS[family.name])
        weights = {
            f"{name}.{key}": value for key, value in get_peft_model_state_dict(trained, adapter_name="one").items()
        }
        apply_toma(trained, **STRIDED, scope=scope)
        pipe = pipeline()
        model = getattr(pipe, name)
        plain = call(family, model)
        apply_toma(model, **STRIDED, scope=scope)  # by itself: each call is then a generation
        without = call(family, model)
        pipe.load_lora_weights(weights)
        same_picture(call(family, model), call(family, trained))
        assert not torch.equal(call(family, model), without)
        pipe.unload_lora_weights()
        same_picture(call(family, model), without)
        remove_toma(pipe)
        assert torch.equal(call(family, model), plain)
        assert not hooks_of(model)

    @scopes
    def test_pixart_with_peft_alone(self, scope, attended):
        """PixArt's transformer has no methods for adapters; its pipeline is trained and loaded with peft itself."""
        family = BY_NAME["pixart"]
        model, merged_first = family.build(), family.build()
        add_lora(model, LORA_TARGETS["pixart"])
        only_lora = call(family, model)
        apply_toma(model, **STRIDED, scope=scope)
        apply_toma(merged_first, **STRIDED, scope=scope)
        lengths, without = lengths_of(attended, family, merged_first), call(family, merged_first)
        add_lora(merged_first, LORA_TARGETS["pixart"])
        assert lengths_of(attended, family, merged_first) == lengths_of(attended, family, model) == lengths
        same_picture(call(family, merged_first), call(family, model))
        assert not torch.equal(call(family, model), without)
        remove_toma(model)
        assert torch.equal(call(family, model), only_lora)
        remove_toma(merged_first)
        same_picture(call(family, merged_first), only_lora)
        assert not hooks_of(model)
        assert not hooks_of(merged_first)


def load_unet_ip_adapter(unet: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    width = unet.config.cross_attention_dim
    weights, key = {}, 1
    for name in unet.attn_processors:
        if not name.endswith("attn1.processor"):
            hidden = unet.get_submodule(name.removesuffix(".processor")).query_dim
            weights |= {f"{key}.to_k_ip.weight": random(hidden, width), f"{key}.to_v_ip.weight": random(hidden, width)}
            key += 2
    projection = {
        "proj.weight": random(4 * width, 16),
        "proj.bias": random(4 * width),
        "norm.weight": torch.ones(width),
        "norm.bias": torch.zeros(width),
    }
    unet._load_ip_adapter_weights([{"image_proj": projection, "ip_adapter": weights}], low_cpu_mem_usage=False)
    unet.requires_grad_(False)


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
    @scopes
    @pytest.mark.parametrize("load_first", [True, False])
    def test_unet(self, scope, load_first, attended):
        unet = sd15_unet()
        plain, processors = call(SD15, unet), unet.attn_processors
        if load_first:
            load_unet_ip_adapter(unet)
        apply_toma(unet, **STRIDED, scope=scope)
        if not load_first:
            load_unet_ip_adapter(unet)
        attended.clear()
        with_image = call(SD15, unet, added_cond_kwargs={"image_embeds": IMAGE})
        queries = {length for length, _ in attended}
        assert queries == {128, 32}
        assert (128, 7) in attended
        assert (128, 4) in attended  # the image's four tokens
        unload_ip_adapter(unet, processors)
        same_picture(call(SD15, unet), merged_call(SD15, scope))
        assert not torch.equal(with_image, merged_call(SD15, scope))
        remove_toma(unet)
        assert torch.equal(call(SD15, unet), plain)

    def test_masks_leave_cross_attention_whole_in_module_scope(self, attended):
        unet = sd15_unet()
        load_unet_ip_adapter(unet)
        handle = apply_toma(unet, **STRIDED)
        inputs = {"added_cond_kwargs": {"image_embeds": IMAGE}}
        free = call(SD15, unet, **inputs)
        attended.clear()
        masked = call(SD15, unet, **inputs, cross_attention_kwargs={"ip_adapter_masks": [MASK]})
        assert set(attended) == {(128, 128), (256, 7), (256, 4), (32, 32), (64, 7), (64, 4)}
        assert not torch.equal(masked, free)
        assert any(note.startswith("single modules were left alone: IP-Adapter") for note in handle.summary().notes)
        same_picture(call(SD15, unet, **inputs), free)  # and the next call is merged again

    def test_masks_where_cross_attention_comes_first(self, attended):
        """It is left whole and sees no plan made; the feed-forward layer after it is merged all the same."""
        unet = sd15_unet()
        load_unet_ip_adapter(unet)
        inputs = {
            "added_cond_kwargs": {"image_embeds": IMAGE},
            "cross_attention_kwargs": {"ip_adapter_masks": [MASK]},
        }
        plain = call(SD15, unet, **inputs)
        apply_toma(unet, **SETTINGS, sites=("cross_attn", "ff"))
        attended.clear()
        assert not torch.equal(call(SD15, unet, **inputs), plain)
        assert set(attended) == {(256, 256), (256, 7), (256, 4), (64, 64), (64, 7), (64, 4)}

    @pytest.mark.parametrize("scope", ["block", "stage"])
    def test_masks_leave_blocks_whole(self, scope):
        unet = sd15_unet()
        load_unet_ip_adapter(unet)
        inputs = {"added_cond_kwargs": {"image_embeds": IMAGE}}
        masked = inputs | {"cross_attention_kwargs": {"ip_adapter_masks": [MASK]}}
        plain = call(SD15, unet, **masked)
        handle = apply_toma(unet, **STRIDED, scope=scope)
        free = call(SD15, unet, **inputs)
        assert not handle.summary().notes
        same_picture(call(SD15, unet, **masked), plain)
        assert any("IP-Adapter masks" in note for note in handle.summary().notes)
        assert "IP-Adapter masks" in str(handle.summary())
        same_picture(call(SD15, unet, **inputs), free)

    @scopes
    @pytest.mark.parametrize("load_first", [True, False])
    def test_flux(self, scope, load_first, attended):
        def inputs():  # the model takes the embeddings out of the dictionary
            return {"joint_attention_kwargs": {"ip_adapter_image_embeds": IMAGE}}

        model = flux_transformer()
        plain, processors = call(FLUX, model), model.attn_processors
        if load_first:
            load_flux_ip_adapter(model)
        apply_toma(model, **STRIDED, scope=scope)
        if not load_first:
            load_flux_ip_adapter(model)
        attended.clear()
        with_image = call(FLUX, model, **inputs())
        assert set(attended) == {(6 + 32, 6 + 32), (32, 4)}
        unload_ip_adapter(model, processors)
        same_picture(call(FLUX, model), merged_call(FLUX, scope))
        assert not torch.equal(with_image, merged_call(FLUX, scope))
        remove_toma(model)
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


def random_residuals(count: int, width: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 64, width, generator=generator) * 0.3 for _ in range(count)]


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
]


class TestControlNet:
    @scopes
    def test_unet(self, scope, attended):
        model = SDXL.build()
        plain, residuals = call(SDXL, model), unet_residuals()
        handle = apply_toma(model, **SETTINGS, scope=scope)
        free = lengths_of(attended, SDXL, model)
        assert lengths_of(attended, SDXL, model, **residuals) == free
        assert {query for query, _ in free} == {32}
        assert not torch.equal(call(SDXL, model, **residuals), call(SDXL, model))
        assert not handle.summary().notes  # residuals go to skip connections, outside of any run
        remove_toma(model)
        assert torch.equal(call(SDXL, model), plain)

    @pytest.mark.parametrize(("family", "residuals"), CONTROLLED, ids=lambda value: getattr(value, "name", "+"))
    def test_stage_scope_goes_block_by_block(self, family, residuals):
        model = family.build()
        handle = apply_toma(model, **STRIDED, scope="stage")
        free = call(family, model)
        assert not handle.summary().notes
        controlled = call(family, model, **residuals)
        same_picture(controlled, merged_call(family, "block", **residuals))
        assert not torch.equal(controlled, free)
        assert any("block by block" in note and "ControlNet" in note for note in handle.summary().notes)
        assert "block by block" in str(handle.summary())
        same_picture(call(family, model), free)  # the next call without it stays merged again

    @pytest.mark.parametrize(("family", "residuals"), CONTROLLED, ids=lambda value: getattr(value, "name", "+"))
    @scopes
    def test_transformers(self, family, residuals, scope, attended):
        model = family.build()
        plain = call(family, model, **residuals)
        whole = list(attended)
        handle = apply_toma(model, **SETTINGS, scope=scope)
        lengths = lengths_of(attended, family, model, **residuals)
        assert max(query for query, _ in lengths) == max(query for query, _ in whole) - 32
        assert not torch.equal(call(family, model, **residuals), call(family, model))
        assert bool(handle.summary().notes) == (scope == "stage")
        remove_toma(model)
        assert torch.equal(call(family, model, **residuals), plain)


# Merged or not, diffusers cannot fuse SD3's second attention, whose processor then wants text, and then drops qk_norm.
SD3_ONE_ATTENTION = replace(SD3, build=lambda: sd3_transformer(dual_attention_layers=(), qk_norm=None))
FUSABLE_TODAY = [family for family in TODAY if family.name != "z-image"]
fusable = pytest.mark.parametrize(
    "family", [SD15, SDXL, FLUX, SD3_ONE_ATTENTION, BY_NAME["pixart"]], ids=lambda family: family.name
)


class TestFusedProjections:
    @pytest.mark.parametrize(
        ("family", "scope"),
        pairwise([SD15, SDXL, FLUX, SD3_ONE_ATTENTION, BY_NAME["pixart"], *FUSABLE_TODAY], SCOPES),
        ids=named,
    )
    def test_fused_after(self, family, scope, attended):
        model = family.build()
        plain = call(family, model)
        apply_toma(model, **STRIDED, scope=scope)
        separate = call(family, model)
        lengths = lengths_of(attended, family, model)
        model.fuse_qkv_projections()
        assert lengths_of(attended, family, model) == lengths
        torch.testing.assert_close(call(family, model), separate, atol=1e-4, rtol=1e-4)
        model.unfuse_qkv_projections()
        same_picture(call(family, model), separate)
        remove_toma(model)
        assert torch.equal(call(family, model), plain)

    @fusable
    @scopes
    def test_fused_before(self, family, scope):
        model = family.build()
        plain = call(family, model)
        model.fuse_qkv_projections()
        fused = call(family, model)
        apply_toma(model, **STRIDED, scope=scope)
        torch.testing.assert_close(call(family, model), merged_call(family, scope), atol=1e-4, rtol=1e-4)
        remove_toma(model)
        assert torch.equal(call(family, model), fused)
        model.unfuse_qkv_projections()
        same_picture(call(family, model), plain)


def chunk(model: nn.Module, dim: int) -> None:
    for module in model.modules():
        if hasattr(module, "set_chunk_feed_forward"):
            module.set_chunk_feed_forward(chunk_size=1 if dim == 0 else 2, dim=dim)


@pytest.mark.parametrize("family", [SD15, SDXL, SD3, BY_NAME["pixart"]], ids=lambda family: family.name)
class TestChunkedFeedForward:
    def test_pieces_of_the_sequence_are_refused(self, family):
        model = family.build()
        chunk(model, dim=1)
        before = hooks_of(model)
        with pytest.raises(ValueError, match=r"set_chunk_feed_forward, dim=1.*leave 'ff' out"):
            apply_toma(model, **SETTINGS)
        assert hooks_of(model) == before

    def test_pieces_of_the_sequence_without_the_feed_forward_site(self, family):
        model, whole = family.build(), family.build()
        chunk(model, dim=1)
        for one in (model, whole):
            apply_toma(one, **STRIDED, sites=("attn",))
        torch.testing.assert_close(call(family, model), call(family, whole), atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("scope", ["block", "stage"])
    def test_whole_blocks_may_feed_pieces(self, family, scope):
        model = family.build()
        chunk(model, dim=1)
        apply_toma(model, **STRIDED, scope=scope)
        torch.testing.assert_close(call(family, model), merged_call(family, scope), atol=1e-5, rtol=1e-5)

    def test_pieces_of_the_batch_are_refused(self, family):
        """A plan is for the whole batch. This is what `enable_forward_chunking()` does unless told otherwise."""
        model = family.build()
        chunk(model, dim=0)
        with pytest.raises(ValueError, match="set_chunk_feed_forward"):
            apply_toma(model, **SETTINGS)
        apply_toma(model, **STRIDED, scope="block")
        torch.testing.assert_close(call(family, model), merged_call(family, "block"), atol=1e-5, rtol=1e-5)


class TestEnableForwardChunking:
    def test_of_sd3(self):
        model = sd3_transformer()
        model.enable_forward_chunking(chunk_size=2, dim=1)
        with pytest.raises(ValueError, match="set_chunk_feed_forward, dim=1"):
            apply_toma(model, **SETTINGS)
        model.disable_forward_chunking()
        apply_toma(model, **STRIDED)
        same_picture(call(SD3, model), merged_call(SD3, "module"))


CACHE = FirstBlockCacheConfig(threshold=0.05)


def cached_call(family, model, seed: int = 0, noise: float = 0.0) -> torch.Tensor:
    inputs = family.inputs(seed=seed)
    inputs["hidden_states"] = inputs["hidden_states"] + noise
    with torch.no_grad(), model.cache_context("cond") if model.is_cache_enabled else nullcontext():
        return model(**inputs, return_dict=False)[0]


class TestFirstBlockCache:
    @pytest.mark.parametrize("cache_first", [True, False])
    @pytest.mark.parametrize("remove_cache_first", [True, False])
    def test_module_scope_in_any_order(self, cache_first, remove_cache_first, attended):
        model = flux_transformer()
        plain = call(FLUX, model)
        if cache_first:
            model.enable_cache(CACHE)
        handle = apply_toma(model, **STRIDED)
        if not cache_first:
            call(FLUX, model)
            model.enable_cache(CACHE)
        first = cached_call(FLUX, model)
        same_picture(first, merged_call(FLUX, "module"))
        attended.clear()
        second = cached_call(FLUX, model, noise=1e-4)
        assert attended == [(38, 38)]  # only the first block ran, merged
        torch.testing.assert_close(second, first, atol=1e-2, rtol=1e-2)
        attended.clear()
        cached_call(FLUX, model, seed=1)
        assert attended == [(38, 38)] * 5
        assert not handle.summary().left_alone
        if remove_cache_first:
            model.disable_cache()
            same_picture(call(FLUX, model), merged_call(FLUX, "module"))
            remove_toma(model)
        else:
            remove_toma(model)
            attended.clear()
            cached_call(FLUX, model, seed=2)
            assert attended == [(70, 70)] * 5
            model.disable_cache()
        assert torch.equal(call(FLUX, model), plain)
        assert not hooks_of(model)

    @pytest.mark.parametrize("scope", ["block", "stage"])
    @pytest.mark.parametrize("remove_cache_first", [True, False])
    def test_whole_blocks_with_the_cache_on(self, scope, remove_cache_first, attended):
        model = flux_transformer()
        plain = call(FLUX, model)
        model.enable_cache(CACHE)
        handle = apply_toma(model, **STRIDED, scope=scope)
        left_alone = dict(handle.summary().left_alone)
        assert set(left_alone) == {"transformer_blocks.0", "single_transformer_blocks.2"}
        assert all("cache" in reason for reason in left_alone.values())
        attended.clear()
        first = cached_call(FLUX, model)
        assert attended == [(70, 70), *[(38, 38)] * 3, (70, 70)]
        attended.clear()
        second = cached_call(FLUX, model, noise=1e-4)
        assert attended == [(70, 70)]
        torch.testing.assert_close(second, first, atol=1e-2, rtol=1e-2)
        without = flux_transformer()
        apply_toma(without, **STRIDED | {"skip_blocks": (0, 4)}, scope=scope)
        same_picture(first, call(FLUX, without))
        for remove in [model.disable_cache, handle.remove][:: 1 if remove_cache_first else -1]:
            remove()
        assert torch.equal(call(FLUX, model), plain)
        assert not hooks_of(model)

    @pytest.mark.parametrize("scope", ["block", "stage"])
    def test_cache_enabled_later_is_refused(self, scope):
        model = flux_transformer()
        plain = call(FLUX, model)
        handle = apply_toma(model, **STRIDED, scope=scope)
        merged = call(FLUX, model)
        model.enable_cache(CACHE)
        with pytest.raises(RuntimeError, match="call remove_toma, then apply_toma again with the cache on"):
            cached_call(FLUX, model)
        handle.enabled = False
        assert torch.equal(cached_call(FLUX, model), plain)
        handle.enabled = True
        model.disable_cache()
        same_picture(call(FLUX, model), merged)
        remove_toma(model)
        assert torch.equal(call(FLUX, model), plain)

    @pytest.mark.parametrize("scope", ["block", "stage"])
    def test_cache_enabled_later_with_first_and_last_block_whole(self, scope):
        model = flux_transformer()
        apply_toma(model, **STRIDED | {"skip_blocks": (0, 4)}, scope=scope)
        merged = call(FLUX, model)
        model.enable_cache(CACHE)
        same_picture(cached_call(FLUX, model), merged)
        torch.testing.assert_close(cached_call(FLUX, model, noise=1e-4), merged, atol=1e-2, rtol=1e-2)


class Offloads:
    """Each takes the weights away between calls: to the meta device or to disk, for want of a GPU."""

    @staticmethod
    def sequential(model, path):
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)

    @staticmethod
    def whole_model(model, path):
        accelerate.cpu_offload_with_hook(model, execution_device=torch.device("cpu"))

    @staticmethod
    def dispatched(model, path):
        names = {name: "cpu" if index % 2 else "disk" for index, (name, _) in enumerate(model.named_children())}
        names |= {name: "cpu" for name, _ in model.named_parameters(recurse=False)}
        accelerate.dispatch_model(
            model, names, main_device="cpu", offload_dir=path, offload_buffers=True, force_hooks=True
        )

    @staticmethod
    def leaf_groups_on_disk(model, path):
        _require_group_offload()
        model.enable_group_offload(
            onload_device=torch.device("cpu"), offload_type="leaf_level", offload_to_disk_path=str(path)
        )

    @staticmethod
    def block_groups_on_disk(model, path):
        _require_group_offload()
        model.enable_group_offload(
            onload_device=torch.device("cpu"),
            offload_type="block_level",
            num_blocks_per_group=1,
            offload_to_disk_path=str(path),
        )


def _require_group_offload() -> None:
    if Version(diffusers.__version__) < Version("0.41") and torch.accelerator.current_accelerator() is None:
        pytest.skip("diffusers before 0.41 offloads groups only on a machine with an accelerator")


OFFLOADS = [value.__func__ for value in vars(Offloads).values() if isinstance(value, staticmethod)]
every_offload = pytest.mark.parametrize(
    ("family", "scope", "offload"), pairwise(EVERY_FAMILY, SCOPES, OFFLOADS), ids=named
)


class TestOffloading:
    @every_offload
    def test_offloaded_after(self, family, scope, offload, tmp_path):
        expected = merged_call(family, scope)
        model = family.build()
        apply_toma(model, **STRIDED, scope=scope)
        offload(model, tmp_path)
        for _ in range(2):
            same_picture(call(family, model), expected)

    @every_offload
    def test_offloaded_before(self, family, scope, offload, tmp_path):
        plain = call(family, family.build())
        expected = merged_call(family, scope)
        model = family.build()
        offload(model, tmp_path)
        apply_toma(model, **STRIDED, scope=scope)
        for _ in range(2):
            same_picture(call(family, model), expected)
        remove_toma(model)
        same_picture(call(family, model), plain)

    @pytest.mark.parametrize(
        ("family", "scope", "storage"), pairwise(EVERY_FAMILY, SCOPES, (torch.float8_e4m3fn, torch.bfloat16)), ids=named
    )
    def test_layerwise_casting(self, family, scope, storage, attended):
        model = family.build()
        apply_toma(model, **SETTINGS, scope=scope)
        lengths, merged = lengths_of(attended, family, model), call(family, model)
        model.enable_layerwise_casting(storage_dtype=storage, compute_dtype=torch.float32)
        assert lengths_of(attended, family, model) == lengths
        cast = call(family, model)
        assert cast.isfinite().all()
        assert not torch.equal(cast, merged)


@families
@scopes
class TestSaving:
    def test_a_saved_model_is_plain(self, family, scope, tmp_path):
        model = family.build()
        plain, weights = call(family, model), {key: value.clone() for key, value in model.state_dict().items()}
        apply_toma(model, **STRIDED, scope=scope)
        merged = call(family, model)
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path)
        assert not hooks_of(loaded)
        assert loaded.state_dict().keys() == weights.keys()
        assert all(torch.equal(value, weights[key]) for key, value in loaded.state_dict().items())
        assert dict(loaded.config)["_class_name"] == type(model).__name__
        same_picture(call(family, loaded), plain)
        same_picture(call(family, model), merged)


@pytest.mark.parametrize(("family", "scope"), pairwise(EVERY_FAMILY, SCOPES), ids=named)
def test_a_copy_merges_for_itself(family, scope):
    model = family.build()
    plain = call(family, model)
    apply_toma(model, **STRIDED, scope=scope)
    merged = call(family, model)
    twin = copy.deepcopy(model)
    ours = {id(hook) for hooks in hooks_of(model).values() for _, hook in hooks if not isinstance(hook, bool)}
    theirs = {id(hook) for hooks in hooks_of(twin).values() for _, hook in hooks if not isinstance(hook, bool)}
    assert len(ours) == len(theirs)
    assert not ours & theirs
    same_picture(call(family, twin), merged)
    remove_toma(twin)
    same_picture(call(family, twin), plain)
    same_picture(call(family, model), merged)
    third = copy.deepcopy(model)
    remove_toma(model)
    assert torch.equal(call(family, model), plain)
    same_picture(call(family, third), merged)
    remove_toma(third)
    same_picture(call(family, third), plain)
    assert not hooks_of(copy.deepcopy(model))
    same_picture(call(family, copy.deepcopy(model)), plain)


@families
@scopes
class TestCopies:
    def test_calling_a_copy_does_not_disturb_a_generation(self, family, scope):
        def generate(model, between=lambda: None):
            inputs = family.inputs()
            name = "sample" if "sample" in inputs else "hidden_states"
            with torch.no_grad():
                for _ in range(4):  # plans are chosen in the first step and reweighed in the third
                    between()
                    inputs[name] = (
                        inputs[name] - 0.5 * model(**inputs, return_dict=False)[0][:, : inputs[name].shape[1]]
                    )
            return inputs[name]

        settings = STRIDED | {"select_every": 4, "reweigh_every": 2}
        model = family.build()
        apply_toma(model, **settings, scope=scope)
        alone = generate(model)
        twin = copy.deepcopy(model)
        same_picture(generate(model, lambda: call(family, twin, **family.inputs(seed=9))), alone)
        same_picture(generate(twin, lambda: call(family, model, **family.inputs(seed=9))), alone)

    def test_two_threads(self, family, scope):
        def generate(seed):
            torch.set_num_threads(1)
            return [family.call(models[seed], seed=seed + index) for index in range(3)]

        models = {seed: family.build() for seed in (10, 20)}
        for model in models.values():
            apply_toma(model, **STRIDED, scope=scope)
        alone = [generate(seed) for seed in models]
        with ThreadPoolExecutor(2) as pool:
            together = list(pool.map(generate, models))
        for one, other in zip(alone, together, strict=True):
            same_picture(torch.stack(one), torch.stack(other))


class TestSharedDenoiser:
    """Two pipelines around one UNet, with one scheduler or with two."""

    @pytest.mark.parametrize("own_scheduler", [True, False])
    @scopes
    def test_alternate_generations(self, own_scheduler, scope):
        def pair():
            first = sd15_pipeline()
            components = dict(first.components)
            if own_scheduler:
                components["scheduler"] = type(first.scheduler).from_config(first.scheduler.config)
            second = type(first)(**components)
            for pipe in (first, second):
                pipe.set_progress_bar_config(disable=True)
            return first, second

        @cache
        def fresh(which, seed):
            pipes = pair()
            apply_toma(pipes[0], PLAIN, **STRIDED, scope=scope, select_every=3, reweigh_every=2)
            return run(pipes[which], seed=seed)

        pipes = pair()
        plain = run(pipes[1], seed=0)
        apply_toma(pipes[0], PLAIN, **STRIDED, scope=scope, select_every=3, reweigh_every=2)
        for which, seed in [(0, 0), (1, 0), (1, 1), (0, 2), (0, 2), (1, 0)]:
            same_picture(run(pipes[which], seed=seed), fresh(which, seed))
        remove_toma(pipes[1])
        assert torch.equal(run(pipes[1], seed=0), plain)


@families
@scopes
class TestHooksOfOthers:
    """A user's hooks on the model and on every module that we hook too."""

    def test_survive_in_any_order(self, family, scope):
        fired = []

        def add(model, label):
            handles = []
            for name, module in [("", model), *model.named_modules()]:
                if name.split(".")[-1] in ("", "attn", "attn1", "attn2", "ff", "norm", "proj_out", "0"):
                    handles.append(module.register_forward_pre_hook(lambda *_: fired.append((label, "pre"))))
                    handles.append(
                        module.register_forward_hook(lambda *_, **__: fired.append((label, "post")), with_kwargs=True)
                    )
            return handles

        model = family.build()
        plain = call(family, model)
        early = add(model, "early")
        only_early = hooks_of(model)
        handle = apply_toma(model, **STRIDED, scope=scope)
        late = add(model, "late")
        same_picture(call(family, model), merged_call(family, scope))
        assert len(fired) == 4 * len([entry for entry in fired if entry == ("early", "pre")])
        handle.remove()
        remaining = hooks_of(model)
        assert {
            key: [item for item in value if item in remaining[key]] for key, value in only_early.items()
        } == only_early
        assert not any(
            type(hook).__module__.startswith("toma_diffusion") for hooks in remaining.values() for _, hook in hooks
        )
        fired.clear()
        assert torch.equal(call(family, model), plain)
        assert set(fired) == {("early", "pre"), ("early", "post"), ("late", "pre"), ("late", "post")}
        for one in late:
            one.remove()
        assert hooks_of(model) == only_early
        for one in early:
            one.remove()
        assert not hooks_of(model)

    def test_removed_before_ours(self, family, scope):
        model = family.build()
        plain = call(family, model)
        fired = []
        early = model.register_forward_pre_hook(lambda *_: fired.append("early"))
        handle = apply_toma(model, **STRIDED, scope=scope)
        late = model.register_forward_hook(lambda *_: fired.append("late"))
        ours = hooks_of(model)
        early.remove()
        late.remove()
        same_picture(call(family, model), merged_call(family, scope))
        assert not fired
        assert len(ours) >= len(hooks_of(model)) > 0
        handle.remove()
        assert not hooks_of(model)
        assert torch.equal(call(family, model), plain)


@pytest.mark.parametrize(
    ("family", "scope", "dtype"), pairwise(FAMILIES, SCOPES, (torch.float16, torch.bfloat16)), ids=named
)
def test_another_dtype_after(family, scope, dtype, attended):
    model = family.build()
    apply_toma(model, **SETTINGS, scope=scope)
    lengths, single = lengths_of(attended, family, model), call(family, model)
    model.to(dtype)
    attended.clear()
    half = call(family, model, **in_dtype(family.inputs(), dtype))
    assert half.dtype == dtype
    assert half.isfinite().all()
    assert attended == lengths
    model.to(torch.float32)
    assert call(family, model).dtype == torch.float32
    torch.testing.assert_close(half.float().std(), single.std(), rtol=0.2, atol=0)


@families
@scopes
class TestNumbers:
    def test_gradients_reach_the_input(self, family, scope):
        model = family.build()
        apply_toma(model, **SETTINGS, scope=scope, select_every=3, reweigh_every=2)
        inputs = family.inputs()
        name = "sample" if "sample" in inputs else "hidden_states"
        for _ in range(3):  # selects, reuses, reweighs
            inputs[name] = torch.randn_like(inputs[name]).requires_grad_()
            model(**inputs, return_dict=False)[0].square().sum().backward()
            gradient = inputs[name].grad
            assert gradient.isfinite().all()
            assert (gradient.flatten(1).abs().sum(dim=1) > 0).all()

    def test_gradients_are_those_of_the_merged_model(self, family, scope):
        """Against the difference quotient, with one choice of destinations for both."""
        model = family.build().double()
        apply_toma(model, **SETTINGS, scope=scope, select_every=100, reweigh_every=100)
        inputs = in_dtype(family.inputs(), torch.float64)
        name = "sample" if "sample" in inputs else "hidden_states"

        def loss(sample):
            return model(**inputs | {name: sample}, return_dict=False)[0].square().sum()

        sample = inputs[name].clone()
        with torch.no_grad():
            loss(sample)  # chooses; all that follow reuse
        sample = sample.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(sample), sample)
        direction = torch.randn_like(sample)
        with torch.no_grad():
            quotient = (loss(sample + 1e-4 * direction) - loss(sample - 1e-4 * direction)) / 2e-4
        torch.testing.assert_close((gradient * direction).sum(), quotient, rtol=1e-2, atol=1e-3)  # norms are in float32

    def test_inference_mode_and_no_grad_alternate(self, family, scope):
        model = family.build()
        apply_toma(model, **STRIDED, scope=scope)
        results = []
        for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                results.append(model(**family.inputs(), return_dict=False)[0].clone())
        for result in results:
            same_picture(result, results[0])


class TestKontext:
    """Reference images follow the image that is being made, in one sequence."""

    @staticmethod
    def inputs(*references: tuple[int, int]) -> dict:
        inputs = FLUX.inputs(height=8, wide=8)
        generator = torch.Generator().manual_seed(11)
        ids = [inputs["img_ids"], *(flux_ids(*size, first=1 + index) for index, size in enumerate(references))]
        extra = sum(height * width for height, width in references)
        more = torch.randn(2, extra, 4, generator=generator)
        inputs |= {"img_ids": torch.cat(ids), "hidden_states": torch.cat([inputs["hidden_states"], more], dim=1)}
        return inputs

    @scopes
    @pytest.mark.parametrize("references", [[(8, 8)], [(6, 4)], [(8, 8), (3, 5)]], ids=str)
    def test_only_the_image_being_made_is_merged(self, scope, references, attended):
        model = flux_transformer()
        extra = sum(height * width for height, width in references)
        plain = call(FLUX, model, **self.inputs(*references))
        handle = apply_toma(model, **STRIDED, scope=scope)
        attended.clear()
        merged = call(FLUX, model, **self.inputs(*references))
        assert set(attended) == {(6 + 32 + extra, 6 + 32 + extra)}
        assert merged.shape == plain.shape == (2, 64 + extra, 4)
        assert {(kind.grid, kind.tokens_before, kind.tokens_after) for kind in handle.summary().kinds} == {
            ("8×8", 64, 32)
        }
        same_picture(call(FLUX, model), merged_call(FLUX, scope))  # and without references
        remove_toma(model)
        assert torch.equal(call(FLUX, model, **self.inputs(*references)), plain)

    @pytest.mark.parametrize("scope", ["block", "stage"])
    def test_references_keep_their_detail(self, scope):
        """With nothing to change in the blocks, what was not merged is returned as it came."""
        model = flux_transformer()
        apply_toma(model, **SETTINGS, scope=scope)
        seen = {}
        first = model.transformer_blocks[0]
        first.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
        call(FLUX, model, **self.inputs((6, 4)))
        whole = {}
        plain = flux_transformer()
        plain.transformer_blocks[0].register_forward_pre_hook(
            lambda module, args, kwargs: whole.update(kwargs), with_kwargs=True
        )
        call(FLUX, plain, **self.inputs((6, 4)))
        torch.testing.assert_close(seen["hidden_states"][:, 32:], whole["hidden_states"][:, 64:])
        for merged, table in zip(seen["image_rotary_emb"], whole["image_rotary_emb"], strict=True):
            assert torch.equal(merged[:6], table[:6])
            assert torch.equal(merged[6 + 32 :], table[6 + 64 :])

    @pytest.mark.parametrize(
        ("ids", "told"),
        [
            (flux_ids(8, 8)[torch.randperm(64, generator=torch.Generator().manual_seed(0))], "64 image tokens"),
            (torch.cat([flux_ids(7, 8), flux_ids(7, 8)[:8]]), r"7×8, with 64 tokens"),
            (torch.cat([flux_ids(4, 8), flux_ids(4, 8)]), r"4×8, with 64 tokens"),
            (flux_ids(8, 8)[:60], r"the 64 image tokens.*8×8, with 60 tokens"),
            (torch.cat([flux_ids(4, 8), flux_ids(2, 8, first=1), flux_ids(2, 8)]), r"4×8, with 48 tokens"),
        ],
    )
    def test_no_grid(self, ids, told):
        model = flux_transformer()
        apply_toma(model, **STRIDED)
        with pytest.raises(ValueError, match=told):
            call(FLUX, model, img_ids=ids)
        same_picture(call(FLUX, model), merged_call(FLUX, "module"))  # the next good call works
