"""Blocks of one kind that take several plans in turn."""

import pytest
import torch
from observe import state_of
from tiny import FAMILIES, SCOPES

from toma_diffusion import apply_toma

ROTATING = {"ratio": 0.5, "num_regions": 4, "num_plans": 2, "rotation": 1.0}
BY_NAME = {family.name: family for family in FAMILIES}


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("name", ["sdxl", "flux"])
class TestModels:
    def test_blocks_take_plans_in_turn(self, name, scope):
        family = BY_NAME[name]
        model = family.build()
        apply_toma(model, **ROTATING | {"rotation": 100.0}, skip_blocks=(), scope=scope)
        family.call(model)
        current = state_of(model).current
        for kind in {slot.kind for slot in state_of(model).slots}:
            mine = [slot.plan for slot in state_of(model).slots if slot.kind == kind]
            assert len(mine) <= 2
            if len(mine) == 2:
                assert not set(mine[0].positions[0].tolist()) & set(mine[1].positions[0].tolist())
        assert len(current) > len(state_of(model).kinds) or scope == "stage"

    def test_the_same_image_again(self, name, scope):
        family = BY_NAME[name]
        model = family.build()
        handle = apply_toma(model, **ROTATING, skip_blocks=(), scope=scope)
        first = family.call(model)
        handle.reset()
        assert torch.equal(family.call(model), first)

    def test_whole_and_compiled(self, name, scope):
        family = BY_NAME[name]
        torch.compiler.reset()
        model, eager = family.build(), family.build()
        for each in (model, eager):
            apply_toma(each, **ROTATING, skip_blocks=(), scope=scope)
        model.compile(fullgraph=True, backend="aot_eager")
        for seed in range(2):
            assert torch.allclose(family.call(model, seed=seed), family.call(eager, seed=seed), atol=1e-5)
        torch.compiler.reset()


def test_summary_tells():
    model = BY_NAME["sdxl"].build()
    told = str(apply_toma(model, **ROTATING).summary())
    assert "2 plans in turn" in told
    assert "damped by exp(−1)" in told
