"""ComfyUI's own KSampler on tiny models of its own, with ToMA on one of two clones."""

import logging
import sys

import pytest
import torch
from observe import bookkeeping, our_hooks, same_picture, state_of
from tiny_comfy import (
    FAMILIES,
    SCOPES,
    SKIP,
    TEXT,
    Lengths,
    accelerated,
    conditioning,
    denoiser,
    joint_text,
    lengths_of,
    sample,
    vace,
)

from toma_diffusion import Skip, UsageError
from toma_diffusion.comfyui import _comfy
from toma_diffusion.comfyui.nodes import accelerate, report
from toma_diffusion.comfyui.place import Place, PlaceReader

pytestmark = pytest.mark.usefixtures("loaded_nodes")

STRIDED = {"selection": "strided", "select_every": 1, "reweigh_every": 1}
"""Destinations that do not depend on the last bit of anything."""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scope", SCOPES)
def test_attention_sees_half_the_tokens(models, family, scope):
    text = joint_text(family)
    whole = lengths_of(models[family], family, steps=1)
    merged = lengths_of(accelerated(models[family], ratio=0.5, scope=scope), family, steps=1)
    assert whole[0] == FAMILIES[family].tokens + text
    assert merged == [text + (length - text) // 2 for length in whole]


@pytest.mark.parametrize("family", FAMILIES)
class TestOriginal:
    """Clones share their modules. The original must never notice."""

    def test_stays_bit_exact(self, models, family):
        model = models[family]
        hooks, before = bookkeeping(denoiser(model)), sample(model, family)
        for settings in ({"scope": scope} for scope in SCOPES):
            changed = sample(accelerated(model, ratio=0.5, **settings), family)
            assert not torch.equal(changed, before)
            assert bookkeeping(denoiser(model)) == hooks
            assert torch.equal(sample(model, family), before)
        attributes = set(vars(denoiser(model)))
        predicted = sample(accelerated(model, **SKIP), family)
        assert not torch.equal(predicted, before)
        assert set(vars(denoiser(model))) == attributes
        assert torch.equal(sample(model, family), before)

    def test_with_all_steps_computed_it_is_the_original(self, models, family):
        model = models[family]
        clone = accelerated(model, ratio=0.0, skip=Skip(computed=(0, 1, 2, 3)))
        assert torch.equal(sample(clone, family), sample(model, family))

    def test_two_clones_with_other_settings(self, models, family):
        model = models[family]
        half, quarter = accelerated(model, ratio=0.5), accelerated(model, ratio=0.25)
        first = [sample(each, family) for each in (half, quarter, model)]
        again = [sample(each, family) for each in (model, quarter, half)]
        for one, other in zip(first, reversed(again), strict=True):
            assert torch.equal(one, other)
        assert not torch.equal(first[0], first[1])


class TestDuringSampling:
    def test_another_clone_calls_the_model(self, models):
        """As a node may that looks at the original while the accelerated clone samples."""
        model, seen = models["sd15"], []
        inputs = (torch.randn(1, 4, 16, 16), torch.tensor([3.0]))
        text = {"c_crossattn": conditioning("sd15", 3)[0][0], "transformer_options": {}}
        expected = model.model.apply_model(*inputs, **text)

        def look(arguments):
            seen.append((len(our_hooks(denoiser(model))), model.model.apply_model(*inputs, **text)))
            return arguments["denoised"]

        clone = accelerated(model, ratio=0.5)
        clone.set_model_sampler_post_cfg_function(look)
        sample(clone, "sd15")
        assert len(seen) == 4
        assert all(hooks > 0 for hooks, _ in seen)
        assert all(torch.equal(result, expected) for _, result in seen)
        assert "another clone" in report(clone, None)[0]

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("settings", [{"ratio": 0.5}, {"ratio": 0.5, "scope": "module"}, SKIP], ids=str)
    def test_interrupt(self, models, family, settings):
        from comfy import model_management

        model = models[family]
        hooks, before = bookkeeping(denoiser(model)), sample(model, family)
        lengths = Lengths(after=lambda calls: model_management.interrupt_current_processing(calls == 5))
        clone = accelerated(model, **settings)
        with pytest.raises(model_management.InterruptProcessingException):
            sample(lengths.watch(clone), family)
        assert len(lengths.seen) == 5
        assert bookkeeping(denoiser(model)) == hooks
        assert torch.equal(sample(model, family), before)
        assert "was interrupted" in report(clone, None)[0]
        assert sample(clone, family).isfinite().all()

    def test_an_error_inside_the_model(self, models):
        model = models["flux"]
        hooks = bookkeeping(denoiser(model))
        lengths = Lengths(after=lambda calls: 1 // (calls - 3))
        with pytest.raises(ZeroDivisionError):
            sample(lengths.watch(accelerated(model, ratio=0.5)), "flux")
        assert bookkeeping(denoiser(model)) == hooks


@pytest.fixture
def places(monkeypatch) -> list[Place]:
    """The places of all calls."""
    found = []
    read = PlaceReader.read

    def note(self, options):
        found.append(read(self, options))
        return found[-1]

    monkeypatch.setattr(PlaceReader, "read", note)
    return found


class TestSteps:
    STEPS = 5

    @pytest.mark.parametrize("family", ["sd15", "flux"])
    @pytest.mark.parametrize(
        "sampler",
        ["euler", "heun", "dpm_2", "dpm_2_ancestral", "dpmpp_2s_ancestral", "dpmpp_sde", "dpmpp_2m", "uni_pc", "lcm"],
    )
    def test_every_sampler_goes_through_all_steps_once(self, models, places, family, sampler):
        clone = accelerated(models[family], **SKIP | {"ratio": 0.5})
        assert sample(clone, family, steps=self.STEPS, sampler_name=sampler).isfinite().all()
        steps = [place.step for place in places]
        assert [place.begins for place in places] == [True] + [False] * (len(places) - 1)
        assert steps == sorted(steps)
        assert {place.num_steps for place in places} == {self.STEPS}
        assert set(steps) == set(range(self.STEPS))

    def test_a_sampler_that_calls_twice_has_two_passes(self, models, places):
        sample(accelerated(models["sd15"], ratio=0.5), "sd15", steps=3, sampler_name="dpm_2", cfg=1.0)
        assert [(place.step, place.ordinal) for place in places] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]

    def test_guidance_in_one_batch(self, models, places):
        sample(accelerated(models["flux"], ratio=0.5), "flux", steps=2)
        assert [(place.step, place.ordinal, place.parts) for place in places] == [(0, 0, 2), (1, 0, 2)]

    def test_guidance_in_separate_calls(self, models, places):
        negative = conditioning("flux", 2, length=TEXT + 3)
        clone = accelerated(models["flux"], **SKIP)
        predicted = sample(clone, "flux", negative=negative)
        assert [(place.step, place.parts) for place in places] == [(step, 1) for step in range(4) for _ in range(2)]
        assert [place.ordinal for place in places] == [0, 1] * 4
        whole = sample(models["flux"], "flux", negative=negative)
        assert 0 < (predicted - whole).abs().mean() < whole.abs().mean()

    def test_a_guider_with_three_conditionings(self, models, places):
        """ComfyUI's own guider for two prompts and a negative one."""
        from comfy.samplers import sampler_object
        from comfy_extras.nodes_custom_sampler import Guider_DualCFG

        guider = Guider_DualCFG(accelerated(models["flux"], ratio=0.5))
        guider.set_conds(*(conditioning("flux", seed) for seed in (1, 2, 3)))
        guider.set_cfg(3.0, 2.0)
        noise = torch.randn(1, *FAMILIES["flux"].latent)
        levels = torch.tensor([1.0, 0.5, 0.0])
        assert guider.sample(noise, torch.zeros_like(noise), sampler_object("euler"), levels, seed=1).isfinite().all()
        assert [(place.step, place.ordinal, place.parts) for place in places] == [(0, 0, 3), (1, 0, 3)]

    def test_a_schedule_that_adds_noise(self, models, places):
        from comfy.samplers import CFGGuider, sampler_object

        guider = CFGGuider(accelerated(models["flux"], ratio=0.5))
        guider.set_conds(conditioning("flux", 1), conditioning("flux", 2))
        picture = torch.randn(1, *FAMILIES["flux"].latent)
        levels = torch.tensor([0.1, 0.4, 0.7, 1.0])
        guider.sample(torch.zeros_like(picture), picture, sampler_object("euler"), levels, seed=1)
        assert [(place.step, place.num_steps) for place in places] == [(0, 3), (1, 3), (2, 3)]

    def test_several_conditionings(self, models, places):
        """Two prompts for two halves of the picture, and a negative one: three passes, or fewer, in every step."""
        left, right = (conditioning("sd15", seed) for seed in (1, 3))
        left[0][1]["area"], right[0][1]["area"] = (16, 8, 0, 0), (16, 8, 0, 8)
        sample(accelerated(models["sd15"], ratio=0.5), "sd15", steps=2, positive=left + right)
        first, second = ([place for place in places if place.step == step] for step in (0, 1))
        assert len(first) > 1
        assert [place.ordinal for place in first] == [place.ordinal for place in second] == list(range(len(first)))

    def test_a_part_of_the_schedule(self, models, places):
        """Denoising less, or the second of two samplers: the steps that are made count."""
        sample(accelerated(models["sd15"], ratio=0.5, window=(0.5, 1.0)), "sd15", steps=4, denoise=0.5)
        assert [(place.step, place.num_steps) for place in places] == [(step, 4) for step in range(4)]

    @pytest.mark.parametrize(("start", "end", "merged"), [(0.5, 1.0, [2, 3]), (0.0, 0.5, [0, 1]), (0.25, 0.75, [1, 2])])
    def test_start_and_end(self, models, start, end, merged):
        lengths = Lengths()
        clone, _ = accelerate(lengths.watch(models["wan"]), "toma-stage", 0.5, start, end, "as in the preset")
        sample(clone, "wan", cfg=1.0)
        tokens, blocks = FAMILIES["wan"].tokens, len(denoiser(clone).blocks)
        steps = [lengths.of_self_attention[first : first + blocks] for first in range(0, 4 * blocks, blocks)]
        assert [step for step, seen in enumerate(steps) if min(seen) < tokens] == merged
        assert f"steps: {4 - len(merged)} whole, {len(merged)} merged" in report(clone, None)[0]


class TestSkippedSteps:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_the_model_runs_in_every_second_step(self, models, family):
        model, ran = models[family], []
        whole = sample(model, family)
        clone = accelerated(model, **SKIP)
        handle = denoiser(model).register_forward_hook(lambda *_: ran.append(1))
        predicted = sample(clone, family)
        handle.remove()
        assert len(ran) == 2  # guidance is one batch
        assert "steps: 2 whole, 2 skipped" in report(clone, None)[0]
        assert 0 < (predicted - whole).abs().mean() < whole.abs().mean()

    def test_it_is_the_solver_on_the_computed_steps(self, models):
        """After one computed step noise and clean latent are held: Euler's steps over the skipped ones are one step."""
        clone = accelerated(models["flux"], ratio=0.0, skip=Skip(computed=(0, 3)))
        predicted = sample_levels(clone, [1.0, 0.8, 0.6, 0.3, 0.0])
        same_picture(predicted, sample_levels(models["flux"], [1.0, 0.3, 0.0]))

    @pytest.mark.parametrize("sampler", ["heun", "dpm_2", "dpmpp_sde", "uni_pc_bh2"])
    def test_several_evaluations_a_step(self, models, sampler):
        """Of a sampler that is known to make them no step is skipped; of another one none after it has made them."""
        clone = accelerated(models["sd15"], **SKIP | {"ratio": 0.5})
        assert sample(clone, "sd15", steps=5, sampler_name=sampler).isfinite().all()
        text = report(clone, None)[0]
        several = sampler != "uni_pc_bh2"
        assert several == ("evaluates the model several times a step" in text)
        assert several == ("skipped" not in next(line for line in text.splitlines() if line.startswith("steps:")))

    def test_a_prompt_that_begins_half_way(self, models):
        """The evaluation in which it is new is made again, with all of its passes computed."""
        late = conditioning("sd15", 3)
        late[0][1]["start_percent"] = 0.4
        model, ran = models["sd15"], []
        clone = accelerated(model, ratio=0.0, skip=Skip(computed=(0,)))
        network = denoiser(model)
        handle = network.register_forward_hook(lambda *_: ran.append(state_of(network)._last_tick.step))
        result = sample(clone, "sd15", steps=6, positive=conditioning("sd15", 1) + late)
        handle.remove()
        assert result.isfinite().all()
        first, second = dict.fromkeys(ran)
        assert first == 0
        assert second > 1
        assert "steps: 2 whole, 4 skipped" in report(clone, None)[0]


def sample_levels(model, levels):
    """Latents of Flux at these noise levels."""
    from comfy.samplers import CFGGuider, sampler_object

    guider = CFGGuider(model)
    guider.set_conds(conditioning("flux", 1), conditioning("flux", 2))
    guider.set_cfg(3.0)
    noise = torch.randn(1, *FAMILIES["flux"].latent, generator=torch.Generator().manual_seed(0))
    return guider.sample(noise, torch.zeros_like(noise), sampler_object("euler"), torch.tensor(levels), seed=1)


class TestBatch:
    @pytest.mark.parametrize("family", ["sd15", "sdxl"])
    @pytest.mark.parametrize("scope", SCOPES)
    def test_pictures_of_a_batch_are_those_of_single_ones(self, models, family, scope):
        """In UNets every picture chooses for itself."""
        clone = accelerated(models[family], ratio=0.5, scope=scope, **STRIDED)
        both, single = (sample(clone, family, batch=batch, steps=1) for batch in (2, 1))
        same_picture(both[:1] / single.abs().max(), single / single.abs().max())

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("settings", [{"ratio": 0.5}, SKIP], ids=["merging", "skipping"])
    def test_sizes_may_change_from_sampling_to_sampling(self, models, family, settings):
        clone = accelerated(models[family], **settings)
        for batch in (2, 1, 3):
            latents = sample(clone, family, batch=batch)
            assert latents.shape[0] == batch
            assert latents.isfinite().all()
        wide = torch.zeros(1, *FAMILIES[family].latent[:-1], 24)
        assert sample(clone, family, latent_image={"samples": wide}).shape == wide.shape

    @pytest.mark.parametrize("family", FAMILIES)
    def test_odd_sizes(self, models, family):
        *rest, height, width = FAMILIES[family].latent
        odd = torch.zeros(1, *rest, height + 1, width - 1)
        grids = {"sd15": ("17×15", "9×8"), "sdxl": ("9×8",), "flux2": ("9×7",), "wan": ("3×5×4",)}
        for scope in SCOPES:
            clone = accelerated(models[family], ratio=0.5, scope=scope)
            result = sample(clone, family, latent_image={"samples": odd}, steps=1)
            assert result.shape == odd.shape
            assert result.isfinite().all()
            found = {kind.grid for kind in _comfy.wrapper_of(clone).last.summary.kinds}
            assert found == set(grids.get(family, ("9×8",)))


def test_diffusers_is_not_used(models, monkeypatch):
    """Who has ComfyUI need not have it."""
    monkeypatch.setitem(sys.modules, "diffusers", None)
    for settings in ({"ratio": 0.5}, SKIP):
        clone = accelerated(models["flux"], **settings)
        sample(clone, "flux")
        assert "steps: " in report(clone, None)[0]


class TestOtherModels:
    def test_steps_are_skipped_where_tokens_cannot_be_merged(self):
        model = vace()
        result, shown = accelerate(model, "balanced", -1.0, -1.0, -1.0, "as in the preset")
        assert "tokens of VaceWanModel cannot be merged" in shown
        assert sample(result, "wan", steps=10).isfinite().all()
        assert "steps: 6 whole, 4 skipped" in report(result, None)[0]

    def test_passed_through_unchanged(self, caplog):
        """By a preset that only merges."""
        model = vace()
        with caplog.at_level(logging.WARNING):
            result, shown = accelerate(model, "toma-stage", -1.0, -1.0, -1.0, "as in the preset")
        assert result is model
        assert not model.wrappers
        for text in (shown, caplog.text):
            assert "tokens of VaceWanModel cannot be merged" in text
        assert "is not accelerated" in report(model, None)[0]

    def test_a_compiled_model_is_passed_through(self, models):
        from comfy_api.torch_helpers import set_torch_compile_wrapper

        model = models["sd15"].clone()
        set_torch_compile_wrapper(model, backend="eager")
        assert accelerate(model, "balanced", -1.0, -1.0, -1.0, "as in the preset")[0] is model

    def test_single_compiled_blocks(self, models):
        """As other nodes put them in."""
        model = models["flux"].clone()
        model.add_object_patch("diffusion_model.double_blocks.0", torch.compile(denoiser(model).double_blocks[0]))
        result, shown = accelerate(model, "balanced", -1.0, -1.0, -1.0, "as in the preset")
        assert result is model
        assert "torch.compile" in shown

    def test_compiled_later(self, models):
        """The node is before that of torch.compile: it is said when the clone samples."""
        from comfy.patcher_extension import WrappersMP
        from comfy_api.torch_helpers.torch_compile import COMPILE_KEY

        clone = accelerated(models["sd15"], ratio=0.5)
        # its place alone: compiling takes most of a minute
        clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, COMPILE_KEY, lambda executor, *args: executor(*args))
        assert set(lengths_of(clone, "sd15", steps=1)) == set(lengths_of(models["sd15"], "sd15", steps=1))
        assert "torch.compile is not supported" in report(clone, None)[0]

    def test_settings_that_do_not_fit_raise_in_the_node(self, models):
        hooks = bookkeeping(denoiser(models["sd15"]))
        with pytest.raises(UsageError, match="skip_blocks"):
            accelerated(models["sd15"], skip_blocks=(99,))
        assert bookkeeping(denoiser(models["sd15"])) == hooks


class TestReport:
    def test_before_sampling(self, models):
        assert "has not sampled yet" in report(accelerated(models["flux"], ratio=0.5), None)[0]

    def test_without_the_other_node(self, models):
        assert "ToMA: accelerate model" in report(models["flux"], None)[0]

    def test_what_was_merged_and_how_long_it_took(self, models):
        clone = accelerated(models["flux"], ratio=0.5, window=(0.5, 1.0))
        sample(clone, "flux", steps=8)
        text = report(clone, None)[0]
        assert "64 → 32" in text
        assert "steps: 4 whole, 4 merged" in text
        assert "time saved: about" in text

    def test_the_node_twice_is_the_second_one(self, models):
        first = accelerated(models["flux"], ratio=0.5)
        second = accelerated(first, ratio=0.25)
        assert "64 → 48" in (sample(second, "flux"), report(second, None)[0])[1]
        assert "64 → 32" in (sample(first, "flux"), report(first, None)[0])[1]

    def test_a_later_clone_is_accelerated_too(self, models):
        """Such as that of a LoRA loader after the node."""
        clone = accelerated(models["flux"], ratio=0.5)
        name = "diffusion_model.double_blocks.0.img_mlp.0.weight"
        weight = models["flux"].model.state_dict()[name].clone()
        patched = clone.clone()
        patched.add_patches({name: (torch.ones_like(weight),)}, 0.1)
        result = sample(patched, "flux")
        assert "64 → 32" in report(patched, None)[0]
        assert not torch.equal(result, sample(clone, "flux"))
        assert torch.equal(models["flux"].model.state_dict()[name], weight)
