from collections import Counter
from itertools import cycle

import diffusers
import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    FlowMatchLCMScheduler,
    FluxImg2ImgPipeline,
    HeunDiscreteScheduler,
    LCMScheduler,
    PNDMScheduler,
    StableDiffusion3Img2ImgPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionPAGPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLImg2ImgPipeline,
    UniPCMultistepScheduler,
)
from diffusers.callbacks import SDCFGCutoffCallback
from diffusers.utils import is_scipy_available, is_torchsde_available
from observe import attention_lengths, same_picture, watch_plans
from tiny import FAMILIES, ONE_PLAN, PLAIN, SETTINGS, STRIDED, sd15_unet
from tiny_pipelines import (
    PIPELINES,
    denoiser,
    flux_pipeline,
    inpainting_pipeline,
    quiet,
    run,
    sd3_pipeline,
    sd15_pipeline,
    sdxl_pipeline,
)
from torch.utils._python_dispatch import TorchDispatchMode

from toma_diffusion import Action, Schedule, apply_toma, toma_enabled

KINDS = {family.name: family.kinds for family in FAMILIES}
SCHEDULE = {"select_every": 10, "reweigh_every": 5}
OFTEN = {"select_every": 3, "reweigh_every": 2}
"""So that a short generation has every action."""
READS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2", "unique_dim", "item")
"""Operators that read a value back from the device."""


class Trace(TorchDispatchMode):
    """Counts the operators that run below every layer of Python, for each call of the pipeline's denoiser by itself."""

    def __init__(self, pipe_or_model):
        super().__init__()
        self.model = pipe_or_model if isinstance(pipe_or_model, torch.nn.Module) else denoiser(pipe_or_model)
        self.calls: list[Counter] = []
        self.running = False

    def __enter__(self):
        self.hooks = [
            self.model.register_forward_pre_hook(lambda *_: self._begin(), prepend=True),
            self.model.register_forward_hook(lambda *_: self._end()),
        ]
        self.plans = watch_plans(lambda name: self.calls[-1].update([name]))
        self.plans.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        for hook in self.hooks:
            hook.remove()
        self.plans.__exit__(*error)
        return super().__exit__(*error)

    def _begin(self):
        self.calls.append(Counter())
        self.running = True

    def _end(self):
        self.running = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.running:
            self.calls[-1][func._opname] += 1
            if func._opname in ("index", "index_put_") and any(
                index is not None and index.dtype == torch.bool for index in args[1]
            ):
                self.calls[-1]["nonzero"] += 1
        return func(*args, **(kwargs or {}))

    def total(self, operator: str) -> int:
        return sum(call[operator] for call in self.calls)

    def where(self, operator: str) -> list[int]:
        """The calls in which it ran."""
        return [index for index, call in enumerate(self.calls) if call[operator]]


def traced(pipe, **arguments) -> Trace:
    with Trace(pipe) as trace:
        run(pipe, **arguments)
    return trace


def scheduled(num_steps: int, action: Action, **settings) -> int:
    schedule = Schedule(**settings)
    return sum(schedule.action(step, num_steps) is action for step in range(num_steps))


def picture(height: int = 128, width: int = 128) -> torch.Tensor:
    return torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(5))


def img2img(pipe, pipeline_class=StableDiffusionImg2ImgPipeline):
    extra = {"requires_safety_checker": False} if pipeline_class is StableDiffusionImg2ImgPipeline else {}
    return quiet(pipeline_class(**pipe.components, **extra))


class TestCounts:
    """Five selections and ten weight computations a plan, in fifty steps."""

    @pytest.mark.parametrize("name", PIPELINES)
    def test_fifty_steps(self, name):
        pipe = PIPELINES[name]()
        apply_toma(pipe, PLAIN, **ONE_PLAN | SCHEDULE)
        trace = traced(pipe, num_inference_steps=50)
        assert len(trace.calls) == 50
        assert trace.where("facility_location") == [0, 10, 20, 30, 40]
        assert trace.where("merge_weights") == [0, 5, 10, 15, 20, 25, 30, 35, 40, 45]
        assert trace.total("facility_location") == 5 * KINDS[name]
        assert trace.total("merge_weights") == 10 * KINDS[name]
        assert trace.where("merge") == trace.where("unmerge") == list(range(50))

    def test_one_call_a_step_twice_in_a_row_then_other_sizes_and_batches(self):
        pipe = sd15_pipeline()
        apply_toma(pipe, PLAIN, **ONE_PLAN | SCHEDULE)
        for arguments in (
            {},
            {},
            {"width": 96},
            {"num_images_per_prompt": 2},
            {"guidance_scale": 0.0},
            {},
        ):
            trace = traced(pipe, num_inference_steps=12, **{"height": 64, "width": 64} | arguments)
            assert trace.where("facility_location") == [0, 10]
            assert trace.total("facility_location") == 2 * 2
            assert trace.total("merge_weights") == 3 * 2

    def test_two_calls_a_step_twice_in_a_row_then_other_sizes_and_batches(self):
        pipe = flux_pipeline()
        apply_toma(pipe, PLAIN, **ONE_PLAN | SCHEDULE)
        for arguments in ({}, {}, {"height": 96}, {"num_images_per_prompt": 2}, {}):
            arguments = {"height": 64, "width": 64, "true_cfg_scale": 2.0} | arguments
            trace = traced(pipe, num_inference_steps=12, **arguments)
            assert len(trace.calls) == 24
            assert trace.where("facility_location") == [0, 1, 20, 21]
            assert trace.total("facility_location") == 2 * 2 * 2
            assert trace.total("merge_weights") == 2 * 3 * 2

    def test_one_and_two_calls_a_step_by_turns(self):
        pipe = flux_pipeline()
        apply_toma(pipe, PLAIN, **ONE_PLAN | SCHEDULE)
        for scale, passes in ((1.0, 1), (2.0, 2), (1.0, 1), (2.0, 2)):
            trace = traced(pipe, num_inference_steps=12, true_cfg_scale=scale)
            assert len(trace.calls) == 12 * passes
            assert trace.total("facility_location") == passes * 2 * 2
            assert trace.total("merge_weights") == passes * 3 * 2


def schedulers() -> list:
    """All that the Stable Diffusion pipelines name as compatible, and the distilled models' own."""
    names = {kind.__name__ for kind in sd15_pipeline().scheduler.compatibles}
    return sorted(names | {"LCMScheduler", "TCDScheduler", "DDIMParallelScheduler", "DDPMParallelScheduler"})


class TestSchedulers:
    # With guidance and without by turns: it changes the batch, not the number of calls.
    @pytest.mark.parametrize(("name", "guidance"), list(zip(schedulers(), cycle([7.5, 0.0]), strict=False)))
    def test_stable_diffusion(self, name, guidance):
        if name == "DPMSolverSDEScheduler" and not is_torchsde_available():
            pytest.skip("DPMSolverSDEScheduler needs torchsde")
        if name == "LMSDiscreteScheduler" and not is_scipy_available():
            pytest.skip("LMSDiscreteScheduler needs scipy")
        pipe = sd15_pipeline()
        pipe.scheduler = getattr(diffusers, name).from_config(pipe.scheduler.config)
        self.check(pipe, 2, num_inference_steps=7, guidance_scale=guidance)

    @pytest.mark.parametrize(
        "scheduler",
        [
            FlowMatchEulerDiscreteScheduler(shift=3.0),
            FlowMatchEulerDiscreteScheduler(stochastic_sampling=True),
            FlowMatchHeunDiscreteScheduler(),
            FlowMatchLCMScheduler(),
            DPMSolverMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction"),
            UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction"),
        ],
        ids=lambda scheduler: type(scheduler).__name__,
    )
    def test_sd3(self, scheduler):
        pipe = sd3_pipeline()
        pipe.scheduler = scheduler
        self.check(pipe, 1, num_inference_steps=7)

    @pytest.mark.parametrize("true_cfg_scale", [1.0, 2.0])
    @pytest.mark.parametrize(
        "scheduler",
        [
            FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
            FlowMatchLCMScheduler(),
            UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction"),
        ],
        ids=lambda scheduler: type(scheduler).__name__,
    )
    def test_flux(self, scheduler, true_cfg_scale):
        pipe = flux_pipeline()
        pipe.scheduler = scheduler
        passes = 2 if true_cfg_scale > 1 else 1
        self.check(pipe, 2, passes, num_inference_steps=7, true_cfg_scale=true_cfg_scale)

    def check(self, pipe, kinds, passes=1, **arguments):
        """As often as the schedule says for the calls that were made; afresh in every generation."""
        apply_toma(pipe, PLAIN, **ONE_PLAN | OFTEN)
        for _ in range(2):
            with Trace(pipe) as trace:
                assert run(pipe, **arguments).isfinite().all()
            steps, rest = divmod(len(trace.calls), passes)
            assert rest == 0
            assert steps == len(pipe.scheduler.timesteps)
            selections = scheduled(steps, Action.SELECT, **OFTEN)
            reweighings = scheduled(steps, Action.REWEIGH, **OFTEN)
            assert trace.total("facility_location") == selections * kinds * passes
            assert trace.total("merge_weights") == (selections + reweighings) * kinds * passes
            assert trace.where("merge") == list(range(len(trace.calls)))

    @pytest.mark.parametrize(("scheduler", "calls"), [(HeunDiscreteScheduler, 15), (PNDMScheduler, 9)])
    def test_more_calls_than_steps(self, scheduler, calls):
        pipe = sd15_pipeline()
        pipe.scheduler = scheduler.from_config(pipe.scheduler.config, skip_prk_steps=True)
        apply_toma(pipe, PLAIN, **ONE_PLAN | {"select_every": 4, "reweigh_every": 4})
        trace = traced(pipe, num_inference_steps=8)
        assert len(trace.calls) == calls
        assert trace.where("facility_location") == list(range(0, calls, 4))


class TestGuidance:
    def test_negative_pass_has_a_plan_of_its_own(self):
        """A scale that takes next to nothing of the negative pass gives what the positive pass alone gives."""
        pipe = flux_pipeline()
        apply_toma(pipe, PLAIN, **STRIDED | SCHEDULE)
        arguments = {"num_inference_steps": 4}
        alone = run(pipe, **arguments)
        both = run(pipe, true_cfg_scale=1 + 1e-7, **arguments)
        torch.testing.assert_close(both, alone, rtol=1e-4, atol=1e-4)

    def test_skip_layer_guidance_is_another_pass_over_the_step(self):
        pipe = sd3_pipeline()
        apply_toma(pipe, PLAIN, **ONE_PLAN | SCHEDULE)
        for _ in range(2):
            trace = traced(
                pipe,
                num_inference_steps=12,
                skip_guidance_layers=[1],
                skip_layer_guidance_start=0.0,
                skip_layer_guidance_stop=1.0,
            )
            # Step 0 makes one call; the others two, of which the second skips a layer and sees the picture once.
            assert len(trace.calls) == 23
            # The batched pass selects in steps 0 and 10, the skipping one in its first, 1, and in 10.
            assert trace.where("facility_location") == [0, 2, 19, 20]
            assert trace.where("merge_weights") == [0, 2, 9, 10, 19, 20]

    @pytest.mark.parametrize(
        ("name", "arguments"),
        [
            (
                "sd3",
                {
                    "skip_guidance_layers": [1],
                    "skip_layer_guidance_start": 0.0,
                    "skip_layer_guidance_stop": 1.0,
                },
            ),
            ("sd15", {"callback_on_step_end": SDCFGCutoffCallback(0.4)}),
        ],
        ids=["pass", "batch"],
    )
    def test_what_begins_late_forgets_the_last_generation(self, name, arguments):
        """A pass, or a size of the batch, that step 0 does not have: its plan must be made anew nevertheless."""
        pipe = PIPELINES[name]()
        arguments = {"num_inference_steps": 8, **arguments}
        with apply_toma(pipe, PLAIN, **STRIDED | SCHEDULE):
            run(pipe, seed=1, **arguments)
            second = run(pipe, **arguments)
        with apply_toma(pipe, PLAIN, **STRIDED | SCHEDULE):
            same_picture(run(pipe, **arguments), second)

    @pytest.mark.parametrize("scope", ["module", "block", "stage"])
    def test_perturbed_attention_guidance(self, scope):
        """PAG triples the batch and puts in attention processors of its own while it runs."""
        parts = sd15_pipeline().components
        pipe = quiet(StableDiffusionPAGPipeline(**parts, requires_safety_checker=False, pag_applied_layers=["mid"]))
        arguments = {"pag_scale": 3.0, "guidance_scale": 5.0}
        plain = run(pipe, **arguments)
        with apply_toma(pipe, PLAIN, **STRIDED, scope=scope):
            merged = run(pipe, **arguments)
            same_picture(run(pipe, **arguments), merged)
            assert {query for query, _ in attention_lengths(lambda: run(pipe, **arguments))} == {128, 32}
        assert not torch.equal(merged, plain)
        assert torch.equal(run(pipe, **arguments), plain)

    def test_guidance_cut_off_half_way(self):
        """The batch halves within a generation; steps go on being counted."""
        pipe = sd15_pipeline()
        apply_toma(pipe, PLAIN, **ONE_PLAN | SCHEDULE)
        trace = traced(pipe, num_inference_steps=20, callback_on_step_end=SDCFGCutoffCallback(0.2))
        assert len(trace.calls) == 20
        assert trace.where("facility_location") == [0, 5, 10]  # in step 5 because the batch is another

    def test_guidance_cut_off_within_a_window(self):
        pipe = sd15_pipeline()
        apply_toma(pipe, PLAIN, **ONE_PLAN | SCHEDULE, window=(0.5, 1.0))
        trace = traced(pipe, num_inference_steps=20, callback_on_step_end=SDCFGCutoffCallback(0.2))
        assert trace.where("merge") == list(range(10, 20))

    @pytest.mark.parametrize("name", PIPELINES)
    def test_one_step(self, name):
        pipe = PIPELINES[name]()
        if name == "pixart":  # its pipeline takes a single step only from a scheduler of distilled models
            pipe.scheduler = LCMScheduler.from_config(pipe.scheduler.config)
        plain = run(pipe, num_inference_steps=1)
        with apply_toma(pipe, PLAIN, **ONE_PLAN):
            for _ in range(3):
                trace = traced(pipe, num_inference_steps=1)
                assert trace.total("facility_location") == KINDS[name] * len(trace.calls)
                assert trace.total("merge_weights") == KINDS[name] * len(trace.calls)
        with apply_toma(pipe, PLAIN, **STRIDED):
            first, second = (run(pipe, num_inference_steps=1) for _ in range(2))
        same_picture(first, second)
        assert not torch.equal(first, plain)

    def test_one_step_with_separate_passes(self):
        pipe = flux_pipeline()
        apply_toma(pipe, PLAIN, **ONE_PLAN | SCHEDULE)
        for _ in range(3):
            trace = traced(pipe, num_inference_steps=1, true_cfg_scale=2.0)
            assert trace.where("facility_location") == [0, 1]

    def test_turbo(self):
        pipe = sdxl_pipeline()
        pipe.scheduler = EulerAncestralDiscreteScheduler.from_config(pipe.scheduler.config, timestep_spacing="trailing")
        arguments = {"guidance_scale": 0.0, "num_inference_steps": 1}
        plain = run(pipe, **arguments)
        apply_toma(pipe, PLAIN, **STRIDED)
        merged = run(pipe, **arguments)
        assert merged.isfinite().all()
        assert not torch.equal(merged, plain)
        same_picture(run(pipe, **arguments), merged)


class TestDirectCalls:
    """A denoiser without any pipeline."""

    def calls(self, unet, number, samples=None, text=None, **arguments):
        text = torch.randn(1, 7, 32) if text is None else text
        with Trace(unet) as trace, torch.no_grad():
            for index in range(number):
                sample = samples[index] if samples else torch.randn(1, 4, 16, 16)
                unet(sample, 10, text, **arguments)
        return trace

    def test_every_call_is_a_step(self):
        unet = sd15_unet()
        apply_toma(unet, **ONE_PLAN | SCHEDULE)
        trace = self.calls(unet, 25)
        assert trace.where("facility_location") == [0, 10, 20]
        assert trace.where("merge_weights") == [0, 5, 10, 15, 20]

    def test_even_with_the_very_same_tensors(self):
        unet = sd15_unet()
        apply_toma(unet, **ONE_PLAN | SCHEDULE)
        trace = self.calls(unet, 12, samples=[torch.randn(1, 4, 16, 16)] * 12)
        assert trace.where("facility_location") == [0, 10]

    def test_new_conditioning_begins_a_new_generation(self):
        unet = sd15_unet()
        apply_toma(unet, **ONE_PLAN | SCHEDULE)
        for number in (3, 7, 12):
            trace = self.calls(unet, number)
            assert trace.where("facility_location") == list(range(0, number, 10))

    def test_same_conditioning_goes_on(self):
        unet = sd15_unet()
        apply_toma(unet, **ONE_PLAN | SCHEDULE)
        text = torch.randn(1, 7, 32)
        assert self.calls(unet, 4, text=text).where("facility_location") == [0]
        assert self.calls(unet, 8, text=text).where("facility_location") == [6]

    def test_reset_begins_a_new_generation(self):
        unet = sd15_unet()
        handle = apply_toma(unet, **ONE_PLAN | SCHEDULE)
        text = torch.randn(1, 7, 32)
        self.calls(unet, 4, text=text)
        handle.reset()
        assert self.calls(unet, 12, text=text).where("facility_location") == [0, 10]

    def test_separate_passes(self):
        unet = sd15_unet()
        apply_toma(unet, **ONE_PLAN | SCHEDULE)
        for _ in range(2):
            texts = torch.randn(1, 7, 32), torch.randn(1, 7, 32)
            with Trace(unet) as trace, torch.no_grad():
                for _ in range(12):
                    sample = torch.randn(1, 4, 16, 16)
                    for text in texts:
                        unet(sample, 10, text)
            assert trace.where("facility_location") == [0, 1, 20, 21]

    def test_pipelines_denoiser_by_itself(self):
        """The loop that users write themselves: the scheduler is the pipeline's, the calls are not."""
        pipe = sd15_pipeline()
        apply_toma(pipe, PLAIN, **ONE_PLAN | SCHEDULE)
        for _ in range(2):
            text, sample = torch.randn(2, 6, 32), torch.randn(1, 4, 16, 16)
            pipe.scheduler.set_timesteps(15)
            with Trace(pipe) as trace, torch.no_grad():
                for timestep in pipe.scheduler.timesteps:
                    noise = pipe.unet(torch.cat([sample] * 2), timestep, text).sample.mean(dim=0, keepdim=True)
                    sample = pipe.scheduler.step(noise, timestep, sample).prev_sample
            assert trace.where("facility_location") == [0, 10]


class TestFailures:
    @pytest.mark.parametrize("scope", ["module", "block", "stage"])
    @pytest.mark.parametrize("name", ["sd15", "sdxl", "flux", "sd3"])
    def test_exception_between_two_steps(self, name, scope):
        pipe = PIPELINES[name]()
        apply_toma(pipe, PLAIN, **STRIDED | SCHEDULE, scope=scope)
        whole = run(pipe, num_inference_steps=6)
        other = run(pipe, num_inference_steps=6, seed=1)

        def fail(pipe, step, timestep, arguments):
            if step == 2:
                raise KeyboardInterrupt
            return arguments

        with pytest.raises(KeyboardInterrupt):
            run(pipe, num_inference_steps=6, callback_on_step_end=fail)
        same_picture(run(pipe, num_inference_steps=6, seed=1), other)
        with pytest.raises(KeyboardInterrupt):
            run(pipe, num_inference_steps=6, seed=1, callback_on_step_end=fail)
        same_picture(run(pipe, num_inference_steps=6), whole)

    @pytest.mark.parametrize("scope", ["module", "block", "stage"])
    def test_exception_inside_a_block(self, scope):
        pipe = sdxl_pipeline()
        apply_toma(pipe, PLAIN, **STRIDED | SCHEDULE, scope=scope)
        whole = run(pipe, num_inference_steps=6)

        def fail(*arguments):
            raise MemoryError

        hook = pipe.unet.down_blocks[1].attentions[0].transformer_blocks[1].attn2.register_forward_hook(fail)
        with pytest.raises(MemoryError):
            run(pipe, num_inference_steps=6, seed=1)
        hook.remove()
        same_picture(run(pipe, num_inference_steps=6), whole)

    def test_between_separate_passes(self):
        pipe = flux_pipeline()
        apply_toma(pipe, PLAIN, **STRIDED | SCHEDULE)
        arguments = {"num_inference_steps": 6, "true_cfg_scale": 2.0}
        whole = run(pipe, **arguments)
        calls = Counter()

        def fail(*_):
            calls["made"] += 1
            if calls["made"] == 5:  # the positive pass of step 2 is made, its negative one never
                raise KeyboardInterrupt

        hook = pipe.transformer.register_forward_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            run(pipe, **arguments)
        hook.remove()
        same_picture(run(pipe, **arguments), whole)

    def test_interrupted_generation(self):
        pipe = sd15_pipeline()
        apply_toma(pipe, PLAIN, **STRIDED | OFTEN)
        whole = run(pipe, num_inference_steps=6)

        def stop(pipe, step, timestep, arguments):
            pipe._interrupt = step >= 1
            return arguments

        assert len(traced(pipe, num_inference_steps=6, callback_on_step_end=stop).calls) == 2
        same_picture(run(pipe, num_inference_steps=6), whole)


class TestWindow:
    WINDOW = ONE_PLAN | SCHEDULE | {"window": (0.4, 1.0)}

    @pytest.mark.parametrize("name", PIPELINES)
    def test_last_six_of_ten_steps(self, name):
        pipe = PIPELINES[name]()
        apply_toma(pipe, PLAIN, **self.WINDOW)
        for _ in range(2):
            trace = traced(pipe, num_inference_steps=10)
            assert trace.where("merge") == trace.where("unmerge") == list(range(4, 10))
            assert trace.where("facility_location") == [4]
            assert trace.where("merge_weights") == [4, 9]

    @pytest.mark.filterwarnings("ignore:a generation was not merged")
    def test_number_of_steps_may_change(self):
        pipe = sd15_pipeline()
        apply_toma(pipe, PLAIN, **self.WINDOW)
        for steps, first in ((10, 4), (5, 2), (20, 8), (1, 1), (10, 4)):
            assert traced(pipe, num_inference_steps=steps).where("merge") == list(range(first, steps))

    def test_separate_passes(self):
        pipe = flux_pipeline()
        apply_toma(pipe, PLAIN, **self.WINDOW)
        trace = traced(pipe, num_inference_steps=10, true_cfg_scale=2.0)
        assert trace.where("merge") == list(range(8, 20))
        assert trace.where("facility_location") == [8, 9]

    def test_end(self):
        pipe = sd15_pipeline()
        apply_toma(pipe, PLAIN, **ONE_PLAN | SCHEDULE, window=(0.2, 0.7))
        assert traced(pipe, num_inference_steps=10).where("merge") == list(range(2, 7))

    def test_scheduler_of_two_calls_a_step(self):
        pipe = sd15_pipeline()
        pipe.scheduler = HeunDiscreteScheduler.from_config(pipe.scheduler.config)
        apply_toma(pipe, PLAIN, **self.WINDOW)
        trace = traced(pipe, num_inference_steps=10)
        assert len(trace.calls) == 19
        assert trace.where("merge") == list(range(8, 19))

    @pytest.mark.parametrize(
        ("make", "pipeline_class"),
        [
            (sd15_pipeline, StableDiffusionImg2ImgPipeline),
            (sdxl_pipeline, StableDiffusionXLImg2ImgPipeline),
            (flux_pipeline, FluxImg2ImgPipeline),
            (sd3_pipeline, StableDiffusion3Img2ImgPipeline),
        ],
        ids=lambda value: value.__name__,
    )
    def test_image_to_image_counts_the_steps_really_made(self, make, pipeline_class):
        pipe = img2img(make(), pipeline_class)
        apply_toma(pipe, PLAIN, **self.WINDOW)
        for steps, strength, made, first in ((20, 0.5, 10, 4), (10, 0.5, 5, 2), (10, 1.0, 10, 4)):
            trace = traced(pipe, image=picture(), num_inference_steps=steps, strength=strength)
            assert len(trace.calls) == made
            assert trace.where("merge") == list(range(first, made))

    def test_base_and_refiner(self):
        base = sdxl_pipeline()
        refiner = img2img(sdxl_pipeline(), StableDiffusionXLImg2ImgPipeline)
        for pipe in (base, refiner):
            apply_toma(pipe, PLAIN, **self.WINDOW)
        trace = traced(base, num_inference_steps=20, denoising_end=0.75)
        assert trace.where("merge") == list(range(6, len(trace.calls)))
        latents = run(base, num_inference_steps=20, denoising_end=0.75)
        trace = traced(refiner, image=latents, num_inference_steps=20, denoising_start=0.75)
        assert len(trace.calls) == 5
        assert trace.where("merge") == [2, 3, 4]

    def test_pipeline_that_is_gone(self):
        pipe = sd15_pipeline()
        apply_toma(pipe, PLAIN, **self.WINDOW)
        pipe = img2img(pipe)
        trace = traced(pipe, image=picture(), num_inference_steps=10, strength=0.5)
        assert trace.where("merge") == [2, 3, 4]


class TestSharedDenoiser:
    """Merging is applied to one pipeline, its parts are used by another."""

    def test_counts_in_both(self):
        pipe = sd15_pipeline()
        apply_toma(pipe, PLAIN, **ONE_PLAN | SCHEDULE)
        other = img2img(pipe)
        for _ in range(2):
            assert traced(pipe, num_inference_steps=4).where("facility_location") == [0]
            trace = traced(other, image=picture(), num_inference_steps=40, strength=0.5)
            assert len(trace.calls) == 20
            assert trace.where("facility_location") == [0, 10]

    def test_scheduler_of_its_own(self):
        pipe = sd15_pipeline()
        apply_toma(pipe, PLAIN, **ONE_PLAN | SCHEDULE)
        scheduler = HeunDiscreteScheduler.from_config(pipe.scheduler.config)
        other = quiet(
            StableDiffusionPipeline(**pipe.components | {"scheduler": scheduler}, requires_safety_checker=False)
        )
        run(pipe, num_inference_steps=4)
        for _ in range(2):
            trace = traced(other, num_inference_steps=8)
            assert len(trace.calls) == 15
            assert trace.where("facility_location") == [0, 10]

    def test_first_pipeline_is_gone(self):
        pipe = sd15_pipeline()
        apply_toma(pipe, PLAIN, **ONE_PLAN | SCHEDULE)
        pipe = img2img(pipe)
        for _ in range(2):
            trace = traced(pipe, image=picture(), num_inference_steps=40, strength=0.5)
            assert trace.where("facility_location") == [0, 10]


SIZES_BY_EIGHT = [(168, 96), (104, 104), (104, 192), (128, 128)]
"""Latents of 21×12, 13×13 and 13×24: those of 1344×768, 1000×1000 and 520×968 in small."""
SIZES_BY_SIXTEEN = [(336, 192), (208, 208), (144, 272), (128, 128)]
"""The same for models whose tokens are 16 pixels wide."""


class TestChanges:
    """Merging applied once and for all gives what merging applied anew gives."""

    @pytest.mark.parametrize("scope", ["module", "stage"])
    @pytest.mark.parametrize("name", PIPELINES)
    def test_sizes_batches_and_steps(self, name, scope):
        sizes = SIZES_BY_EIGHT if name in ("sd15", "sdxl") else SIZES_BY_SIXTEEN
        # SD3's pipeline repeats pooled embeddings that it made itself, not those it is given.
        images = {"prompts": 2} if name == "sd3" else {"num_images_per_prompt": 2}
        batches = [{"prompts": 1}, {"prompts": 3}, images, {"prompts": 4}]
        cases = [
            {"height": height, "width": width, "num_inference_steps": steps, **batch}
            for (height, width), batch, steps in zip(sizes, batches, (3, 5, 2, 4), strict=True)
        ]
        self.check(PIPELINES[name](), [*cases, cases[0]], scope=scope)

    @pytest.mark.parametrize("size", SIZES_BY_EIGHT)
    @pytest.mark.parametrize("name", ["sd15", "sdxl"])
    def test_every_size_runs_merged(self, name, size):
        pipe = PIPELINES[name]()
        height, width = size
        plain = run(pipe, height=height, width=width)
        handle = apply_toma(pipe, PLAIN, **SETTINGS)
        merged = run(pipe, height=height, width=width)
        assert merged.shape == plain.shape == (1, 4, height // 8, width // 8)
        assert merged.isfinite().all()
        assert not torch.equal(merged, plain)
        assert all(kind.tokens_after < kind.tokens_before for kind in handle.summary().kinds)

    @pytest.mark.parametrize("size", SIZES_BY_SIXTEEN)
    @pytest.mark.parametrize("name", ["flux", "sd3", "pixart"])
    def test_every_size_runs_merged_in_transformers(self, name, size):
        pipe = PIPELINES[name]()
        height, width = size
        plain = run(pipe, height=height, width=width)
        handle = apply_toma(pipe, PLAIN, **SETTINGS)
        merged = run(pipe, height=height, width=width)
        assert merged.shape == plain.shape
        assert merged.isfinite().all()
        assert not torch.equal(merged, plain)
        for kind in handle.summary().kinds:
            assert kind.tokens_before == (height // 16) * (width // 16)
            assert kind.tokens_after < kind.tokens_before

    def test_samples_of_a_batch_do_not_touch_each_other(self):
        """That each chooses for itself too is in tests/core/test_plan.py."""
        pipe = sd15_pipeline()
        apply_toma(pipe, PLAIN, **STRIDED | OFTEN)
        latents, text = torch.randn(3, 4, 16, 16), torch.randn(3, 6, 32)
        arguments = {"prompts": 3, "num_inference_steps": 4}
        before = run(pipe, latents=latents, prompt_embeds=text, **arguments)
        latents, text = latents.clone(), text.clone()
        latents[1], text[1] = torch.randn(4, 16, 16), torch.randn(6, 32)
        after = run(pipe, latents=latents, prompt_embeds=text, **arguments)
        same_picture(after[[0, 2]], before[[0, 2]])
        assert not torch.equal(after[1], before[1])

    def test_schedulers(self):
        pipe = sd15_pipeline()
        ddim = pipe.scheduler
        schedulers = [
            ddim,
            HeunDiscreteScheduler.from_config(ddim.config),
            DPMSolverMultistepScheduler.from_config(ddim.config),
            ddim,
            PNDMScheduler.from_config(ddim.config),
        ]
        self.check(pipe, [{"num_inference_steps": 5}] * 5, schedulers)

    def test_guidance(self):
        cases = [{"guidance_scale": scale, "num_inference_steps": 4} for scale in (7.5, 0.0, 7.5)]
        self.check(sd15_pipeline(), cases)
        cases = [{"true_cfg_scale": scale, "num_inference_steps": 4} for scale in (2.0, 1.0, 2.0)]
        self.check(flux_pipeline(), cases)

    def check(self, pipe, cases, schedulers=None, **settings):
        schedulers = schedulers or [pipe.scheduler] * len(cases)
        settings = STRIDED | OFTEN | settings
        together = []
        with apply_toma(pipe, PLAIN, **settings):
            for case, pipe.scheduler in zip(cases, schedulers, strict=True):
                together.append(run(pipe, **case))
        for result, case, pipe.scheduler in zip(together, cases, schedulers, strict=True):
            with apply_toma(pipe, PLAIN, **settings):
                same_picture(run(pipe, **case), result)
        assert not torch.equal(run(pipe, **cases[-1]), together[-1])


class TestImagesIn:
    """Image to image, inpainting."""

    @pytest.mark.parametrize("scope", ["module", "block", "stage"])
    @pytest.mark.parametrize(
        ("make", "pipeline_class"),
        [
            (sd15_pipeline, StableDiffusionImg2ImgPipeline),
            (sdxl_pipeline, StableDiffusionXLImg2ImgPipeline),
            (flux_pipeline, FluxImg2ImgPipeline),
            (sd3_pipeline, StableDiffusion3Img2ImgPipeline),
        ],
        ids=lambda value: value.__name__,
    )
    def test_image_to_image(self, make, pipeline_class, scope):
        self.check(img2img(make(), pipeline_class), scope, image=picture(), strength=0.5)

    @pytest.mark.parametrize("scope", ["module", "block", "stage"])
    @pytest.mark.parametrize("strength", [0.5, 1.0])
    def test_inpainting(self, strength, scope):
        mask = torch.zeros(1, 1, 128, 128)
        mask[..., 32:96] = 1
        self.check(inpainting_pipeline(), scope, image=picture(), mask_image=mask, strength=strength)

    def check(self, pipe, scope, **arguments):
        plain = run(pipe, num_inference_steps=4, **arguments)
        handle = apply_toma(pipe, PLAIN, **STRIDED | OFTEN, scope=scope)
        merged = run(pipe, num_inference_steps=4, **arguments)
        assert merged.shape == plain.shape
        assert merged.isfinite().all()
        assert not torch.equal(merged, plain)
        same_picture(run(pipe, num_inference_steps=4, **arguments), merged)
        handle.remove()
        assert torch.equal(run(pipe, num_inference_steps=4, **arguments), plain)


class TestNoWaiting:
    """Nothing in the loop reads a value back from the device."""

    @pytest.mark.parametrize(
        ("name", "guidance"), [*((name, {}) for name in PIPELINES), ("flux", {"true_cfg_scale": 2.0})]
    )
    def test_no_value_is_read_after_the_first_step(self, name, guidance):
        pipe = PIPELINES[name]()
        arguments = {"num_inference_steps": 7, **guidance}
        plain = traced(pipe, **arguments)
        apply_toma(pipe, PLAIN, **ONE_PLAN | OFTEN, window=(0.2, 1.0))
        merged = traced(pipe, **arguments)
        assert merged.total("merge")
        for index, (ours, theirs) in enumerate(zip(merged.calls, plain.calls, strict=True)):
            if index > 0:
                assert {name: ours[name] for name in READS} == {name: theirs[name] for name in READS}

    @pytest.mark.parametrize("scope", ["module", "block", "stage"])
    @pytest.mark.parametrize("family", [family for family in FAMILIES if family.name != "flux"], ids=lambda f: f.name)
    def test_tensors_without_values(self, family, scope):
        """On the meta device any reading of a value, and any copy to another device, is an error."""
        model = family.build().to("meta")
        apply_toma(model, **ONE_PLAN | OFTEN, scope=scope)
        inputs = to_meta(family.inputs())
        with Trace(model) as trace, torch.no_grad():
            for _ in range(4):
                output = model(**inputs, return_dict=False)[0]
        assert output.is_meta
        assert trace.where("facility_location") == [0, 3]


def to_meta(value):
    if isinstance(value, dict):
        return {name: to_meta(item) for name, item in value.items()}
    return value.to("meta") if isinstance(value, torch.Tensor) else value


class TestSwitching:
    @pytest.mark.parametrize("name", PIPELINES)
    def test_off_is_the_original_bit_for_bit_and_on_is_as_before(self, name):
        pipe = PIPELINES[name]()
        plain = run(pipe, num_inference_steps=4)
        handle = apply_toma(pipe, PLAIN, **STRIDED | OFTEN)
        merged = run(pipe, num_inference_steps=4)
        with toma_enabled(pipe, False):
            assert not handle.enabled
            trace = traced(pipe, num_inference_steps=4)
            assert trace.total("merge") == trace.total("merge_weights") == 0
            assert torch.equal(run(pipe, num_inference_steps=4), plain)
        assert handle.enabled
        same_picture(run(pipe, num_inference_steps=4), merged)
        handle.enabled = False
        assert torch.equal(run(pipe, num_inference_steps=4), plain)
        with toma_enabled(pipe):
            same_picture(run(pipe, num_inference_steps=4), merged)
        assert torch.equal(run(pipe, num_inference_steps=4), plain)

    def test_context_restores_after_an_exception(self):
        pipe = sd15_pipeline()
        handle = apply_toma(pipe, PLAIN, **SETTINGS)
        with pytest.raises(KeyError), toma_enabled(pipe, False):
            raise KeyError
        assert handle.enabled

    def test_half_way_through_a_generation(self):
        pipe = sd15_pipeline()
        handle = apply_toma(pipe, PLAIN, **ONE_PLAN | SCHEDULE)

        def switch(pipe, step, timestep, arguments):
            handle.enabled = not 2 <= step < 5
            return arguments

        for _ in range(2):
            trace = traced(pipe, num_inference_steps=9, callback_on_step_end=switch)
            assert trace.where("merge") == [0, 1, 2, 6, 7, 8]
            assert trace.where("facility_location") == [0, 6]

    def test_half_way_through_a_window(self):
        pipe = sd15_pipeline()
        handle = apply_toma(pipe, PLAIN, **ONE_PLAN | SCHEDULE, window=(0.5, 1.0))

        def switch(pipe, step, timestep, arguments):
            handle.enabled = step >= 3
            return arguments

        trace = traced(pipe, num_inference_steps=10, callback_on_step_end=switch)
        assert trace.where("merge") == [5, 6, 7, 8, 9]

    def test_removed(self):
        pipe = sd15_pipeline()
        plain = run(pipe)
        with apply_toma(pipe, PLAIN, **SETTINGS):
            assert not torch.equal(run(pipe), plain)
        assert torch.equal(run(pipe), plain)
