"""What is asked for: methods, cells and the bounds they share."""

import json
import math

import pytest
import torch
from toma_lab.bench.models import build
from toma_lab.bench.scenario import Scenario, compare
from toma_lab.experiments.cells import Cell, MethodSpec
from toma_lab.experiments.parsing import Resolution, split_list

from toma_diffusion import ToMAConfig

CPU = torch.device("cpu")
BOUNDS = ("lower-bound", "floor")
SETTINGS = {
    "methods": (),
    "ratios": (0.5,),
    "scopes": (),
    "resolutions": (Resolution(64, 64),),
    "batches": (1,),
    "modes": ("eager",),
    "compile": "block",
    "steps": 3,
    "repeats": 2,
    "bounds": BOUNDS,
    "pipeline": False,
    "cache": None,
}


class TestMethods:
    @pytest.mark.parametrize(
        ("text", "preset", "overrides"),
        [
            ("toma", "toma", {}),
            ("toma:scale=inf", "toma", {"scale": "inf"}),
            (" toma-stage:num_regions=256; scope=block", "toma-stage", {"num_regions": 256, "scope": "block"}),
            ("toma:sites=(attn,ff);window=(0.2,1.0)", "toma", {"sites": ("attn", "ff"), "window": (0.2, 1.0)}),
            ("toma:skip_blocks=(3,)", "toma", {"skip_blocks": (3,)}),
            ("toma:scale=1e2", "toma", {"scale": 100.0}),
            ("tomesd", "tomesd", {}),
            ("tomesd:cell=(3,3);random=False", "tomesd", {"cell": (3, 3), "random": False}),
            ("tofu:prune_share=0.25", "tofu", {"prune_share": 0.25}),
            ("todo:deeper_factors=(2,)", "todo", {"deeper_factors": (2,)}),
        ],
    )
    def test_parsing(self, text, preset, overrides):
        assert MethodSpec.parse(text) == MethodSpec(preset, tuple(overrides.items()))

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("tomas", "preset='tomas' is not known.*Did you mean 'toma'"),
            ("toma:scala=3", "'scala' is not a field of ToMAConfig.*Did you mean 'scale'"),
            ("toma:scope=everywhere", "scope='everywhere' is not known"),
            ("toma:num_regions=2.5", "num_regions=2.5 is not allowed"),
            ("toma:scale", "'scale' is not a setting"),
            ("toma:ratio=0.3", "an option of its own"),
            ("tomesd:scope=block", "'scope' is not a field of ToMeSDConfig"),
            ("tomesb", "preset='tomesb' is not known.*Did you mean 'tomesd'"),
        ],
    )
    def test_errors_quote_the_value(self, text, message):
        with pytest.raises(ValueError, match=message):
            MethodSpec.parse(text)

    def test_commas_in_parentheses_do_not_separate(self):
        assert split_list("toma, toma-stage:skip_blocks=(1,2);scale=2,,x") == [
            "toma",
            "toma-stage:skip_blocks=(1,2);scale=2",
            "x",
        ]


class TestResolution:
    @pytest.mark.parametrize(("text", "sides"), [("64", (64, 64)), ("128x64", (128, 64))])
    def test_parsing(self, text, sides):
        assert Resolution.parse(text, 16) == Resolution(*sides)

    @pytest.mark.parametrize("text", ["72", "64x", "64x64x64", "big", "0", "-64", ""])
    def test_errors_quote_the_value(self, text):
        with pytest.raises(ValueError, match=f"'{text}'.*multiples of 16"):
            Resolution.parse(text, 16)


class TestScenario:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"modes": ("eagre",)}, "'eagre'"),
            ({"compile": "all"}, "'all'"),
            ({"modes": ("compiled",), "compile": "none"}, "--compile block"),
            ({"steps": 0}, "steps=0"),
            ({"repeats": -1}, "repeats=-1"),
            ({"batches": (2, 0)}, "batch=0"),
            ({"cache": 0.1, "modes": ("eager", "graph")}, "--cache 0.1 .*'graph'"),
            ({"cache": 0.1, "modes": ("compiled",), "compile": "whole"}, "--cache 0.1 .*--compile block"),
        ],
    )
    def test_errors_quote_the_value(self, changes, message):
        with pytest.raises(ValueError, match=message):
            Scenario(**SETTINGS | changes)

    def test_groups(self):
        scenario = Scenario(**SETTINGS | {"batches": (1, 2), "modes": ("eager", "compiled")})
        groups = scenario.groups("sdxl", "float16")
        assert [(group.batch, group.mode, group.compile) for group in groups] == [
            (1, "eager", "none"),
            (1, "compiled", "block"),
            (2, "eager", "none"),
            (2, "compiled", "block"),
        ]


class TestCells:
    def test_settings_are_what_differs_and_what_was_set(self):
        config = ToMAConfig.from_preset("toma", ratio=0.25, scale=math.inf, num_regions=64, scope="block")
        cell = Cell("toma", config, ("scale", "num_regions", "scope"))
        assert cell.settings == '{"distance_weight":0.0,"num_regions":64,"scale":"inf","share":"plan"}'
        assert cell.key["scope"], cell.key["ratio"] == ("block", "0.25")

    def test_bounds_follow_the_method_and_are_shared(self):
        model = build("sd15", small=True, device=CPU).model
        texts = ("toma", "toma:select_every=2", "toma:reweigh_every=2", "toma-tile", "toma-stage")
        methods = [MethodSpec.parse(text) for text in texts]
        toma, often, weighed, tile, fast = compare(model, methods, [0.5], [], bounds=BOUNDS)
        assert toma.lower_bound == often.lower_bound == weighed.lower_bound != tile.lower_bound
        assert toma.floor == often.floor == tile.floor != fast.floor
        assert toma.lower_bound.config == ToMAConfig.from_preset("toma", selection="none")
        assert fast.lower_bound.config == ToMAConfig.from_preset(
            "toma-stage", selection="none", select_every=10, reweigh_every=5
        )
        assert fast.floor.config.selection == "slice"
        assert fast.floor.config.scope == "stage"

    def test_family_defaults_are_those_of_apply_toma(self):
        model = build("flux", small=True, device=CPU).model
        (comparison,) = compare(model, [MethodSpec.parse("toma")], [0.5], [], bounds=BOUNDS)
        skipped = (0, 1, 2, 3, 4, 6, 7, 8, 9, 10)
        assert comparison.cell.config.select_every == 1
        for cell in (comparison.cell, *comparison.references):
            assert cell.config.skip_blocks == skipped
            assert json.loads(cell.settings)["skip_blocks"] == list(skipped)

    def test_scopes_and_ratios_multiply(self):
        model = build("sd15", small=True, device=CPU).model
        cells = [c.cell for c in compare(model, [MethodSpec("toma")], [0.25, 0.5], ["block", "stage"], bounds=())]
        assert [(cell.config.scope, cell.config.ratio) for cell in cells] == [
            ("block", 0.25),
            ("block", 0.5),
            ("stage", 0.25),
            ("stage", 0.5),
        ]

    def test_other_methods_have_no_bounds_and_no_scopes(self):
        model = build("sd15", small=True, device=CPU).model
        methods = [MethodSpec.parse(text) for text in ("tomesd", "tofu:seed=3", "todo", "tomesd:cell=(4,4)")]
        comparisons = compare(model, methods, [0.5, 0.75, 0.9], ["block", "stage"], bounds=BOUNDS)
        assert [(c.cell.method, c.cell.config.ratio) for c in comparisons] == [
            ("tomesd", 0.5),
            ("tomesd", 0.75),
            ("tofu", 0.5),
            ("tofu", 0.75),
            ("todo", 0.75),
            ("tomesd", 0.5),
            ("tomesd", 0.75),
            ("tomesd", 0.9),
        ]
        assert all(not c.references for c in comparisons)
        keys = [c.cell.key for c in comparisons]
        assert all((key["scope"], key["assign"]) == ("module", "") for key in keys)
        assert keys[2]["settings"] == '{"seed":3}'
        assert keys[0]["settings"] == "{}"

    def test_a_method_that_can_have_none_of_the_ratios(self):
        model = build("sd15", small=True, device=CPU).model
        with pytest.raises(ValueError, match=r"ratio=0\.5 is not allowed: every n-th row"):
            compare(model, [MethodSpec.parse("todo")], [0.5], [], bounds=BOUNDS)

    def test_planning_leaves_the_model_alone(self):
        model = build("sd15", small=True, device=CPU).model
        compare(model, [MethodSpec("toma")], [0.5], [], bounds=BOUNDS)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())

    def test_what_apply_toma_refuses_is_refused(self):
        model = build("sd15", small=True, device=CPU).model
        with pytest.raises(ValueError, match=r"skip_blocks=\(99,\) names block 99"):
            compare(model, [MethodSpec.parse("toma:skip_blocks=(99,)")], [0.5], [], bounds=BOUNDS)
