"""The settings that a user writes: wrong values are quoted, and nothing is silently without effect."""

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toma_diffusion import Merge, Skip, UsageError
from toma_diffusion.merge.base import SITES
from toma_diffusion.merge.config import ASSIGNMENTS, REGIONS, SCOPES
from toma_diffusion.merge.variants import VARIANTS, variant
from toma_diffusion.others import METHODS
from toma_diffusion.presets import PRESETS, Chosen, Settings, named

WRONG = [
    ("ratio", 1.0),
    ("ratio", -0.1),
    ("ratio", float("nan")),
    ("ratio", "0.5"),
    ("ratio", True),
    ("ratio", None),
    ("scope", "layer"),
    ("window", (0.5, 0.5)),
    ("window", (0.8, 0.2)),
    ("window", (0.0, 1.5)),
    ("window", (0.0,)),
    ("window", 0.5),
    ("skip_blocks", 3),
    ("skip_blocks", (1.5,)),
    ("sites", ()),
    ("sites", "attn"),
    ("sites", ("attn", "mlp")),
    ("min_tokens", -1),
    ("min_tokens", 0.5),
    ("region", "tiles"),
    ("region", None),
    ("region_tokens", 0),
    ("region_tokens", 1.5),
    ("selection_tokens", 0),
    ("num_regions", 0),
    ("num_regions", 64.0),
    ("num_regions", True),
    ("region_frames", 0),
    ("distance_weight", -0.1),
    ("distance_weight", math.inf),
    ("assign", "block"),
    ("scale", 0.0),
    ("scale", "infinite"),
    ("scale", -float("inf")),
    ("scale", float("nan")),
    ("select_every", 0),
    ("reweigh_every", -5),
    ("share_plan", "yes"),
    ("guidance_parts", 0),
    ("guidance_parts", "two"),
    ("guidance_parts", 1.5),
    ("backend", "cuda"),
]

# Every field of Merge with a value that has no effect beside the others, and what to say of it. Fields that always have
# one are named with None.
WITHOUT_EFFECT = {
    "ratio": ({"ratio": 0}, "ratio=0 merges nothing"),
    "scope": None,
    "window": None,
    "skip_blocks": None,  # tests/families: naming all blocks raises when it is applied
    "sites": ({"sites": ("attn",), "scope": "block"}, "scope 'module'"),
    "min_tokens": None,  # above all grids it warns at the first call
    "region": None,
    "region_tokens": ({"region_tokens": 64, "num_regions": 4}, "without num_regions"),
    "selection_tokens": ({"selection_tokens": 64, "num_regions": 4}, "without num_regions"),
    "num_regions": ({"num_regions": 4, "region": "global"}, "is one"),
    "region_frames": ({"region_frames": 2, "region": "stripe"}, "for tiles"),
    "distance_weight": None,
    "assign": None,
    "scale": None,
    "select_every": None,
    "reweigh_every": ({"reweigh_every": 5}, "below select_every=1"),
    "share_plan": None,
    "guidance_parts": None,
    "backend": None,
}


class TestMerge:
    @pytest.mark.parametrize(("field", "value"), WRONG)
    def test_wrong_value_is_quoted(self, field, value):
        with pytest.raises(UsageError, match=field) as error:
            Merge(**{field: value, **({"scope": "module"} if field == "sites" else {})})
        offender = value[-1] if field in ("sites", "skip_blocks") and isinstance(value, tuple) and value else value
        assert repr(offender) in str(error.value) or repr(value) in str(error.value)

    def test_every_field_has_a_wrong_value_here(self):
        assert {field for field, _ in WRONG} == set(Merge.names())

    @pytest.mark.parametrize(("field", "allowed"), [("region", REGIONS), ("assign", ASSIGNMENTS), ("scope", SCOPES)])
    def test_wrong_name_lists_what_is_allowed(self, field, allowed):
        with pytest.raises(UsageError, match="use one of") as error:
            Merge(**{field: "nonsense"})
        assert all(repr(name) in str(error.value) for name in allowed)

    def test_near_miss_is_suggested(self):
        with pytest.raises(UsageError, match="Did you mean 'tile'"):
            Merge(region="tiles")

    @pytest.mark.parametrize("field", Merge.names())
    def test_what_has_no_effect_is_refused(self, field):
        case = WITHOUT_EFFECT[field]
        if case is None:
            return
        settings, message = case
        with pytest.raises(UsageError, match=message):
            Merge(**settings)

    def test_values_are_normalised(self):
        merge = Merge(ratio=np.float32(0.5), num_regions=np.int64(16), skip_blocks=[3, 1, 3], window=[0, 1])
        assert (merge.ratio, merge.num_regions) == (0.5, 16)
        assert (merge.skip_blocks, merge.window) == ((1, 3), (0.0, 1.0))
        assert Merge(scope="module", sites=["ff", "attn"]).sites == ("attn", "ff")
        assert hash(merge) == hash(dataclasses.replace(merge))

    @given(
        st.builds(
            Merge,
            ratio=st.floats(0.001, 0.999),
            region=st.sampled_from(("tile", "stripe")),
            num_regions=st.integers(1, 4096) | st.none(),
            assign=st.sampled_from(ASSIGNMENTS),
            scale=st.floats(1e-3, 1e6) | st.just(math.inf),
            scope=st.just("module"),
            sites=st.lists(st.sampled_from(SITES), min_size=1).map(tuple) | st.none(),
            select_every=st.integers(5, 100),
            reweigh_every=st.integers(1, 5) | st.none(),
            window=st.tuples(st.floats(0, 0.49), st.floats(0.5, 1)),
            skip_blocks=st.lists(st.integers(0, 60)).map(tuple) | st.none(),
        )
    )
    def test_goes_through_json(self, merge):
        assert Merge.from_dict(json.loads(json.dumps(merge.to_dict()))) == merge

    def test_unknown_field_is_named(self):
        with pytest.raises(UsageError, match=r"'ration' is not a field.*Did you mean 'ratio'"):
            Merge.from_dict({"ration": 0.5})
        with pytest.raises(UsageError, match="must be a mapping"):
            Merge.from_dict("ratio")


class TestSkip:
    @pytest.mark.parametrize("computed", [0, -1, 0.0, 1.0, 1.5, True, "8", None, (), (1, 2), (0, -1), (0, 1.5)])
    def test_wrong_value_is_quoted(self, computed):
        with pytest.raises(UsageError, match="computed"):
            Skip(computed=computed)

    def test_counts(self):
        assert [Skip(computed=0.4).count(steps) for steps in (1, 2, 3, 20, 50)] == [1, 1, 1, 8, 20]
        assert [Skip(computed=8).count(steps) for steps in (4, 8, 20)] == [4, 8, 8]
        assert Skip(computed=(0, 2, 9)).count(5) == 2

    @pytest.mark.parametrize("computed", [0.4, 8, (0, 1, 5)])
    def test_goes_through_json(self, computed):
        skip = Skip(computed=computed)
        assert Skip.from_dict(json.loads(json.dumps(skip.to_dict()))) == skip

    def test_what_is_learned_must_be_a_file_of_ours(self, tmp_path):
        with pytest.raises(UsageError, match="cannot be read"):
            Skip(learned=tmp_path / "none.json")
        (tmp_path / "other.json").write_text("{}")
        with pytest.raises(UsageError, match=r"was not written by handle\.save"):
            Skip(learned=tmp_path / "other.json")


class TestPresets:
    def test_how_many_steps_are_computed(self):
        def counts(name):
            skips = [PRESETS[name](steps).skip for steps in (4, 5, 8, 10, 20, 50)]
            return [None if skip is None else skip.computed for skip in skips]

        assert counts("balanced") == [None, 4, 6, 6, 12, 30]
        assert counts("fast") == [3, 4, 5, 5, 8, 20]
        assert counts("faster") == [3, 4, 4, 4, 6, 15]

    def test_few_steps(self):
        assert PRESETS["balanced"](4) == Settings(merge=VARIANTS["toma-late"])
        assert PRESETS["fast"](3) == Settings()

    def test_unknown_lists_the_known(self):
        with pytest.raises(UsageError, match=r"preset='balancd' is not known.*Did you mean 'balanced'") as error:
            named("balancd")
        assert all(name in str(error.value) for name in PRESETS)

    def test_settings_take_the_place_of_what_it_has(self):
        merge, skip = Merge(ratio=0.25), Skip(computed=0.9)
        chosen = Chosen(PRESETS["balanced"], merge, skip)
        assert chosen.merging is merge
        assert chosen.skips_in(20) is skip
        assert chosen.merges_in(20)
        assert not Chosen(PRESETS["balanced"]).merges_in(20)
        assert Chosen(PRESETS["balanced"]).merges_in(4)

    def test_without_a_number_of_steps_it_says_what_to_do(self):
        with pytest.raises(RuntimeError, match=r"handle\.begin\(num_steps\)"):
            Chosen(PRESETS["fast"]).skips_in(None)


class TestVariants:
    def test_names(self):
        assert set(VARIANTS) == {"toma", "toma-stripe", "toma-tile", "toma-once", "toma-stage", "toma-late"}

    @pytest.mark.parametrize(
        ("name", "region", "num_regions", "assign", "scope"),
        [
            ("toma", "tile", 64, "global", "module"),
            ("toma-stripe", "stripe", 64, "local", "module"),
            ("toma-tile", "tile", 256, "local", "module"),
            ("toma-once", "tile", 64, "local", "block"),
            ("toma-stage", "tile", None, "local", "stage"),
            ("toma-late", "tile", None, "local", "block"),
        ],
    )
    def test_settings(self, name, region, num_regions, assign, scope):
        found = VARIANTS[name]
        assert (found.region, found.num_regions, found.assign, found.scope) == (region, num_regions, assign, scope)

    def test_the_papers_select_every_tenth_step_in_unets(self):
        assert (variant("toma").select_every, variant("toma").reweighed_every) == (10, 5)
        in_transformers = variant("toma", selects_every_step=True)
        assert (in_transformers.select_every, in_transformers.reweighed_every) == (1, 1)

    def test_ratio(self):
        assert variant("toma-tile", 0.75).ratio == 0.75
        with pytest.raises(UsageError, match=r"ratio=1\.5"):
            variant("toma-tile", 1.5)

    def test_unknown_lists_the_known(self):
        with pytest.raises(UsageError, match=r"variant='toma-tiles' is not known.*Did you mean 'toma-tile'"):
            variant("toma-tiles")


def test_other_methods_have_settings_of_their_own():
    for name in ("tomesd", "tofu", "todo"):
        settings = METHODS[name]
        assert settings.from_dict(settings().to_dict()) == settings()
