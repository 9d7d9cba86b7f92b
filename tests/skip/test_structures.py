"""The output of a skipped step has the structure of a computed one, and every tensor in it is a weighted sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from skipping import BY_NAME, counts, skipping
from tiny import chosen
from torch import Tensor, nn

from toma_diffusion import Skip, speed_up
from toma_diffusion.skip.learned import Learned, LearnedSteps, Weights

WEIGHTS = Weights(outputs=(0.7, -0.4), sample=0.3, last_sample=-0.2)
STEPS = LearnedSteps(computed=(0, 1), weights={2: (WEIGHTS,)})
(LTX2,) = chosen("ltx2")


def predicted(build: Callable[[], nn.Module], inputs: Callable[..., dict[str, Any]], **more: Any) -> list[Any]:
    """What three steps return, of which the last is skipped."""
    model = build()
    learned = Learned(model_class=type(model).__name__, num_steps=3, scheduler="", guidance=None, steps=(STEPS,))
    handle = speed_up(model, skip=Skip(computed=(0, 1), learned=learned))
    handle.begin(3)
    outputs = []
    for step in range(3):
        handle.step(step)
        with torch.no_grad():
            outputs.append(model(**inputs(seed=step), **more))
    assert counts(handle) == (2, 1)
    return outputs


def assert_sum(outputs: list[Tensor], samples: list[Tensor]) -> None:
    """The third output is the sum of the other two, the latest first, and of the samples of this step and the last."""
    first, second, skipped = outputs
    wanted = 0.7 * second - 0.4 * first + 0.3 * samples[2] - 0.2 * samples[1]
    torch.testing.assert_close(skipped, wanted, rtol=1e-5, atol=1e-6)


def samples_of(inputs: Callable[..., dict[str, Any]], name: str) -> list[Any]:
    return [inputs(seed=seed)[name] for seed in range(3)]


@pytest.mark.parametrize("more", [{}, {"return_dict": False}], ids=["dataclass", "tuple"])
def test_a_dataclass_and_a_tuple(more: dict[str, Any]) -> None:
    family = BY_NAME["flux"]
    outputs = predicted(family.build, family.inputs, **more)
    assert type(outputs[2]) is type(outputs[0])
    assert_sum([each[0] for each in outputs], samples_of(family.inputs, "hidden_states"))


def test_a_list_of_samples() -> None:
    family = BY_NAME["z-image"]
    outputs = [each[0] for each in predicted(family.build, family.inputs, return_dict=False)]
    samples = samples_of(family.inputs, "x")
    assert len(outputs[2]) == 2
    for index in range(2):
        assert_sum([each[index] for each in outputs], [each[index] for each in samples])


def test_video_and_audio() -> None:
    outputs = predicted(LTX2.build, LTX2.inputs)
    for name, argument in (("sample", "hidden_states"), ("audio_sample", "audio_hidden_states")):
        assert_sum([each[name] for each in outputs], samples_of(LTX2.inputs, argument))


def test_a_learned_variance_stays_as_it_was() -> None:
    """PixArt returns four channels of noise and four of variance; the sample has four."""
    family = BY_NAME["pixart"]
    outputs = [each.sample for each in predicted(family.build, family.inputs)]
    assert_sum([each[:, :4] for each in outputs], samples_of(family.inputs, "hidden_states"))
    assert torch.equal(outputs[2][:, 4:], outputs[1][:, 4:])


def test_channels_that_only_go_in() -> None:
    """Inpainting and image to image: a mask and a given picture come after the noisy sample."""
    family = BY_NAME["sd15"]

    def inputs(seed: int) -> dict[str, Any]:
        found = family.inputs(seed=seed)
        return found | {"sample": torch.cat([found["sample"], torch.ones(2, 5, 16, 16)], dim=1)}

    outputs = predicted(lambda: family.build(in_channels=9), inputs)
    assert_sum([each.sample for each in outputs], samples_of(family.inputs, "sample"))


def test_half_precision_is_summed_in_float32() -> None:
    family = BY_NAME["flux"]

    def inputs(seed: int) -> dict[str, Any]:
        found = family.inputs(seed=seed)
        return {name: value if name.endswith("ids") else value.bfloat16() for name, value in found.items()}

    outputs = [each.sample for each in predicted(lambda: family.build().bfloat16(), inputs)]
    one, two, now, last = (each.float() for each in (*outputs[:2], *samples_of(inputs, "hidden_states")[:0:-1]))
    exact = 0.7 * two - 0.4 * one + 0.3 * now - 0.2 * last
    assert outputs[2].dtype == torch.bfloat16
    torch.testing.assert_close(outputs[2].float(), exact, rtol=2**-8, atol=1e-6)  # it is rounded once


def test_a_prediction_is_a_copy() -> None:
    """Pipelines scale outputs in place: what is kept must not change."""
    family = BY_NAME["flux"]
    model = family.build()
    handle = skipping(model, 0)
    handle.begin(3)
    outputs = []
    for step in range(3):
        handle.step(step)
        with torch.no_grad():
            outputs.append(model(**family.inputs(seed=step)).sample.add_(1))
    assert torch.equal(outputs[1], outputs[0])
    assert torch.equal(outputs[2], outputs[0])


def test_without_a_noisy_sample_it_says_so() -> None:
    class Empty(nn.Module):
        def forward(self, guidance: float) -> float:
            return guidance

    model = Empty()
    skipping(model, 0)
    with pytest.raises(ValueError, match="no noisy sample was found among the arguments of Empty"):
        model(1.0)
