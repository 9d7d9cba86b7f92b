"""What torch's compiler and exporter see of a model that is made faster, and what is left of it afterwards."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from observe import Graphs
from pairs import named
from tiny import FAMILIES
from torch import nn

from toma_diffusion import Merge, Skip, UsageError, speed_up
from toma_diffusion.engine import compile as compiling

FLUX = next(family for family in FAMILIES if family.name == "flux")
MERGE, SKIP = Merge(num_regions=4, skip_blocks=()), Skip(computed=(0, 2))
EITHER = pytest.mark.parametrize("settings", [{"merge": MERGE}, {"skip": SKIP}], ids=["merge", "skip"])
CALL = "_compiled_call_impl"


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def shallow() -> Any:
    return FLUX.build(num_layers=1, num_single_layers=0)


class Denoiser(nn.Module):
    """What an exporter can always follow."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        return self.layer(sample) * timestep


class TestExport:
    @EITHER
    @pytest.mark.parametrize("strict", [True, False])
    def test_it_is_refused(self, settings: dict[str, Any], strict: bool) -> None:
        """In one line; in strict mode torch raises an error of its own, and gives ours as the reason."""
        model, inputs = shallow(), FLUX.inputs()
        handle = speed_up(model, **settings)
        kind = torch._dynamo.exc.Unsupported if strict else UsageError
        with torch.no_grad(), pytest.raises(kind, match=r"export.*call handle\.remove\(\) first") as error:
            torch.export.export(model, (), inputs, strict=strict)
        assert strict or "\n" not in str(error.value)
        handle.remove()

    @pytest.mark.parametrize("strict", [True, False])
    def test_after_removal_it_works(self, strict: bool) -> None:
        model = Denoiser()
        arguments = (torch.randn(1, 4), torch.tensor(2.0))
        expected = model(*arguments)
        speed_up(model, skip=SKIP).remove()
        exported = torch.export.export(model, arguments, strict=strict)
        torch.testing.assert_close(exported.module()(*arguments), expected)


class TestSettingsOfTheCompiler:
    """They are global: what is changed for models that are made faster is put back after the last of them."""

    @pytest.fixture(autouse=True)
    def _nobody_else(self) -> None:
        gc.collect()
        for holder in list(compiling._holders):  # models of other tests that are still alive
            compiling.release_compiler(holder)

    @staticmethod
    def now() -> dict[str, Any]:
        return {name: getattr(torch._dynamo.config, name) for name in compiling.SETTINGS}

    @EITHER
    def test_after_the_last_removal(self, settings: dict[str, Any]) -> None:
        before = self.now()
        models = [shallow(), shallow()]
        first, second = (speed_up(model, **settings) for model in models)
        changed = self.now()
        assert changed != before
        first.remove()
        assert self.now() == changed
        second.remove()
        assert self.now() == before

    @EITHER
    def test_after_the_last_model_was_deleted(self, settings: dict[str, Any]) -> None:
        before = self.now()
        model = shallow()
        speed_up(model, **settings)
        assert self.now() != before
        del model
        gc.collect()
        assert self.now() == before

    def test_a_copy_needs_them_too(self) -> None:
        before = self.now()
        model = shallow()
        handle = speed_up(model, merge=MERGE)
        changed = self.now()
        twin = copy.deepcopy(model)
        handle.remove()
        assert self.now() == changed
        type(handle).of(twin).remove()
        assert self.now() == before

    def test_a_limit_that_the_user_raised_stays(self) -> None:
        with torch._dynamo.config.patch(recompile_limit=1000):
            handle = speed_up(shallow(), merge=MERGE)
            assert torch._dynamo.config.recompile_limit == 1000
            handle.remove()
            assert torch._dynamo.config.recompile_limit == 1000


def compiled_calls(model: nn.Module) -> list[Any]:
    return [vars(module).get(CALL) for module in model.modules()]


def by_block(model: Any, backend: Any) -> None:
    for block in model.transformer_blocks:
        block.compile(backend=backend)


def as_a_whole(model: nn.Module, backend: Any) -> None:
    model.compile(backend=backend)


def of_a_sub_module(model: Any, backend: Any) -> None:
    model.x_embedder.compile(backend=backend)


class TestTheUsersOwnCompilation:
    @EITHER
    @pytest.mark.parametrize("compiled", [by_block, as_a_whole, of_a_sub_module], ids=named)
    @pytest.mark.parametrize("mode", [None, "blocks", "whole"])
    def test_removal_puts_it_back(
        self, settings: dict[str, Any], compiled: Callable[[nn.Module, Any], None], mode: str | None
    ) -> None:
        model = shallow()
        compiled(model, "eager")
        before = compiled_calls(model)
        handle = speed_up(model, **settings)
        for _ in range(1 if mode is None else 2):  # compiled anew, too
            if mode is not None:
                handle.compile(mode, backend="eager")
        handle.remove()
        assert all(one is other for one, other in zip(compiled_calls(model), before, strict=True))

    def test_it_runs_again(self) -> None:
        graphs = Graphs()
        model = shallow()
        by_block(model, graphs)
        handle = speed_up(model, skip=SKIP)
        handle.compile("whole", backend="eager")
        FLUX.call(model)
        handle.remove()
        assert graphs.count == 0
        torch.testing.assert_close(FLUX.call(model), FLUX.call(shallow()))
        assert graphs.count > 0
