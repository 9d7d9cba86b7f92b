"""Reuse in real pipelines, and in loops without one: every pass has its memory, every generation starts afresh."""

import pytest
import torch
from diffusers import (
    FluxImg2ImgPipeline,
    HeunDiscreteScheduler,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionXLImg2ImgPipeline,
)
from diffusers.callbacks import SDCFGCutoffCallback
from observe import same_picture, state_of
from parts import BY_NAME, Kinds, call, generate, only_reuse, plain
from tiny_pipelines import (
    PIPELINES,
    denoiser,
    embeds,
    flux_pipeline,
    quiet,
    run,
    sd3_pipeline,
    sd15_pipeline,
    sdxl_pipeline,
)

from toma_diffusion import Reuse, ToMAConfig, apply_toma, remove_toma, toma_enabled

EVERY_SECOND = only_reuse(start=0)
DEEP = only_reuse(start=0, part="deep")


def reused_in(pipe, **arguments) -> list[int]:
    with Kinds(denoiser(pipe)) as kinds:
        run(pipe, **arguments)
    return kinds.reused


def memories(pipe) -> list:
    return list(state_of(denoiser(pipe))._memories.values())


@pytest.mark.parametrize("name", PIPELINES)
class TestEveryPipeline:
    def test_a_second_generation_equals_the_first(self, name):
        """Another one in between leaves nothing behind."""
        pipe = PIPELINES[name]()
        original = run(pipe, num_inference_steps=4)
        apply_toma(pipe, DEEP)
        first = run(pipe, num_inference_steps=4)
        run(pipe, seed=1, num_inference_steps=6)
        assert torch.equal(run(pipe, num_inference_steps=4), first)
        assert not torch.equal(first, original)
        with toma_enabled(pipe, False):
            assert torch.equal(run(pipe, num_inference_steps=4), original)
        assert torch.equal(run(pipe, num_inference_steps=4), first)
        remove_toma(pipe)
        assert torch.equal(run(pipe, num_inference_steps=4), original)

    def test_the_schedule(self, name):
        pipe = PIPELINES[name]()
        apply_toma(pipe, only_reuse(period=3, start=0.25))
        assert reused_in(pipe, num_inference_steps=8) == [2, 3, 5, 6]
        assert reused_in(pipe, num_inference_steps=4) == [1, 2]


class TestGuidance:
    def test_in_one_call_has_one_memory(self):
        pipe = sd15_pipeline()
        apply_toma(pipe, EVERY_SECOND)
        run(pipe, num_inference_steps=4)
        assert len(memories(pipe)) == 1
        assert {buffer.shape[0] for buffer in memories(pipe)[0].buffers[:-2]} == {2}

    def test_in_two_passes_has_two(self):
        """Each pass is reused from itself: another negative prompt must not change what the other pass remembers."""
        pipe = flux_pipeline()
        apply_toma(pipe, EVERY_SECOND)
        with Kinds(pipe.transformer) as kinds:
            run(pipe, num_inference_steps=4, true_cfg_scale=3.0)
        assert kinds.seen == [(step, ordinal, step % 2 == 1) for step in range(4) for ordinal in range(2)]
        first, second = (memory.parts[0].last[0] for memory in memories(pipe))
        assert not torch.allclose(first, second, atol=1e-3)

    def test_two_passes_are_one_call_in_halves(self):
        """SDXL is run by hand with guidance in one call and in two: the same pictures."""
        family = BY_NAME["sdxl"]
        together, apart = family.build(), family.build()
        outputs = generate(family, together, apply_toma(together, DEEP), 4)
        handle = apply_toma(apart, DEEP)
        handle.begin(4)
        for step in range(4):
            handle.step(step)
            inputs = family.inputs(seed=step)
            halves = []
            for half in range(2):
                conditions = {key: value[half : half + 1] for key, value in inputs["added_cond_kwargs"].items()}
                part = {key: inputs[key][half : half + 1] for key in ("sample", "encoder_hidden_states")}
                with torch.no_grad():
                    halves.append(apart(**inputs | part | {"added_cond_kwargs": conditions}).sample)
            same_picture(torch.cat(halves), outputs[step])
        assert len(state_of(apart)._memories) == 2

    def test_cut_off_half_way_is_computed_again(self):
        """The batch halves in step 5, which would reuse."""
        pipe = sd15_pipeline()
        apply_toma(pipe, DEEP)
        arguments = {"num_inference_steps": 10, "callback_on_step_end": SDCFGCutoffCallback(0.4)}
        assert reused_in(pipe, **arguments) == [1, 3, 7, 9]
        assert torch.equal(run(pipe, **arguments), run(pipe, **arguments))


@pytest.mark.parametrize(
    ("make", "pipeline_class", "extra"),
    [
        (sd15_pipeline, StableDiffusionImg2ImgPipeline, {"requires_safety_checker": False}),
        (sdxl_pipeline, StableDiffusionXLImg2ImgPipeline, {}),
        (flux_pipeline, FluxImg2ImgPipeline, {}),
    ],
    ids=["sd15", "sdxl", "flux"],
)
def test_image_to_image(make, pipeline_class, extra):
    """The steps that are made count, not those of the scheduler."""
    pipe = make()
    apply_toma(pipe, only_reuse(start=0.25))
    other = quiet(pipeline_class(**pipe.components, **extra))
    image = torch.rand(1, 3, 128, 128) * 2 - 1
    assert reused_in(other, image=image, num_inference_steps=20, strength=0.4) == [2, 4, 6]
    assert reused_in(pipe, num_inference_steps=4) == [1, 3]
    assert reused_in(other, image=image, num_inference_steps=20, strength=0.4) == [2, 4, 6]


@pytest.mark.parametrize("name", PIPELINES)
def test_two_pictures_equal_singles(name):
    pipe = PIPELINES[name]()
    apply_toma(pipe, DEEP)
    shape = (1, 64, 4) if name == "flux" else (1, 4, 16, 16)
    noise = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    settings = {"num_inference_steps": 4}
    both = {key: value for key, value in embeds(pipe, 2).items() if isinstance(value, torch.Tensor)}
    together = run(pipe, 2, latents=torch.cat(noise), **settings | both)
    for index in range(2):
        single = {key: value[index : index + 1] for key, value in both.items()}
        same_picture(run(pipe, latents=noise[index], **settings | single), together[index : index + 1])


@pytest.mark.parametrize("make", [sd15_pipeline, flux_pipeline])
def test_several_sizes_one_after_another(make):
    sizes = [(128, 128), (96, 160), (128, 128), (160, 96)]
    fresh = {}
    for height, width in sizes:
        pipe = make()
        apply_toma(pipe, DEEP)
        fresh[height, width] = run(pipe, num_inference_steps=4, height=height, width=width)
    for height, width in sizes:  # the last pipeline has made another size already
        assert torch.equal(run(pipe, num_inference_steps=4, height=height, width=width), fresh[height, width])
    assert len(memories(pipe)) == 1  # of the last size; others are freed


def test_an_exception_in_the_middle():
    pipe = sd15_pipeline()
    apply_toma(pipe, DEEP)
    expected = run(pipe, num_inference_steps=6)

    def stop(pipe, step, timestep, tensors):
        return {} if step < 3 else 1 / 0

    with pytest.raises(ZeroDivisionError):
        run(pipe, seed=1, num_inference_steps=6, callback_on_step_end=stop)
    assert torch.equal(run(pipe, num_inference_steps=6), expected)


@pytest.mark.parametrize("part", ["blocks", "deep"])
def test_an_exception_inside_a_part(part):
    """What went in is forgotten with the call."""
    family = BY_NAME["sd15"]
    model = family.build()
    handle = apply_toma(model, only_reuse(start=0, part=part))
    expected = generate(family, model, handle, 4)
    broken = model.mid_block.resnets[-1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate(family, model, handle, 4)
    broken.remove()
    assert all(map(torch.equal, generate(family, model, handle, 4), expected))


def test_a_scheduler_with_two_calls_a_step():
    """Heun's method calls twice, at timesteps of its own: what it counts as steps is reused."""
    pipe = sd15_pipeline()
    pipe.scheduler = HeunDiscreteScheduler.from_config(pipe.scheduler.config)
    apply_toma(pipe, EVERY_SECOND)
    first = run(pipe, num_inference_steps=4)
    assert reused_in(pipe, num_inference_steps=4) == [1, 3, 5]
    assert torch.equal(run(pipe, num_inference_steps=4), first)


def test_skip_layer_guidance_of_sd3():
    """The pass that leaves out blocks is computed, the others reuse."""
    pipe = sd3_pipeline()
    handle = apply_toma(pipe, only_reuse(start=0, order=0))
    arguments = {"num_inference_steps": 4, "skip_guidance_layers": [1], "skip_layer_guidance_stop": 1.0}
    arguments["skip_layer_guidance_start"] = 0.0
    with Kinds(pipe.transformer) as kinds:
        first = run(pipe, **arguments)
    assert kinds.reused == [1, 3]
    extra = [reused for _, ordinal, reused in kinds.seen if ordinal == 1]
    assert extra
    assert not any(extra)
    assert any("a pass was not reused: skip-layer guidance" in note for note in handle.summary().notes)
    assert torch.equal(run(pipe, **arguments), first)


class TestTold:
    """On a bare model."""

    family = BY_NAME["pixart"]

    def model(self, **fields):
        model = self.family.build()
        return model, apply_toma(model, only_reuse(**fields)), Kinds(model)

    def test_begin_and_step(self):
        model, handle, kinds = self.model(start=0.5)
        for _ in range(2):
            generate(self.family, model, handle, 4)
        assert kinds.reused == [2, 2]

    def test_begin_alone(self):
        model, handle, kinds = self.model(start=0.5)
        for _ in range(2):
            handle.begin(4)
            for step in range(4):
                call(self.family, model, step)
        assert kinds.reused == [2, 2]

    def test_neither_where_none_is_needed(self):
        model, _, kinds = self.model(start=0)
        inputs = self.family.inputs()
        for step in range(4):
            call(self.family, model, encoder_hidden_states=inputs["encoder_hidden_states"], seed=step)
        assert kinds.reused == [1, 3]

    def test_a_generation_that_begins_late(self):
        """As image to image does: its first step has nothing to reuse, whatever came before."""
        model, handle, kinds = self.model(start=0)
        handle.begin(8)
        outputs = []
        for _ in range(2):
            for step in range(3, 7):
                handle.step(step)
                outputs.append(call(self.family, model, step))
        assert kinds.reused == [5, 5]
        assert all(map(torch.equal, outputs[4:], outputs[:4]))
        assert handle.summary().steps == (3, 1)

    def test_steps_left_out(self):
        """A line goes on over the distance that was made."""
        model, handle, _ = self.model(computed=(0, 3), order=1)
        handle.begin(9)
        for step in (0, 3, 8):
            handle.step(step)
            call(self.family, model, step)
        (memory,) = state_of(model)._memories.values()
        assert (memory.step, memory.ahead.item(), memory.per_step.item()) == (3, 5, pytest.approx(1 / 3))

    def test_reset_forgets(self):
        model, handle, kinds = self.model(start=0)
        inputs = {"encoder_hidden_states": self.family.inputs()["encoder_hidden_states"]}
        call(self.family, model, **inputs)
        handle.reset()
        output = call(self.family, model, **inputs)
        assert kinds.reused == []
        assert torch.equal(output, plain(self.family, 1, **inputs)[0])


def test_addresses_stay_over_generations():
    """Compiled code and CUDA graphs hold them."""
    pipe = sd15_pipeline()
    apply_toma(pipe, DEEP)
    run(pipe, num_inference_steps=4)
    before = [buffer.data_ptr() for memory in memories(pipe) for buffer in memory.buffers]
    run(pipe, seed=1, num_inference_steps=6)
    assert [buffer.data_ptr() for memory in memories(pipe) for buffer in memory.buffers] == before


def test_presets_reuse_in_a_pipeline():
    pipe = sdxl_pipeline()
    for name in ("reuse", "balanced", "fast", "faster"):
        apply_toma(pipe, name)
        assert reused_in(pipe, num_inference_steps=8), name
        remove_toma(pipe)
    apply_toma(pipe, ToMAConfig(ratio=0, scope="stage", reuse=Reuse(min_steps=5, start=0)))
    assert reused_in(pipe, num_inference_steps=4) == []
