"""What is asked for: groups, columns and the bounds they share."""

import json

import pytest
import torch
from toma_lab.bench.scenario import Comparison, Scenario
from toma_lab.bench.scenario import comparisons_of as of_specs
from toma_lab.bench.zoo import build
from toma_lab.columns import ColumnSpec
from toma_lab.parsing import Resolution, split_list

CPU = torch.device("cpu")
BOUNDS = ("lower-bound", "floor")
SETTINGS = {
    "resolutions": (Resolution(64, 64),),
    "batches": (1,),
    "modes": ("eager",),
    "compile": "block",
    "steps": 3,
    "repeats": 2,
}


def comparisons_of(model, methods: str, *settings) -> list[Comparison]:
    return of_specs(model, [ColumnSpec.parse(text) for text in split_list(methods)], *settings)


@pytest.fixture(scope="module")
def sd15():
    return build("sd15", small=True, device=CPU).model


class TestScenario:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"modes": ("eagre",)}, "mode='eagre' is not known.*Did you mean 'eager'"),
            ({"compile": "all"}, "compile='all'"),
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

    @pytest.mark.parametrize(
        ("method", "message"),
        [
            ("deepcache:2", "needs a pipeline"),
            ("first-block-cache:0.1", "mode 'graph' cannot follow"),
            ("steps:9", "9"),
        ],
    )
    def test_methods_that_cannot_be_timed_so(self, method, message):
        model = build("sd15" if "deep" in method else "flux", small=True, device=CPU).model
        (comparison,) = comparisons_of(model, method, [], [], ())
        with pytest.raises(ValueError, match=message):
            Scenario(**SETTINGS | {"modes": ("graph",)}).check(comparison.column)


class TestComparisons:
    def test_bounds_follow_the_method_and_are_shared(self, sd15):
        texts = "toma,toma:select_every=2,toma:reweigh_every=2,toma-tile,toma-stage"
        toma, often, weighed, tile, stage = comparisons_of(sd15, texts, [0.5], [], BOUNDS)
        assert toma.lower_bound == often.lower_bound == weighed.lower_bound != tile.lower_bound
        assert toma.floor == often.floor == tile.floor != stage.floor
        assert [column.name for column in stage.references] == ["lower-bound", "floor"]
        assert stage.floor.key["scope"] == stage.lower_bound.key["scope"] == "stage"

    def test_only_the_bounds_that_are_wanted(self, sd15):
        (comparison,) = comparisons_of(sd15, "toma", [0.5], [], ["floor"])
        assert [column.name for column in comparison.references] == ["floor"]
        with pytest.raises(ValueError, match="bound='ceiling'"):
            comparisons_of(sd15, "toma", [0.5], [], ["ceiling"])

    def test_family_defaults_are_those_of_apply_toma(self):
        model = build("flux", small=True, device=CPU).model
        (comparison,) = comparisons_of(model, "toma", [0.5], [], BOUNDS)
        for column in (comparison.column, *comparison.references):
            assert json.loads(column.key["settings"])["skip_blocks"] == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]

    def test_scopes_and_ratios_multiply(self, sd15):
        columns = [
            comparison.column for comparison in comparisons_of(sd15, "toma", [0.25, 0.5], ["block", "stage"], ())
        ]
        assert [(column.key["scope"], column.key["ratio"]) for column in columns] == [
            ("block", "0.25"),
            ("block", "0.5"),
            ("stage", "0.25"),
            ("stage", "0.5"),
        ]

    def test_other_methods_have_no_bounds_and_no_scopes(self, sd15):
        texts = "steps:2,tomesd,tofu:seed=3,todo,tomesd:cell=(4,4)"
        comparisons = comparisons_of(sd15, texts, [0.5, 0.75, 0.9], ["block", "stage"], BOUNDS)
        assert [(c.column.name, c.column.key["ratio"]) for c in comparisons] == [
            ("steps", ""),
            ("tomesd", "0.5"),
            ("tomesd", "0.75"),
            ("tofu", "0.5"),
            ("tofu", "0.75"),
            ("todo", "0.75"),
            ("tomesd", "0.5"),
            ("tomesd", "0.75"),
            ("tomesd", "0.9"),
        ]
        assert all(not comparison.references for comparison in comparisons)
        assert comparisons[3].column.key["settings"] == '{"seed":3}'

    def test_a_method_that_can_have_none_of_the_ratios(self, sd15):
        with pytest.raises(ValueError, match=r"ratio=0\.5 is not allowed: every n-th row"):
            comparisons_of(sd15, "todo", [0.5], [], BOUNDS)

    def test_planning_leaves_the_model_alone(self, sd15):
        comparisons_of(sd15, "toma", [0.5], [], BOUNDS)
        with pytest.raises(ValueError, match=r"skip_blocks=\(99,\) names block 99"):
            comparisons_of(sd15, "toma:skip_blocks=(99,)", [0.5], [], BOUNDS)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in sd15.modules())
