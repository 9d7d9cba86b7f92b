"""Weights and computed steps that are learned on a model: closer than with nothing learned, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

from toma_diffusion import Skip, ToMAConfig, ToMAHandle, UsageError, apply_toma
from toma_diffusion.skip.learned import Learned

STEPS = 12
GUIDANCE = 3.0


class Known(nn.Module):
    """A real denoiser whose answer is known: data are Gaussian around what a prompt says, each value with a spread of
    its own.

    It predicts noise − image, as flow models do, from the sample and 1000 · σ.
    """

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.patterns = nn.Parameter(torch.randn(5, 4, 8, 8, generator=generator))
        self.spread = nn.Parameter(torch.rand(4, 8, 8, generator=generator) * 1.5 + 0.1)
        self.calls = 0

    def forward(
        self, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, return_dict: bool = True
    ) -> tuple[Tensor]:
        self.calls += 1
        sigma = float(timestep) / 1000
        kept, variance = 1 - sigma, self.spread**2
        mean = torch.einsum("bk,kchw->bchw", encoder_hidden_states, self.patterns)
        image = mean + kept * variance / (kept**2 * variance + sigma**2) * (hidden_states - kept * mean)
        return ((hidden_states - kept * image) / sigma - image,)


def generate(
    model: nn.Module,
    handle: ToMAHandle,
    seed: int,
    steps: int = STEPS,
    scheduler_class: type = FlowMatchEulerDiscreteScheduler,
    shift: float = 3.0,
) -> Tensor:
    """A loop of one's own with two passes over every step."""
    generator = torch.Generator().manual_seed(seed)
    sample = torch.randn(1, 4, 8, 8, generator=generator)
    prompt = torch.randn(1, 5, generator=generator)
    nothing = torch.zeros(1, 5)
    scheduler = (
        scheduler_class(shift=shift) if scheduler_class is FlowMatchEulerDiscreteScheduler else scheduler_class()
    )
    scheduler.set_timesteps(steps)
    handle.begin(steps, scheduler)
    with torch.no_grad():
        for step, timestep in enumerate(scheduler.timesteps):
            handle.step(step)
            without, given = (model(sample, timestep, each)[0] for each in (nothing, prompt))
            output = without + GUIDANCE * (given - without)
            sample = scheduler.step(output, timestep, sample, return_dict=False)[0]
    return sample


def calls(model: nn.Module, handle: ToMAHandle, count: int = 5, steps: int = STEPS) -> list[Callable[[], Tensor]]:
    return [lambda seed=seed: generate(model, handle, 100 + seed, steps) for seed in range(count)]  # type: ignore[misc]


def skipping(computed: int | tuple[int, ...] = 6, **fields: object) -> tuple[Known, ToMAHandle]:
    model = Known()
    return model, apply_toma(model, ToMAConfig(ratio=0, skip=Skip(computed=computed, **fields)))


def distance(model: nn.Module, handle: ToMAHandle, seeds: range = range(5)) -> float:
    """Of generations that were not learned from, to the same ones with every step computed."""
    total = 0.0
    for seed in seeds:
        handle.enabled = False
        whole = generate(model, handle, seed)
        handle.enabled = True
        total += float((generate(model, handle, seed) - whole).norm() / whole.norm())
    return total


@pytest.mark.parametrize("minutes", [0.0, 0.05])
def test_what_was_learned_is_closer_on_other_generations(minutes: float) -> None:
    model, handle = skipping()
    before = distance(model, handle)
    learned = handle.learn(calls(model, handle), computed=6, minutes=minutes, on_progress=lambda progress: None)
    assert distance(model, handle) < 0.8 * before
    assert (learned.num_steps, learned.counts, learned.model_class) == (STEPS, (6,), "Known")
    assert learned.steps[0].distance < learned.steps[0].distance_before
    assert handle.summary().config.skip.learned == learned


def test_longer_learning_is_closer_on_what_it_learns_from() -> None:
    def of(minutes: float) -> float:
        model, handle = skipping(5)
        handle.learn(calls(model, handle), computed=5, minutes=minutes, on_progress=lambda progress: None)
        return distance(model, handle, range(100, 104))

    assert of(0.08) <= of(0.0)


def test_several_numbers_of_steps_are_learned_at_once_and_saved(tmp_path) -> None:
    model, handle = skipping(6)
    handle.learn(calls(model, handle), computed=[8, 6], on_progress=lambda progress: None)
    handle.save(tmp_path / "learned.json")
    expected = generate(model, handle, 0)
    handle.remove()
    again = apply_toma(model, "fast", computed=6, learned=str(tmp_path / "learned.json"))
    torch.testing.assert_close(generate(model, again, 0), expected, rtol=0, atol=0)
    assert again.summary().steps == (6, STEPS - 6)
    assert Learned.read(tmp_path / "learned.json").counts == (8, 6)


def test_a_preset_takes_the_steps_that_were_learned_for_its_number(tmp_path) -> None:
    model, handle = skipping(6)
    handle.learn(calls(model, handle), on_progress=lambda progress: None)
    handle.save(tmp_path / "learned.json")
    counts = Learned.read(tmp_path / "learned.json").counts
    handle.remove()
    again = apply_toma(model, "fast", learned=tmp_path / "learned.json")
    generate(model, again, 0)
    assert again.summary().steps[0] in counts
    assert "learned on the model" in str(again.summary())


def test_the_model_is_as_before_while_learning_and_after_an_error() -> None:
    model, handle = skipping(6)
    before = generate(model, handle, 0)

    def fails() -> None:
        generate(model, handle, 1)
        raise RuntimeError("no disk")

    with pytest.raises(RuntimeError, match="no disk"):
        handle.learn([*calls(model, handle), fails], on_progress=lambda progress: None)
    assert torch.equal(generate(model, handle, 0), before)


def test_what_is_not_closer_is_refused_and_changes_nothing() -> None:
    model, handle = skipping(6)
    before, config = generate(model, handle, 0), handle.summary().config
    with pytest.raises(UsageError, match=r"not closer on the last generation.*6 computed steps.*Nothing was changed"):
        handle.learn(
            calls(model, handle), computed=6, distance=lambda one, other: 1.0, on_progress=lambda progress: None
        )
    assert torch.equal(generate(model, handle, 0), before)
    assert handle.summary().config == config


def test_what_is_refused_for_one_number_of_steps_is_named() -> None:
    model, handle = skipping(6)
    made: list[float] = []

    def closer_with_eight(one: object, other: object) -> float:
        made.append(0.0)
        return 1.0 if len(made) in (1, 3, 4) else 0.5  # 8 steps: 1.0, then 0.5; 6 steps: 1.0, then 1.0

    with pytest.warns(UserWarning, match="no closer: 6 computed steps"):
        learned = handle.learn(
            calls(model, handle), computed=[8, 6], distance=closer_with_eight, on_progress=lambda progress: None
        )
    assert learned.counts == (8,)
    assert handle.summary().config.skip.learned is None  # it computes 6


def test_generations_must_be_the_same_when_they_are_made_again() -> None:
    model, handle = skipping(6)
    seeds = iter(range(100))
    with pytest.raises(UsageError, match=r"begins with other noise.*pass a generator with a seed"):
        handle.learn([lambda: generate(model, handle, next(seeds))] * 3, on_progress=lambda progress: None)


def test_a_number_that_is_learned_alone_is_used() -> None:
    model, handle = skipping(8)
    handle.learn(calls(model, handle), computed=6, on_progress=lambda progress: None)
    model.calls = 0
    generate(model, handle, 0)
    assert model.calls == 2 * 6


def test_what_is_not_used_is_said() -> None:
    model, handle = skipping(8)
    with pytest.warns(UserWarning, match=r"8 of 12 steps are computed, and what was learned is for 6 or 5"):
        handle.learn(calls(model, handle), computed=[6, 5], on_progress=lambda progress: None)


def test_a_list_of_steps_is_what_learning_begins_with() -> None:
    listed = (0, 1, 2, 5, 8, 11)
    model, handle = skipping(listed)
    learned = handle.learn(calls(model, handle), on_progress=lambda progress: None)
    assert learned.of(6).computed == listed


def test_passes_are_those_that_were_learned() -> None:
    model, handle = skipping(6)
    handle.learn(calls(model, handle), on_progress=lambda progress: None)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(STEPS)
    handle.begin(STEPS, scheduler)

    @torch.no_grad()
    def with_one_pass() -> None:
        for step, timestep in enumerate(scheduler.timesteps):
            handle.step(step)
            model(torch.randn(1, 4, 8, 8), timestep, torch.zeros(1, 5))

    with pytest.raises(UsageError, match="learned for 2 passes over a step, and this generation has 1"):
        with_one_pass()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"generations": "a prompt"}, "pass a list of prompts, or of functions"),
        ({"generations": ["a", "b", "c"]}, "prompts need a pipeline"),
        ({"generations": [print, "b", "c"]}, "must all be prompts, or all be functions"),
        ({"generations": [print] * 3, "height": 64}, "height cannot be passed on to functions"),
        ({"generations": [print] * 2}, "2 generations are too few"),
        ({"generations": [print] * 3}, "did not call the denoiser"),
        ({"generations": [print] * 3, "computed": []}, r"computed=\[\] is empty"),
        ({"generations": [print] * 3, "minutes": -1}, "minutes=-1 is not allowed"),
        ({"generations": [print] * 3, "minutes": float("nan")}, "minutes=nan is not allowed"),
    ],
)
def test_wrong_arguments_say_what_to_do(arguments, message) -> None:
    _, handle = skipping(6)
    with pytest.raises(UsageError, match=message):
        handle.learn(**arguments, on_progress=lambda progress: None)


def test_without_skipped_steps_there_is_nothing_to_learn(tmp_path) -> None:
    from skipping import BY_NAME

    handle = apply_toma(BY_NAME["sd15"].build(), ratio=0.5, num_regions=4)
    with pytest.raises(UsageError, match="no steps are skipped"):
        handle.learn([print] * 3)
    with pytest.raises(UsageError, match="no steps are skipped"):
        handle.save(tmp_path / "learned.json")


def test_nothing_is_saved_before_it_was_learned(tmp_path) -> None:
    _, handle = skipping(6)
    with pytest.raises(UsageError, match=r"call handle\.learn first"):
        handle.save(tmp_path / "learned.json")


class TestNextGenerations:
    def test_they_run_whole_and_the_one_after_skips_as_it_was_learned(self) -> None:
        model, handle = skipping(6)
        before = distance(model, handle)
        handle.enabled = False
        whole = [generate(model, handle, 100 + seed) for seed in range(4)]
        handle.enabled = True
        handle.learn_from_next(4)
        for seed, expected in enumerate(whole):
            assert torch.equal(generate(model, handle, 100 + seed), expected)
        model.calls = 0
        generate(model, handle, 0)
        assert model.calls == 2 * 6
        assert "learned from 4 generations" in str(handle.summary())
        assert distance(model, handle) < 0.8 * before

    def test_generations_of_another_kind_begin_anew(self) -> None:
        model, handle = skipping(6)
        handle.learn_from_next(3)
        for steps in (STEPS, STEPS, 9, 9):
            generate(model, handle, 0, steps)
        assert handle.summary().config.skip.learned is None
        generate(model, handle, 1, 9)
        assert handle.summary().config.skip.learned.num_steps == 9

    def test_the_generation_in_progress_is_left_alone(self) -> None:
        model, handle = skipping(6)
        scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
        scheduler.set_timesteps(STEPS)
        handle.begin(STEPS, scheduler)
        with torch.no_grad():
            for step, timestep in enumerate(scheduler.timesteps):
                if step == 4:
                    handle.learn_from_next(3)
                handle.step(step)
                model(torch.randn(1, 4, 8, 8), timestep, torch.zeros(1, 5))
        for seed in range(3):
            generate(model, handle, seed)
        assert "learned from 3 generations" in str(handle.summary())

    @pytest.mark.parametrize("last_of_both", [0, 7])
    def test_guidance_that_ends_half_way_ends_learning_and_no_generation(self, last_of_both: int) -> None:
        model, handle = skipping(6)
        handle.learn_from_next(3)
        scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
        for _ in range(2):
            scheduler.set_timesteps(STEPS)
            handle.begin(STEPS, scheduler)
            with torch.no_grad():
                for step, timestep in enumerate(scheduler.timesteps):
                    handle.step(step)
                    for prompt in (torch.zeros(1, 5), torch.ones(1, 5))[: 2 if step <= last_of_both else 1]:
                        model(torch.randn(1, 4, 8, 8), timestep, prompt)
        assert "nothing was learned" in str(handle.summary())
        model.calls = 0
        generate(model, handle, 0)
        assert model.calls == 2 * 6

    def test_as_many_computed_steps_as_there_are_end_learning_and_no_generation(self) -> None:
        model, handle = skipping(6)
        handle.learn_from_next(3, computed=STEPS)
        for seed in range(3):
            generate(model, handle, seed)
        assert "nothing was learned: all 12 steps would be computed" in str(handle.summary())

    def test_too_few_are_refused(self) -> None:
        _, handle = skipping(6)
        with pytest.raises(UsageError, match="count=2 is not allowed"):
            handle.learn_from_next(2)


class TestFile:
    @pytest.fixture
    def path(self, tmp_path):
        model, handle = skipping(6)
        handle.learn(calls(model, handle), computed=6, on_progress=lambda progress: None)
        handle.save(tmp_path / "learned.json")
        return tmp_path / "learned.json"

    def test_another_number_of_steps_and_another_scheduler_are_refused(self, path) -> None:
        model = Known()
        handle = apply_toma(model, "fast", computed=6, learned=path)
        with pytest.raises(UsageError, match="number of steps 9, not 12"):
            generate(model, handle, 0, 9)
        with pytest.raises(UsageError, match="scheduler 'EulerDiscreteScheduler', not 'FlowMatchEuler"):
            generate(model, handle, 0, scheduler_class=EulerDiscreteScheduler)

    def test_other_noise_levels_are_refused(self, path) -> None:
        model = Known()
        handle = apply_toma(model, "fast", computed=6, learned=path)
        generate(model, handle, 0, shift=3.05)
        with pytest.raises(UsageError, match="other noise levels, because of the size of the picture"):
            generate(model, handle, 0, shift=6.0)

    def test_another_model_is_refused(self, path) -> None:
        class Other(Known):
            pass

        model = Other()
        handle = apply_toma(model, "fast", computed=6, learned=path)
        with pytest.raises(UsageError, match="model 'Other', not 'Known'"):
            generate(model, handle, 0)

    def test_another_number_of_computed_steps_is_refused_at_once(self, path) -> None:
        with pytest.raises(UsageError, match="nothing was learned for 7 computed steps of 12, but for 6"):
            apply_toma(Known(), "fast", computed=7, learned=path)
        with pytest.raises(UsageError, match=r"computed=\(0, 1\).*nothing was learned for 2|nothing was learned for 2"):
            apply_toma(Known(), "fast", computed=(0, 1), learned=path)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (None, "cannot be read"),
            ("no json", "is not JSON"),
            ("[]", "was not written by"),
            ('{"format": 99, "steps": []}', "its format is 99"),
            ('{"format": 1, "steps": []}', "is not complete"),
            ('{"format": 1, "steps": 3}', "is not complete"),
        ],
    )
    def test_a_broken_file_says_what_to_do(self, tmp_path, text, message) -> None:
        path = tmp_path / "broken.json"
        if text is not None:
            path.write_text(text)
        with pytest.raises(UsageError, match=message):
            Skip(learned=path)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda steps: steps.update(computed=[1, 2]), "is not a list of steps"),
            (lambda steps: steps["weights"].popitem(), "but there are weights for"),
            (lambda steps: next(iter(steps["weights"].values()))[0].update(sample=float("nan")), "not finite"),
        ],
    )
    def test_weights_that_cannot_be_are_refused(self, path, change, message) -> None:
        values = json.loads(path.read_text())
        change(values["steps"][0])
        path.write_text(json.dumps(values))
        with pytest.raises(UsageError, match=message):
            Skip(computed=6, learned=path)

    def test_a_configuration_keeps_it(self, path) -> None:
        config = ToMAConfig(ratio=0, skip=Skip(computed=6, learned=path))
        assert ToMAConfig.from_json(config.to_json()) == config
        assert hash(config) == hash(ToMAConfig.from_json(config.to_json()))


class TestResume:
    def test_what_was_made_before_it_was_killed_is_not_made_again(self, tmp_path) -> None:
        model, handle = skipping(6)
        made: list[int] = []

        def call(index: int, killed: bool) -> Tensor:
            if killed and len(made) == 3:
                raise KeyboardInterrupt
            made.append(index)
            return generate(model, handle, 100 + index)

        def learn(killed: bool) -> Learned:
            generations = [lambda index=index: call(index, killed) for index in range(4)]  # type: ignore[misc]
            return handle.learn(generations, computed=6, folder=tmp_path / "work", on_progress=lambda progress: None)

        with pytest.raises(KeyboardInterrupt):
            learn(killed=True)
        made.clear()
        resumed = learn(killed=False)
        assert made == [3, 3, 3]  # whole, with nothing learned, as it was learned
        other, other_handle = skipping(6)
        fresh = other_handle.learn(calls(other, other_handle, 4), computed=6, on_progress=lambda progress: None)
        assert resumed == fresh

    def test_a_folder_of_a_model_that_was_changed_is_refused(self, tmp_path) -> None:
        model, handle = skipping(6)
        handle.learn(calls(model, handle), computed=6, folder=tmp_path / "work", on_progress=lambda progress: None)
        with torch.no_grad():
            model.patterns.mul_(2)
        with pytest.raises(UsageError, match="begin anew if the model was changed"):
            handle.learn(calls(model, handle), computed=6, folder=tmp_path / "work", on_progress=lambda progress: None)

    def test_a_folder_of_other_settings_is_refused(self, tmp_path) -> None:
        model, handle = skipping(6)
        generations = calls(model, handle)
        handle.learn(generations, computed=6, folder=tmp_path / "work", on_progress=lambda progress: None)
        with pytest.raises(UsageError, match=r"computed=\['6'\], not \['5'\]: delete the folder"):
            handle.learn(generations, computed=5, folder=tmp_path / "work", on_progress=lambda progress: None)


def test_a_pipeline_learns_from_prompts() -> None:
    from tiny_text import PROMPTS, text_pipeline

    distances = [1.0, 0.5] * 3  # with nothing learned, and as it was learned
    pipe = text_pipeline()
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config)
    handle = apply_toma(pipe, "fast")
    shown: list[str] = []
    learned = handle.learn(
        PROMPTS[:3],
        distance=lambda whole, made: distances.pop(0),
        num_inference_steps=8,
        output_type="np",
        on_progress=lambda progress: shown.append(progress.text),
    )
    assert any("recording generation 1 of 3" in each for each in shown)
    assert (learned.scheduler, learned.num_steps, learned.counts) == ("DDIMScheduler", 8, (6, 5, 4))
