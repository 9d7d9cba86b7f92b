"""Which steps are computed: spread by noise levels, for any number of steps."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from diffusers import DDIMScheduler, EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler
from hypothesis import given
from hypothesis import strategies as st

from toma_diffusion import Skip
from toma_diffusion.skip.levels import read_levels
from toma_diffusion.skip.schedule import computed_steps, spread, spread_by_index

SCHEDULERS = {
    "ddim": DDIMScheduler(timestep_spacing="trailing", rescale_betas_zero_snr=True),
    "karras": EulerDiscreteScheduler(use_karras_sigmas=True),
    "flow": FlowMatchEulerDiscreteScheduler(shift=3.0),
    "flow shifted more": FlowMatchEulerDiscreteScheduler(shift=7.0),
}


def levels_of(name: str, steps: int):
    scheduler = SCHEDULERS[name]
    scheduler.set_timesteps(steps)
    return read_levels(scheduler, 0, steps)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize(("steps", "count"), [(20, 12), (20, 8), (20, 6), (8, 6), (8, 5), (50, 20), (4, 3), (28, 10)])
def test_so_many_from_the_first_on(name, steps, count):
    computed = computed_steps(Skip(computed=count), steps, levels_of(name, steps))
    assert len(computed) == count
    assert computed[0] == 0
    assert list(computed) == sorted(set(computed))
    left = 0.25 if name == "karras" else 0.12  # the last steps decide how sharp a picture is; Karras' are very fine
    assert computed[-1] >= steps - max(2, left * steps)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_distances_grow_slowly_in_the_logarithm_of_signal_to_noise(name):
    levels = levels_of(name, 50)
    computed = computed_steps(Skip(computed=10), 50, levels)
    values = [min(levels.log_signal_to_noise[step], 2.0) for step in computed[1:]]
    gaps = [after - before for before, after in pairwise(values)]
    assert max(gaps) < 3 * min(gaps)


def test_with_two_the_other_one_is_in_the_middle():
    levels = levels_of("flow", 20)
    assert 4 < computed_steps(Skip(computed=2), 20, levels)[1] < 16


@given(st.lists(st.floats(-60, 60) | st.sampled_from([-math.inf, math.inf]), min_size=1, max_size=40), st.data())
def test_any_levels_give_a_list(levels, data):
    count = data.draw(st.integers(1, len(levels)))
    for computed in (spread(count, sorted(levels)), spread(count, levels), spread_by_index(count, len(levels))):
        assert len(computed) == count
        assert computed[0] == 0
        assert list(computed) == sorted(set(computed))
        assert computed[-1] < len(levels)


def test_shares_have_a_least_number():
    levels = levels_of("flow", 8)
    assert len(computed_steps(Skip(computed=0.4, fewest=5), 8, levels)) == 5
    assert computed_steps(Skip(computed=0.4, min_steps=9), 8, levels) == tuple(range(8))
