"""What the summary says about reuse."""

import pytest
import torch
from observe import state_of
from parts import BY_NAME, PARTS, generate, only_reuse
from tiny import SETTINGS

from toma_diffusion import Reuse, apply_toma


def text(handle) -> str:
    return " ".join(str(handle.summary()).split())


@pytest.mark.parametrize(("family", "part"), PARTS, ids=lambda value: getattr(value, "name", value))
def test_parts_steps_and_memory(family, part):
    model = family.build()
    handle = apply_toma(model, only_reuse(start=0, part=part))
    before = handle.summary()
    assert (before.steps, before.memory_bytes) == ((0, 0), 0)
    assert all(name in text(handle) for name in before.parts[:3])
    assert "the last generation" not in text(handle)
    generate(family, model, handle, 5)
    summary = handle.summary()
    assert summary.parts == before.parts == tuple(part.name for part in state_of(model).parts)
    assert summary.steps == (3, 2)
    assert "the last generation computed 3 steps and reused 2; what is remembered takes" in text(handle)
    (memory,) = state_of(model)._memories.values()
    assert summary.memory_bytes == sum(buffer.nbytes for buffer in memory.buffers) > 0


@pytest.mark.parametrize("name", ["sdxl", "flux"])
def test_it_never_claims_a_merge(name):
    family = BY_NAME[name]
    model = family.build()
    handle = apply_toma(model, only_reuse(start=0))
    generate(family, model, handle, 4)
    summary = handle.summary()
    assert summary.kinds == ()
    assert summary.plan_bytes == 0
    assert summary.merged_multiplications is None
    assert "no tokens are merged" in text(handle)
    for claim in ("→", "multiplications", "operators:", "destinations", "ratio 0.5"):
        assert claim not in text(handle)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "every second step reuses; the first 20% of the steps are computed"),
        ({"start": 0}, "every second step reuses; the first step is computed"),
        ({"period": 4, "end": 0.1}, "3 of 4 steps reuse; the first 20% of the steps and the last 10% are computed"),
        ({"period": 2.5}, "on average one step in 2.5 is computed, the others reuse; the first 20% of the steps"),
        (
            {"growth": 1.4, "start": 0},
            "one step in 2 is computed, most of them early, the others reuse; the first step is",
        ),
        ({"min_computed": 5}, "every second step reuses, and at least 5 are computed"),
        ({"order": "auto"}, "last two computed steps where more than 6 are computed"),
        ({"order": 0.25}, "last two computed steps, for 25% of the way"),
        ({"computed": (0, 3)}, "all steps but 0, 3 reuse"),
        ({"min_steps": 5}, "nothing is reused in generations of fewer than 5 steps"),
        ({"order": 0}, "as in the last computed step"),
        ({"order": 1}, "continued in a line from the last two computed steps"),
        ({"part": "deep"}, "everything below the first level"),
        ({"part": "blocks"}, "the changes of runs of blocks"),
        ({"period": 1}, "nothing is reused: period=1"),
    ],
    ids=str,
)
def test_when_and_how(fields, said):
    assert said in text(apply_toma(BY_NAME["sd15"].build(), only_reuse(**fields)))


def test_with_period_1_no_step_is_reused():
    family = BY_NAME["pixart"]
    model = family.build()
    handle = apply_toma(model, only_reuse(period=1))
    generate(family, model, handle, 3)
    assert handle.summary().steps == (3, 0)
    assert handle.summary().memory_bytes == 0


def test_together_with_merging():
    family = BY_NAME["sdxl"]
    model = family.build()
    handle = apply_toma(model, **SETTINGS, scope="stage", reuse=Reuse(start=0, update="destinations"))
    generate(family, model, handle, 4)
    assert "64 → 32" in text(handle)
    assert "merged tokens correct what is reused: destinations" in text(handle)
    assert handle.summary().steps == (2, 2)


def test_switched_off_every_step_is_computed():
    family = BY_NAME["pixart"]
    model = family.build()
    handle = apply_toma(model, only_reuse(start=0))
    handle.enabled = False
    generate(family, model, handle, 4)
    assert handle.summary().steps == (4, 0)
    assert "switched off" in text(handle)


def test_two_passes_take_two_memories():
    family = BY_NAME["flux"]
    model = family.build()
    handle = apply_toma(model, only_reuse(start=0))
    generate(family, model, handle, 2)
    single = handle.summary().memory_bytes
    handle.begin(2)
    for step in range(2):
        handle.step(step)
        latent = torch.randn(2, 64, 4)
        for seed in range(2):
            with torch.no_grad():
                model(**family.inputs(seed=seed) | {"hidden_states": latent})
    assert handle.summary().memory_bytes == 2 * single
    assert handle.summary().steps == (1, 1)


def test_a_model_without_reuse_says_nothing_of_it():
    handle = apply_toma(BY_NAME["sd15"].build(), **SETTINGS)
    assert handle.summary().reuse == handle.summary().parts == ()
    assert "reuse" not in text(handle)
