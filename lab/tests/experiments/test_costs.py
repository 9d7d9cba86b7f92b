"""Gains computed from measured steps: by hand, and empty where nothing was measured."""

import csv
import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from toma_lab.bench.records import COLUMNS
from toma_lab.experiments.costs import CACHED, FILE, MERGED, StepCost, StepCosts
from toma_lab.experiments.shortcuts import parse_shortcut

from toma_diffusion import ToDoConfig, ToMAConfig, ToMeSDConfig, UsageError

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
        StepCost("sdxl", CACHED, "first-block-cache", share=0.1),
        StepCost("sdxl", CACHED, "deepcache, branch 0", share=0.2),
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


class TestPresets:
    """On a small model, where the last block and a small grid are another part of the whole."""

    COSTS = StepCosts(
        "sdxl",
        [
            replace(HALF, merged_blocks=0.9857, share=0.72),
            replace(HALF, share=0.7),
            replace(HALF, preset="toma-late", scope="block", share=0.74),
        ],
    )

    @pytest.mark.parametrize(("preset", "expected"), [("toma-stage", 1 / 0.72), ("toma-late", 20 / (10 + 10 * 0.74))])
    def test_a_preset_has_the_row_of_its_own_settings(self, preset, expected):
        config = ToMAConfig.from_preset(preset)
        assert self.COSTS.gain(20, preset=preset, config=config, blocks=14) == pytest.approx(expected)
        assert self.COSTS.step_of_preset(preset, config).note == ""

    def test_it_says_which_unrelated_settings_differ(self):
        config = ToMAConfig.from_preset("toma-stage", region_tokens=64, select_every=10, window=(0.5, 1.0))
        assert self.COSTS.gain(20, preset="toma-stage", config=config, blocks=14) == pytest.approx(
            20 / (10 + 10 * 0.72)
        )
        step = self.COSTS.step_of_preset("toma-stage", config)
        assert step.not_counted == {"region_tokens": 64, "select_every": 10}
        assert step.note.endswith("what one of toma-stage costs; not counted: region_tokens=64, select_every=10")

    @pytest.mark.parametrize(
        ("preset", "changes"),
        [
            ("toma-stage", {"skip_blocks": (0, -1)}),
            ("toma-stage", {"scope": "module"}),
            ("toma-stage", {"share": "plan"}),
            ("toma-stage", {"ratio": 0.3}),
            ("toma-stage", {"min_tokens": 512}),
            ("toma-late", {"min_tokens": 600}),
            ("toma-tile", {}),
        ],
    )
    def test_other_settings_have_no_row(self, preset, changes):
        config = ToMAConfig.from_preset(preset, **changes)
        assert self.COSTS.step_of_preset(preset, config) is None
        assert self.COSTS.gain(20, preset=preset, config=config, blocks=14) is None

    def test_other_methods_are_no_presets(self):
        for name in ("tomesd", "toma-stage"):
            assert COSTS.step_of_preset(name, ToMeSDConfig(ratio=0.5)) is None


class TestShortcuts:
    def test_fewer_steps_alone_and_with_merging(self):
        fewer = (parse_shortcut("steps:16"),)
        assert COSTS.gain(20) == 1
        assert COSTS.gain(20, shortcuts=fewer) == pytest.approx(1.25)
        assert COSTS.gain(20, preset="toma-stage", config=FAST, shortcuts=fewer) == pytest.approx(1.25 / 0.7)

    def test_a_step_with_a_cache_costs_what_stays_of_it(self):
        cache = (parse_shortcut("first-block-cache"),)
        assert COSTS.gain(20, shortcuts=cache, cached=0.5) == pytest.approx(1 / 0.55)
        assert COSTS.gain(20, shortcuts=cache) == 1
        both = COSTS.gain(20, preset="toma-stage", config=FAST, shortcuts=cache, cached=0.5)
        assert both == pytest.approx(1 / (0.5 * 0.7 + 0.5 * 0.1))

    def test_deepcache_by_its_branch(self):
        assert COSTS.gain(20, shortcuts=(parse_shortcut("deepcache"),), cached=0.5) == pytest.approx(1 / 0.6)
        assert COSTS.gain(20, shortcuts=(parse_shortcut("deepcache:branch=3"),), cached=0.5) is None

    def test_caches_that_run_no_more_than_a_measured_one(self):
        for text, known in (("magcache", True), ("taylorseer:use_lite_mode=True", True), ("taylorseer", False)):
            gain = COSTS.gain(20, shortcuts=(parse_shortcut(text),), cached=0.5)
            assert (gain == pytest.approx(1 / 0.55)) if known else gain is None

    def test_unknown_where_a_cache_meets_a_window(self):
        late = changed(window=(0.5, 1.0))
        shortcuts = (parse_shortcut("first-block-cache"),)
        assert COSTS.gain(20, preset="toma-stage", config=late, shortcuts=shortcuts, cached=0.5) is None


class TestSkippedSteps:
    """They cost nothing."""

    @pytest.mark.parametrize(
        ("computed", "expected"), [(8, 2.5), (0.25, 4), ((0, 1, 4, 9), 5), (20, 1), (list(range(20)), 1)]
    )
    def test_by_hand(self, computed, expected):
        config = ToMAConfig.from_preset("fast", computed=computed)
        assert COSTS.gain(20, preset="fast", config=config) == pytest.approx(expected)

    def test_with_fewer_steps(self):
        config = ToMAConfig.from_preset("fast", computed=8)
        assert COSTS.gain(20, config=config, shortcuts=(parse_shortcut("steps:16"),)) == pytest.approx(20 / 8)

    def test_too_few_steps_are_all_computed(self):
        config = ToMAConfig.from_preset("fast", computed=8, min_steps=30)
        assert COSTS.gain(20, config=config) == 1

    def test_computed_steps_may_be_merged(self):
        config = changed(skip={"computed": [0, 1, 4, 12]}, window=(0.5, 1.0))
        assert COSTS.gain(20, preset="toma-stage", config=config) == pytest.approx(20 / (3 + 0.7))

    def test_unknown_together_with_a_cache(self):
        config = ToMAConfig.from_preset("fast", computed=8)
        assert COSTS.gain(20, config=config, shortcuts=(parse_shortcut("deepcache"),), cached=0.5) is None


class TestFile:
    def test_it_is_made_from_the_rows(self, monkeypatch):
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        assert importlib.import_module("step_costs").as_csv() == FILE.read_text(encoding="utf-8")

    def test_gains_are_near_the_speed_ups_that_were_measured(self):
        costs = StepCosts.load("sdxl")
        for config, expected in ((FAST, 1.409), (ToMAConfig.from_preset("toma-stage"), 1.383)):
            assert costs.gain(10, preset="toma-stage", config=config, blocks=70) == pytest.approx(expected, abs=0.001)
        for preset, expected in (("toma-stage", 1.383), ("toma-late", 1.156)):  # on the demo model
            config = ToMAConfig.from_preset(preset)
            assert costs.gain(20, preset=preset, config=config, blocks=14) == pytest.approx(expected, abs=0.001)
        late = ToMAConfig.from_preset("toma-once", window=(0.5, 1.0))
        assert costs.gain(10, preset="toma-late", config=late) == pytest.approx(1.17, abs=0.02)

    def test_another_model_is_refused(self):
        with pytest.raises(UsageError, match="no measured steps of 'sd15': use one of flux, sdxl"):
            StepCosts.load("sd15")


LEFT_WHOLE = {"skip_blocks": [0, 1, 2, 3, 4]}
STAGE = LEFT_WHOLE | {"select_every": 1, "reweigh_every": 1}
LATE = STAGE | {"window": [0.5, 1.0], "min_tokens": 512}
SKIP = {"skip": {"computed": 0.4}}
OLDER = {"reuse": {"period": 2}}
ROWS_OF_WAN = (
    ("toma-stage", "stage", 0.5, STAGE, 65, ""),
    ("toma-stage", "stage", 0.5, STAGE | {"region_frames": 1}, 58, ""),
    ("toma-late", "block", 0.5, LATE, 86, ""),
    ("toma-stage", "stage", 0.5, STAGE | SKIP, 30, ""),
    ("fast", "stage", 0, SKIP, 41, ""),
    ("fast", "stage", 0, OLDER, 68, ""),
    ("first-block-cache", "", "", {"threshold": 0.1}, 60, "0.5"),
    ("baseline", "", "", {}, 100, ""),
)
"""Method, scope, ratio, settings, milliseconds a step (100 of the baseline), share of the steps in which a cache
skips blocks. Five of 40 blocks are left whole. Where steps are skipped, the mean says nothing about a merged one."""


class TestClips:
    """Gains of clips, from rows of Wan as `toma bench` writes them."""

    @pytest.fixture
    def costs(self, tmp_path, monkeypatch):
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        step_costs = importlib.import_module("step_costs")
        common = dict.fromkeys(COLUMNS, "") | {"model": "wan-480p", "resolution": "832x480", "frames": "81"}
        common |= {"mode": "compiled", "compile": "block", "steps": "10", "baseline_ms": "100", "commit": "abc"}
        with (tmp_path / "video_h200.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            for method, scope, ratio, settings, milliseconds, hits in ROWS_OF_WAN:
                row = {"method": method, "scope": scope, "assign": "local" if ratio else "", "ratio": str(ratio)}
                row |= {"settings": json.dumps(settings), "step_ms": str(milliseconds), "cache_hits": hits}
                writer.writerow(common | row)
            writer.writerow(common | row | {"frames": "41", "method": "toma-stage", "ratio": "0.5"})
        monkeypatch.setattr(step_costs, "RESULTS", tmp_path)
        (tmp_path / "costs.csv").write_text(step_costs.as_csv())
        return StepCosts.load("wan-480p", tmp_path / "costs.csv")

    def test_every_row_once(self, costs):
        assert [(cost.kind, cost.method, cost.share) for cost in costs.costs] == [
            *(("merged", "toma", share) for share in (0.72, 0.65, 0.58)),
            ("cached", "first-block-cache", 0.2),
        ]

    def test_regions_within_frames_have_their_own_row(self, costs):
        """As if no block were left whole: 35 of 40 save 0.35, so that 40 save 0.4."""
        whole = costs.gain(20, preset="toma-stage", config=FAST, blocks=8)
        assert whole == pytest.approx(1 / 0.6)
        assert costs.gain(20, preset="toma-stage", config=changed(region_frames=16), blocks=8) == whole
        assert costs.gain(20, preset="toma-stage", config=changed(region_frames=1), blocks=8) == pytest.approx(1 / 0.52)
        half = changed(skip_blocks=(0, 1, 2, 3))
        assert costs.gain(20, preset="toma-stage", config=half, blocks=8) == pytest.approx(1 / 0.8)
        assert costs.gain(20, preset="toma-stage", config=changed(ratio=0.75), blocks=8) is None

    def test_a_preset_that_merges_in_half_of_the_steps(self, costs):
        late = ToMAConfig.from_preset("toma-late", skip_blocks=())
        assert costs.gain(20, preset="toma-late", config=late, blocks=8) == pytest.approx(20 / (10 + 10 * 0.68))

    def test_caches(self, costs):
        cache = (parse_shortcut("taylorseer:use_lite_mode=True"),)
        assert costs.gain(20, shortcuts=cache, cached=0.5) == pytest.approx(1 / 0.6)
