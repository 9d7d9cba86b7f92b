"""Which steps are computed: spread by noise levels, for any number of steps."""

from __future__ import annotations

import math
from itertools import pairwise, product
from typing import Any

import pytest
from diffusers import DDIMScheduler, EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler
from hypothesis import given
from hypothesis import strategies as st

from toma_diffusion import Skip
from toma_diffusion.skip.levels import Levels, read_levels
from toma_diffusion.skip.schedule import computed_steps, spread, spread_by_index

SCHEDULERS = {
    "ddim": DDIMScheduler(timestep_spacing="trailing", rescale_betas_zero_snr=True),
    "karras": EulerDiscreteScheduler(use_karras_sigmas=True),
    "flow": FlowMatchEulerDiscreteScheduler(shift=3.0),
    "flow shifted more": FlowMatchEulerDiscreteScheduler(shift=7.0),
}


def levels_of(name: str, steps: int) -> Levels:
    SCHEDULERS[name].set_timesteps(steps)
    levels = read_levels(SCHEDULERS[name], 0, steps)
    assert levels is not None
    return levels


@pytest.mark.parametrize("name", SCHEDULERS)
def test_so_many_from_the_first_to_nearly_the_last_ever_farther_apart(name: str) -> None:
    for steps, count in [(20, 12), (20, 8), (20, 6), (8, 6), (8, 5), (50, 20), (50, 10), (4, 3), (28, 10)]:
        computed = computed_steps(Skip(computed=count), steps, levels_of(name, steps))
        assert len(computed) == count
        assert computed[0] == 0
        assert list(computed) == sorted(set(computed))
        left = 0.25 if name == "karras" else 0.12  # the last steps decide how sharp a picture is; Karras' are very fine
        assert computed[-1] >= steps - max(2, left * steps)
    signal = levels_of(name, 50).log_signal_to_noise
    values = [min(signal[step], 2.0) for step in computed_steps(Skip(computed=10), 50, levels_of(name, 50))[1:]]
    gaps = [after - before for before, after in pairwise(values)]
    assert max(gaps) < 3 * min(gaps)


def test_with_two_the_other_one_is_in_the_middle() -> None:
    assert 4 < computed_steps(Skip(computed=2), 20, levels_of("flow", 20))[1] < 16


def test_without_noise_levels_they_are_close_together_at_first() -> None:
    assert computed_steps(Skip(computed=8), 20) == (0, 1, 2, 3, 6, 9, 13, 18)


def test_as_many_as_there_are_and_lists_of_ones_own() -> None:
    for computed, steps in product((6, 9), (4, 6)):
        assert computed_steps(Skip(computed=computed), steps) == tuple(range(steps))
    assert computed_steps(Skip(computed=(0, 3, 9)), 6) == (0, 3)


@given(st.lists(st.floats(-60, 60) | st.sampled_from([-math.inf, math.inf]), min_size=1, max_size=40), st.data())
def test_any_levels_give_a_list(levels: list[float], data: Any) -> None:
    count = data.draw(st.integers(1, len(levels)))
    for computed in (spread(count, sorted(levels)), spread(count, levels), spread_by_index(count, len(levels))):
        assert len(computed) == count
        assert computed[0] == 0
        assert list(computed) == sorted(set(computed))
        assert computed[-1] < len(levels)
