"""Settings of reuse: wrong ones are quoted, and they can be written flat, nested, as text or in a preset."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parts import BY_NAME, only_reuse
from tiny import SETTINGS
from toma_diffusion.config.reuse import PARTS, UPDATES

from toma_diffusion import PRESETS, Reuse, ToMAConfig, ToMeSDConfig, UsageError, apply_toma
from toma_diffusion.core.schedule import computed_steps
from toma_diffusion.hooks.root import find_root

WRONG = [
    ("period", 0),
    ("period", 0.5),
    ("period", float("inf")),
    ("growth", 0.9),
    ("growth", float("nan")),
    ("growth", "fast"),
    ("period", True),
    ("period", "2"),
    ("start", -0.1),
    ("start", 1.1),
    ("start", "early"),
    ("start", float("nan")),
    ("end", 1.5),
    ("end", None),
    ("min_computed", 0),
    ("min_computed", 2.5),
    ("computed", ()),
    ("computed", (1, 2)),
    ("computed", 0),
    ("computed", (0, -3)),
    ("computed", (0, 1.5)),
    ("order", 2),
    ("order", -1),
    ("order", 1.5),
    ("order", True),
    ("order", "line"),
    ("part", "attention"),
    ("part", None),
    ("keep", "mid_block"),
    ("keep", (3,)),
    ("keep", ("",)),
    ("update", "tokens"),
    ("update", None),
    ("min_steps", 0),
    ("min_steps", 4.5),
]
FAMILY = BY_NAME["sd15"]


def config_of(model) -> ToMAConfig:
    return find_root(model).state.config


class TestWrongValues:
    @pytest.mark.parametrize(("field", "value"), WRONG, ids=str)
    def test_they_are_quoted(self, field, value):
        offenders = [value, *value] if isinstance(value, tuple) else [value]
        for make in (Reuse, lambda **fields: ToMAConfig.from_dict(fields)):
            with pytest.raises(UsageError, match=field) as error:
                make(**{field: value})
            assert any(repr(offender) in str(error.value) for offender in offenders)

    def test_every_field_has_one_here(self):
        assert {field for field, _ in WRONG} == {field.name for field in dataclasses.fields(Reuse)}

    @pytest.mark.parametrize(("field", "allowed"), [("part", PARTS), ("update", UPDATES)])
    def test_names_are_listed(self, field, allowed):
        with pytest.raises(UsageError, match="use one of") as error:
            Reuse(**{field: "nonsense"})
        assert all(repr(name) in str(error.value) for name in allowed)

    @pytest.mark.parametrize("value", ["often", 3, ["period", 2]], ids=str)
    @pytest.mark.parametrize("others", [{}, {"period": 3}], ids=str)
    def test_what_is_no_reuse_at_all(self, value, others):
        for make in (ToMAConfig.from_dict, lambda fields: ToMAConfig().changed(fields)):
            with pytest.raises(UsageError, match="pass a Reuse, a mapping of its fields, or None"):
                make({"reuse": value, **others})

    def test_unknown_fields(self):
        with pytest.raises(UsageError, match=r"'periode' is not a field of Reuse.*Did you mean 'period'"):
            ToMAConfig(reuse={"periode": 2})
        with pytest.raises(UsageError, match=r"'periode' is not a field of ToMAConfig.*Did you mean 'period'"):
            ToMAConfig.from_dict({"periode": 2})

    def test_frozen(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            Reuse().period = 3


class TestOnAModel:
    def test_an_unknown_name_in_keep_lists_the_parts(self):
        model = FAMILY.build()
        with pytest.raises(UsageError, match=r"'middle'.*UNet2DConditionModel.*mid_block\.attentions\.0") as error:
            apply_toma(model, only_reuse(keep=("down_blocks", "middle")))
        assert "up_blocks.1.attentions.1.transformer_blocks.0" in str(error.value)
        assert find_root(model) is None

    @pytest.mark.parametrize(
        ("part", "keep"), [("blocks", ("down", "mid", "up")), ("deep", ("below level 0", "down_blocks", "up_"))]
    )
    def test_all_names_in_keep(self, part, keep):
        with pytest.raises(UsageError, match="names all parts of this UNet2DConditionModel"):
            apply_toma(FAMILY.build(), only_reuse(part=part, keep=keep))

    @pytest.mark.parametrize(
        "changes",
        [
            {"scope": "block"},
            {"scope": "module"},
            {"ratio": 0},
            {"skip_blocks": (1,)},
            {"part": "deep"},
            {"keep": ("mid",)},
        ],
        ids=str,
    )
    def test_a_correction_needs_runs_of_merged_blocks(self, changes):
        with pytest.raises(UsageError, match=r"update='clusters' corrects.*needs scope='stage'") as error:
            apply_toma(FAMILY.build(), **SETTINGS | {"scope": "stage", "update": "clusters"} | changes)
        (value,) = changes.values()
        assert f"{value!r}" in str(error.value)

    def test_other_methods_cannot_correct(self):
        with pytest.raises(UsageError, match=r"needs scope='stage' \(here 'module'\)"):
            apply_toma(FAMILY.build(), "tomesd", update="destinations")


class TestWays:
    """To write them."""

    @pytest.mark.parametrize("name", ["reuse", "balanced", "fast", "faster"])
    def test_over_a_preset(self, name):
        model = FAMILY.build()
        apply_toma(model, name, period=3, keep=("mid",), part="blocks")
        expected = dataclasses.replace(PRESETS[name].reuse, period=3, keep=("mid",), part="blocks", min_computed=1)
        assert config_of(model).reuse == expected
        assert config_of(model).ratio == PRESETS[name].ratio

    def test_a_period_is_never_without_effect(self):
        """The minimum of a preset is for its own period."""
        for name in ("balanced", "fast", "faster"):
            counts = [
                len(computed_steps(PRESETS[name].changed({"period": period}).reuse, 8)) for period in (1.5, 2, 3, 4, 8)
            ]
            assert counts == sorted(set(counts), reverse=True)
            assert PRESETS[name].changed({"period": 4, "min_computed": 5}).reuse.min_computed == 5

    def test_over_a_preset_without_reuse(self):
        assert ToMAConfig.from_preset("toma", period=3).reuse == Reuse(period=3)
        assert ToMAConfig.from_preset("toma").reuse is None

    def test_over_a_configuration(self):
        model = FAMILY.build()
        apply_toma(model, only_reuse(period=5, order=0), period=3)
        assert config_of(model).reuse == Reuse(period=3, order=0)

    def test_without_anything_else(self):
        model = FAMILY.build()
        apply_toma(model, ratio=0, computed=(0, 2))
        assert config_of(model).reuse == Reuse(computed=(0, 2))

    def test_switched_off_in_a_preset(self):
        config = ToMAConfig.from_preset("balanced", reuse=None)
        assert config.reuse is None
        assert config.ratio == 0.5

    @pytest.mark.parametrize("reuse", [Reuse(period=3), {"period": 3}, {"period": 4}], ids=str)
    def test_nested_and_flat(self, reuse):
        assert ToMAConfig.from_dict({"reuse": reuse, "period": 3, "order": 0}).reuse == Reuse(period=3, order=0)
        assert PRESETS["fast"].changed({"reuse": reuse, "period": 3}).reuse == Reuse(period=3)

    def test_of_another_method(self):
        config = ToMeSDConfig.from_dict({"period": 3})
        assert config.reuse == Reuse(period=3)
        assert ToMeSDConfig.from_json(config.to_json()) == config

    def test_values_are_normalised(self):
        reuse = Reuse(computed=[5, 0, 5, 2], keep=["mid"], start=0, growth=1)
        assert (reuse.computed, reuse.keep, reuse.start, reuse.growth) == ((0, 2, 5), ("mid",), 0.0, 1.0)
        assert hash(reuse) == hash(dataclasses.replace(reuse))
        assert isinstance(ToMAConfig(reuse={"period": 3}).reuse, Reuse)


class TestRoundTrip:
    @settings(max_examples=25)
    @given(
        st.builds(
            Reuse,
            period=st.floats(1, 50),
            growth=st.floats(1, 5),
            start=st.floats(0, 1),
            min_computed=st.integers(1, 50),
            end=st.floats(0, 1),
            computed=st.none() | st.lists(st.integers(0, 50)).map(lambda steps: (0, *steps)),
            order=st.floats(0, 1) | st.just("auto"),
            part=st.sampled_from(PARTS),
            keep=st.lists(st.text(min_size=1)).map(tuple),
            update=st.sampled_from(UPDATES),
            min_steps=st.integers(1, 50),
        )
    )
    def test_dict_and_json(self, reuse):
        config = ToMAConfig(reuse=reuse)
        assert ToMAConfig.from_dict(config.to_dict()) == config
        assert ToMAConfig.from_json(config.to_json()) == config

    @pytest.mark.parametrize("name", PRESETS)
    def test_presets(self, name):
        assert ToMAConfig.from_json(PRESETS[name].to_json()) == PRESETS[name]
