"""The step clock on bare tensors; with real pipelines and schedulers it is tested in tests/adapters."""

import copy
import gc
import weakref
from types import SimpleNamespace

import torch

from toma_diffusion.hooks.clock import StepClock


def latent(batch: int = 1) -> torch.Tensor:
    return torch.zeros(batch, 4)


def test_a_plain_loop_counts_every_call():
    clock, prompt, same = StepClock(), latent(), latent()
    assert [clock.tick(same, prompt).step for _ in range(4)] == [0, 1, 2, 3]
    assert [clock.tick(latent(), prompt).step for _ in range(2)] == [4, 5]


def test_separate_passes_share_a_step():
    clock, prompt, negative = StepClock(), latent(), latent()
    ticks = []
    for _ in range(3):
        sample = latent()
        ticks += [clock.tick(sample, prompt), clock.tick(sample, negative)]
    assert [(tick.step, tick.ordinal) for tick in ticks] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_another_prompt_is_another_generation_without_a_pipeline():
    clock, first, second = StepClock(), latent(), latent()
    assert [clock.tick(latent(), first).step for _ in range(3)] == [0, 1, 2]
    assert [clock.tick(latent(), second).step for _ in range(2)] == [0, 1]


def test_another_size_is_another_step_without_a_pipeline():
    clock, prompt = StepClock(), latent()
    assert [clock.tick(latent(batch), prompt).ordinal for batch in (1, 2, 3)] == [0, 0, 0]


def test_no_conditioning_at_all():
    clock = StepClock()
    assert [clock.tick(latent(), None).step for _ in range(3)] == [0, 1, 2]


class TestWithPipeline:
    def pipeline(self, steps: int) -> SimpleNamespace:
        return SimpleNamespaceWithReferences(scheduler=SimpleNamespace(timesteps=torch.arange(steps)))

    def test_new_timesteps_are_a_new_generation(self):
        pipeline = self.pipeline(5)
        clock, prompt = StepClock(pipeline), latent()
        assert [clock.tick(latent(), prompt).step for _ in range(3)] == [0, 1, 2]  # broken off
        pipeline.scheduler.timesteps = torch.arange(5)
        tick = clock.tick(latent(), prompt)
        assert (tick.step, tick.num_steps) == (0, 5)

    def test_another_prompt_inside_a_generation_is_not(self):
        pipeline = self.pipeline(5)
        clock = StepClock(pipeline)
        prompts = [latent() for _ in range(5)]
        assert [clock.tick(latent(), prompt).step for prompt in prompts] == [0, 1, 2, 3, 4]

    def test_another_prompt_after_the_last_step_is(self):
        """Another pipeline that shares the model, with a scheduler of its own that is not seen."""
        pipeline = self.pipeline(3)
        clock, first, second = StepClock(pipeline), latent(), latent()
        assert [clock.tick(latent(), first).step for _ in range(4)] == [0, 1, 2, 3]
        assert [clock.tick(latent(), second).step for _ in range(2)] == [0, 1]

    def test_another_prompt_when_the_first_is_gone_is(self):
        pipeline = self.pipeline(9)
        clock, prompt = StepClock(pipeline), latent()
        assert [clock.tick(latent(), prompt).step for _ in range(2)] == [0, 1]
        del prompt
        assert clock.tick(latent(), latent()).step == 0

    def test_a_batch_cut_in_half_goes_on(self):
        """Guidance cut off: batch and prompts halve; the first such call passes for another pass, then steps go on."""
        pipeline = self.pipeline(9)
        clock, prompts = StepClock(pipeline), latent(2)
        assert [clock.tick(latent(2), prompts).step for _ in range(3)] == [0, 1, 2]
        prompts = latent(1)
        assert [clock.tick(latent(1), prompts).step for _ in range(3)] == [2, 3, 4]

    def test_a_sample_of_another_shape_is_another_pass(self):
        """Skip-layer guidance calls the model once more, without the negative half of the batch."""
        pipeline = self.pipeline(4)
        clock, prompts, prompt = StepClock(pipeline), latent(2), latent()
        ticks = [clock.tick(*call) for _ in range(3) for call in ((latent(2), prompts), (latent(1), prompt))]
        assert [(tick.step, tick.ordinal) for tick in ticks] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]

    def test_a_pipeline_that_starts_late_says_how_many_steps_it_makes(self):
        pipeline = self.pipeline(10)
        pipeline.num_timesteps = 4
        assert StepClock(pipeline).tick(latent(), latent()).num_steps == 4

    def test_nothing_is_kept_alive(self):
        pipeline, sample, prompt = self.pipeline(3), latent(), latent()
        clock = StepClock(pipeline)
        clock.tick(sample, prompt)
        references = [weakref.ref(item) for item in (pipeline, sample, prompt)]
        del pipeline, sample, prompt
        gc.collect()
        assert [reference() for reference in references] == [None, None, None]
        assert clock.tick(latent(), latent()).num_steps is None

    def test_a_copy_is_in_no_pipeline(self):
        pipeline = self.pipeline(3)
        clock = StepClock(pipeline)
        assert clock.has_pipeline
        assert not copy.deepcopy(clock).has_pipeline


class SimpleNamespaceWithReferences(SimpleNamespace):
    """SimpleNamespace that weak references may point to."""
