import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toma_diffusion import PRESETS, ToMAConfig, UsageError
from toma_diffusion.merge.base import SITES
from toma_diffusion.merge.config import ASSIGNMENTS, REGIONS, SCOPES, SELECTIONS, UNMERGES
from toma_diffusion.others import named_config

WRONG = [
    ("ratio", 1.0),
    ("ratio", -0.1),
    ("ratio", float("nan")),
    ("ratio", "0.5"),
    ("ratio", True),
    ("ratio", None),
    ("selection", "greedy"),
    ("region", "tiles"),
    ("region", None),
    ("num_regions", 0),
    ("num_regions", 64.0),
    ("num_regions", True),
    ("assign", "block"),
    ("scale", 0.0),
    ("scale", "infinite"),
    ("scale", -float("inf")),
    ("scale", float("nan")),
    ("unmerge", "inverse"),
    ("scope", "layer"),
    ("sites", ()),
    ("sites", "attn"),
    ("sites", ("attn", "mlp")),
    ("min_tokens", -1),
    ("min_tokens", 0.5),
    ("select_every", 0),
    ("reweigh_every", -5),
    ("window", (0.5, 0.5)),
    ("window", (0.8, 0.2)),
    ("window", (0.0, 1.5)),
    ("window", (0.0,)),
    ("window", 0.5),
    ("skip_blocks", 3),
    ("skip_blocks", (1.5,)),
    ("region_tokens", 0),
    ("region_tokens", 1.5),
    ("distance_weight", -0.1),
    ("distance_weight", math.inf),
    ("frame_weight", -1),
    ("region_frames", 0),
    ("guidance_parts", 0),
    ("guidance_parts", "two"),
    ("guidance_parts", 1.5),
    ("size_aware_attention", 1),
    ("norm_preserving", "yes"),
    ("share", "blocks"),
    ("selection_tokens", 0),
    ("backend", "cuda"),
    ("max_steps", 0),
    ("skip", "often"),
]


class TestValidation:
    @pytest.mark.parametrize(("field", "value"), WRONG)
    def test_wrong_value_is_quoted(self, field, value):
        with pytest.raises(ValueError, match=field) as error:
            ToMAConfig(**{field: value})
        offender = value[-1] if field in ("sites", "skip_blocks") and isinstance(value, tuple) and value else value
        assert repr(offender) in str(error.value) or repr(value) in str(error.value)

    @pytest.mark.parametrize(
        ("field", "allowed"),
        [
            ("selection", SELECTIONS),
            ("region", REGIONS),
            ("assign", ASSIGNMENTS),
            ("unmerge", UNMERGES),
            ("scope", SCOPES),
        ],
    )
    def test_wrong_name_lists_what_is_allowed(self, field, allowed):
        with pytest.raises(ValueError, match="use one of") as error:
            ToMAConfig(**{field: "nonsense"})
        assert all(repr(name) in str(error.value) for name in allowed)

    def test_near_miss_is_suggested(self):
        with pytest.raises(ValueError, match="Did you mean 'tile'"):
            ToMAConfig(region="tiles")

    def test_every_field_has_a_wrong_value_here(self):
        assert {field for field, _ in WRONG} == {field.name for field in dataclasses.fields(ToMAConfig)}

    def test_frozen(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            ToMAConfig().ratio = 0.75

    def test_values_are_normalised(self):
        config = ToMAConfig(
            ratio=np.float32(0.5), num_regions=np.int64(16), sites=["ff", "attn"], skip_blocks=[3, 1, 3], window=[0, 1]
        )
        assert (config.ratio, config.num_regions) == (0.5, 16)
        assert (config.sites, config.skip_blocks, config.window) == (("attn", "ff"), (1, 3), (0.0, 1.0))
        assert hash(config) == hash(dataclasses.replace(config))


class TestRoundTrip:
    @given(
        st.builds(
            ToMAConfig,
            ratio=st.floats(0, 0.999),
            selection=st.sampled_from(SELECTIONS),
            region=st.sampled_from(REGIONS),
            num_regions=st.integers(1, 4096),
            assign=st.sampled_from(ASSIGNMENTS),
            scale=st.floats(1e-3, 1e6) | st.just(float("inf")),
            unmerge=st.sampled_from(UNMERGES),
            scope=st.sampled_from(SCOPES),
            sites=st.lists(st.sampled_from(SITES), min_size=1).map(tuple),
            select_every=st.integers(1, 100),
            reweigh_every=st.integers(1, 100),
            window=st.tuples(st.floats(0, 0.49), st.floats(0.5, 1)),
            skip_blocks=st.lists(st.integers(0, 60)).map(tuple),
        )
    )
    def test_dict_and_json(self, config):
        assert ToMAConfig.from_dict(config.to_dict()) == config
        assert ToMAConfig.from_json(config.to_json()) == config
        assert json.loads(config.to_json()) == config.to_dict()

    def test_missing_fields_take_defaults(self):
        assert ToMAConfig.from_dict({"ratio": 0.25}) == ToMAConfig(ratio=0.25)

    def test_unknown_field_is_named(self):
        with pytest.raises(ValueError, match=r"'ration' is not a field.*Did you mean 'ratio'"):
            ToMAConfig.from_dict({"ration": 0.5})

    @pytest.mark.parametrize("text", ["", "{", "[1]", "3"])
    def test_wrong_json(self, text):
        with pytest.raises(ValueError, match=r"JSON|mapping"):
            ToMAConfig.from_json(text)


class TestPresets:
    def test_named_variants(self):
        papers = {"toma", "toma-stripe", "toma-tile", "toma-once"}
        assert set(PRESETS) == papers | {"toma-stage", "toma-late", "balanced", "fast", "faster"}

    @pytest.mark.parametrize("name", ["lower-bound", "floor"])
    def test_bounds_are_presets_no_more(self, name):
        for refused in (ToMAConfig.from_preset, lambda name: named_config(name, {})):
            with pytest.raises(UsageError, match=f"'{name}' is not a preset any more.*toma bench --bounds {name}"):
                refused(name)

    @pytest.mark.parametrize(
        ("name", "selection", "region", "num_regions", "assign", "scope"),
        [
            ("toma", "facility-location", "tile", 64, "global", "module"),
            ("toma-stripe", "facility-location", "stripe", 64, "local", "module"),
            ("toma-tile", "facility-location", "tile", 256, "local", "module"),
            ("toma-once", "facility-location", "tile", 64, "local", "block"),
            ("toma-stage", "facility-location", "tile", None, "local", "stage"),
        ],
    )
    def test_settings(self, name, selection, region, num_regions, assign, scope):
        preset = ToMAConfig.from_preset(name)
        assert (preset.selection, preset.region, preset.num_regions) == (selection, region, num_regions)
        assert (preset.assign, preset.scope) == (assign, scope)

    def test_override(self):
        assert ToMAConfig.from_preset("toma-stage", ratio=0.75).ratio == 0.75
        with pytest.raises(ValueError, match="'ration' is not a field"):
            ToMAConfig.from_preset("toma-stage", ration=0.75)
        with pytest.raises(ValueError, match=r"ratio=1\.5"):
            ToMAConfig.from_preset("toma-stage", ratio=1.5)

    def test_unknown_lists_the_known(self):
        with pytest.raises(ValueError, match="preset='toma-tiles' is not known") as error:
            ToMAConfig.from_preset("toma-tiles")
        assert all(name in str(error.value) for name in PRESETS)
        assert "Did you mean 'toma-tile'" in str(error.value)

    def test_cannot_be_changed(self):
        with pytest.raises(TypeError):
            PRESETS["mine"] = ToMAConfig()
