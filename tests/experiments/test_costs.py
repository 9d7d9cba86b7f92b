"""Gains computed from measured steps: by hand, and empty where nothing was measured."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

from toma_diffusion import ToDoConfig, ToMAConfig, ToMeSDConfig, UsageError
from toma_diffusion.experiments.costs import FILE, MERGED, SKIPPED, StepCost, StepCosts
from toma_diffusion.experiments.shortcuts import parse_shortcut

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FAST = ToMAConfig.from_preset("toma-stage", skip_blocks=())
HALF = StepCost("sdxl", MERGED, "toma", "toma-stage", "stage", "local", ratio=0.5, share=0.7)
PLAN = '{"share": "plan"}'
COSTS = StepCosts(
    "sdxl",
    [
        HALF,
        replace(HALF, preset="other", share=0.1),
        replace(HALF, ratio=0.75, share=0.5),
        replace(HALF, scope="module", assign="global", preset="toma", extras=PLAN, share=0.9),
        replace(HALF, scope="module", assign="global", preset="toma", extras=PLAN, is_hard=True, share=0.8),
        replace(HALF, leaves_grids=True, share=0.95),
        StepCost("sdxl", MERGED, "tomesd", "tomesd", "module", ratio=0.5, share=1.25),
        StepCost("sdxl", SKIPPED, "first-block-cache", share=0.1),
        StepCost("sdxl", SKIPPED, "deepcache, branch 0", share=0.2),
    ],
)


def changed(**changes) -> ToMAConfig:
    return ToMAConfig.from_dict(FAST.to_dict() | changes)


class TestMerging:
    @pytest.mark.parametrize(
        ("config", "expected"),
        [
            (FAST, 1 / 0.7),
            (changed(ratio=0.75), 2),
            (changed(window=(0.5, 1.0)), 20 / (10 + 10 * 0.7)),
            (changed(window=(0.05, 1.0)), 20 / (1 + 19 * 0.7)),
            (changed(select_every=1, reweigh_every=1, selection="random"), 1 / 0.7),
            (changed(min_tokens=512), 1 / 0.95),
            (ToMAConfig.from_preset("toma"), 1 / 0.8),
            (ToMAConfig.from_preset("toma", scale=1000), 1 / 0.9),
            (ToMeSDConfig(ratio=0.5), 0.8),
        ],
    )
    def test_by_hand(self, config, expected):
        assert COSTS.gain(20, preset="toma-stage", config=config) == pytest.approx(expected)

    @pytest.mark.parametrize(
        "config",
        [
            changed(ratio=0.3),
            changed(scope="block"),
            changed(share="plan"),
            changed(unmerge="pseudo-inverse"),
            changed(skip_blocks=(0,)),
            ToDoConfig(),
        ],
    )
    def test_what_was_not_measured_stays_empty(self, config):
        assert COSTS.gain(20, preset="toma-stage", config=config, blocks=14) is None

    def test_rows_of_the_same_preset_are_preferred(self):
        assert COSTS.gain(20, preset="other", config=FAST) == pytest.approx(10)
        assert COSTS.gain(20, preset="third", config=FAST) == pytest.approx(1 / 0.4)  # the median of both

    def test_blocks_of_a_transformer_are_alike(self):
        costs = StepCosts("flux", [replace(HALF, model="flux", merged_blocks=0.8, share=0.6)])
        assert costs.gain(4, config=changed(skip_blocks=(0, 1)), blocks=10) == pytest.approx(1 / 0.6)
        assert costs.gain(4, config=FAST, blocks=10) == pytest.approx(1 / 0.5)
        assert costs.gain(4, config=changed(skip_blocks=(0, 1, 2, 3)), blocks=10) == pytest.approx(1 / 0.7)


class TestShortcuts:
    def test_fewer_steps_alone_and_with_merging(self):
        fewer = (parse_shortcut("steps:16"),)
        assert COSTS.gain(20) == 1
        assert COSTS.gain(20, shortcuts=fewer) == pytest.approx(1.25)
        assert COSTS.gain(20, preset="toma-stage", config=FAST, shortcuts=fewer) == pytest.approx(1.25 / 0.7)

    def test_a_skipped_step_costs_what_stays_of_it(self):
        cache = (parse_shortcut("first-block-cache"),)
        assert COSTS.gain(20, shortcuts=cache, skipped=0.5) == pytest.approx(1 / 0.55)
        assert COSTS.gain(20, shortcuts=cache) == 1
        both = COSTS.gain(20, preset="toma-stage", config=FAST, shortcuts=cache, skipped=0.5)
        assert both == pytest.approx(1 / (0.5 * 0.7 + 0.5 * 0.1))

    def test_deepcache_by_its_branch(self):
        assert COSTS.gain(20, shortcuts=(parse_shortcut("deepcache"),), skipped=0.5) == pytest.approx(1 / 0.6)
        assert COSTS.gain(20, shortcuts=(parse_shortcut("deepcache:branch=3"),), skipped=0.5) is None

    def test_caches_that_run_no_more_than_a_measured_one(self):
        for text, known in (("magcache", True), ("taylorseer:use_lite_mode=True", True), ("taylorseer", False)):
            gain = COSTS.gain(20, shortcuts=(parse_shortcut(text),), skipped=0.5)
            assert (gain == pytest.approx(1 / 0.55)) if known else gain is None

    def test_unknown_where_a_cache_meets_a_window(self):
        late = changed(window=(0.5, 1.0))
        shortcuts = (parse_shortcut("first-block-cache"),)
        assert COSTS.gain(20, preset="toma-stage", config=late, shortcuts=shortcuts, skipped=0.5) is None


class TestFile:
    def test_it_is_made_from_the_rows(self, monkeypatch):
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        assert importlib.import_module("step_costs").as_csv() == FILE.read_text(encoding="utf-8")

    def test_gains_are_near_the_speed_ups_that_were_measured(self):
        costs = StepCosts.load("sdxl")
        for config, expected in ((FAST, 1.409), (ToMAConfig.from_preset("toma-stage"), 1.388)):
            assert costs.gain(10, preset="toma-stage", config=config, blocks=70) == pytest.approx(expected, abs=0.001)
        late = ToMAConfig.from_preset("toma-once", window=(0.5, 1.0))
        assert costs.gain(10, preset="toma-late", config=late) == pytest.approx(1.17, abs=0.02)

    def test_another_model_is_refused(self):
        with pytest.raises(UsageError, match="no measured steps of 'sd15': use one of flux, sdxl"):
            StepCosts.load("sd15")
