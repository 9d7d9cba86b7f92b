"""What is tried on a model, and what is not."""

import pytest
from tiny import flux_transformer, sdxl_unet

from toma_diffusion import UsageError
from toma_diffusion.tune.candidates import CANDIDATES, open_candidates


def test_percentages_are_shares_of_the_steps():
    found = open_candidates(sdxl_unet(), ["steps:70%", "steps:14", "toma-stage+steps:80%@0.25"], 20)
    assert [each.title for each in found.variants] == ["14 steps", "toma-stage 0.25 + 16 steps"]


def test_what_a_model_cannot_have_is_left_out_with_its_reason():
    found = open_candidates(sdxl_unet(), ["steps:50%", "first-block-cache:threshold=0.1", "steps:20", "tomes@0.5"], 20)
    assert [each.title for each in found.variants] == ["10 steps"]
    cache, steps, unknown = found.left_out
    assert cache.startswith("first-block-cache:threshold=0.1: ")
    assert "cannot be used with a UNet2DConditionModel" in cache
    assert "is not fewer than the 20 steps" in steps
    assert "'tomes' is not known" in unknown


def test_nothing_left_is_an_error():
    with pytest.raises(UsageError, match="no candidate is possible on this UNet2DConditionModel"):
        open_candidates(sdxl_unet(), ["magcache:threshold=0.1"], 20)


def test_a_ratio_must_be_a_number():
    found = open_candidates(sdxl_unet(), ["steps:50%", "toma-stage@half"], 20)
    assert found.left_out == ("toma-stage@half: 'toma-stage@half': the ratio 'half' is not a number between 0 and 1.",)


@pytest.mark.parametrize("budget", CANDIDATES)
def test_every_kind_of_model_has_merging_caches_and_fewer_steps(budget):
    pytest.importorskip("DeepCache")
    for model in (sdxl_unet(), flux_transformer(num_layers=6, num_single_layers=6)):
        found = open_candidates(model, CANDIDATES[budget], 20).variants
        assert any(each.config is not None for each in found)
        assert any(each.name == "steps" for each in found)
        assert any(each.name in ("deepcache", "first-block-cache") for each in found)
