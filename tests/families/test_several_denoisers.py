"""One handle over several denoisers, and what is kept of each."""

import warnings

import pytest
import torch
from observe import same_picture
from tiny import FAMILIES, SETTINGS, sd15_unet
from tiny_pipelines import run, sd15_pipeline

from toma_diffusion import ToMAHandle, apply_toma, remove_toma, toma_enabled
from toma_diffusion.api import apply_with
from toma_diffusion.engine.install import find_root
from toma_diffusion.families import find_adapter

SD15 = next(family for family in FAMILIES if family.name == "sd15")


class TestHandle:
    def test_of_two_models(self):
        first, second = sd15_unet(), sd15_unet()
        plain = SD15.call(first)
        handle = apply_toma([first, second], **SETTINGS)
        merged = SD15.call(first)
        assert not torch.equal(merged, plain)
        same_picture(SD15.call(second), merged)
        assert len(handle.summary().others) == 1
        assert "Denoiser 2 of 2:" in str(handle.summary())
        handle.enabled = False
        assert torch.equal(SD15.call(first), plain)
        assert torch.equal(SD15.call(second), plain)
        handle.remove()
        assert find_root(first) is find_root(second) is None

    def test_removed_from_one_it_is_for_the_other(self):
        first, second = sd15_unet(), sd15_unet()
        with apply_toma([first, second], **SETTINGS) as handle:
            remove_toma(first)
            assert handle.enabled
            assert handle.summary().others == ()
        assert find_root(second) is None
        with pytest.raises(RuntimeError, match="apply_toma again"):
            handle.summary()

    def test_a_with_block_gives_each_its_own_state_back(self):
        pipe = sd15_pipeline()
        apply_toma(pipe, **SETTINGS)
        ToMAHandle(pipe.unet).enabled = False
        with toma_enabled(pipe) as handle:
            assert handle.enabled
        assert not ToMAHandle(pipe.unet).enabled
        remove_toma(pipe)
        with (
            pytest.raises(RuntimeError, match="apply_toma was not called on this UNet2DConditionModel"),
            toma_enabled(pipe),
        ):
            pass


class TestAdapterThatIsNotRegistered:
    def test_compiling_finds_its_blocks(self):
        model = sd15_unet()
        adapter = find_adapter(model)
        model.__class__ = type("Another", (torch.nn.Module,), dict(vars(type(model))))  # which no adapter matches
        assert find_adapter(model) is None
        handle = apply_with(adapter, model, None, SETTINGS)
        handle.compile("blocks", backend="eager")
        assert any(module._compiled_call_impl is not None for module in model.modules())


class TestWarnings:
    @pytest.mark.parametrize(
        ("settings", "steps", "named"),
        [
            ({"config_or_preset": "fast", "computed": (0, 1, 2, 3)}, 4, r"computed=\(0, 1, 2, 3\)"),
            ({"config_or_preset": "fast", "min_steps": 5}, 4, "min_steps=5"),
            ({"ratio": 0.5, "max_steps": 2}, 4, "max_steps=2"),
            ({"ratio": 0.5, "window": (0.9, 1.0)}, 1, r"window=\(0.9, 1.0\)"),
        ],
    )
    def test_a_generation_that_is_not_made_faster_names_the_setting(self, settings, steps, named):
        pipe = sd15_pipeline()
        apply_toma(pipe, **settings)
        with pytest.warns(UserWarning, match=f"none is merged or skipped with .*{named}"):
            run(pipe, num_inference_steps=steps)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(pipe, num_inference_steps=steps)
