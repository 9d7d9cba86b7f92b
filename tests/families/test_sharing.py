"""Which blocks share destinations and weights."""

import pytest
import torch
from observe import CountOperators, state_of
from tiny import FAMILIES, SETTINGS, sdxl_unet
from tiny_pipelines import denoiser, run, sd3_pipeline

from toma_diffusion import apply_toma

UNET = next(family for family in FAMILIES if family.name == "sdxl")
EVERY_STEP = SETTINGS | {"select_every": 1, "reweigh_every": 1}
DESTINATIONS = EVERY_STEP | {"share": "destinations"}


def runs_of(model) -> int:
    return sum(type(module).__name__ == "Transformer2DModel" for module in model.modules())


@pytest.mark.parametrize("scope", ["module", "block", "stage"])
class TestUNet:
    def test_every_run_has_its_weights_and_all_have_the_destinations_of_the_first(self, scope):
        model = sdxl_unet()
        apply_toma(model, **DESTINATIONS, scope=scope)
        with CountOperators() as count:
            UNET.call(model)
        plans = state_of(model).current
        assert len(plans) == runs_of(model) > 1
        assert count.calls["merge_weights"] == runs_of(model)
        assert count.calls["facility_location"] == UNET.kinds
        for slot in state_of(model).slots:
            if slot.first_of_kind is not None:
                assert slot.plan.positions is slot.first_of_kind.plan.positions
                assert not torch.equal(slot.plan.weights, slot.first_of_kind.plan.weights)

    def test_every_run_has_a_plan_of_its_own(self, scope):
        model = sdxl_unet()
        apply_toma(model, **EVERY_STEP, scope=scope)
        with CountOperators() as count:
            UNET.call(model)
        assert count.calls["merge_weights"] == count.calls["facility_location"] == runs_of(model)
        first, second = list(state_of(model).current.values())[:2]
        assert not torch.equal(first.positions, second.positions)

    def test_one_plan_for_a_kind(self, scope):
        model = sdxl_unet()
        apply_toma(model, **EVERY_STEP, scope=scope, share="plan")
        with CountOperators() as count:
            UNET.call(model)
        assert len(state_of(model).current) == UNET.kinds
        assert count.calls["merge_weights"] == count.calls["facility_location"] == UNET.kinds


def test_weights_are_kept_between_steps_that_reuse_them():
    model = sdxl_unet()
    handle = apply_toma(model, **SETTINGS, scope="stage", share="destinations", select_every=4, reweigh_every=2)
    inputs = UNET.inputs()
    with CountOperators() as count, torch.no_grad():
        for step in range(4):
            handle.step(step)
            model(**inputs)
    assert count.calls["facility_location"] == UNET.kinds
    assert count.calls["merge_weights"] == 2 * runs_of(model)


def test_a_first_run_that_is_left_out_does_not_matter():
    """Skip-layer guidance leaves out blocks in an extra pass, which has plans of its own."""
    pipe = sd3_pipeline()
    apply_toma(denoiser(pipe), **DESTINATIONS, scope="block")
    image = run(pipe, skip_guidance_layers=[0], skip_layer_guidance_start=0.0, skip_layer_guidance_stop=1.0)
    assert image.isfinite().all()


def test_memory_of_shared_destinations_is_counted_once():
    model = sdxl_unet()
    handle = apply_toma(model, **DESTINATIONS, scope="stage")
    UNET.call(model)
    plans = state_of(model).current.values()
    buffers = {buffer.data_ptr(): buffer.nbytes for plan in plans for buffer in plan.buffers}
    assert handle.summary().plan_bytes == sum(buffers.values())
