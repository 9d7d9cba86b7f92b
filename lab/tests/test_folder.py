"""Columns, plans, and the folder of a run."""

from dataclasses import replace

import pytest
from run_folders import FACTS
from toma_lab.columns import BASELINE, NOISE_FLOOR, Column, parse_shortcut
from toma_lab.columns.ours import Ours
from toma_lab.evaluate import EvalFolder, EvalPlan
from toma_lab.plan import Item
from toma_lab.tune.folder import TuneFolder

from toma_diffusion import Merge, Skip, UsageError
from toma_diffusion.others import ToDo

FINE = Column("toma-stage", Ours(merge=Merge(num_regions=256, scale="inf", skip_blocks=())), ("num_regions", "scale"))
FEWER = Column("steps", shortcuts=(parse_shortcut("steps:2"),))
BOTH = Column("toma-stage", Ours(merge=Merge()), shortcuts=FEWER.shortcuts)
SKIPPING = Column("fast", Ours("fast", skip=Skip(computed=2)), ("computed",))
PLAN = EvalPlan(
    model="bundled",
    prompts=("a red apple", "a blue shoe"),
    seeds=(0, 7),
    columns=(Column(BASELINE), Column(NOISE_FLOOR), BOTH, FINE, SKIPPING, Column("todo", Ours(merge=ToDo()))),
    metrics=("psnr",),
    steps=3,
)


class TestNames:
    def test_items(self):
        assert [item.name for item in PLAN.items] == ["p0000-s0", "p0000-s7", "p0001-s0", "p0001-s7"]
        assert [item.seed for item in replace(PLAN, seeds=()).items] == [0, 1]

    def test_columns_are_short_in_paths_and_differ(self):
        names = [column.column_id for column in PLAN.columns]
        assert names[:3] == ["baseline", "noise-floor", "toma-stage-0.5-steps-2"]
        assert names[3].startswith("toma-stage-0.5-")
        assert len(set(names)) == len(names)

    def test_titles_say_what_was_asked_for(self):
        assert [column.title for column in PLAN.columns][1:] == [
            "noise floor",
            "toma-stage 0.5 + 2 steps",
            "toma-stage 0.5, num_regions=256, scale=inf",
            "fast, computed=2",
            "todo 0.75",
        ]

    def test_cells_of_a_row(self):
        assert FINE.key == {
            "method": "toma-stage",
            "settings": '{"num_regions":256,"scale":"inf"}',
            "scope": "stage",
            "assign": "local",
            "ratio": "0.5",
        }
        assert (SKIPPING.key["settings"], SKIPPING.key["ratio"]) == ('{"skip":{"computed":2}}', "0")
        assert (BOTH.key["method"], BOTH.key["settings"]) == ("toma-stage+steps", '{"steps":2}')

    def test_columns_go_through_json(self):
        for column in PLAN.columns:
            assert Column.from_dict(column.to_dict()) == column


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": ()}, "at least one prompt"),
        ({"seeds": (0, 0)}, "seed 0 is given twice"),
        ({"seeds": (2**64,)}, "seed=18446744073709551616 is not allowed"),
        ({"batch": 0}, "batch=0 is not allowed"),
        ({"columns": (FINE,)}, "the first column must be the baseline"),
        ({"columns": (Column(BASELINE), FINE, FINE)}, "is asked for twice"),
        ({"steps": 2}, "'steps:2' is not fewer than the 2 steps of the run"),
    ],
)
def test_plans_that_cannot_be(changes, message):
    with pytest.raises(UsageError, match=message):
        replace(PLAN, **changes)


class TestFolder:
    def test_opens_what_was_started(self, tmp_path):
        started = EvalFolder.start(tmp_path / "run", PLAN, FACTS)
        opened = EvalFolder(tmp_path / "run")
        assert (opened.plan, opened.facts, opened.date) == (PLAN, FACTS, started.date)
        assert (opened.table(), opened.item_row(FINE, PLAN.items[0])) == ([], {})

    def test_two_runs_at_once_are_refused(self, tmp_path):
        folder = EvalFolder.start(tmp_path, PLAN, FACTS)
        # The second is another process of the same run.
        refused = pytest.raises(UsageError, match=r"another process is at work in .*: wait for it, or give another")
        with folder.locked(), folder.locked(is_first=False), refused, EvalFolder(tmp_path).locked():
            pass
        with EvalFolder(tmp_path).locked():
            pass

    def test_what_is_no_run(self, tmp_path):
        with pytest.raises(UsageError, match=r"is not a run of `toma eval`: it has no run\.json"):
            EvalFolder(tmp_path)
        (tmp_path / "file").touch()
        with pytest.raises(UsageError, match=r"file/run\.json' cannot be written"):
            EvalFolder.start(tmp_path / "file", PLAN, FACTS)
        EvalFolder.start(tmp_path / "run", PLAN, FACTS)
        with pytest.raises(UsageError, match="is a folder of `toma eval`, not of `toma tune`"):
            TuneFolder(tmp_path / "run")

    @pytest.mark.parametrize("written", ["{", "[]", "{}", '{"command": "toma eval", "plan": {"colour": 1}}'])
    def test_a_damaged_run_is_reported(self, written, tmp_path):
        (tmp_path / "run.json").write_text(written)
        with pytest.raises(UsageError, match=r"run\.json' cannot be read, it may be of another version"):
            EvalFolder(tmp_path)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"steps": 4}, "Its steps is 3, this command has 4"),
            ({"prompts": (*PLAN.prompts, "a tree")}, "1 prompts of this command are not in it, for example 'a tree'"),
            ({"weights": "0123abcd"}, "Its weights is '', this command has '0123abcd'"),
            ({"seeds": (7, 0)}, "The seeds have another order"),
            ({"columns": PLAN.columns[:-1]}, "1 of its columns are not in this command, for example 'todo 0.75'"),
            (
                {"columns": (*PLAN.columns[:-1], Column("todo", Ours(merge=ToDo(window=(0.2, 1.0)))))},
                "the same names, but other settings",
            ),
        ],
    )
    def test_another_run_is_refused_and_the_difference_named(self, changes, message, tmp_path):
        EvalFolder.start(tmp_path, PLAN, FACTS)
        with pytest.raises(UsageError, match=message):
            EvalFolder.start(tmp_path, replace(PLAN, **changes), FACTS)
        with pytest.raises(UsageError, match=r"Its torch is '2\.13\.0', this command has '2\.14'"):
            EvalFolder.start(tmp_path, PLAN, replace(FACTS, torch="2.14"))

    def test_a_picture_s_row(self, tmp_path):
        folder, item = EvalFolder.start(tmp_path, PLAN, FACTS), Item(0, "a red apple", 7)
        folder.rows.add({"column_id": FINE.column_id, "item": item.name, "lpips": 0.1})
        assert EvalFolder(tmp_path).item_row(FINE, item)["lpips"] == 0.1
        assert folder.item_row(FINE, PLAN.items[0]) == {}
