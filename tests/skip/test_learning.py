"""Weights and computed steps that are learned on a model: closer than with nothing learned, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler
from skipping import BY_NAME, counts
from tiny_text import PROMPTS, text_pipeline
from torch import Tensor, nn

from toma_diffusion import Handle, Merge, Skip, UsageError, speed_up
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

    def forward(
        self, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, return_dict: bool = True
    ) -> tuple[Tensor]:
        sigma = float(timestep) / 1000
        kept, variance = 1 - sigma, self.spread**2
        mean = torch.einsum("bk,kchw->bchw", encoder_hidden_states, self.patterns)
        image = mean + kept * variance / (kept**2 * variance + sigma**2) * (hidden_states - kept * mean)
        return ((hidden_states - kept * image) / sigma - image,)


def generate(
    model: nn.Module, handle: Handle, seed: int, steps: int = STEPS, guided: int = STEPS, scheduler: Any = None
) -> Tensor:
    """A loop of one's own. In so many steps there are two passes, then one."""
    generator = torch.Generator().manual_seed(seed)
    sample = torch.randn(1, 4, 8, 8, generator=generator)
    prompt, nothing = torch.randn(1, 5, generator=generator), torch.zeros(1, 5)
    scheduler = scheduler or FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(steps)
    handle.begin(steps, scheduler)
    with torch.no_grad():
        for step, timestep in enumerate(scheduler.timesteps):
            handle.step(step)
            output = model(sample, timestep, nothing)[0]
            if step < guided:
                output = output + GUIDANCE * (model(sample, timestep, prompt)[0] - output)
            sample = scheduler.step(output, timestep, sample, return_dict=False)[0]
    return sample


def calls(model: nn.Module, handle: Handle, count: int = 5) -> list[Callable[[], Tensor]]:
    return [partial(generate, model, handle, 100 + seed) for seed in range(count)]


def made(computed: int | tuple[int, ...] = 6) -> tuple[Known, Handle]:
    model = Known()
    return model, speed_up(model, skip=Skip(computed=computed))


def learn(model: nn.Module, handle: Handle, count: int = 5, **arguments: Any) -> Learned:
    return handle.learn(calls(model, handle, count), **{"on_progress": lambda progress: None} | arguments)


def distance(model: nn.Module, handle: Handle, seeds: range = range(5)) -> float:
    """Of generations that were not learned from, to the same ones with every step computed."""
    total = 0.0
    for seed in seeds:
        handle.enabled = False
        whole = generate(model, handle, seed)
        handle.enabled = True
        total += float((generate(model, handle, seed) - whole).norm() / whole.norm())
    return total


def is_learned(handle: Handle) -> bool:
    return "learned on the model" in str(handle.summary())


class TestWhatIsLearned:
    @pytest.mark.parametrize("minutes", [0.0, 0.02])
    def test_it_is_closer_on_other_generations(self, minutes: float) -> None:
        model, handle = made()
        before = distance(model, handle)
        learned = learn(model, handle, computed=6, minutes=minutes)
        assert distance(model, handle) < 0.8 * before
        assert (learned.num_steps, learned.counts, learned.model_class) == (STEPS, (6,), "Known")
        assert is_learned(handle)

    def test_several_numbers_of_steps_are_learned_at_once_and_saved(self, tmp_path: Path) -> None:
        model, handle = made()
        learn(model, handle, computed=[8, 6])
        handle.save(tmp_path / "learned.json")
        expected = generate(model, handle, 0)
        handle.remove()
        learned = str(tmp_path / "learned.json")
        again = speed_up(model, skip=Skip(computed=6), learned=learned)
        assert torch.equal(generate(model, again, 0), expected)
        assert counts(again) == (6, STEPS - 6)
        assert Learned.read(learned).counts == (8, 6)

    def test_presets_take_the_steps_that_were_learned_for_their_number(self, tmp_path: Path) -> None:
        model, handle = made()
        learned = learn(model, handle)
        assert learned.counts == (7, 6, 5, 4)  # those of the presets, and its own
        handle.save(tmp_path / "learned.json")
        handle.remove()
        again = speed_up(model, "fast", learned=tmp_path / "learned.json")
        generate(model, again, 0)
        assert counts(again) == (5, 7)
        assert is_learned(again)

    def test_a_number_that_is_learned_alone_is_used_and_what_is_not_used_is_said(self) -> None:
        model, handle = made(8)
        with pytest.warns(UserWarning, match=r"8 of 12 steps are computed, and what was learned is for 6 or 5"):
            learn(model, handle, computed=[6, 5])
        learn(model, handle, computed=6)
        generate(model, handle, 0)
        assert counts(handle) == (6, 6)

    def test_a_list_of_steps_is_what_learning_begins_with(self) -> None:
        listed = (0, 1, 2, 5, 8, 11)
        assert learn(*made(listed)).of(6).computed == listed


class TestRefused:
    def test_what_is_not_closer_changes_nothing(self) -> None:
        model, handle = made()
        before = generate(model, handle, 0)
        with pytest.raises(UsageError, match=r"not closer on the last generation.*Nothing was changed"):
            learn(model, handle, computed=6, distance=lambda one, other: 1.0)
        assert torch.equal(generate(model, handle, 0), before)

    def test_for_one_number_of_steps_it_is_named(self) -> None:
        model, handle = made()
        distances = iter([1.0, 0.5, 1.0, 1.0])  # without and with what was learned: of 8 steps, then of 6
        with pytest.warns(UserWarning, match="no closer: 6 computed steps"):
            learned = learn(model, handle, computed=[8, 6], distance=lambda one, other: next(distances))
        assert learned.counts == (8,)
        generate(model, handle, 0)
        assert not is_learned(handle)  # it computes 6

    def test_after_an_error_the_model_is_as_before(self) -> None:
        model, handle = made()
        before = generate(model, handle, 0)

        def fails() -> None:
            generate(model, handle, 1)
            raise RuntimeError("no disk")

        with pytest.raises(RuntimeError, match="no disk"):
            handle.learn([*calls(model, handle), fails], on_progress=lambda progress: None)
        assert torch.equal(generate(model, handle, 0), before)

    def test_generations_that_are_others_when_they_are_made_again(self) -> None:
        model, handle = made()
        seeds = iter(range(100))
        with pytest.raises(UsageError, match=r"begins with other noise.*pass a generator with a seed"):
            handle.learn([lambda: generate(model, handle, next(seeds))] * 3, on_progress=lambda progress: None)

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
    def test_wrong_arguments_say_what_to_do(self, arguments: dict[str, Any], message: str) -> None:
        _, handle = made()
        with pytest.raises(UsageError, match=message):
            handle.learn(**arguments, on_progress=lambda progress: None)

    def test_where_nothing_is_skipped_or_was_learned(self, tmp_path: Path) -> None:
        handle = speed_up(BY_NAME["sd15"].build(), merge=Merge(num_regions=4, skip_blocks=()))
        for use in (lambda: handle.learn([print] * 3), lambda: handle.save(tmp_path / "learned.json")):
            with pytest.raises(UsageError, match="no steps are skipped"):
                use()
        with pytest.raises(UsageError, match=r"call handle\.learn first"):
            made()[1].save(tmp_path / "learned.json")
        with pytest.raises(UsageError, match="count=2 is not allowed"):
            made()[1].learn_from_next(2)


class TestNextGenerations:
    def test_they_run_whole_and_the_one_after_skips_as_it_was_learned(self) -> None:
        model, handle = made()
        before = distance(model, handle)
        handle.enabled = False
        whole = [generate(model, handle, 100 + seed) for seed in range(4)]
        handle.enabled = True
        handle.learn_from_next(4)
        for seed, expected in enumerate(whole):
            assert torch.equal(generate(model, handle, 100 + seed), expected)
        generate(model, handle, 0)
        assert counts(handle) == (6, 6)
        assert "learned from 4 generations" in str(handle.summary())
        assert distance(model, handle) < 0.8 * before

    def test_the_handle_need_not_be_kept(self, tmp_path: Path) -> None:
        model, handle = made()
        handle.learn_from_next(3)
        assert "the next generations run whole" in str(handle.summary())
        models = handle.models
        del handle
        for seed in range(3):
            generate(model, Handle(*models), 100 + seed)
        other = Handle.of(model)
        assert "learned from 3 generations" in str(other.summary())
        other.save(tmp_path / "learned.json")
        other.remove()
        again = speed_up(model, skip=Skip(computed=6), learned=tmp_path / "learned.json")
        assert again.summary().skip.lines[0].startswith(f"6 of {STEPS} steps are computed")
        again.save(tmp_path / "again.json")  # before any generation
        assert (tmp_path / "again.json").read_text() == (tmp_path / "learned.json").read_text()

    def test_generations_of_another_kind_begin_anew(self) -> None:
        model, handle = made()
        handle.learn_from_next(3)
        for steps in (STEPS, STEPS, 9, 9):
            generate(model, handle, 0, steps)
        assert "learned from" not in str(handle.summary())
        generate(model, handle, 1, 9)
        assert "learned from 3 generations" in str(handle.summary())

    def test_the_generation_in_progress_is_left_whole(self) -> None:
        model, handle = made()
        runs = iter(range(1000))
        model.register_forward_pre_hook(lambda *_: handle.learn_from_next(3) if next(runs) == 8 else None)
        for seed in range(4):  # begun in a computed step in the middle of the first
            assert "learned from 3" not in str(handle.summary())
            generate(model, handle, seed)
        assert "learned from 3 generations" in str(handle.summary())

    @pytest.mark.parametrize("guided", [1, 8])
    def test_guidance_that_ends_half_way_ends_learning_and_no_generation(self, guided: int) -> None:
        model, handle = made()
        handle.learn_from_next(3)
        for seed in range(2):
            generate(model, handle, seed, guided=guided)
        assert "nothing was learned" in str(handle.summary())
        generate(model, handle, 0)
        assert counts(handle) == (6, 6)

    def test_as_many_computed_steps_as_there_are_end_learning_and_no_generation(self) -> None:
        model, handle = made()
        handle.learn_from_next(3, computed=STEPS)
        for seed in range(3):
            generate(model, handle, seed)
        assert "nothing was learned: all 12 steps would be computed" in str(handle.summary())


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What was learned for 6 of 12 steps."""
    model, handle = made()
    learn(model, handle, computed=6)
    found = tmp_path_factory.mktemp("learned") / "learned.json"
    handle.save(found)
    return found


class TestFile:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"steps": 9}, "number of steps 9, not 12"),
            ({"scheduler": EulerDiscreteScheduler()}, "scheduler 'EulerDiscreteScheduler', not 'FlowMatchEuler"),
            ({"scheduler": FlowMatchEulerDiscreteScheduler(shift=6.0)}, "other noise levels, because of the size"),
            ({"guided": 0}, "learned for 2 passes over a step, and this generation has 1"),
        ],
        ids=["steps", "scheduler", "levels", "passes"],
    )
    def test_other_generations_are_refused(self, path: Path, arguments: dict[str, Any], message: str) -> None:
        model = Known()
        handle = speed_up(model, skip=Skip(computed=6), learned=path)
        generate(model, handle, 0, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.05))  # as good as the same
        with pytest.raises(UsageError, match=message):
            generate(model, handle, 0, **arguments)

    def test_another_model_is_refused_and_another_number_of_computed_steps_at_once(self, path: Path) -> None:
        class Other(Known):
            pass

        model = Other()
        handle = speed_up(model, skip=Skip(computed=6), learned=path)
        with pytest.raises(UsageError, match="model 'Other', not 'Known'"):
            generate(model, handle, 0)
        with pytest.raises(UsageError, match="nothing was learned for 7 computed steps of 12, but for 6"):
            speed_up(Known(), skip=Skip(computed=7), learned=path)
        with pytest.raises(UsageError, match=r"computed=\(0, 1, 2, 3, 4, 5\) cannot go with what was learned"):
            speed_up(Known(), skip=Skip(computed=tuple(range(6))), learned=path)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (None, "cannot be read"),
            ("no json", "is not JSON"),
            ("[]", "was not written by"),
            ('{"format": 99, "steps": []}', "its format is 99"),
            ('{"format": 1, "steps": 3}', "is not complete"),
        ],
    )
    def test_a_broken_file_says_what_to_do(self, tmp_path: Path, text: str | None, message: str) -> None:
        broken = tmp_path / "broken.json"
        if text is not None:
            broken.write_text(text)
        with pytest.raises(UsageError, match=message):
            speed_up(Known(), "fast", learned=broken)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda steps: steps.update(computed=[1, 2]), "is not a list of steps"),
            (lambda steps: steps["weights"].popitem(), "but there are weights for"),
            (lambda steps: next(iter(steps["weights"].values()))[0].update(sample=float("nan")), "not finite"),
        ],
    )
    def test_weights_that_cannot_be_are_refused(
        self, path: Path, tmp_path: Path, change: Callable[[Any], None], message: str
    ) -> None:
        values = json.loads(path.read_text())
        change(values["steps"][0])
        (tmp_path / "changed.json").write_text(json.dumps(values))
        with pytest.raises(UsageError, match=message):
            speed_up(Known(), skip=Skip(computed=6), learned=tmp_path / "changed.json")

    def test_settings_keep_it(self, path: Path) -> None:
        skip = Skip(computed=6, learned=Learned.read(path))
        again = Skip.from_dict(json.loads(json.dumps(skip.to_dict())))
        assert again == skip
        assert hash(again) == hash(skip)


class TestResume:
    def test_what_was_made_before_it_was_killed_is_not_made_again(self, tmp_path: Path) -> None:
        model, handle = made()
        done: list[int] = []

        def call(index: int, *, killed: bool) -> Tensor:
            if killed and len(done) == 3:
                raise KeyboardInterrupt
            done.append(index)
            return generate(model, handle, 100 + index)

        def attempt(*, killed: bool) -> Learned:
            generations = [partial(call, index, killed=killed) for index in range(4)]
            return handle.learn(generations, computed=6, folder=tmp_path / "work", on_progress=lambda progress: None)

        with pytest.raises(KeyboardInterrupt):
            attempt(killed=True)
        done.clear()
        resumed = attempt(killed=False)
        assert done == [3, 3, 3]  # whole, with nothing learned, as it was learned
        assert resumed == learn(*made(), count=4, computed=6)

    def test_a_folder_of_a_model_that_was_changed_or_of_other_settings_is_refused(self, tmp_path: Path) -> None:
        model, handle = made()
        learn(model, handle, computed=6, folder=tmp_path / "work")
        with pytest.raises(UsageError, match=r"computed=\['6'\], not \['5'\]: delete the folder"):
            learn(model, handle, computed=5, folder=tmp_path / "work")
        with torch.no_grad():
            model.patterns.mul_(2)
        with pytest.raises(UsageError, match="begin anew if the model was changed"):
            learn(model, handle, computed=6, folder=tmp_path / "work")


def test_a_pipeline_learns_from_prompts() -> None:
    distances = [1.0, 0.5] * 3  # with nothing learned, and as it was learned
    pipe = text_pipeline()
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config)
    handle = speed_up(pipe, "fast")
    shown: list[str] = []
    learned = handle.learn(
        PROMPTS[:3],
        distance=lambda whole, found: distances.pop(0),
        num_inference_steps=8,
        output_type="np",
        on_progress=lambda progress: shown.append(progress.text),
    )
    assert any("recording generation 1 of 3" in each for each in shown)
    assert (learned.scheduler, learned.num_steps, learned.counts) == ("DDIMScheduler", 8, (6, 5, 4))
