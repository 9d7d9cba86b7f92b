"""Destinations that rotate: tokens that were not chosen lately come first."""

import pytest
import torch

from toma_diffusion import Action, Grid, MergePlan, ToMAConfig

GRID = Grid(8, 8)
ROTATING = {"ratio": 0.5, "num_regions": 4, "num_plans": 2, "rotation": 1.0}


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, GRID.num_tokens, 12, generator=torch.Generator().manual_seed(seed))


def plans(joint: bool = False, **settings) -> tuple[MergePlan, MergePlan]:
    config = ToMAConfig(**ROTATING | settings)
    first = MergePlan(GRID, config, batch_size=2, joint=joint)
    return first, MergePlan(GRID, config, batch_size=2, joint=joint, turn=1, share_picks_with=first)


def shared(first: MergePlan, second: MergePlan) -> int:
    """How many destinations two plans have in common, in all samples."""
    return sum(
        len(set(one) & set(other))
        for one, other in zip(first.positions.tolist(), second.positions.tolist(), strict=True)
    )


class TestPlans:
    @pytest.mark.parametrize("joint", [False, True])
    def test_the_second_takes_the_tokens_that_the_first_left(self, joint):
        first, second = plans(joint, rotation=100.0)
        first.update(tokens(), Action.SELECT)
        second.update(tokens(), Action.SELECT)
        assert shared(first, second) == 0

    def test_without_rotation_both_choose_the_same(self):
        first, second = plans(rotation=0.0)
        first.update(tokens(), Action.SELECT)
        second.update(tokens(), Action.SELECT)
        assert shared(first, second) > 0.9 * 2 * first.num_destinations  # but where two tokens tie

    def test_so_does_the_next_selection_of_one_plan(self):
        plan, _ = plans(rotation=100.0)
        plan.update(tokens(), Action.SELECT)
        before = plan.positions.clone()
        plan.update(tokens(), Action.REWEIGH)
        assert torch.equal(plan.positions, before)
        plan.update(tokens(), Action.SELECT)
        assert not set(before[0].tolist()) & set(plan.positions[0].tolist())

    def test_over_many_selections_every_token_has_its_turn(self):
        plan, _ = plans(rotation=0.3)
        for _ in range(12):
            plan.update(tokens(), Action.SELECT)
        assert plan.picks.sum() == 12 * 2 * plan.num_destinations
        assert plan.picks.min() >= 3

    @pytest.mark.parametrize("rotation", [1.0, 3.0, 100.0])
    def test_rotation_does_not_stop_in_a_long_run(self, rotation):
        """exp(−rotation · picks) is 0 in float32 after 104 picks at a rotation of 1, and then nothing rotates."""
        plan, _ = plans(rotation=rotation)
        for _ in range(300):
            plan.update(tokens(), Action.SELECT)
        before = plan.picks.clone()
        for _ in range(8):
            plan.update(tokens(), Action.SELECT)
        assert (plan.picks > before).all()
        assert plan.picks.max() - plan.picks.min() <= 8

    def test_of_two_tokens_that_tie_each_has_its_turn(self):
        """In a region of two each covers as much as the other, whatever they are."""
        plan = MergePlan(GRID, ToMAConfig(ratio=0.5, num_regions=32, rotation=0.3), batch_size=2)
        assert plan.regions.size == 2
        for _ in range(6):
            plan.update(tokens(), Action.SELECT)
        assert (plan.picks == 3).all()

    def test_a_new_generation_starts_over(self):
        plan, _ = plans(rotation=100.0)
        plan.update(tokens(), Action.SELECT)
        before = set(plan.positions[0].tolist())
        plan.forget()
        plan.update(tokens(), Action.SELECT)
        assert plan.picks.sum() == 2 * plan.num_destinations
        assert len(before & set(plan.positions[0].tolist())) > 0.8 * len(before)  # some tokens tie

    @pytest.mark.parametrize("selection", ["random", "strided"])
    def test_fixed_choices_differ_by_their_turn(self, selection):
        first, second = plans(selection=selection)
        assert 0 <= shared(first, second) < 2 * first.num_destinations
