"""The plans of a denoiser between calls."""

import pytest
from observe import state_of
from tiny import one

from toma_diffusion import Merge, speed_up

FLUX = one("flux")
SETTINGS = {"merge": Merge(num_regions=4, skip_blocks=())}


def addresses(model) -> list[int]:
    return [buffer.data_ptr() for plan in state_of(model).current.values() for buffer in plan.buffers]


@pytest.mark.parametrize("between", ["nothing", "reset", "switched off and on"])
def test_buffers_stay_where_they_are(between):
    """CUDA graphs and compiled code hold their addresses."""
    model = FLUX.build()
    handle = speed_up(model, **SETTINGS)
    FLUX.call(model)
    before = addresses(model)
    if between == "reset":
        handle.reset()
    if between == "switched off and on":
        handle.enabled = False
        handle.enabled = True
    FLUX.call(model, seed=1)
    assert addresses(model) == before


def test_buffers_of_sizes_no_longer_in_use_are_freed():
    model = FLUX.build()
    speed_up(model, **SETTINGS)
    for _ in range(3):
        FLUX.call(model, height=8, wide=8)
        FLUX.call(model, height=12, wide=8)
    assert len(state_of(model)._plans) <= 4
