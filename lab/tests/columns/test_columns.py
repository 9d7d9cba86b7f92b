"""The paper's tables as rows on a model, UNet or transformer."""

import pytest
from tiny import flux_transformer, sdxl_unet
from toma_lab.columns import UNCHANGED, ColumnSpec, columns_of
from toma_lab.columns.paper import PAPER, paper_columns
from toma_lab.evaluate import EvalPlan

from toma_diffusion import UsageError

FIELDS = {
    "table2": ("selection", "region"),
    "table3": ("num_regions", "select_every", "reweigh_every", "assign"),
    "table6": ("unmerge", "select_every", "reweigh_every", "assign"),
    "table7": ("select_every", "reweigh_every"),
}
ROWS = {
    "table2": [
        ("random", "global"),
        ("facility-location", "global"),
        ("facility-location", "stripe"),
        ("facility-location", "tile"),
    ],
    "table3": [(count, 1, 1, "global") for count in (4, 16, 64, 256)],
    "table6": [("transpose", 1, 1, "global"), ("pseudo-inverse", 1, 1, "global")],
    "table7": [(1, 1), (10, 1), (10, 5), (10, 10)],
}


def deep_flux():
    """More than the five blocks of either kind that the paper leaves alone."""
    return flux_transformer(num_layers=6, num_single_layers=6)


class TestPaper:
    @pytest.mark.parametrize("table", ROWS)
    def test_ablations_are_at_one_half(self, table):
        columns, left_out = paper_columns(sdxl_unet(), table)
        assert left_out == []
        assert {(column.name, column.own.merge.ratio) for column in columns} == {("toma", 0.5)}
        assert [tuple(column.own.value(name) for name in FIELDS[table]) for column in columns] == ROWS[table]

    @pytest.mark.parametrize("table", PAPER)
    def test_every_table_is_a_plan(self, table):
        """All rows differ, in their names as in their folders."""
        columns, _ = paper_columns(sdxl_unet(), table)
        plan = EvalPlan(model="m", prompts=("p",), seeds=(0,), columns=(*UNCHANGED, *columns), steps=1)
        assert len({column.title for column in plan.columns}) == len(plan.columns)

    def test_all_methods(self):
        columns, left_out = paper_columns(sdxl_unet(), "table9")
        assert left_out == []
        methods = ("toma", "toma-stripe", "toma-tile", "toma-once", "tomesd", "tofu")
        expected = {(name, ratio) for name in methods for ratio in (0.25, 0.5, 0.75)} | {("todo", 0.75)}
        assert {(column.name, column.own.merge.ratio) for column in columns} == expected

    def test_a_row_that_the_model_cannot_have_is_left_out_and_named(self):
        columns, left_out = paper_columns(deep_flux(), "table9")
        assert "todo" not in [column.name for column in columns]
        assert len(left_out) == 1
        assert "todo: ToDo cannot be applied here" in left_out[0]

    def test_flux_has_what_flux_wants(self):
        columns, _ = paper_columns(deep_flux(), "table10")
        assert [column.own.merge.ratio for column in columns] == [0.25, 0.5, 0.75]
        assert {column.own.merge.select_every for column in columns} == {1}

    def test_unknown_tables(self):
        with pytest.raises(ValueError, match="'table5' is not a known table of the paper: use one of table2"):
            paper_columns(sdxl_unet(), "table5")


def test_settings_are_those_that_the_model_gets():
    (column,) = columns_of(deep_flux(), [ColumnSpec.parse("toma-stage:num_regions=4")], [0.5])
    assert column.own.merge.num_regions == 4
    assert column.own.merge.select_every == 1
    assert column.overrides == ("num_regions",)


class TestSpecs:
    def test_merging_shortcuts_or_both(self):
        specs = [ColumnSpec.parse(text) for text in ("toma-stage", "steps:14", "toma-stage:scale=1e+3+steps:14")]
        columns = columns_of(sdxl_unet(), specs, [0.25, 0.5])
        assert [column.title for column in columns] == [
            *("toma-stage 0.25", "toma-stage 0.5", "14 steps"),
            *("toma-stage 0.25, scale=1000.0 + 14 steps", "toma-stage 0.5, scale=1000.0 + 14 steps"),
        ]

    def test_a_cache_the_model_cannot_have_is_refused(self):
        with pytest.raises(UsageError, match="'first-block-cache' cannot be used with a UNet2DConditionModel"):
            columns_of(sdxl_unet(), [ColumnSpec.parse("toma-stage+first-block-cache")], [0.5])

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (
                "toma-stage+toma",
                r"method 'toma-stage\+toma' has several methods of merging, toma-stage and toma: leave one",
            ),
            ("steps:3+steps:4", "several numbers of steps, steps:3 and steps:4"),
            ("magcache+taylorseer", "several caches, magcache and taylorseer"),
            ("fastt", "method 'fastt' is not known: .*Did you mean 'fast'"),
        ],
    )
    def test_mistakes_are_named(self, text, message):
        with pytest.raises(UsageError, match=message):
            ColumnSpec.parse(text)

    def test_ratios_that_a_method_cannot_have(self):
        assert ColumnSpec.parse("todo+steps:4").impossible([0.5, 0.75]) == ["todo cannot have ratio 0.5."]
        assert ColumnSpec.parse("toma-stage:computed=8").impossible([0.5, 0.75]) == []  # it has its own
        assert ColumnSpec.parse("fast").impossible([0.5]) == []
        assert ColumnSpec.parse("steps:4").impossible([0.5]) == []


def test_what_depends_on_the_other_images_of_a_batch():
    unet, flux = sdxl_unet(), deep_flux()
    (merged,) = columns_of(flux, [ColumnSpec.parse("toma-stage")], [0.5])
    (cached,) = columns_of(flux, [ColumnSpec.parse("first-block-cache")], [])
    (fewer,) = columns_of(flux, [ColumnSpec.parse("steps:4")], [])
    assert [each.mixes_images(flux) for each in (*UNCHANGED, fewer, merged, cached)] == [False] * 3 + [True] * 2
    assert not columns_of(unet, [ColumnSpec.parse("toma-stage")], [0.5])[0].mixes_images(unet)
