"""Reuse together with the rest of diffusers: adapters, control, caches, offloading, copies."""

import copy
import pickle

import accelerate
import diffusers
import pytest
import torch
from accelerate.hooks import remove_hook_from_submodules
from diffusers import ControlNetModel
from diffusers.hooks import FirstBlockCacheConfig
from observe import our_hooks, same_picture, state_of
from packaging.version import Version
from pairs import named, pairwise
from parts import BY_NAME, PARTS, call, ends_of, generate, only_reuse, own_forwards, plain, reusing
from peft import LoraConfig, inject_adapter_in_model
from tiny import FAMILIES
from torch import nn

from toma_diffusion import ToMAHandle, UsageError, apply_toma, remove_toma

SD15, SDXL, FLUX, SD3, PIXART = (BY_NAME[name] for name in ("sd15", "sdxl", "flux", "sd3", "pixart"))
FIELDS = {"start": 0, "part": "deep"}
every_part = pytest.mark.parametrize(("family", "part"), PARTS, ids=lambda value: getattr(value, "name", value))


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    same_picture(torch.stack(ours), torch.stack(theirs))


def differ(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return not torch.allclose(torch.stack(ours), torch.stack(theirs), atol=1e-3)


def add_lora(model: nn.Module, name: str = "one", seed: int = 0) -> None:
    config = LoraConfig(r=2, target_modules=["to_q", "to_out.0", "ff.net.2"], init_lora_weights=False)
    if hasattr(model, "add_adapter"):
        model.add_adapter(config, adapter_name=name)
    else:
        inject_adapter_in_model(config, model, name)
    generator = torch.Generator().manual_seed(seed)
    for key, parameter in model.named_parameters():
        if "lora_" in key and f".{name}." in key:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    model.requires_grad_(False)


class TestLora:
    @pytest.mark.parametrize("family", FAMILIES, ids=named)
    def test_order_does_not_matter(self, family):
        lora_first, reuse_first = family.build(), family.build()
        add_lora(lora_first)
        only_lora = call(family, lora_first)
        handles = [apply_toma(model, only_reuse(**FIELDS)) for model in (lora_first, reuse_first)]
        without = generate(family, reuse_first, handles[1], 4)
        add_lora(reuse_first)
        outputs = generate(family, lora_first, handles[0], 4)
        assert differ(outputs, without)
        same(generate(family, reuse_first, handles[1], 4), outputs)
        for model in (lora_first, reuse_first):
            remove_toma(model)
            assert not own_forwards(model)
            same_picture(call(family, model), only_lora)

    @pytest.mark.parametrize("family", [SDXL, FLUX, SD3], ids=named)
    def test_switching_adapters(self, family):
        model = family.build()
        handle = apply_toma(model, only_reuse(**FIELDS))
        outputs = {}
        for seed, name in enumerate(("one", "two")):
            add_lora(model, name, seed)
            model.set_adapters([name], [1.0])
            outputs[name] = generate(family, model, handle, 2)
        assert differ(outputs["one"], outputs["two"])
        model.set_adapters(["one"], [1.0])
        same(generate(family, model, handle, 2), outputs["one"])
        model.delete_adapters(["one", "two"])
        same(generate(family, model, handle, 2), reusing(family, 2, **FIELDS))


def control_net_residuals() -> dict:
    """Of a real ControlNet, whose zero convolutions were trained a little."""
    net = ControlNetModel.from_unet(SDXL.build(), conditioning_channels=3).eval()
    for parameter in [*net.controlnet_down_blocks.parameters(), *net.controlnet_mid_block.parameters()]:
        nn.init.normal_(parameter, std=0.1)
    with torch.no_grad():
        down, middle = net(**SDXL.inputs(), controlnet_cond=torch.rand(2, 3, 128, 128), return_dict=False)
    return {"down_block_additional_residuals": down, "mid_block_additional_residual": middle}


def adapter_residuals() -> dict:
    """As a T2I-Adapter gives them, one for every level."""
    return {"down_intrablock_additional_residuals": [torch.randn(2, 32, 8, 8), torch.randn(2, 64, 8, 8)]}


def flux_residuals() -> dict:
    return {
        "controlnet_block_samples": [torch.randn(2, 64, 32) * 0.3 for _ in range(2)],
        "controlnet_single_block_samples": [torch.randn(2, 64, 32) * 0.3 for _ in range(3)],
    }


def sd3_residuals() -> dict:
    return {"block_controlnet_hidden_states": [torch.randn(2, 64, 32) * 0.3 for _ in range(4)]}


class TestControl:
    @pytest.mark.parametrize(
        ("family", "part", "make"),
        [
            (SDXL, "deep", control_net_residuals),
            (SDXL, "blocks", control_net_residuals),
            (SDXL, "deep", adapter_residuals),
            (FLUX, "blocks", flux_residuals),
            (SD3, "blocks", sd3_residuals),
        ],
        ids=lambda value: getattr(value, "name", None) or getattr(value, "__name__", value),
    )
    def test_residuals(self, family, part, make):
        """They are in the change that is remembered; what the model adds after a part, it adds in every step."""
        residuals = make()

        def step(model, seed):  # the model takes residuals of an adapter out of the list
            extra = {key: list(value) if isinstance(value, list) else value for key, value in residuals.items()}
            return call(family, model, seed, **extra)

        model, original = family.build(), family.build()
        handle = apply_toma(model, only_reuse(computed=(0, 2), part=part, order=0))
        ends = ends_of(model)
        handle.begin(4)
        for index in range(4):
            handle.step(index)
            output = step(model, index)
            assert torch.equal(output, step(original, index)) == (index in (0, 2))
            for each in ends.values():
                assert (each.layers[index] == 0) == (index in (1, 3))
        for each in ends.values():
            for ours, last in zip(each.change(3), each.change(2), strict=False):
                torch.testing.assert_close(ours, last, atol=1e-5, rtol=1e-5)
        controlled = step(original, 2)
        assert not torch.equal(controlled, call(family, original, 2))

    def test_control_of_the_first_level_is_in_every_step(self):
        """A ControlNet that moves is followed where the model computes."""
        model = SDXL.build()
        handle = apply_toma(model, only_reuse(computed=(0,), part="deep", order=0))
        residuals = control_net_residuals()
        moved = residuals | {
            "down_block_additional_residuals": [2 * x for x in residuals["down_block_additional_residuals"]]
        }
        handle.begin(3)
        outputs = []
        for step, extra in enumerate((residuals, residuals, moved)):
            handle.step(step)
            outputs.append(call(SDXL, model, 5, **extra))
        assert not torch.allclose(outputs[1], outputs[2], atol=1e-3)


class TestSkippedLayers:
    @pytest.mark.parametrize("skipped", [[0], [3], [1, 2]], ids=str)
    def test_they_are_computed_with_a_note(self, skipped):
        model, original = SD3.build(), SD3.build()
        handle = apply_toma(model, only_reuse(start=0))
        outputs = generate(SD3, model, handle, 3, skip_layers=skipped)
        expected = [call(SD3, original, step, skip_layers=skipped) for step in range(3)]
        assert all(map(torch.equal, outputs, expected))
        assert "a pass was not reused: skip-layer guidance leaves out blocks" in handle.summary().notes
        assert handle.summary().steps == (3, 0)


class TestRefused:
    def test_a_block_cache_that_is_on(self):
        model = FLUX.build()
        original = call(FLUX, model)
        model.enable_cache(FirstBlockCacheConfig(threshold=0.05))
        with pytest.raises(UsageError, match="cannot be combined with a block cache"):
            apply_toma(model, only_reuse())
        assert not our_hooks(model)
        assert not of_ours(model)
        model.disable_cache()
        assert torch.equal(call(FLUX, model), original)

    def test_a_block_cache_enabled_later(self):
        model = FLUX.build()
        original = call(FLUX, model)
        handle = apply_toma(model, only_reuse(start=0))
        expected = generate(FLUX, model, handle, 2)
        model.enable_cache(FirstBlockCacheConfig(threshold=0.05))
        with (
            pytest.raises(RuntimeError, match=r"a block cache was enabled after apply_toma.*reuse=None"),
            model.cache_context("cond"),
        ):
            generate(FLUX, model, handle, 2)
        model.disable_cache()
        assert all(map(torch.equal, generate(FLUX, model, handle, 2), expected))
        remove_toma(model)
        assert not of_ours(model)
        assert torch.equal(call(FLUX, model), original)

    @pytest.mark.parametrize("part", ["blocks", "deep"])
    def test_gradient_checkpointing(self, part):
        model = SD15.build().train().requires_grad_()
        model.enable_gradient_checkpointing()
        handle = apply_toma(model, only_reuse(start=0, part=part))
        handle.begin(2)
        with pytest.raises(RuntimeError, match=r"gradient checkpointing.*reuse over time.*torch\.no_grad"):
            model(**SD15.inputs())
        generate(SD15, model, handle, 2)  # nothing is recomputed without gradients


class Offloads:
    """Each takes the weights away between calls: to the meta device or to disk, for want of a GPU."""

    @staticmethod
    def sequential(model, path):
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)

    @staticmethod
    def whole_model(model, path):
        accelerate.cpu_offload_with_hook(model, execution_device=torch.device("cpu"))

    @staticmethod
    def leaf_groups(model, path):
        _offload_groups(model, path, offload_type="leaf_level")

    @staticmethod
    def block_groups(model, path):
        _offload_groups(model, path, offload_type="block_level", num_blocks_per_group=1)


def _offload_groups(model, path, **options) -> None:
    if Version(diffusers.__version__) < Version("0.41") and torch.accelerator.current_accelerator() is None:
        pytest.skip("diffusers before 0.41 offloads groups only on a machine with an accelerator")
    model.enable_group_offload(onload_device=torch.device("cpu"), offload_to_disk_path=str(path), **options)


OFFLOADS = [value.__func__ for value in vars(Offloads).values() if isinstance(value, staticmethod)]


@pytest.mark.parametrize(
    ("family", "offload", "when"), pairwise(FAMILIES, OFFLOADS, ("offloaded before", "offloaded after")), ids=named
)
def test_offloading(family, offload, when, tmp_path):
    expected, original = reusing(family, **FIELDS), plain(family, 1)[0]
    model = family.build()
    if when == "offloaded before":
        offload(model, tmp_path)
    before = own_forwards(model)
    handle = apply_toma(model, only_reuse(**FIELDS))
    if when == "offloaded after":
        offload(model, tmp_path)
    ends = ends_of(model)
    same(generate(family, model, handle, 4), expected)
    assert all(each.layers == [each.layers[0], 0] * 2 for each in ends.values())
    remove_toma(model)
    same_picture(call(family, model), original)
    assert not of_ours(model)
    if when == "offloaded before":
        assert own_forwards(model) == before


def forwards(model: nn.Module) -> list:
    """All that a call of a module may go through, as far as modules know it."""
    found = []
    for module in model.modules():
        own = vars(module)
        found += [own[name] for name in ("forward", "_old_forward") if name in own]
        registry = own.get("_diffusers_hook")
        for reference in getattr(registry, "_fn_refs", ()):
            found += [getattr(reference, name, None) for name in ("forward", "original_forward")]
    return found


def of_ours(model: nn.Module) -> list:
    return [each for each in forwards(model) if type(each).__module__.startswith("toma_diffusion")]


class TestOffloadingEnds:
    """Hooks of accelerate are taken out again, before ours and after."""

    @pytest.mark.parametrize("offload_first", [True, False])
    @pytest.mark.parametrize("ours_first", [True, False])
    @pytest.mark.parametrize("family", [SD15, PIXART], ids=named)  # blocks of PixArt have weights, and hooks
    def test_in_any_order(self, family, offload_first, ours_first):
        model, original = family.build(), plain(family, 1)[0]
        if offload_first:
            Offloads.sequential(model, None)
        handle = apply_toma(model, only_reuse(**FIELDS))
        if not offload_first:
            Offloads.sequential(model, None)
        expected = generate(family, model, handle, 4)
        if ours_first:
            remove_toma(model)
            remove_hook_from_submodules(model)
        else:
            remove_hook_from_submodules(model)
            ends = ends_of(model)
            same(generate(family, model, handle, 4), expected)
            assert all(each.layers == [each.layers[0], 0] * 2 for each in ends.values())
            remove_toma(model)
        same_picture(call(family, model), original)
        assert not of_ours(model)


class TestCopies:
    @every_part
    @pytest.mark.parametrize(
        "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
    )
    def test_a_copy_reuses_for_itself(self, family, part, how):
        model, original = family.build(), plain(family, 1)[0]
        handle = apply_toma(model, only_reuse(start=0, part=part))
        expected = generate(family, model, handle, 4)
        twin = how(model)
        ends = ends_of(twin)
        assert not {id(each) for each in forwards(model)} & {id(each) for each in forwards(twin)}
        same(generate(family, twin, ToMAHandle(twin), 4), expected)
        assert all(each.layers == [each.layers[0], 0] * 2 for each in ends.values())
        remove_toma(twin)
        assert not own_forwards(twin)
        same_picture(call(family, twin), original)
        same(generate(family, model, handle, 4), expected)

    @pytest.mark.parametrize(("family", "part"), [(SDXL, "deep"), (FLUX, "blocks")], ids=named)
    def test_calling_a_copy_does_not_disturb_a_generation(self, family, part):
        model = family.build()
        handle = apply_toma(model, only_reuse(start=0, part=part))
        expected = generate(family, model, handle, 4)
        handle.begin(4)
        handle.step(0)
        outputs = [call(family, model, 0)]
        twin = copy.deepcopy(model)
        state_of(twin).steps.begin(4)
        for step in range(1, 4):
            call(family, twin, seed=9)
            handle.step(step)
            outputs.append(call(family, model, step))
        same(outputs, expected)

    @every_part
    def test_a_saved_model_is_plain(self, family, part, tmp_path):
        model = family.build()
        weights = {key: value.clone() for key, value in model.state_dict().items()}
        handle = apply_toma(model, only_reuse(start=0, part=part))
        generate(family, model, handle, 2)
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path)
        assert not our_hooks(loaded)
        assert not own_forwards(loaded)
        assert loaded.state_dict().keys() == weights.keys()
        assert all(torch.equal(value, weights[key]) for key, value in loaded.state_dict().items())


class TestHooksOfOthers:
    def test_a_forward_of_ones_own_is_kept(self):
        """Wrapped before, it runs in computed steps and comes back as it was; wrapped later, it stays."""
        model = PIXART.build()
        block = model.transformer_blocks[1]
        calls = []

        def wrap(inner, name):
            def forward(*args, **kwargs):
                calls.append(name)
                return inner(*args, **kwargs)

            return forward

        block.forward = before = wrap(block.forward, "before")
        handle = apply_toma(model, only_reuse(start=0))
        ours, block.forward = block.forward, wrap(block.forward, "after")
        after = block.forward
        generate(PIXART, model, handle, 2)
        assert calls == ["after", "before", "after"]
        remove_toma(model)
        assert block.forward is after
        same_picture(call(PIXART, model), plain(PIXART, 1)[0])
        assert ours.before is before
        assert own_forwards(model) == ["transformer_blocks.1"]

    def test_removed_in_a_step_that_reuses(self):
        """Nothing of the last call is left."""
        model = PIXART.build()
        handle = apply_toma(model, only_reuse(computed=(0,)))
        generate(PIXART, model, handle, 3)
        handle.remove()
        assert torch.equal(call(PIXART, model), plain(PIXART, 1)[0])
        second = apply_toma(model, only_reuse(computed=(0,)))
        same(generate(PIXART, model, second, 3), reusing(PIXART, 3, computed=(0,)))


def load_ip_adapter(unet: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    width, weights = unet.config.cross_attention_dim, {}
    names = [name for name in unet.attn_processors if not name.endswith("attn1.processor")]
    for index, name in enumerate(names):
        hidden = unet.get_submodule(name.removesuffix(".processor")).query_dim
        weights |= {f"{2 * index + 1}.to_{part}_ip.weight": random(hidden, width) for part in ("k", "v")}
    projection = {"proj.weight": random(4 * width, 16), "proj.bias": random(4 * width)}
    projection |= {"norm.weight": torch.ones(width), "norm.bias": torch.zeros(width)}
    unet._load_ip_adapter_weights([{"image_proj": projection, "ip_adapter": weights}], low_cpu_mem_usage=False)
    unet.requires_grad_(False)


class TestIPAdapter:
    @pytest.mark.parametrize("load_first", [True, False])
    @pytest.mark.parametrize("masked", [True, False])
    def test_it_is_in_what_is_reused(self, load_first, masked):
        model, original = SD15.build(), SD15.build()
        load_ip_adapter(original)
        if load_first:
            load_ip_adapter(model)
        handle = apply_toma(model, only_reuse(computed=(0, 2), part="deep"))
        if not load_first:
            load_ip_adapter(model)
        mask = torch.zeros(1, 1, 16, 16)
        mask[..., :8] = 1
        extra = {"added_cond_kwargs": {"image_embeds": [torch.randn(2, 1, 16)]}}
        extra |= {"cross_attention_kwargs": {"ip_adapter_masks": [mask]}} if masked else {}
        outputs = generate(SD15, model, handle, 4, **extra)
        expected = [call(SD15, original, step, **extra) for step in range(4)]
        assert [torch.equal(*each) for each in zip(outputs, expected, strict=True)] == [True, False, True, False]
