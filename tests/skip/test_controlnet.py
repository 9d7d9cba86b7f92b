"""ControlNets of a pipeline do not run in skipped steps either."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from diffusers import (
    AutoPipelineForText2Image,
    ControlNetModel,
    DiffusionPipeline,
    FluxControlNetModel,
    FluxControlNetPipeline,
    MultiControlNetModel,
    StableDiffusionControlNetPipeline,
)
from skipping import Runs, skipping
from tiny import seeded
from tiny_pipelines import denoiser, flux_pipeline, quiet, sd15_pipeline
from tiny_pipelines import run as run_pipeline
from torch import Tensor, nn

from toma_diffusion.skip import controlnet
from toma_diffusion.skip.front import CALL

Make = Callable[[], tuple[DiffusionPipeline, dict[str, Any]]]
PICTURE = {"image": torch.rand(1, 3, 128, 128), "height": 128, "width": 128}
CONTROL = {"control_image": torch.rand(1, 3, 128, 128), "height": 128, "width": 128}


def run(pipe: DiffusionPipeline, steps: int = 6, **arguments: Any) -> Tensor:
    return run_pipeline(pipe, num_inference_steps=steps, **arguments)


def lively(build: Callable[[], nn.Module]) -> nn.Module:
    """Trained a little: what a new one returns is zero."""

    def made() -> nn.Module:
        net = build()
        for parameter in net.parameters():
            if not parameter.any():
                nn.init.normal_(parameter, std=0.1)
        return net

    return seeded(made)


def sd15_net(unet: nn.Module) -> nn.Module:
    return lively(lambda: ControlNetModel.from_unet(unet, conditioning_channels=3))


def sd15() -> tuple[DiffusionPipeline, dict[str, Any]]:
    parts = sd15_pipeline().components
    pipe = StableDiffusionControlNetPipeline(**parts, controlnet=sd15_net(parts["unet"]), requires_safety_checker=False)
    return quiet(pipe), PICTURE


def several() -> tuple[DiffusionPipeline, dict[str, Any]]:
    pipe, _ = sd15()
    pipe.controlnet = MultiControlNetModel([pipe.controlnet, sd15_net(pipe.unet)])
    return pipe, PICTURE | {"image": [PICTURE["image"]] * 2, "controlnet_conditioning_scale": [1.0, 0.5]}


def guessing() -> tuple[DiffusionPipeline, dict[str, Any]]:
    """The ControlNet sees the half with the prompt alone."""
    return sd15()[0], PICTURE | {"guess_mode": True}


def flux() -> tuple[DiffusionPipeline, dict[str, Any]]:
    parts = flux_pipeline().components
    names = ("patch_size", "in_channels", "num_layers", "num_single_layers", "attention_head_dim")
    names += ("num_attention_heads", "joint_attention_dim", "pooled_projection_dim", "axes_dims_rope")
    config = {name: parts["transformer"].config[name] for name in names}
    for name in ("image_encoder", "feature_extractor"):
        parts.pop(name)
    net = lively(lambda: FluxControlNetModel(**config))
    return quiet(FluxControlNetPipeline(**parts, controlnet=net)), CONTROL | {"true_cfg_scale": 2.0}


class Nets:
    """How often the parts of a ControlNet run, in a `with` block."""

    def __init__(self, net: nn.Module) -> None:
        self.parts = list(net.nets) if isinstance(net, MultiControlNetModel) else [net]
        self.runs = [0] * len(self.parts)

    def __enter__(self) -> Nets:
        self.hooks = [part.register_forward_pre_hook(self._count) for part in self.parts]
        return self

    def _count(self, part: nn.Module, *_: Any) -> None:
        self.runs[self.parts.index(part)] += 1

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()


@pytest.mark.parametrize("make", [sd15, several, guessing, flux])
def test_it_runs_in_computed_steps_alone(make: Make) -> None:
    """And pictures are as if it ran in every step."""
    pipe, arguments = make()
    before = [dict(vars(module)) for module in pipe.controlnet.modules()]
    whole = run(pipe, **arguments)
    handle = skipping(pipe, 0, 1, 3)
    for _ in range(2):
        with Nets(pipe.controlnet) as nets, Runs(denoiser(pipe)) as runs:
            skipped = run(pipe, **arguments)
        assert nets.runs == [3] * len(nets.runs)
        assert runs.steps == [0, 1, 3]
    assert not torch.equal(skipped, whole)
    handle.enabled = False
    with Nets(pipe.controlnet) as nets:
        assert torch.equal(run(pipe, **arguments), whole)
    assert nets.runs == [6] * len(nets.runs)
    handle.remove()
    assert [vars(module) for module in pipe.controlnet.modules()] == before
    with patch.object(controlnet, "put_before", lambda *_: None), Nets(pipe.controlnet) as nets:
        skipping(pipe, 0, 1, 3)
        assert torch.equal(run(pipe, **arguments), skipped)
    assert nets.runs == [6] * len(nets.runs)


def test_one_that_comes_with_another_pipeline_is_found() -> None:
    """Of pipelines that share a denoiser, the one that runs counts. Its first output is new in every generation."""
    pipe, arguments = sd15()
    plain = quiet(AutoPipelineForText2Image.from_pipe(pipe, controlnet=None))
    handle = skipping(plain, 0, 1, 3)
    with Nets(pipe.controlnet) as nets:
        run(pipe, **arguments)
    assert nets.runs == [3]
    run(plain)
    handle.remove()
    assert CALL not in vars(pipe.controlnet)


def test_another_one_takes_its_place() -> None:
    pipe, arguments = sd15()
    handle = skipping(pipe, 0, 1, 3)
    run(pipe, **arguments)
    first, pipe.controlnet = pipe.controlnet, sd15_net(pipe.unet)
    with Nets(pipe.controlnet) as nets:
        run(pipe, **arguments)
    assert nets.runs == [3]
    handle.remove()
    for net in (first, pipe.controlnet):
        assert CALL not in vars(net)


def test_one_that_two_pipelines_share() -> None:
    pipe, arguments = sd15()
    other, _ = sd15()
    other.controlnet = pipe.controlnet
    handle = skipping(pipe, 0, 1, 3)
    skipping(other, 0, 2)
    for each, expected in ((pipe, 3), (other, 2), (pipe, 3)):
        with Nets(pipe.controlnet) as nets:
            run(each, **arguments)
        assert nets.runs == [expected]
    handle.remove()
    with Nets(pipe.controlnet) as nets:
        run(pipe, **arguments)
        run(other, **arguments)
    assert nets.runs == [6 + 2]


def test_a_compiled_one_is_not_entered() -> None:
    pipe, arguments = sd15()
    calls: list[int] = []

    def compiled(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return pipe.controlnet._call_impl(*args, **kwargs)

    pipe.controlnet._compiled_call_impl = compiled  # as `pipe.controlnet.compile()` does
    handle = skipping(pipe, 0, 1, 3)
    run(pipe, **arguments)
    assert len(calls) == 3
    handle.remove()
    assert vars(pipe.controlnet)[CALL] is compiled


def test_guidance_that_ends_half_way_runs_it_again() -> None:
    """The batch of the step halves, and the denoiser computes it."""
    pipe, arguments = sd15()
    skipping(pipe, 0, 1)

    def cut_off(pipe: Any, step: int, timestep: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if step == 4:
            pipe._guidance_scale = 0.0
        return {} if step != 4 else {name: tensor[-1:] for name, tensor in tensors.items()}

    arguments = arguments | {
        "callback_on_step_end": cut_off,
        "callback_on_step_end_tensor_inputs": ["prompt_embeds", "image"],
    }
    with Nets(pipe.controlnet) as nets, Runs(pipe.unet) as runs:
        run(pipe, 8, **arguments)
    assert runs.passes == [0, 1, 5]
    assert nets.runs == [3]


def test_it_keeps_no_denoiser_alive_and_a_copy_is_its_own() -> None:
    pipe, arguments = sd15()
    handle = skipping(pipe, 0, 1, 3)
    run(pipe, **arguments)
    assert CALL not in vars(copy.deepcopy(pipe.controlnet))
    net, unet = pipe.controlnet, weakref.ref(pipe.unet)
    del pipe, handle
    gc.collect()
    assert unet() is None
    assert net(torch.zeros(1, 4, 16, 16), 1, torch.zeros(1, 7, 32), torch.zeros(1, 3, 128, 128)) is not None
