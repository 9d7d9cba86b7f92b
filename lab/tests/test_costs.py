"""Gains computed from measured steps: by hand, and empty where nothing was measured."""

import csv
import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from toma_lab.columns import Column, parse_shortcut
from toma_lab.columns.ours import Ours
from toma_lab.costs import CACHED, FILE, MERGED, StepCost, StepCosts
from toma_lab.rows import COLUMNS

from toma_diffusion import Merge, Skip, UsageError
from toma_diffusion.merge.variants import variant
from toma_diffusion.others import ToDo, ToMeSD

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FAST = Merge(skip_blocks=())
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


def changed(**changes) -> Merge:
    return FAST.changed(changes)


def column(merge=None, *shortcuts: str, name: str = "toma-stage", skip=None) -> Column:
    own = None if merge is None and skip is None else Ours(merge=merge, skip=skip)
    return Column(name, own, shortcuts=tuple(map(parse_shortcut, shortcuts)))


class TestMerging:
    @pytest.mark.parametrize(
        ("config", "expected"),
        [
            (FAST, 1 / 0.7),
            (changed(ratio=0.75), 2),
            (changed(window=(0.5, 1.0)), 20 / (10 + 10 * 0.7)),
            (changed(window=(0.05, 1.0)), 20 / (1 + 19 * 0.7)),
            (changed(select_every=10, reweigh_every=5), 1 / 0.7),
            (changed(min_tokens=512), 1 / 0.95),
            (variant("toma"), 1 / 0.8),
            (variant("toma").changed({"scale": 1000}), 1 / 0.9),
            (ToMeSD(ratio=0.5), 0.8),
        ],
    )
    def test_by_hand(self, config, expected):
        assert COSTS.gain(20, column(config)) == pytest.approx(expected)

    @pytest.mark.parametrize(
        "config",
        [
            changed(ratio=0.3),
            changed(scope="block"),
            changed(share_plan=True),
            changed(skip_blocks=(0,)),
            ToDo(),
        ],
    )
    def test_what_was_not_measured_stays_empty(self, config):
        assert COSTS.gain(20, column(config), blocks=14) is None

    def test_rows_of_the_same_preset_are_preferred(self):
        assert COSTS.gain(20, column(FAST, name="other")) == pytest.approx(10)
        assert COSTS.gain(20, column(FAST, name="third")) == pytest.approx(1 / 0.4)  # the median of both

    def test_blocks_of_a_transformer_are_alike(self):
        costs = StepCosts("flux", [replace(HALF, model="flux", merged_blocks=0.8, share=0.6)])
        assert costs.gain(4, column(changed(skip_blocks=(0, 1))), blocks=10) == pytest.approx(1 / 0.6)
        assert costs.gain(4, column(FAST), blocks=10) == pytest.approx(1 / 0.5)
        assert costs.gain(4, column(changed(skip_blocks=(0, 1, 2, 3))), blocks=10) == pytest.approx(1 / 0.7)


class TestVariants:
    """On a small model, where the last block and a small grid are another part of the whole."""

    COSTS = StepCosts(
        "sdxl",
        [
            replace(HALF, merged_blocks=0.9857, share=0.72),
            replace(HALF, share=0.7),
            replace(HALF, preset="toma-late", scope="block", share=0.74),
        ],
    )

    @pytest.mark.parametrize(("name", "expected"), [("toma-stage", 1 / 0.72), ("toma-late", 20 / (10 + 10 * 0.74))])
    def test_a_variant_has_the_row_of_its_own_settings(self, name, expected):
        own = column(variant(name), name=name)
        assert self.COSTS.gain(20, own, blocks=14) == pytest.approx(expected)

    def test_a_preset_that_merges_has_the_row_of_its_variant(self):
        balanced = Column("balanced", Ours("balanced"))
        assert self.COSTS.gain(4, balanced, blocks=14) == pytest.approx(4 / (2 + 2 * 0.74))
        assert self.COSTS.gain(20, balanced, blocks=14) == pytest.approx(20 / 12)

    def test_settings_that_change_little_are_not_counted(self):
        own = column(Merge(region_tokens=64, select_every=10, window=(0.5, 1.0)))
        assert self.COSTS.gain(20, own, blocks=14) == pytest.approx(20 / (10 + 10 * 0.72))

    @pytest.mark.parametrize(
        ("name", "changes"),
        [
            ("toma-stage", {"skip_blocks": (0, -1)}),
            ("toma-stage", {"scope": "module"}),
            ("toma-stage", {"share_plan": True}),
            ("toma-stage", {"ratio": 0.3}),
            ("toma-stage", {"min_tokens": 512}),
            ("toma-late", {"min_tokens": 600}),
            ("toma-tile", {}),
        ],
    )
    def test_other_settings_have_no_row(self, name, changes):
        own = column(variant(name).changed(changes), name=name)
        assert self.COSTS.gain(20, own, blocks=14) is None


class TestShortcuts:
    def test_fewer_steps_alone_and_with_merging(self):
        assert COSTS.gain(20, column()) == 1
        assert COSTS.gain(20, column(None, "steps:16")) == pytest.approx(1.25)
        assert COSTS.gain(20, column(FAST, "steps:16")) == pytest.approx(1.25 / 0.7)

    def test_a_step_with_a_cache_costs_what_stays_of_it(self):
        cache = column(None, "first-block-cache")
        assert COSTS.gain(20, cache, cached=0.5) == pytest.approx(1 / 0.55)
        assert COSTS.gain(20, cache) == 1
        both = COSTS.gain(20, column(FAST, "first-block-cache"), cached=0.5)
        assert both == pytest.approx(1 / (0.5 * 0.7 + 0.5 * 0.1))

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("deepcache", 1 / 0.6),
            ("deepcache:branch=3", None),
            ("magcache", 1 / 0.55),  # they run no more than a measured one
            ("taylorseer:use_lite_mode=True", 1 / 0.55),
            ("taylorseer", None),
        ],
    )
    def test_caches(self, text, expected):
        gain = COSTS.gain(20, column(None, text), cached=0.5)
        assert gain is None if expected is None else gain == pytest.approx(expected)

    def test_unknown_where_a_cache_meets_a_window(self):
        late = column(changed(window=(0.5, 1.0)), "first-block-cache")
        assert COSTS.gain(20, late, cached=0.5) is None


class TestSkippedSteps:
    """They cost nothing."""

    @pytest.mark.parametrize(("computed", "expected"), [(8, 2.5), (0.25, 4), ((0, 1, 4, 9), 5), (20, 1)])
    def test_by_hand(self, computed, expected):
        assert COSTS.gain(20, column(skip=Skip(computed=computed))) == pytest.approx(expected)

    def test_with_fewer_steps(self):
        assert COSTS.gain(20, column(None, "steps:16", skip=Skip(computed=8))) == pytest.approx(20 / 8)

    def test_computed_steps_may_be_merged(self):
        both = column(changed(window=(0.5, 1.0)), skip=Skip(computed=(0, 1, 4, 12)))
        assert COSTS.gain(20, both) == pytest.approx(20 / (3 + 0.7))

    def test_unknown_together_with_a_cache(self):
        assert COSTS.gain(20, column(None, "deepcache", skip=Skip(computed=8)), cached=0.5) is None


class TestFile:
    def test_it_is_made_from_the_rows(self, monkeypatch):
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        assert importlib.import_module("step_costs").as_csv() == FILE.read_text(encoding="utf-8")

    def test_gains_are_near_the_speed_ups_that_were_measured(self):
        costs = StepCosts.load("sdxl")
        for config, expected in ((FAST, 1.409), (Merge(), 1.383)):
            assert costs.gain(10, column(config), blocks=70) == pytest.approx(expected, abs=0.001)
        for name, expected in (("toma-stage", 1.383), ("toma-late", 1.156)):  # on the demo model
            own = column(variant(name), name=name)
            assert costs.gain(20, own, blocks=14) == pytest.approx(expected, abs=0.001)

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
        whole = costs.gain(20, column(FAST), blocks=8)
        assert whole == pytest.approx(1 / 0.6)
        assert costs.gain(20, column(changed(region_frames=16)), blocks=8) == whole
        assert costs.gain(20, column(changed(region_frames=1)), blocks=8) == pytest.approx(1 / 0.52)
        half = changed(skip_blocks=(0, 1, 2, 3))
        assert costs.gain(20, column(half), blocks=8) == pytest.approx(1 / 0.8)
        assert costs.gain(20, column(changed(ratio=0.75)), blocks=8) is None

    def test_a_preset_that_merges_in_half_of_the_steps(self, costs):
        late = column(variant("toma-late").changed({"skip_blocks": ()}), name="toma-late")
        assert costs.gain(20, late, blocks=8) == pytest.approx(20 / (10 + 10 * 0.68))

    def test_caches(self, costs):
        assert costs.gain(20, column(None, "taylorseer:use_lite_mode=True"), cached=0.5) == pytest.approx(1 / 0.6)
