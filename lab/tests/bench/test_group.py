"""What is asked for: groups, columns and the bounds they share."""

import json

import pytest
import torch
from toma_lab.bench.group import BOUNDS, Group
from toma_lab.bench.group import with_bounds as of_specs
from toma_lab.bench.zoo import build
from toma_lab.columns import ColumnSpec
from toma_lab.parsing import Resolution, split_list

CPU = torch.device("cpu")
SETTINGS = {"model": "sd15", "resolution": Resolution(64, 64), "batch": 1, "mode": "eager", "compile": "block"}
SETTINGS |= {"steps": 3, "dtype": "float32"}


def with_bounds(model, methods: str, *settings):
    return of_specs(model, [ColumnSpec.parse(text) for text in split_list(methods)], *settings)


@pytest.fixture(scope="module")
def sd15():
    return build("sd15", small=True, device=CPU).model


class TestGroup:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"mode": "eagre"}, "mode='eagre' is not known.*Did you mean 'eager'"),
            ({"compile": "all"}, "compile='all'"),
            ({"mode": "compiled", "compile": "none"}, "--compile block"),
            ({"steps": 0}, "steps=0"),
            ({"batch": 0}, "batch=0"),
            ({"cache": 0.1, "mode": "graph"}, "--cache 0.1 .*'graph'"),
            ({"cache": 0.1, "mode": "compiled", "compile": "whole"}, "--cache 0.1 .*--compile block"),
        ],
    )
    def test_errors_quote_the_value(self, changes, message):
        with pytest.raises(ValueError, match=message):
            Group(**SETTINGS | changes)

    def test_nothing_is_compiled_in_eager_mode(self):
        assert (Group(**SETTINGS).compile, Group(**SETTINGS | {"mode": "compiled"}).compile) == ("none", "block")

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
        (column,) = with_bounds(model, method, [], ())
        with pytest.raises(ValueError, match=message):
            Group(**SETTINGS | {"mode": "graph"}).check(column)


class TestBounds:
    def test_bounds_follow_the_method_and_are_shared(self, sd15):
        texts = "toma,toma:select_every=2,toma:reweigh_every=2,toma-tile,toma-stage"
        toma, often, weighed, tile, stage = with_bounds(sd15, texts, [0.5], BOUNDS).values()
        assert toma["lower-bound"] == often["lower-bound"] == weighed["lower-bound"] != tile["lower-bound"]
        assert toma["floor"] == often["floor"] == tile["floor"] != stage["floor"]
        assert list(stage) == ["lower-bound", "floor"]
        assert stage["floor"].key["scope"] == stage["lower-bound"].key["scope"] == "stage"

    def test_only_the_bounds_that_are_wanted(self, sd15):
        (bounds,) = with_bounds(sd15, "toma", [0.5], ["floor"]).values()
        assert list(bounds) == ["floor"]
        with pytest.raises(ValueError, match="bound='ceiling'"):
            with_bounds(sd15, "toma", [0.5], ["ceiling"])

    def test_they_leave_the_same_blocks_whole(self):
        model = build("flux", small=True, device=CPU).model
        ((column, bounds),) = with_bounds(model, "toma", [0.5], BOUNDS).items()
        for each in (column, *bounds.values()):
            assert json.loads(each.key["settings"])["skip_blocks"] == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]

    def test_other_methods_have_none(self, sd15):
        columns = with_bounds(sd15, "steps:2,tomesd,tofu:seed=3,todo,fast", [0.5, 0.75], BOUNDS)
        assert [(column.name, column.key["ratio"]) for column in columns] == [
            ("steps", ""),
            ("tomesd", "0.5"),
            ("tomesd", "0.75"),
            ("tofu", "0.5"),
            ("tofu", "0.75"),
            ("todo", "0.75"),
            ("fast", "0"),
        ]
        assert not any(columns.values())
