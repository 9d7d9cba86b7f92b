"""Every pass over a step is predicted from its own outputs, never from those of another one."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from diffusers.callbacks import SDCFGCutoffCallback
from skipping import BY_NAME, Runs, counts, skipping
from tiny import Family
from tiny_pipelines import flux_pipeline, generate, hunyuan15_pipeline, run, sd3_pipeline, sd15_pipeline
from torch import Tensor, nn

SD15, FLUX = BY_NAME["sd15"], BY_NAME["flux"]
SAMPLE = {"sd15": "sample", "flux": "hidden_states"}


class Story:
    """Calls a model with a prompt for each pass, and says from which step each output is."""

    def __init__(self, family: Family, computed: tuple[int, ...], *, named: bool = False) -> None:
        self.family, self.named = family, named
        self.original, self.model = family.build(), family.build()
        self.prompts: dict[str, Tensor] = {}
        self.handle = skipping(self.model, *computed)

    def prompt(self, name: str) -> Tensor:
        if name not in self.prompts:
            self.prompts[name] = self.family.inputs(seed=100 + len(self.prompts))["encoder_hidden_states"]
        return self.prompts[name]

    def call(self, model: nn.Module, sample: Tensor, prompt: Tensor) -> Tensor:
        inputs = self.family.inputs() | {SAMPLE[self.family.name]: sample, "encoder_hidden_states": prompt}
        with torch.no_grad():
            return model(**inputs, return_dict=False)[0]

    def of(self, *passes: str) -> list[list[int]]:
        """The passes of every step, such as "cond uncond"."""
        self.handle.begin(len(passes))
        computed: dict[str, dict[int, Tensor]] = {}
        found = []
        for step, names in enumerate(passes):
            self.handle.step(step)
            sample = self.family.inputs(seed=step)[SAMPLE[self.family.name]]
            row = []
            for name in names.split():
                prompt = self.prompt(name)
                outputs = computed.setdefault(name, {})
                outputs[step] = self.call(self.original, sample, prompt)
                with self.model.cache_context(name) if self.named else nullcontext():
                    output = self.call(self.model, sample, prompt)
                row.append(next((each for each, known in outputs.items() if torch.equal(output, known)), -1))
            found.append(row)
        return found


@pytest.mark.parametrize(
    ("family", "named"), [(SD15, False), (FLUX, False), (FLUX, True)], ids=["sd15", "flux", "flux-named"]
)
class TestPasses:
    def test_two_have_their_own_outputs(self, family: Family, named: bool) -> None:
        story = Story(family, (0, 2), named=named)
        assert story.of(*["cond uncond"] * 4) == [[0, 0], [0, 0], [2, 2], [2, 2]]

    def test_one_that_begins_half_way_is_computed_and_so_is_the_next_step(self, family: Family, named: bool) -> None:
        """The first pass over its step was predicted already: that is made good in the next step."""
        found = Story(family, (0,), named=named).of("cond", "cond", "cond uncond", "cond uncond", "cond uncond")
        assert found == [[0], [0], [0, 2], [3, 3], [3, 3]]

    def test_one_that_comes_before_the_others_makes_the_whole_step_computed(self, family: Family, named: bool) -> None:
        story = Story(family, (0,), named=named)
        assert story.of("cond", "cond", "uncond cond", "uncond cond") == [[0], [0], [2, 2], [2, 2]]

    def test_the_one_that_is_left_is_not_predicted_from_the_one_that_ended(self, family: Family, named: bool) -> None:
        found = Story(family, (0,), named=named).of("uncond cond", "uncond cond", "cond", "cond")
        assert found == [[0, 0], [0, 0], *([[0], [0]] if named else [[2], [2]])]  # a name says that it is the same

    def test_three_of_which_the_second_ends(self, family: Family, named: bool) -> None:
        found = Story(family, (0,), named=named).of(
            "cond skip uncond", "cond skip uncond", "cond uncond", "cond uncond"
        )
        assert found == [[0, 0, 0], [0, 0, 0], *([[0, 0], [0, 0]] if named else [[0, 2], [3, 3]])]


def test_a_prompt_that_changes_is_another_pass() -> None:
    """Prompts may be exchanged half-way: the old one's output is no prediction for the new one."""
    assert Story(SD15, (0,)).of("cat", "cat", "dog", "dog") == [[0], [0], [2], [2]]


def test_a_prompt_that_is_made_anew_in_every_step_is_the_same_pass() -> None:
    model = SD15.build()
    handle = skipping(model, 0)
    handle.begin(3)
    for step in range(3):
        handle.step(step)
        SD15.call(model, seed=step)
    assert counts(handle) == (1, 2)


def test_the_user_says_which_pass_it_is() -> None:
    """Then they may come in any order."""
    story = Story(FLUX, (0,))
    outputs: dict[tuple[int, int], Tensor] = {}
    story.handle.begin(3)
    for step in range(3):
        sample = FLUX.inputs(seed=step)["hidden_states"]
        for pass_index in (0, 1) if step % 2 == 0 else (1, 0):
            story.handle.step(step, pass_index=pass_index)
            outputs[step, pass_index] = story.call(story.model, sample, story.prompt(str(pass_index)))
    for step in (1, 2):
        assert torch.equal(outputs[step, 0], outputs[0, 0])
        assert torch.equal(outputs[step, 1], outputs[0, 1])
    assert not torch.equal(outputs[0, 0], outputs[0, 1])


def test_many_tiles_in_a_loop_of_ones_own_are_one_step() -> None:
    """Each tile is predicted from its own output."""
    model = SD15.build()
    handle = skipping(model, 0, 2)
    handle.begin(4)
    prompt, tiles = SD15.inputs()["encoder_hidden_states"], [torch.full((1, 4, 16, 16), 0.1 * i) for i in range(66)]
    with Runs(model) as runs, torch.no_grad():
        outputs = []
        for step in range(4):
            handle.step(step)
            outputs.append(torch.cat([model(tile, 10 - step, prompt[:1]).sample for tile in tiles]))
    assert runs.passes == [0] * 66 + [2] * 66
    assert counts(handle) == (2, 2)
    assert torch.equal(outputs[1], outputs[0])
    assert torch.equal(outputs[3], outputs[2])
    assert not torch.equal(outputs[2], outputs[0])


class TestGuidance:
    """In real pipelines."""

    def test_of_flux_in_two_calls(self) -> None:
        pipe = flux_pipeline()
        skipping(pipe, 0, 1, 3)
        with Runs(pipe.transformer) as runs:
            run(pipe, num_inference_steps=5, true_cfg_scale=3.0)
        assert runs.passes == [0, 0, 1, 1, 3, 3]

    def test_that_is_cut_off_in_a_skipped_step(self) -> None:
        """The batch halves: its outputs do not fit any more."""
        pipe = sd15_pipeline()
        handle = skipping(pipe, 0, 2)
        with Runs(pipe.unet) as runs:
            image = run(pipe, num_inference_steps=8, callback_on_step_end=SDCFGCutoffCallback(0.5))
        assert runs.passes == [0, 2, 5]
        assert counts(handle) == (3, 5)
        assert image.isfinite().all()

    def test_that_leaves_out_layers_of_sd3(self) -> None:
        """Its pass begins in step 2 and ends after step 5."""
        pipe = sd3_pipeline()
        skipping(pipe, 0, 1, 4)
        arguments = {"skip_guidance_layers": [1], "skip_layer_guidance_start": 0.2, "skip_layer_guidance_stop": 0.7}
        with Runs(pipe.transformer) as runs:
            run(pipe, num_inference_steps=8, **arguments)
        assert runs.passes == [0, 1, 2, 3, 3, 4, 4]

    @pytest.mark.parametrize(("start", "stop"), [(0.0, 0.5), (0.5, 1.0)], ids=str)
    def test_of_a_guider_that_begins_or_ends_half_way(self, start: float, stop: float) -> None:
        pipe = hunyuan15_pipeline(start=start, stop=stop)
        skipping(pipe, 0, 2)
        with Runs(pipe.transformer) as runs:
            generate(pipe, steps=6)
        assert runs.passes == ([0, 0, 2, 2] if stop == 0.5 else [0, 2, 3, 4, 4])
