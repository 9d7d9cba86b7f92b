"""What is tried on a model, and what is not."""

import pytest
from run_folders import FACTS
from tiny import flux_transformer, sdxl_unet
from tiny_clips import clip_pipeline
from toma_lab.folder import write_json
from toma_lab.tune.candidates import CANDIDATES, MORE_OF_CLIPS, Candidates, open_candidates, texts_of
from toma_lab.tune.folder import TuneFolder
from toma_lab.tune.plan import TunePlan

from toma_diffusion import UsageError


def test_what_computes_the_same_steps_is_one_candidate():
    same = ["fast", "fast:computed=8", "fast:computed=40%"]
    others = ["fast:computed=9", "toma-stage:computed=8;ratio=0.5", "fast:computed=(0,1,2,3,6,9,13,18)"]
    titles = [each.title for each in open_candidates(sdxl_unet(), [*same, *others], 20).columns]
    listed = "fast, computed=[0, 1, 2, 3, 6, 9, 13, 18]"  # where a number puts them is for the noise levels to decide
    assert titles == ["fast", "fast, computed=9", "toma-stage 0.5, computed=8", listed]
    few = open_candidates(sdxl_unet(), ["fast", "faster"], 4).columns
    assert [each.title for each in few] == ["fast"]


def test_what_makes_nothing_faster_is_left_out():
    found = open_candidates(sdxl_unet(), ["fast+steps:3", "fast:computed=95%", "fast:computed=(0,1,2,3)", "fast"], 4)
    assert [each.title for each in found.columns] == ["fast"]
    assert found.left_out[0] == "fast+steps:3: nothing is merged or skipped in a generation of 3 steps."
    assert len(found.left_out) == 3


def test_candidates_of_another_version_must_be_searched_again(tmp_path):
    plan = TunePlan(model="", model_class="", prompts=("an apple",), steps=8)
    folder = TuneFolder.start(tmp_path / "run", plan, FACTS)
    write_json(folder.candidates_path, {"columns": [{"name": "fast", "config": None}], "left_out": []})
    with pytest.raises(UsageError, match=r"candidates\.json' is of another version .*search again"):
        Candidates.read(folder)


def test_percentages_are_shares_of_the_steps():
    found = open_candidates(sdxl_unet(), ["steps:70%", "steps:14", "toma-stage+steps:80%@0.25"], 20)
    assert [each.title for each in found.columns] == ["14 steps", "toma-stage 0.25 + 16 steps"]


def test_what_a_model_cannot_have_is_left_out_with_its_reason():
    found = open_candidates(sdxl_unet(), ["steps:50%", "first-block-cache:threshold=0.1", "steps:20", "tomes@0.5"], 20)
    assert [each.title for each in found.columns] == ["10 steps"]
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
        found = open_candidates(model, CANDIDATES[budget], 20).columns
        assert any(each.own is not None for each in found)
        assert any(each.name == "steps" for each in found)
        assert any(each.name in ("deepcache", "first-block-cache") for each in found)


class TestClips:
    @pytest.mark.parametrize("budget", CANDIDATES)
    def test_all_that_is_for_clips_is_possible(self, budget):
        pipe = clip_pipeline()
        assert open_candidates(pipe, MORE_OF_CLIPS, 20).left_out == ()
        titles = {each.title for each in open_candidates(pipe, texts_of(budget, clips=True), 20).columns}
        assert {"toma-stage 0.5", "toma-stage 0.5, region_frames=1", "fast, computed=16", "14 steps"} <= titles
        assert any(title.startswith("first-block-cache") for title in titles)

    def test_a_cache_that_counts_all_steps_is_not_for_two_denoisers(self):
        texts = ["magcache:threshold=0.06", "taylorseer:cache_interval=3;use_lite_mode=True"]
        assert len(open_candidates(clip_pipeline(), texts, 20).columns) == 2
        found = open_candidates(clip_pipeline("two"), texts, 20)
        assert [each.name for each in found.columns] == ["taylorseer"]
        assert "cannot be used with 2 denoisers that take turns" in found.left_out[0]
