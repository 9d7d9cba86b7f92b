"""ToMA together with what else is done to ComfyUI's models: ControlNets, nodes that patch them, casting of weights."""

import asyncio
import logging
from typing import ClassVar

import pytest
import torch
from observe import bookkeeping
from tiny_comfy import (
    FAMILIES,
    SCOPES,
    SKIP,
    accelerated,
    conditioning,
    controlnet,
    denoiser,
    flux_config,
    joint_text,
    lengths_of,
    patcher_of,
    report,
    sample,
)

EXTRAS = ("nodes_pag", "nodes_slg", "nodes_freelunch", "nodes_model_downscale", "nodes_tomesd", "nodes_hypertile")


@pytest.fixture(scope="module")
def extras(comfyui, loaded_nodes):
    """ComfyUI's nodes with those that patch models."""
    import nodes

    for name in EXTRAS:
        path = str(comfyui / "comfy_extras" / f"{name}.py")
        assert asyncio.run(nodes.load_custom_node(path, module_parent="comfy_extras"))
    return loaded_nodes


def run(nodes, name, model, **inputs):
    """The model that one of ComfyUI's nodes makes of another."""
    node = nodes[name]
    function = getattr(node if hasattr(node, "define_schema") else node(), getattr(node, "FUNCTION", "execute"))
    result = function(model, **inputs) if not hasattr(node, "define_schema") else node.execute(model, **inputs)
    return result[0]


@pytest.fixture(scope="module")
def controlled(loaded_nodes):
    """For a family, prompts with ComfyUI's own ControlNet for it, as its node applies it."""
    with torch.inference_mode():
        networks = {family: controlnet(family) for family in ("sd15", "flux")}
    picture = torch.rand(1, 128, 128, 3, generator=torch.Generator().manual_seed(5))

    def prompts(family):
        positive, negative = loaded_nodes["ControlNetApplyAdvanced"]().apply_controlnet(
            conditioning(family, 1), conditioning(family, 2), networks[family], picture, 1.0, 0.0, 1.0
        )
        return {"positive": positive, "negative": negative}

    return prompts


class TestControlNet:
    @pytest.mark.parametrize("family", ["sd15", "flux"])
    @pytest.mark.parametrize("scope", SCOPES)
    def test_merging(self, models, controlled, family, scope, caplog):
        model, prompts = models[family], controlled(family)
        before = sample(model, family, **prompts)
        assert not torch.equal(before, sample(model, family))
        clone, text = accelerated(model, ratio=0.5, scope=scope), joint_text(family)
        whole = lengths_of(model, family, steps=1, **prompts)
        merged = lengths_of(clone, family, steps=1, **prompts)
        assert sorted(merged) != sorted(whole)
        halved = {text + (FAMILIES[family].tokens) // 2}
        assert halved <= set(merged)
        assert not torch.equal(sample(clone, family, **prompts), before)
        assert torch.equal(sample(model, family, **prompts), before)
        assert "could not be applied" not in caplog.text
        by_block = "stages were merged block by block: a ControlNet" in report(clone)
        assert by_block == (family == "flux" and scope == "stage")

    @pytest.mark.parametrize("family", ["sd15", "flux"])
    def test_skipped_steps(self, models, controlled, family, caplog):
        model, prompts = models[family], controlled(family)
        before = sample(model, family, **prompts)
        clone = accelerated(model, **SKIP)
        with caplog.at_level(logging.WARNING):
            result = sample(clone, family, **prompts)
        assert "could not be applied" not in caplog.text
        assert "steps: 2 whole, 2 skipped" in report(clone)
        assert 0 < (result - before).abs().mean() < before.abs().mean()
        assert torch.equal(sample(model, family, **prompts), before)


class TestOtherNodes:
    """Nodes of ComfyUI that patch the model, before ours or after it."""

    CASES: ClassVar = {
        "PerturbedAttentionGuidance": ("sd15", {"scale": 3.0}),
        "FreeU_V2": ("sd15", {"b1": 1.3, "b2": 1.4, "s1": 0.9, "s2": 0.2}),
        "PatchModelAddDownscale": (
            "sd15",
            {
                "block_number": 1,
                "downscale_factor": 2.0,
                "start_percent": 0.0,
                "end_percent": 1.0,
                "downscale_after_skip": True,
                "downscale_method": "bicubic",
                "upscale_method": "bicubic",
            },
        ),
        "TomePatchModel": ("sd15", {"ratio": 0.3}),
        "HyperTile": ("sd15", {"tile_size": 64, "swap_size": 1, "max_depth": 0, "scale_depth": False}),
        "SkipLayerGuidanceDiT": (
            "qwen-image",
            {
                "double_layers": "0, 2",  # the first and the last
                "single_layers": "1",
                "scale": 3.0,
                "start_percent": 0.0,
                "end_percent": 1.0,
                "rescaling_scale": 0.0,
            },
        ),
    }

    @pytest.mark.parametrize("name", CASES)
    @pytest.mark.parametrize(
        "settings",
        [*({"ratio": 0.5, "scope": scope} for scope in SCOPES), SKIP],
        ids=[*SCOPES, "skipping"],
    )
    def test_before_and_after(self, models, extras, name, settings):
        family, inputs = self.CASES[name]
        model = models[family]
        hooks, before = bookkeeping(denoiser(model)), sample(model, family)
        patched = run(extras, name, model, **inputs)
        whole = sample(patched, family)
        assert not torch.equal(whole, before)
        results = [
            sample(accelerated(patched, **settings), family),
            sample(run(extras, name, accelerated(model, **settings), **inputs), family),
        ]
        assert torch.equal(*results)
        assert results[0].isfinite().all()
        assert bookkeeping(denoiser(model)) == hooks
        assert torch.equal(sample(patched, family), whole)

    def test_what_could_not_be_merged_is_said(self, models, extras):
        clone = accelerated(run(extras, "PerturbedAttentionGuidance", models["sd15"], scale=3.0), ratio=0.5)
        sample(clone, "sd15")
        assert "nothing was merged: other nodes patch its blocks (attn1)" in report(clone)
        assert "256 → 128" in report(clone)

    def test_a_resized_picture_is_left_whole(self, models, extras):
        name = "PatchModelAddDownscale"
        patched = run(extras, name, models["sd15"], **self.CASES[name][1])
        clone = accelerated(patched, ratio=0.5)
        assert torch.equal(sample(clone, "sd15"), sample(patched, "sd15"))
        assert "may resize the picture" in report(clone)


class TestWeights:
    @pytest.mark.parametrize("settings", [{"ratio": 0.5}, {"ratio": 0.5, "scope": "module"}, SKIP], ids=str)
    def test_cast_in_every_layer(self, loaded_nodes, settings):
        """As ComfyUI does with weights of a type in which it does not compute."""
        from comfy import supported_models

        config = supported_models.Flux(flux_config())
        config.manual_cast_dtype = torch.float32
        model = patcher_of(config, dtype=torch.bfloat16)
        assert {weight.dtype for weight in denoiser(model).parameters()} == {torch.bfloat16}
        before = sample(model, "flux")
        result = sample(accelerated(model, **settings), "flux")
        assert result.isfinite().all()
        assert not torch.equal(result, before)
        assert torch.equal(sample(model, "flux"), before)

    @pytest.mark.parametrize("family", ["sd15", "flux", "wan"])
    @pytest.mark.parametrize("settings", [{"ratio": 0.5}, SKIP], ids=["merging", "skipping"])
    def test_offloaded_with_a_lora(self, models, family, settings):
        """Weights that stay where they are, and get their patches when they are used."""
        model = FAMILIES[family].make()
        names = [
            name
            for name in model.model.state_dict()
            if name.endswith(("ff.net.2.weight", "mlp.0.weight", "ffn.0.weight"))
        ]
        patches = {name: (torch.randn_like(model.model.state_dict()[name]),) for name in names}
        assert patches
        model.add_patches(patches, 0.05)
        before = sample(model, family)
        whole = sample(accelerated(model, **settings), family)
        model.detach()
        model.load(torch.device("cpu"), lowvram_model_memory=1, full_load=False)
        assert any(getattr(module, "weight_function", None) for module in denoiser(model).modules())
        assert torch.allclose(sample(model, family), before, atol=1e-3, rtol=1e-3)
        assert torch.allclose(sample(accelerated(model, **settings), family), whole, atol=0.05, rtol=0.05)
