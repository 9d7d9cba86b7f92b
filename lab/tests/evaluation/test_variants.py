"""The paper's tables as rows on a model, UNet or transformer."""

import pytest
from tiny import flux_transformer, sdxl_unet
from toma_lab.evaluation.plan import Plan
from toma_lab.evaluation.variants import PAPER, UNMERGED, VariantSpec, mixes_images, paper_variants, variants_of

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
        variants, left_out = paper_variants(sdxl_unet(), table)
        assert left_out == []
        assert {(variant.name, variant.config.ratio) for variant in variants} == {("toma", 0.5)}
        assert [tuple(variant.config.to_dict()[name] for name in FIELDS[table]) for variant in variants] == ROWS[table]

    @pytest.mark.parametrize("table", PAPER)
    def test_every_table_is_a_plan(self, table):
        """All rows differ, in their names as in their folders."""
        variants, _ = paper_variants(sdxl_unet(), table)
        plan = Plan(model="m", prompts=("p",), seeds=(0,), variants=(*UNMERGED, *variants), metrics=(), steps=1)
        assert len({variant.title for variant in plan.variants}) == len(plan.variants)

    def test_all_methods(self):
        variants, left_out = paper_variants(sdxl_unet(), "table9")
        assert left_out == []
        methods = ("toma", "toma-stripe", "toma-tile", "toma-once", "tomesd", "tofu")
        expected = {(name, ratio) for name in methods for ratio in (0.25, 0.5, 0.75)} | {("todo", 0.75)}
        assert {(variant.name, variant.config.ratio) for variant in variants} == expected

    def test_a_row_that_the_model_cannot_have_is_left_out_and_named(self):
        variants, left_out = paper_variants(deep_flux(), "table9")
        assert "todo" not in [variant.name for variant in variants]
        assert len(left_out) == 1
        assert "todo: ToDo cannot be applied here" in left_out[0]

    def test_flux_has_what_flux_wants(self):
        variants, _ = paper_variants(deep_flux(), "table10")
        assert [variant.config.ratio for variant in variants] == [0.25, 0.5, 0.75]
        assert {variant.config.select_every for variant in variants} == {1}

    def test_unknown_tables(self):
        with pytest.raises(ValueError, match="'table5' is not a known table of the paper: use one of table2"):
            paper_variants(sdxl_unet(), "table5")


def test_settings_are_those_that_the_model_gets():
    (variant,) = variants_of(deep_flux(), [VariantSpec.parse("toma-stage:num_regions=4")], [0.5])
    assert variant.config.num_regions == 4
    assert variant.config.select_every == 1
    assert variant.overrides == ("num_regions",)


class TestSpecs:
    def test_merging_shortcuts_or_both(self):
        specs = [VariantSpec.parse(text) for text in ("toma-stage", "steps:14", "toma-stage:scale=1e+3+steps:14")]
        variants = variants_of(sdxl_unet(), specs, [0.25, 0.5])
        assert [variant.title for variant in variants] == [
            *("toma-stage 0.25", "toma-stage 0.5", "14 steps"),
            *("toma-stage 0.25, scale=1000.0 + 14 steps", "toma-stage 0.5, scale=1000.0 + 14 steps"),
        ]

    def test_a_cache_the_model_cannot_have_is_refused(self):
        with pytest.raises(UsageError, match="'first-block-cache' cannot be used with a UNet2DConditionModel"):
            variants_of(sdxl_unet(), [VariantSpec.parse("toma-stage+first-block-cache")], [0.5])

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (
                "toma-stage+toma",
                r"method 'toma-stage\+toma' has several methods of merging, toma-stage and toma: leave one",
            ),
            ("steps:3+steps:4", "several numbers of steps, steps:3 and steps:4"),
            ("magcache+taylorseer", "several caches, magcache and taylorseer"),
            ("fastt", "preset='fastt' is not known"),
        ],
    )
    def test_mistakes_are_named(self, text, message):
        with pytest.raises(UsageError, match=message):
            VariantSpec.parse(text)

    def test_ratios_that_a_method_cannot_have(self):
        assert VariantSpec.parse("todo+steps:4").impossible([0.5, 0.75]) == ["todo cannot have ratio 0.5."]
        (reason,) = VariantSpec.parse("toma-stage:computed=8").impossible([0.5, 0.75])
        assert "here 0.5. Set it there: toma-stage:ratio=0.75." in reason
        assert VariantSpec.parse("steps:4").impossible([0.5]) == []


def test_what_depends_on_the_other_images_of_a_batch():
    unet, flux = sdxl_unet(), deep_flux()
    (merged,) = variants_of(flux, [VariantSpec.parse("toma-stage")], [0.5])
    (cached,) = variants_of(flux, [VariantSpec.parse("first-block-cache")], [])
    (fewer,) = variants_of(flux, [VariantSpec.parse("steps:4")], [])
    assert [mixes_images(flux, each) for each in (*UNMERGED, fewer, merged, cached)] == [False] * 3 + [True] * 2
    assert not mixes_images(unet, variants_of(unet, [VariantSpec.parse("toma-stage")], [0.5])[0])
