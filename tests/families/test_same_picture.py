"""The tolerance of `same_picture`: above rounding, below what merging does."""

import pytest
import torch
from observe import same_picture
from tiny import FAMILIES, SCOPES, STRIDED

from toma_diffusion import apply_toma

FLOAT32_ROUNDING = 2.0**-23


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
class TestTolerance:
    def test_rounding_is_the_same_picture(self, family, scope):
        """Every weight moved by about the last bit of float32, which is more than a product in another order does."""
        model, rounded = family.build(), family.build()
        for parameter in rounded.parameters():
            parameter.mul_(1 + FLOAT32_ROUNDING * torch.randn_like(parameter))
        for each in (model, rounded):
            apply_toma(each, **STRIDED, scope=scope)
        assert not torch.equal(family.call(rounded), family.call(model))
        same_picture(family.call(rounded), family.call(model))

    def test_merging_is_another(self, family, scope):
        model = family.build()
        plain = family.call(model)
        apply_toma(model, **STRIDED, scope=scope)
        with pytest.raises(AssertionError):
            same_picture(family.call(model), plain)

    def test_weights_of_another_step_are_another(self, family, scope):
        """So that a plan that was kept by mistake is seen, though strided destinations are always the same."""
        fresh, stale = family.build(), family.build()
        for each in (fresh, stale):
            apply_toma(each, **STRIDED, scope=scope, select_every=9, reweigh_every=9)
        inputs = family.inputs()
        name = "sample" if "sample" in inputs else "hidden_states"
        with torch.no_grad():
            stale(**inputs | {name: family.inputs(seed=1)[name]})
            output = stale(**inputs, return_dict=False)[0]
        with pytest.raises(AssertionError):
            same_picture(output, family.call(fresh))
