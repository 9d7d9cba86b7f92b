"""In a skipped step no weight is moved, and the host does not wait for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import accelerate
import diffusers
import pytest
import torch
from accelerate import hooks
from accelerate.hooks import remove_hook_from_submodules
from diffusers import DDIMScheduler, DiffusionPipeline
from diffusers.hooks import group_offloading
from packaging.version import Version
from pairs import named
from skipping import BY_NAME, Runs, call, equal, generate, only_skip, plain
from tiny import Family
from tiny_pipelines import denoiser, flux_pipeline, pixart_pipeline, run, sd3_pipeline, sd15_pipeline, sdxl_pipeline
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from toma_diffusion import Skip, ToMAConfig, apply_toma, remove_toma
from toma_diffusion.skip.denoiser import Skipper

CPU = torch.device("cpu")


class Offloads:
    """Each takes the weights away between calls: to the meta device or to disk, for want of a GPU."""

    @staticmethod
    def sequential(model: nn.Module, path: Path) -> None:
        accelerate.cpu_offload(model, execution_device=CPU, offload_buffers=True)

    @staticmethod
    def dispatched(model: nn.Module, path: Path) -> None:
        accelerate.disk_offload(model, path, execution_device=CPU, offload_buffers=True)

    @staticmethod
    def leaf_groups(model: Any, path: Path) -> None:
        offload_groups(model, path, offload_type="leaf_level")

    @staticmethod
    def block_groups(model: Any, path: Path) -> None:
        offload_groups(model, path, offload_type="block_level", num_blocks_per_group=1)


def offload_groups(model: Any, path: Path, **options: Any) -> None:
    if Version(diffusers.__version__) < Version("0.41") and torch.accelerator.current_accelerator() is None:
        pytest.skip("diffusers before 0.41 offloads groups only on a machine with an accelerator")
    model.enable_group_offload(onload_device=CPU, offload_to_disk_path=str(path), **options)


OFFLOADS = [value.__func__ for value in vars(Offloads).values() if isinstance(value, staticmethod)]


class Moves:
    """How many weights are moved, in a `with` block."""

    count = 0

    def __enter__(self) -> Moves:
        def counting(move: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*args: Any, **kwargs: Any) -> Any:
                self.count += 1
                return move(*args, **kwargs)

            return counted

        group = group_offloading.ModuleGroup
        self.patches = [
            patch.object(hooks, "set_module_tensor_to_device", counting(hooks.set_module_tensor_to_device)),
            patch.object(group, "onload_", counting(group.onload_)),
            patch.object(group, "offload_", counting(group.offload_)),
        ]
        for each in self.patches:
            each.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.patches:
            each.__exit__(None, None, None)


@pytest.mark.parametrize("offload", OFFLOADS, ids=named)
@pytest.mark.parametrize(
    ("family", "first"), [(BY_NAME["sd15"], True), (BY_NAME["flux"], False), (BY_NAME["z-image"], True)], ids=named
)
def test_no_weight_is_moved(
    family: Family, first: bool, offload: Callable[[nn.Module, Path], None], tmp_path: Path
) -> None:
    original, model = plain(family), family.build()
    if first:
        offload(model, tmp_path)
    handle = apply_toma(model, only_skip(0, 2))
    if not first:
        offload(model, tmp_path)
    handle.begin(4)
    outputs, counts = [], []
    for step in range(4):
        handle.step(step)
        with Moves() as moves:
            outputs.append(call(family, model, step))
        counts.append(moves.count)
    torch.testing.assert_close(torch.stack(outputs), torch.stack([original[step] for step in (0, 0, 2, 2)]))
    assert counts[0] > 0
    assert counts == [counts[0], 0, counts[0], 0]
    handle.remove()
    with Moves() as moves:
        torch.testing.assert_close(call(family, model), original[0])
    assert moves.count == counts[0]


@pytest.mark.parametrize("ours_first", [True, False])
def test_hooks_of_accelerate_are_removed_before_ours_and_after(ours_first: bool) -> None:
    family = BY_NAME["pixart"]
    original, model = plain(family), family.build()
    Offloads.sequential(model, Path())
    handle = apply_toma(model, only_skip(0, 2))
    outputs = generate(family, model, handle, 4)
    if ours_first:
        remove_toma(model)
        remove_hook_from_submodules(model)
    else:
        remove_hook_from_submodules(model)
        assert all(equal(generate(family, model, handle, 4), outputs))
        remove_toma(model)
    assert torch.equal(call(family, model), original[0])


class Reads(TorchDispatchMode):
    """Notes every operator that makes the host wait for a value of a tensor."""

    WAITING = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._opname in self.WAITING:
            self.seen.append(func._opname)
        return func(*args, **(kwargs or {}))


@contextmanager
def reads_by_call() -> Iterator[list[list[str]]]:
    """What the host reads in every call of a denoiser."""
    found: list[list[str]] = []
    answer = Skipper.answer

    def watched(self: Skipper, *args: Any) -> Any:
        with Reads() as reads:
            output = answer(self, *args)
        found.append(reads.seen)
        return output

    with patch.object(Skipper, "answer", watched):
        yield found


@pytest.mark.parametrize("make", [sd15_pipeline, sdxl_pipeline, flux_pipeline, sd3_pipeline, pixart_pipeline])
def test_the_host_does_not_wait(make: Callable[[], DiffusionPipeline]) -> None:
    pipe = make()
    handle = apply_toma(pipe, only_skip(0, 2, 3))
    with Runs(denoiser(pipe)) as runs, reads_by_call() as reads:
        run(pipe, num_inference_steps=6)
    assert runs.steps == [0, 2, 3]
    assert handle.summary().steps == (3, 3)
    passes = len(reads) // 6
    for step in (1, 4, 5):
        assert not any(reads[step * passes : (step + 1) * passes])


def test_a_tensor_without_values_can_be_predicted() -> None:
    """On the meta device there is nothing that could be read."""
    family = BY_NAME["sd15"]
    model = family.build().to("meta")
    scheduler = DDIMScheduler()
    scheduler.set_timesteps(4)
    handle = apply_toma(model, ToMAConfig(ratio=0, skip=Skip(computed=(0, 2))))
    handle.begin(4, scheduler)
    for step in range(4):
        handle.step(step)
        inputs = {name: value.to("meta") for name, value in family.inputs(seed=step).items()}
        with torch.no_grad():
            assert model(**inputs, return_dict=False)[0].is_meta
    assert handle.summary().steps == (2, 2)
