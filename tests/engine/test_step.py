"""The step counter on bare tensors; with real pipelines it is tested in tests/families/test_steps.py."""

import copy
import gc
import pickle
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from toma_diffusion import UsageError
from toma_diffusion.engine.clock import MOST_PASSES, StepCounter, Tick

MODEL = nn.Identity()


def latent(batch: int = 1) -> torch.Tensor:
    return torch.zeros(batch, 4)


def read(counter: StepCounter, sample: torch.Tensor, conditioning=None, timestep=None) -> Tick:
    return counter.read(MODEL, sample, conditioning, timestep)


def places(ticks: list[Tick]) -> list[tuple[int, int]]:
    return [(tick.step, tick.pass_index) for tick in ticks]


class Referable(SimpleNamespace):
    """SimpleNamespace that weak references may point to."""


def pipeline(steps: int, **scheduler) -> Referable:
    return Referable(scheduler=Referable(timesteps=torch.arange(steps), **scheduler))


class TestByIdentity:
    """Without a scheduler."""

    def test_a_plain_loop_counts_every_call(self):
        counter, prompt, same = StepCounter(), latent(), latent()
        assert [read(counter, same, prompt).step for _ in range(4)] == [0, 1, 2, 3]
        assert [read(counter, latent(), prompt).step for _ in range(2)] == [4, 5]

    def test_separate_passes_share_a_step(self):
        counter, prompt, negative = StepCounter(), latent(), latent()
        ticks = []
        for _ in range(3):
            sample = latent()
            ticks += [read(counter, sample, prompt), read(counter, sample, negative)]
        assert places(ticks) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
        assert not any(tick.is_exact for tick in ticks)

    def test_another_prompt_is_another_generation(self):
        counter, first, second = StepCounter(), latent(), latent()
        assert [read(counter, latent(), first).step for _ in range(3)] == [0, 1, 2]
        assert [read(counter, latent(), second).step for _ in range(2)] == [0, 1]

    def test_another_size_is_another_step(self):
        counter, prompt = StepCounter(), latent()
        assert [read(counter, latent(batch), prompt).pass_index for batch in (1, 2, 3)] == [0, 0, 0]

    def test_no_conditioning_at_all(self):
        counter = StepCounter()
        assert [read(counter, latent()).step for _ in range(3)] == [0, 1, 2]


class TestGiven:
    def test_many_tiles_are_one_step_of_one_generation(self):
        counter, prompt, ticks = StepCounter(), latent(), []
        counter.begin(2)
        for step in range(2):
            counter.set_step(step)
            ticks += [read(counter, latent(), prompt) for _ in range(70)]
        assert places(ticks) == [(step, tile) for step in range(2) for tile in range(70)]
        assert len({tick.generation for tick in ticks}) == 1

    def test_steps_and_passes(self):
        counter = StepCounter()
        counter.begin(3)
        ticks = []
        for step in range(3):
            counter.set_step(step)
            ticks += [read(counter, latent()) for _ in range(2)]
        assert places(ticks) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
        assert {tick.num_steps for tick in ticks} == {3}
        assert all(tick.is_exact for tick in ticks)

    def test_only_the_number_of_steps(self):
        """The steps are counted by the identity of tensors, and a prompt rebuilt in every step does no harm."""
        counter = StepCounter()
        counter.begin(4)
        ticks = [read(counter, latent(), latent()) for _ in range(4)]
        assert [(tick.step, tick.num_steps) for tick in ticks] == [(0, 4), (1, 4), (2, 4), (3, 4)]

    def test_step_zero_begins_again(self):
        counter = StepCounter()
        generations = []
        for _ in range(2):
            for step in range(2):
                counter.set_step(step)
                tick = read(counter, latent())
                assert (tick.step, tick.pass_index) == (step, 0)
                generations.append(tick.generation)
        first, same, second, last = generations
        assert first == same != second == last

    def test_it_goes_before_a_scheduler(self):
        pipe = pipeline(20)
        counter = StepCounter(pipe)
        counter.begin(5)
        counter.set_step(3)
        tick = read(counter, latent())
        assert (tick.step, tick.num_steps) == (3, 5)

    def test_reset_ends_it(self):
        pipe = pipeline(20)
        counter = StepCounter(pipe)
        counter.begin(5)
        counter.reset()
        assert read(counter, latent()).num_steps == 20

    @pytest.mark.parametrize("value", [0, -1, 2.5, True, None, "3"])
    def test_wrong_numbers_of_steps(self, value):
        with pytest.raises(UsageError, match=f"num_steps={value!r} is not allowed"):
            StepCounter().begin(value)

    @pytest.mark.parametrize("value", [-1, 4, 1.0, True])
    def test_wrong_steps(self, value):
        counter = StepCounter()
        counter.begin(4)
        with pytest.raises(UsageError, match=rf"step={value!r} is not allowed.*from 0 to 3 after begin\(4\)"):
            counter.set_step(value)


class TestGivenPasses:
    """A program that knows which pass a call is says so."""

    def test_in_whatever_order_they_come(self):
        counter = StepCounter()
        counter.begin(2)
        ticks = []
        for step, pass_index in ((0, 1), (0, 0), (1, 0), (1, 1)):
            counter.set_step(step, pass_index)
            ticks.append(read(counter, latent()))
        assert places(ticks) == [(0, 1), (0, 0), (1, 0), (1, 1)]
        assert [tick.first_pass for tick in ticks] == [1, 0, 0, 1]
        assert len({tick.generation for tick in ticks}) == 1

    def test_parts(self):
        counter = StepCounter()
        counter.set_step(0, 0, parts=2)
        assert read(counter, latent(2)).parts == 2
        counter.set_step(1)
        assert read(counter, latent(2)).parts == 1

    def test_going_back_or_beginning_anew(self):
        counter = StepCounter()
        generations = []
        for step in (0, 1, 0, 0):
            counter.set_step(step, 0)
            generations.append(read(counter, latent()).generation)
        counter.begin(2)
        counter.set_step(0, 0)
        generations.append(read(counter, latent()).generation)
        numbers = [generations.index(each) for each in generations]
        assert numbers == [0, 0, 2, 2, 4]  # the call with which each of them began

    def test_without_a_pass_step_0_always_begins(self):
        counter = StepCounter()
        counter.set_step(0, 0)
        first = read(counter, latent())
        counter.set_step(0)
        assert read(counter, latent()).generation != first.generation


class TestByTimestep:
    """The timestep is a view into the scheduler's: where it stands is known without reading it."""

    def test_tiles_of_a_picture(self):
        pipe = pipeline(3)
        counter, prompt = StepCounter(pipe), latent()
        ticks = [read(counter, latent(), prompt, t) for t in pipe.scheduler.timesteps for _ in range(4)]
        assert places(ticks) == [(step, tile) for step in range(3) for tile in range(4)]
        assert all(tick.is_exact for tick in ticks)

    def test_two_seeds_after_one_set_timesteps(self):
        pipe = pipeline(3)
        counter, prompt = StepCounter(pipe), latent()
        ticks = [read(counter, latent(), prompt, t) for _ in range(2) for t in pipe.scheduler.timesteps]
        assert places(ticks) == [(0, 0), (1, 0), (2, 0)] * 2

    def test_a_late_start_leaves_fewer_steps(self):
        pipe = pipeline(10)
        counter = StepCounter(pipe)
        ticks = [read(counter, latent(), latent(), t.expand(2)) for t in pipe.scheduler.timesteps[6:]]
        assert [(tick.step, tick.num_steps) for tick in ticks] == [(0, 4), (1, 4), (2, 4), (3, 4)]

    def test_guidance_cut_off_counts_at_once(self):
        pipe = pipeline(4)
        counter = StepCounter(pipe)
        batches = [2, 2, 1, 1]
        ticks = [
            read(counter, latent(batch), latent(batch), t)
            for batch, t in zip(batches, pipe.scheduler.timesteps, strict=True)
        ]
        assert places(ticks) == [(0, 0), (1, 0), (2, 0), (3, 0)]

    def test_the_same_call_again_and_again_keeps_no_passes(self):
        pipe = pipeline(3)
        counter, sample, t = StepCounter(pipe), latent(), pipe.scheduler.timesteps[1]
        assert {read(counter, sample, None, t).pass_index for _ in range(5)} == {0}
        assert max(read(counter, latent(), None, t).pass_index for _ in range(3 * MOST_PASSES)) < MOST_PASSES

    @pytest.mark.parametrize("change", [lambda t: t.clone(), lambda t: t.float(), int], ids=["clone", "cast", "int"])
    def test_a_timestep_of_its_own_says_nothing(self, change):
        pipe = pipeline(3)
        counter, prompt = StepCounter(pipe), latent()
        ticks = [read(counter, latent(), prompt, change(t)) for t in pipe.scheduler.timesteps]
        assert places(ticks) == [(0, 0), (1, 0), (2, 0)]
        assert not any(tick.is_exact for tick in ticks)


class TestBySchedulersIndex:
    """Casting a timestep, as Flux does, loses its place; most schedulers count by themselves."""

    @pytest.mark.parametrize("begin", [None, 0, 5])
    def test_passes_and_late_starts(self, begin):
        pipe = pipeline(8, step_index=None, begin_index=begin)
        counter, prompt = StepCounter(pipe), latent()
        ticks = []
        for index in range(begin or 0, 8):
            ticks += [read(counter, latent(), prompt) for _ in range(2)]
            pipe.scheduler.step_index = index + 1
        count = 8 - (begin or 0)
        assert places(ticks) == [(step, pass_index) for step in range(count) for pass_index in range(2)]
        assert {tick.num_steps for tick in ticks} == {count}

    def test_a_start_that_the_scheduler_says_only_after_its_first_step(self):
        pipe = pipeline(8, step_index=None, begin_index=None)
        counter, ticks = StepCounter(pipe), []
        for index in range(5, 8):
            ticks.append(read(counter, latent(), latent()))
            pipe.scheduler.step_index = index + 1
        assert [tick.step for tick in ticks] == [0, 1, 2]
        assert [tick.num_steps for tick in ticks[1:]] == [3, 3]


class TestByIdentityWithAScheduler:
    """It has timesteps, but tells no position."""

    def test_new_timesteps_are_a_new_generation(self):
        pipe = pipeline(5)
        counter, prompt = StepCounter(pipe), latent()
        assert [read(counter, latent(), prompt).step for _ in range(3)] == [0, 1, 2]  # broken off
        pipe.scheduler.timesteps = torch.arange(5)
        tick = read(counter, latent(), prompt)
        assert (tick.step, tick.num_steps) == (0, 5)

    def test_another_prompt_inside_a_generation_is_not(self):
        pipe = pipeline(5)
        counter = StepCounter(pipe)
        prompts = [latent() for _ in range(5)]
        assert [read(counter, latent(), prompt).step for prompt in prompts] == [0, 1, 2, 3, 4]

    def test_another_prompt_after_the_last_step_is(self):
        pipe = pipeline(3)
        counter, first, second = StepCounter(pipe), latent(), latent()
        assert [read(counter, latent(), first).step for _ in range(4)] == [0, 1, 2, 3]
        assert [read(counter, latent(), second).step for _ in range(2)] == [0, 1]

    def test_another_prompt_when_the_first_is_gone_is(self):
        pipe = pipeline(9)
        counter, prompt = StepCounter(pipe), latent()
        assert [read(counter, latent(), prompt).step for _ in range(2)] == [0, 1]
        del prompt
        assert read(counter, latent(), latent()).step == 0

    def test_a_sample_of_another_shape_is_another_pass(self):
        """Skip-layer guidance calls the model once more, without the negative half of the batch."""
        pipe = pipeline(4)
        counter, prompts, prompt = StepCounter(pipe), latent(2), latent()
        ticks = [read(counter, *call) for _ in range(3) for call in ((latent(2), prompts), (latent(1), prompt))]
        assert places(ticks) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


class Runner:
    """Runs a model as a pipeline does."""

    def __init__(self, steps: int, num_timesteps: int | None = None) -> None:
        self.unet = MODEL
        self.scheduler = Referable(timesteps=torch.arange(steps))
        if num_timesteps is not None:
            self.num_timesteps = num_timesteps

    def __call__(self, counter: StepCounter) -> Tick:
        return read(counter, latent(), latent(), self.scheduler.timesteps[0])


class Named(Runner):
    """Its author called the first argument otherwise."""

    def __call__(pipe, counter: StepCounter) -> Tick:  # noqa: N805
        return read(counter, latent(), latent(), pipe.scheduler.timesteps[0])


class TestRunningPipeline:
    def test_whatever_its_first_argument_is_called(self):
        assert Named(7)(StepCounter()).num_steps == 7

    def test_it_goes_before_the_one_that_was_passed(self):
        passed = pipeline(20)
        counter = StepCounter(passed)
        assert Runner(7)(counter).num_steps == 7
        assert read(counter, latent(), latent()).num_steps == 20

    def test_it_says_how_many_steps_it_makes(self):
        assert Runner(10, num_timesteps=4)(StepCounter()).num_steps == 4

    def test_what_one_that_is_not_running_says_is_old(self):
        passed = Runner(10, num_timesteps=4)
        assert read(StepCounter(passed), latent(), latent()).num_steps == 10

    def test_one_with_another_model_is_not_meant(self):
        running = Runner(7)
        running.unet = nn.Identity()
        assert running(StepCounter()).num_steps is None


def test_nothing_is_kept_alive():
    pipe, sample, prompt = pipeline(3), latent(), latent()
    counter = StepCounter(pipe)
    read(counter, sample, prompt)
    references = [weakref.ref(item) for item in (pipe, sample, prompt)]
    del pipe, sample, prompt
    gc.collect()
    assert [reference() for reference in references] == [None, None, None]
    assert read(counter, latent(), latent()).num_steps is None


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda counter: pickle.loads(pickle.dumps(counter))])
def test_a_copy_is_in_no_pipeline(duplicate):
    pipe = pipeline(3)
    counter = StepCounter(pipe)
    assert read(counter, latent()).num_steps == 3
    assert read(duplicate(counter), latent()).num_steps is None


class Pipeline:
    """Runs like a pipeline of diffusers: the counter finds it on Python's stack, with its scheduler and its model."""

    def __init__(self, steps: int) -> None:
        self.transformer = MODEL
        self.num_timesteps = steps
        self.scheduler = Referable(timesteps=torch.arange(steps))

    def __call__(self, counter: StepCounter, passes: list, begin: int = 0) -> list[Tick]:
        self.scheduler.timesteps = torch.arange(self.num_timesteps)
        ticks = []
        for timestep in self.scheduler.timesteps[begin:]:
            sample = latent()
            ticks += [read(counter, sample, conditioning, timestep) for conditioning in passes]
        return ticks


class Tiled(Pipeline):
    """Calls the denoiser for each of many tiles, with new latents or with the same."""

    def __call__(self, counter: StepCounter, fresh: bool, casts: bool) -> list[Tick]:
        prompt, tiles, ticks = latent(), [latent() for _ in range(TILES)], []
        for index, timestep in enumerate(self.scheduler.timesteps):
            time = timestep.float() if casts else timestep
            ticks += [read(counter, latent() if fresh else tile, prompt, time) for tile in tiles]
            self.scheduler.step_index = index + 1
        return ticks


TILES = 70


class TestInARunningPipeline:
    @pytest.mark.parametrize("fresh", [True, False])
    @pytest.mark.parametrize("casts", [True, False])
    def test_many_tiles_are_one_step_of_one_generation(self, fresh, casts):
        """A timestep that was cast has no place: the scheduler's own count says which step it is."""
        pipe = Tiled(3)
        pipe.scheduler.step_index = pipe.scheduler.begin_index = None
        ticks = pipe(StepCounter(), fresh, casts)
        assert places(ticks) == [(step, tile) for step in range(3) for tile in range(TILES)]
        assert len({tick.generation for tick in ticks}) == 1

    def test_the_same_conditioning_again_is_another_pass(self):
        """Guidance that leaves out layers calls the model twice with the very same tensors."""
        prompt, negative = latent(), latent()
        counter, pipe = StepCounter(), Pipeline(3)
        ticks = pipe(counter, [prompt, negative, prompt])
        assert places(ticks) == [(step, pass_index) for step in range(3) for pass_index in range(3)]
        assert len({tick.generation for tick in ticks}) == 1
        again = pipe(counter, [prompt, negative, prompt])
        assert places(again) == places(ticks)
        assert {tick.generation for tick in again}.isdisjoint(tick.generation for tick in ticks)

    def test_a_denoiser_that_comes_in_late(self):
        """The second of a pipeline's denoisers, with a counter of its own: its first step is not step 0."""
        ticks = Pipeline(8)(StepCounter(), [latent()], begin=4)
        assert [(tick.step, tick.num_steps) for tick in ticks] == [(4, 8), (5, 8), (6, 8), (7, 8)]

    @pytest.mark.parametrize(("steps", "begin", "made"), [(8, 5, 3), (8, 0, 5)])
    def test_parts_of_a_schedule_begin_with_step_0(self, steps, begin, made):
        """Image-to-image makes the last steps, a base model before its refiner the first."""
        timesteps = torch.arange(steps)

        class Part(Pipeline):
            def __call__(self, counter: StepCounter) -> list[Tick]:
                prompt = latent()
                return [read(counter, latent(), prompt, each) for each in timesteps[begin : begin + made]]

        part = Part(steps)
        part.scheduler.timesteps, part.num_timesteps = timesteps, made
        assert [(tick.step, tick.num_steps) for tick in part(StepCounter())] == [(step, made) for step in range(made)]


class TestGivenValues:
    def test_parts_count_without_a_pass_too(self):
        counter = StepCounter()
        counter.set_step(0, parts=2)
        assert read(counter, latent(2)).parts == 2

    @pytest.mark.parametrize("wrong", [{"pass_index": -1}, {"pass_index": True}, {"parts": 0}, {"parts": "two"}])
    def test_wrong_ones_are_quoted(self, wrong):
        ((name, value),) = wrong.items()
        with pytest.raises(UsageError, match=f"{name}={value!r} is not allowed"):
            StepCounter().set_step(0, **wrong)
