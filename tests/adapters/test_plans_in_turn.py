"""Blocks of one kind that take several plans in turn."""

import pytest
import torch
from observe import CountOperators, Graphs, attention_lengths, compile_blocks, same_picture, state_of
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
        """Its tokens are chosen as if none had been chosen before, but where two of them tie."""
        family = BY_NAME[name]
        model = family.build()
        handle = apply_toma(model, **ROTATING | {"ratio": 0.75, "rotation": 100.0}, skip_blocks=(), scope=scope)
        family.call(model)
        first = [set(slot.plan.positions[0].tolist()) for slot in state_of(model).slots]
        handle.reset()
        family.call(model)
        again = [set(slot.plan.positions[0].tolist()) for slot in state_of(model).slots]
        for before, after in zip(first, again, strict=True):
            assert len(before & after) > 0.8 * len(before)


@pytest.mark.parametrize(("name", "scope", "backend"), [("sdxl", "module", "aot_eager"), ("flux", "block", "eager")])
def test_whole_and_compiled(name, scope, backend):
    family = BY_NAME[name]
    torch.compiler.reset()
    model, eager = (family.build(**family.shallow) for _ in range(2))
    for each in (model, eager):
        apply_toma(each, **ROTATING, selection="strided", skip_blocks=(), scope=scope)
    model.compile(fullgraph=True, backend=backend)
    for seed in range(2):
        same_picture(family.call(model, seed=seed), family.call(eager, seed=seed))
    torch.compiler.reset()


@pytest.mark.parametrize(("name", "count"), [("sdxl", 4), ("flux", 10)])
def test_plans_share_the_graphs_of_compiled_blocks(name, count):
    """As with one plan, but that in Flux the second block that makes one gets its tokens in another layout."""
    family, graphs = BY_NAME[name], Graphs("aot_eager")  # which lays results out in its own way, as inductor does
    torch.compiler.reset()
    model = family.build()
    apply_toma(model, **ROTATING, skip_blocks=(), select_every=4, reweigh_every=2)
    compile_blocks(model, fullgraph=True, backend=graphs)
    inputs = family.inputs()
    with torch.no_grad():
        for _ in range(6):
            model(**inputs)
        assert graphs.count == count
        with torch.compiler.set_stance("fail_on_recompile"):
            for _ in range(6):
                model(**inputs)
    torch.compiler.reset()


class TestCheckpointing:
    """Blocks run once more on the way back: chosen again, rotation would choose others."""

    family = BY_NAME["sd15"]

    def passes(self, model, switch: str) -> tuple[int, list[torch.Tensor]]:
        """Selections made on the way forth and back, and the gradients."""
        getattr(model, f"{switch}_gradient_checkpointing")()
        model.zero_grad()
        with CountOperators() as count:
            model(**self.family.inputs(), return_dict=False)[0].square().sum().backward()
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        return count.calls["facility_location"], gradients

    def test_nothing_is_chosen_on_the_way_back(self):
        model = self.family.build().requires_grad_(True).train()
        apply_toma(model, **ROTATING)
        once, _ = self.passes(model, "disable")
        again, _ = self.passes(model, "enable")
        assert once == again > 0

    def test_gradients_are_the_same(self):
        model = self.family.build().requires_grad_(True).train()
        handle = apply_toma(model, **ROTATING, selection="strided")
        _, expected = self.passes(model, "disable")
        handle.reset()
        for ours, theirs in zip(self.passes(model, "enable")[1], expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


class TestBlocksLeftOut:
    """A plan is made by the first of its blocks that runs, whichever that is in this call."""

    @pytest.mark.parametrize(("num_plans", "left_out"), [(1, [0]), (2, [1]), (2, [0, 1])])
    def test_skip_layer_guidance_may_leave_out_the_first(self, num_plans, left_out):
        family = BY_NAME["sd3"]
        model = family.build()
        apply_toma(model, **ROTATING | {"num_plans": num_plans}, skip_blocks=(), select_every=1)
        inputs = family.inputs() | {"skip_layers": left_out}
        for _ in range(2):  # the schedule is followed in the second step too
            with CountOperators() as counted, torch.no_grad():
                lengths = attention_lengths(lambda: model(**inputs))
            assert counted.calls["facility_location"] == num_plans
            assert {query for query, _ in lengths} <= {32, 32 + 6}  # of 64 image tokens, without and with text

    def test_its_result_is_that_of_a_model_without_the_first(self):
        family = BY_NAME["sd3"]
        model, shorter = family.build(), family.build()
        del shorter.transformer_blocks[0]
        for each in (model, shorter):
            apply_toma(each, **ROTATING | {"num_plans": 1}, selection="strided", skip_blocks=())
        inputs = family.inputs() | {"return_dict": False}
        with torch.no_grad():
            same_picture(model(**inputs, skip_layers=[0])[0], shorter(**inputs)[0])


class TestSummary:
    def test_it_tells(self):
        told = str(apply_toma(BY_NAME["sdxl"].build(), **ROTATING).summary())
        assert "2 plans in turn" in told
        assert "damped by exp(−1)\n" in told
        assert "reweighed every 5 steps, in all steps" in told

    def test_every_plan_costs(self):
        family, costs = BY_NAME["sdxl"], []
        for num_plans in (1, 2, 3):
            model = family.build()
            handle = apply_toma(model, **ROTATING | {"num_plans": num_plans})
            family.call(model)
            costs.append(handle.summary().merged_multiplications)
        assert costs[0] < costs[1]
        assert costs[2] - costs[1] == pytest.approx(costs[1] - costs[0])

    @pytest.mark.parametrize(
        ("scope", "notes"),
        [
            ("module", ["joint takes 2 of the 3 plans: it has no more merged blocks"]),
            (
                "stage",
                [f"{kind} takes 1 of the 3 plans: it has no more runs of blocks" for kind in ("joint", "single")],
            ),
        ],
    )
    def test_plans_that_no_block_takes_are_told(self, scope, notes):
        """Flux has two joint and three single blocks here, and one run of each."""
        model = BY_NAME["flux"].build()
        handle = apply_toma(model, **ROTATING | {"num_plans": 3}, skip_blocks=(), scope=scope)
        assert list(handle.summary().notes) == notes

    def test_rotation_that_does_nothing_is_told(self):
        told = str(apply_toma(BY_NAME["sdxl"].build(), **ROTATING, selection="random").summary())
        assert "rotation=1 without effect" in told
        assert "damped" not in told
