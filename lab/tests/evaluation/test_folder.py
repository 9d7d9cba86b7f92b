"""Items, variants and plans, and the folder that holds them."""

import json
import math
from dataclasses import replace

import pytest
from toma_lab.evaluation import BASELINE, NOISE_FLOOR, Item, Plan, RunFolder, Scores, Variant
from toma_lab.experiments.facts import Facts
from toma_lab.experiments.shortcuts import parse_shortcut

from toma_diffusion import ToDoConfig, ToMAConfig, ToMeSDConfig, UsageError

FACTS = Facts("cpu", "2.13", "0.42", "", "0.1", "abcdef")
FINE = Variant("toma", ToMAConfig(num_regions=256, scale=math.inf), ("num_regions", "scale"))
FEWER = Variant("steps", shortcuts=(parse_shortcut("steps:2"),))
BOTH = Variant("toma", ToMAConfig(), shortcuts=FEWER.shortcuts)
CACHED = Variant("first-block-cache", shortcuts=(parse_shortcut("first-block-cache:threshold=0.1"),))
PLAN = Plan(
    model="bundled",
    prompts=("a red apple", "a blue shoe"),
    seeds=(0, 7),
    variants=(
        Variant(BASELINE),
        Variant(NOISE_FLOOR),
        Variant("toma", ToMAConfig()),
        FINE,
        Variant("todo", ToDoConfig()),
    ),
    metrics=("psnr",),
    steps=3,
)


class TestNames:
    def test_items(self):
        assert [item.name for item in PLAN.items] == ["p0000-s0", "p0000-s7", "p0001-s0", "p0001-s7"]

    def test_slugs_are_short_and_differ(self):
        slugs = [variant.slug for variant in PLAN.variants]
        assert slugs[:3] == ["baseline", "noise-floor", "toma-0.5"]
        assert slugs[3].startswith("toma-0.5-")
        assert len(set(slugs)) == len(slugs)

    def test_titles_say_what_was_asked_for(self):
        assert [variant.title for variant in PLAN.variants][1:4] == [
            "noise floor",
            "toma 0.5",
            "toma 0.5, num_regions=256, scale=inf",
        ]

    def test_columns_are_those_of_the_benchmark(self):
        assert FINE.key == {
            "method": "toma",
            "settings": '{"num_regions":256,"scale":"inf"}',
            "scope": "module",
            "assign": "local",
            "ratio": "0.5",
        }

    def test_of_shortcuts_alone_and_with_merging(self):
        assert [each.title for each in (FEWER, BOTH, CACHED)] == [
            "2 steps",
            "toma 0.5 + 2 steps",
            "first-block-cache, threshold=0.1",
        ]
        assert [each.slug for each in (FEWER, BOTH, CACHED)] == [
            "steps-2",
            "toma-0.5-steps-2",
            "first-block-cache-threshold-0.1",
        ]
        assert [(each.key["method"], each.key["ratio"], each.key["settings"]) for each in (FEWER, BOTH, CACHED)] == [
            ("steps", "", '{"steps":2}'),
            ("toma+steps", "0.5", '{"steps":2}'),
            ("first-block-cache", "", '{"threshold":0.1}'),
        ]
        assert [each.steps_of(8) for each in (FEWER, BOTH, CACHED)] == [2, 2, 8]


class TestPlan:
    def test_json_and_back(self):
        plan = replace(PLAN, variants=(*PLAN.variants, FEWER, BOTH, CACHED), batch=3)
        assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan

    def test_what_older_versions_wrote_can_be_read(self):
        written = PLAN.to_dict()
        del written["batch"]
        assert all("shortcuts" not in each for each in written["variants"])
        assert Plan.from_dict(written) == PLAN

    def test_batches_are_items_in_their_order(self):
        names = [[item.name for item in batch] for batch in replace(PLAN, batch=3).batches]
        assert names == [["p0000-s0", "p0000-s7", "p0001-s0"], ["p0001-s7"]]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"prompts": ()}, "at least one prompt"),
            ({"steps": 0}, "steps=0"),
            ({"seeds": (0, 2**64)}, "seed=18446744073709551616 is not allowed"),
            ({"width": 64}, "give both, or neither"),
            ({"seeds": (1, 1)}, "seed 1 is given twice"),
            ({"batch": 0}, "batch=0 is not allowed"),
            ({"variants": (Variant(BASELINE), FEWER), "steps": 2}, "'steps:2' is not fewer than the 2 steps"),
            ({"variants": (Variant("toma", ToMAConfig()),)}, "must be the baseline"),
            (
                {"variants": (Variant(BASELINE), FINE, FINE)},
                "'toma 0.5, num_regions=256, scale=inf' is asked for twice",
            ),
        ],
    )
    def test_mistakes_are_named(self, changes, message):
        with pytest.raises(ValueError, match=message):
            replace(PLAN, **changes)


class TestFolder:
    def test_opens_what_was_started(self, tmp_path):
        started = RunFolder.start(tmp_path / "run", PLAN, FACTS)
        opened = RunFolder(tmp_path / "run")
        assert (opened.plan, opened.facts, opened.date) == (PLAN, FACTS, started.date)
        assert set(opened.missing()) == {(variant, (item,)) for item in PLAN.items for variant in PLAN.variants}
        assert opened.table() == []

    def test_variants_take_turns_and_none_always_comes_first(self, tmp_path):
        missing = RunFolder.start(tmp_path, PLAN, FACTS).missing()
        count = len(PLAN.variants)
        for number, item in enumerate(PLAN.items):
            turn = missing[number * count : (number + 1) * count]
            assert {each for _, each in turn} == {(item,)}
            assert [variant for variant, _ in turn] == [*PLAN.variants[number:], *PLAN.variants[:number]]

    def test_a_batch_that_lacks_an_image_is_missing_as_a_whole(self, tmp_path):
        folder = RunFolder.start(tmp_path, replace(PLAN, batch=2), FACTS)
        first, second = folder.plan.batches
        for variant in PLAN.variants:
            for item in PLAN.items[:3]:
                folder.image_path(variant, item).parent.mkdir(parents=True, exist_ok=True)
                folder.image_path(variant, item).touch()
        assert {batch for _, batch in folder.missing()} == {second}
        folder.image_path(PLAN.baseline, PLAN.items[1]).unlink()
        assert [batch for variant, batch in folder.missing() if variant == PLAN.baseline] == [first, second]

    def test_a_file_in_place_of_the_folder(self, tmp_path):
        (tmp_path / "run").touch()
        with pytest.raises(UsageError, match=r"run/run\.json' cannot be written"):
            RunFolder.start(tmp_path / "run", PLAN, FACTS)
        with pytest.raises(UsageError, match="run' is not a run"):
            RunFolder(tmp_path / "run")

    def test_is_no_run(self, tmp_path):
        with pytest.raises(ValueError, match=r"is not a run of `toma eval`: it has no run\.json"):
            RunFolder(tmp_path)

    @pytest.mark.parametrize("written", ["{", "[]", "{}", '{"plan": {"model": "x", "colour": 1}}'])
    def test_a_damaged_run_is_reported(self, written, tmp_path):
        (tmp_path / "run.json").write_text(written)
        with pytest.raises(ValueError, match=r"run\.json' cannot be read, it may be of another version"):
            RunFolder(tmp_path)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"steps": 4}, "Its steps is 3, this command has 4"),
            ({"prompts": (*PLAN.prompts, "a tree")}, "1 prompts of this command are not in it, for example 'a tree'"),
            ({"weights": "0123abcd"}, "Its weights is '', this command has '0123abcd'"),
            ({"seeds": (7, 0)}, "The seeds have another order"),
            ({"variants": PLAN.variants[:-1]}, "1 of its variants are not in this command, for example 'todo 0.75'"),
            (
                {"variants": (*PLAN.variants[:-1], Variant("todo", ToDoConfig(window=(0.2, 1.0))))},
                "the same names, but other settings",
            ),
        ],
    )
    def test_another_run_is_refused_and_the_difference_named(self, changes, message, tmp_path):
        RunFolder.start(tmp_path, PLAN, FACTS)
        with pytest.raises(ValueError, match=message):
            RunFolder.start(tmp_path, replace(PLAN, **changes), FACTS)

    def test_another_version_is_refused(self, tmp_path):
        RunFolder.start(tmp_path, PLAN, FACTS)
        with pytest.raises(ValueError, match=r"Its torch is '2\.13', this command has '2\.14'"):
            RunFolder.start(tmp_path, PLAN, replace(FACTS, torch="2.14"))

    def test_scores_come_back_infinity_and_all(self, tmp_path):
        folder = RunFolder.start(tmp_path, PLAN, FACTS)
        item = PLAN.items[1]
        scores = Scores({"psnr": math.inf, "lpips": 0.1}, {"lpips": "weights 1"})
        folder.write_item_scores(FINE, item, scores)
        folder.write_joint_scores(FINE, Scores({"fid": 2.0}, {"fid": "weights 2"}))
        assert folder.item_scores(FINE, item) == scores
        assert folder.scores(FINE) == {item.name: scores.values}
        assert folder.joint_scores(FINE).values == {"fid": 2.0}
        assert folder.item_scores(FINE, Item(0, "a red apple", 0)).values == {}
        assert "Infinity" not in "".join(path.read_text() for path in tmp_path.rglob("*.json"))

    def test_damaged_scores_are_named(self, tmp_path):
        folder = RunFolder.start(tmp_path, PLAN, FACTS)
        folder.write_joint_scores(FINE, Scores({"fid": 2.0}, {"fid": "weights 2"}))
        (tmp_path / "scores" / f"{FINE.slug}.json").write_text("")
        with pytest.raises(ValueError, match=rf"{FINE.slug}\.json' holds no scores .*: delete it"):
            folder.joint_scores(FINE)

    def test_weights_tell_scores_apart(self):
        scores = Scores({"psnr": 1.0, "lpips": 0.1}, {"psnr": "", "lpips": "weights 1"})
        assert scores.has("psnr", "")
        assert scores.has("lpips", "weights 1")
        assert not scores.has("lpips", "weights 2")
        assert not scores.has("dino", "")

    def test_other_methods_keep_their_kind(self):
        variant = Variant("tomesd", ToMeSDConfig(ratio=0.25))
        assert Variant.from_dict(variant.to_dict()) == variant
