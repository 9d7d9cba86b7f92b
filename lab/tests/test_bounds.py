"""The bounds of ToMA's time, and the other choices in the paper's tables."""

import math

import pytest
import torch
from observe import CountOperators
from tiny import one, sd15_unet
from toma_lab.bounds import LeastSquares, Projection, Random, Replaced, ReplacedPlan, Slice, Strided

from toma_diffusion import speed_up
from toma_diffusion.merge import Action, Grid, MergePlan
from toma_diffusion.others import METHODS

GRID = Grid(8, 8)
SETTINGS = {"num_regions": 4, "ratio": 0.75}
every_scale = pytest.mark.parametrize("scale", [10.0, math.inf])


def selected(config: Replaced, tokens: torch.Tensor) -> ReplacedPlan:
    plan = ReplacedPlan(GRID, config, batch_size=len(tokens))
    plan.update(tokens, Action.SELECT)
    return plan


@every_scale
@pytest.mark.parametrize("settings", [Random, Strided, Projection])
def test_fixed_destinations_depend_on_nothing_and_survive_a_new_generation(settings, scale):
    first, second = (selected(settings(scale=scale, **SETTINGS), torch.randn(2, 64, 8)) for _ in range(2))
    assert torch.equal(first.positions, second.positions)
    assert (first.positions.unflatten(1, (4, 4)).sort().values.diff() > 0).all()
    before = first.positions.clone()
    first.forget()
    first.update(torch.randn(2, 64, 8), Action.SELECT)
    assert torch.equal(first.positions, before)


def test_the_users_random_state_is_left_whole():
    before = torch.get_rng_state()
    for settings in (Random, Projection):
        ReplacedPlan(GRID, settings(**SETTINGS), batch_size=1)
    assert torch.equal(torch.get_rng_state(), before)


@every_scale
def test_a_projection_computes_nothing_but_merges(scale):
    plan = ReplacedPlan(GRID, Projection(scale=scale, **SETTINGS), batch_size=2)
    weights = plan.weights.clone()
    with CountOperators() as count:
        plan.update(torch.randn(2, 64, 8), Action.SELECT)
        merged = plan.merge(torch.randn(2, 64, 8))
        plan.unmerge(merged)
    assert count.calls == {"merge": 1, "unmerge": 1}
    assert torch.equal(plan.weights, weights)
    torch.testing.assert_close(weights.sum(dim=-2), torch.ones(8, 16))
    assert (weights.sum(dim=-1) > 0).all()
    assert plan.backends.keys() == {"merging", "unmerging"}


def test_a_slice_takes_the_first_tokens_and_adds_nothing_to_the_others():
    tokens, residual = torch.randn(2, 2, 64, 8)
    plan = selected(Slice(**SETTINGS), tokens)
    assert torch.equal(plan.merge(tokens), tokens[:, :16])
    result = plan.unmerge(plan.merge(tokens), residual)
    assert torch.equal(result[:, :16], residual[:, :16] + tokens[:, :16])
    assert torch.equal(result[:, 16:], residual[:, 16:])
    assert torch.equal(plan.gather(torch.arange(64)), torch.arange(16).expand(2, -1))
    assert plan.num_bytes < 1024


def test_the_pseudo_inverse_gives_back_what_was_merged():
    """M M⁺ = 1: merging what was spread back changes nothing. With Aᵀ it does."""
    tokens, residual = torch.randn(2, 2, 64, 32)
    merged = torch.randn(2, 16, 8)
    ours = selected(LeastSquares(scale=10.0, **SETTINGS), tokens)
    transposed = selected(Replaced(scale=10.0, **SETTINGS), tokens)
    torch.testing.assert_close(ours.merge(ours.unmerge(merged)), merged, rtol=1e-3, atol=1e-3)
    assert (transposed.merge(transposed.unmerge(merged)) - merged).abs().max() > 0.1
    torch.testing.assert_close(ours.unmerge(merged, residual[:, :, :8]), residual[:, :, :8] + ours.unmerge(merged))


@every_scale
def test_with_nothing_replaced_it_is_toma(scale):
    tokens, config = torch.randn(2, 64, 8), Replaced(scale=scale, **SETTINGS)
    toma = MergePlan(GRID, config, batch_size=2)
    toma.update(tokens, Action.SELECT)
    plan = selected(config, tokens)
    assert torch.equal(plan.merge(tokens), toma.merge(tokens))
    assert plan.multiplications(64) == toma.multiplications(64)


def test_what_is_not_computed_costs_nothing():
    def cost(settings):
        return ReplacedPlan(GRID, settings(**SETTINGS), batch_size=1).multiplications(64)

    whole, strided, projection = cost(Replaced), cost(Strided), cost(Projection)
    assert whole.selection > 0 == strided.selection == projection.selection
    assert whole.weights == strided.weights > 0 == projection.weights
    assert whole.reduced == strided.reduced == projection.reduced


@pytest.mark.parametrize("name", ["bound-projection", "bound-slice", "random", "strided", "pseudo-inverse"])
def test_they_are_methods(name):
    family, model = one("sd15"), sd15_unet()
    before = family.call(model)
    config = METHODS[name](scope="module", **SETTINGS)
    with speed_up(model, merge=config) as handle:
        assert not torch.equal(family.call(model), before)
        assert f"selection {config.selection}, unmerge {config.unmerge}" in str(handle.summary())
        assert handle.summary().merge.config.to_dict()["selection"] == config.selection
    assert torch.equal(family.call(model), before)


def test_wrong_values():
    with pytest.raises(ValueError, match="selection='best' is not known"):
        Replaced(selection="best")
    with pytest.raises(ValueError, match="unmerge='inverse' is not known"):
        Replaced(unmerge="inverse")
