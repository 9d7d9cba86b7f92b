"""The output of a skipped step has the structure of a computed one, and every tensor in it is a weighted sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from skipping import BY_NAME, only_skip
from tiny import chosen
from torch import Tensor, nn

from toma_diffusion import apply_toma
from toma_diffusion.skip.learned import Learned, LearnedSteps, Weights

WEIGHTS = Weights(outputs=(0.7, -0.4), sample=0.3, last_sample=-0.2)
STEPS = LearnedSteps(computed=(0, 1), weights={2: (WEIGHTS,)})
(LTX2,) = chosen("ltx2")


def run(model: nn.Module, inputs: dict[str, Any], **more: Any) -> Any:
    with torch.no_grad():
        return model(**inputs, **more)


def weighted(outputs: tuple[Tensor, Tensor], samples: tuple[Tensor, Tensor]) -> Tensor:
    """From the last two outputs, the latest first, and the samples of this step and of the last computed one."""
    return 0.7 * outputs[0] - 0.4 * outputs[1] + 0.3 * samples[0] - 0.2 * samples[1]


def predicted(build: Callable[[], nn.Module], inputs: Callable[..., dict[str, Any]], **more: Any) -> list[Any]:
    """What three steps return, of which the last is skipped."""
    model = build()
    name = type(model).__name__
    learned = Learned(model_class=name, num_steps=3, scheduler="", guidance=None, steps=(STEPS,))
    handle = apply_toma(model, only_skip(0, 1, learned=learned))
    handle.begin(3)
    outputs = []
    for step in range(3):
        handle.step(step)
        outputs.append(run(model, inputs(seed=step), **more))
    assert handle.summary().steps == (2, 1)
    return outputs


def same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["sdxl", "flux", "sd3"])
def test_a_dataclass_and_a_tuple(name: str) -> None:
    family = BY_NAME[name]
    samples = [next(iter(family.inputs(seed=seed).values())) for seed in range(3)]
    for more in ({}, {"return_dict": False}):
        first, second, skipped = predicted(family.build, family.inputs, **more)
        assert type(skipped) is type(first)
        same(skipped[0], weighted((second[0], first[0]), (samples[2], samples[1])))


def test_a_list_of_samples() -> None:
    family = BY_NAME["z-image"]
    outputs = [each[0] for each in predicted(family.build, family.inputs, return_dict=False)]
    samples = [family.inputs(seed=seed)["x"] for seed in range(3)]
    assert len(outputs[2]) == len(samples[2]) == 2
    for index in range(2):
        first, second, skipped = (each[index] for each in outputs)
        same(skipped, weighted((second, first), (samples[2][index], samples[1][index])))


def test_video_and_audio() -> None:
    first, second, skipped = predicted(LTX2.build, LTX2.inputs)
    assert type(skipped) is type(first)
    inputs = [LTX2.inputs(seed=seed) for seed in range(3)]
    for name, argument in (("sample", "hidden_states"), ("audio_sample", "audio_hidden_states")):
        samples = (inputs[2][argument], inputs[1][argument])
        same(skipped[name], weighted((second[name], first[name]), samples))


def test_a_learned_variance_stays_as_it_was() -> None:
    """PixArt returns four channels of noise and four of variance; the sample has four."""
    family = BY_NAME["pixart"]
    first, second, skipped = (each.sample for each in predicted(family.build, family.inputs))
    samples = [family.inputs(seed=seed)["hidden_states"] for seed in range(3)]
    same(skipped[:, :4], weighted((second[:, :4], first[:, :4]), (samples[2], samples[1])))
    assert torch.equal(skipped[:, 4:], second[:, 4:])


def test_channels_that_only_go_in() -> None:
    """Inpainting and image to image: a mask and a given picture come after the noisy sample."""
    family = BY_NAME["sd15"]

    def inputs(seed: int) -> dict[str, Any]:
        found = family.inputs(seed=seed)
        return found | {"sample": torch.cat([found["sample"], torch.ones(2, 5, 16, 16)], dim=1)}

    first, second, skipped = (each.sample for each in predicted(lambda: family.build(in_channels=9), inputs))
    samples = [family.inputs(seed=seed)["sample"] for seed in range(3)]
    assert skipped.shape == (2, 4, 16, 16)
    same(skipped, weighted((second, first), (samples[2], samples[1])))


def test_half_precision_is_summed_in_float32() -> None:
    family = BY_NAME["flux"]

    def inputs(seed: int) -> dict[str, Any]:
        found = family.inputs(seed=seed)
        return {name: value if name.endswith("ids") else value.bfloat16() for name, value in found.items()}

    first, second, skipped = (each.sample for each in predicted(lambda: family.build().bfloat16(), inputs))
    samples = [inputs(seed=seed)["hidden_states"].float() for seed in range(3)]
    exact = weighted((second.float(), first.float()), (samples[2], samples[1]))
    assert skipped.dtype == torch.bfloat16
    torch.testing.assert_close(skipped.float(), exact, rtol=2**-8, atol=1e-6)  # it is rounded once


def test_a_prediction_is_a_copy() -> None:
    """Pipelines scale outputs in place: what is kept must not change."""
    family = BY_NAME["flux"]
    model = family.build()
    handle = apply_toma(model, only_skip(0))
    handle.begin(3)
    outputs = []
    for step in range(3):
        handle.step(step)
        outputs.append(run(model, family.inputs(seed=step)).sample)
        outputs[-1].add_(1)
    assert torch.equal(outputs[1], outputs[0])
    assert torch.equal(outputs[2], outputs[0])
