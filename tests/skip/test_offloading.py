"""In a skipped step no weight is moved, and the host does not wait for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import accelerate
import diffusers
import pytest
import torch
from accelerate import hooks
from accelerate.hooks import remove_hook_from_submodules
from diffusers import DiffusionPipeline
from diffusers.hooks import group_offloading
from packaging.version import Version
from pairs import in_turn, named
from skipping import BY_NAME, FOLLOWED, Runs, call, counts, equal, generate, plain, skipping
from tiny import Family
from tiny_pipelines import denoiser, flux_pipeline, run, sd3_pipeline, sd15_pipeline
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from toma_diffusion.skip.denoiser import Skipper

CPU = torch.device("cpu")

# Each takes the weights away between calls: to the meta device or to disk, for want of a GPU.


def sequential(model: nn.Module, path: Path) -> None:
    accelerate.cpu_offload(model, execution_device=CPU, offload_buffers=True)


def dispatched(model: nn.Module, path: Path) -> None:
    accelerate.disk_offload(model, path, execution_device=CPU, offload_buffers=True)


def groups(model: Any, path: Path) -> None:
    if Version(diffusers.__version__) < Version("0.41") and torch.accelerator.current_accelerator() is None:
        pytest.skip("diffusers before 0.41 offloads groups only on a machine with an accelerator")
    options = {"offload_type": "block_level", "num_blocks_per_group": 1}
    model.enable_group_offload(onload_device=CPU, offload_to_disk_path=str(path), **options)


@contextmanager
def counted_moves() -> Iterator[list[str]]:
    """One entry for every weight, or group of weights, that is moved."""
    moves: list[str] = []

    def counting(name: str, move: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            moves.append(name)
            return move(*args, **kwargs)

        return counted

    group = group_offloading.ModuleGroup
    with ExitStack() as stack:
        for owner, name in ((hooks, "set_module_tensor_to_device"), (group, "onload_"), (group, "offload_")):
            stack.enter_context(patch.object(owner, name, counting(name, getattr(owner, name))))
        yield moves


@pytest.mark.parametrize(
    ("offload", "family", "first"),
    in_turn([sequential, dispatched, groups, groups], [BY_NAME["sd15"], BY_NAME["flux"]], [True, False, False, True]),
    ids=named,
)
def test_no_weight_is_moved(
    family: Family, first: bool, offload: Callable[[nn.Module, Path], None], tmp_path: Path
) -> None:
    original, model = plain(family), family.build()
    if first:
        offload(model, tmp_path)
    handle = skipping(model, 0, 2)
    if not first:
        offload(model, tmp_path)
    handle.begin(4)
    outputs, moved = [], []
    for step in range(4):
        handle.step(step)
        with counted_moves() as moves:
            outputs.append(call(family, model, step))
        moved.append(len(moves))
    torch.testing.assert_close(torch.stack(outputs), torch.stack([original[step] for step in FOLLOWED]))
    assert moved[0] > 0
    assert moved == [moved[0], 0, moved[0], 0]
    handle.remove()
    with counted_moves() as moves:
        torch.testing.assert_close(call(family, model), original[0])
    assert len(moves) == moved[0]


@pytest.mark.parametrize("ours_first", [True, False])
def test_hooks_of_accelerate_are_removed_before_ours_and_after(ours_first: bool) -> None:
    family = BY_NAME["pixart"]
    original, model = plain(family), family.build()
    sequential(model, Path())
    handle = skipping(model, 0, 2)
    outputs = generate(family, model, handle)
    if ours_first:
        handle.remove()
        remove_hook_from_submodules(model)
    else:
        remove_hook_from_submodules(model)
        assert all(equal(generate(family, model, handle), outputs))
        handle.remove()
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


@pytest.mark.parametrize("make", [sd15_pipeline, flux_pipeline, sd3_pipeline])
def test_the_host_does_not_wait(make: Callable[[], DiffusionPipeline]) -> None:
    pipe = make()
    handle = skipping(pipe, 0, 2, 3)
    found: list[list[str]] = []
    answer = Skipper.answer

    def watched(self: Skipper, *args: Any) -> Any:
        with Reads() as reads:
            output = answer(self, *args)
        found.append(reads.seen)
        return output

    with Runs(denoiser(pipe)) as runs, patch.object(Skipper, "answer", watched):
        run(pipe, num_inference_steps=6)
    assert runs.steps == [0, 2, 3]
    assert counts(handle) == (3, 3)
    passes = len(found) // 6
    assert not any(seen for step in (1, 4, 5) for seen in found[step * passes : (step + 1) * passes])
