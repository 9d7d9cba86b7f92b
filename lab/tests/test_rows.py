"""Rows: one schema, in files that survive being killed, a full disk and several processes."""

import csv
import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from toma_lab.rows import Rows, number, read_csv, write_csv

from toma_diffusion import UsageError

KEY = ("column_id", "item")


def row(item: str, **cells) -> dict:
    return {"column_id": "fast", "item": item, **cells}


class TestLog:
    """Lines that are appended."""

    def test_a_second_row_of_a_key_changes_the_first(self, tmp_path):
        rows = Rows(tmp_path / "rows.jsonl", KEY)
        rows.add(row("a", seconds=1.5), row("b", seconds=2.0))
        rows.add(row("a", lpips=0.1))
        again = Rows(tmp_path / "rows.jsonl", KEY)
        assert [*again] == [*rows] == [row("a", seconds=1.5, lpips=0.1), row("b", seconds=2.0)]
        assert again.get(**row("b"))["seconds"] == 2.0
        assert again.get(**row("c")) is None

    def test_infinity_is_valid_json_and_comes_back(self, tmp_path):
        rows = Rows(tmp_path / "rows.jsonl", KEY)
        rows.add(row("a", psnr=float("inf")))
        assert "Infinity" not in (tmp_path / "rows.jsonl").read_text()
        assert number(rows.get(**row("a")), "psnr") == float("inf")
        assert number(rows.get(**row("a")), "lpips") is None

    @pytest.mark.parametrize("left", ['{"column_id": "fa', "\n", '{"column_id": "fast", "item": "x"}'])
    def test_what_a_killed_process_left_of_a_line_spoils_no_other(self, tmp_path, left):
        path = tmp_path / "rows.jsonl"
        Rows(path, KEY).add(row("a", seconds=1.0))
        with path.open("a") as file:
            file.write(left)
        Rows(path, KEY).add(row("b", seconds=2.0))
        names = [each["item"] for each in Rows(path, KEY)]
        assert [name for name in names if name != "x"] == ["a", "b"]

    def test_a_failure_is_known_until_the_file_is_opened_again(self, tmp_path):
        rows = Rows(tmp_path / "rows.jsonl", KEY)
        rows.add(row("a", failure="OutOfMemoryError"))
        assert rows.get(**row("a"))["failure"]
        assert len(Rows(tmp_path / "rows.jsonl", KEY)) == 0
        rows.add(row("a", seconds=1.0))
        assert [*Rows(tmp_path / "rows.jsonl", KEY)] == [row("a", seconds=1.0)]

    def test_others_see_what_was_added(self, tmp_path):
        other = Rows(tmp_path / "rows.jsonl", KEY)
        with ThreadPoolExecutor(4) as threads:
            [*threads.map(lambda n: Rows(tmp_path / "rows.jsonl", KEY).add(row(str(n), seconds=n)), range(40))]
        other.refresh()
        assert {each["item"] for each in other} == {str(n) for n in range(40)}

    def test_a_full_disk_is_one_error_that_says_so(self, tmp_path, monkeypatch):
        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        rows = Rows(tmp_path / "rows.jsonl", KEY)
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(UsageError, match=r"the disk is full\. Free some space; the same command goes on") as raised:
            rows.add(row("a", seconds=1.0))
        assert raised.value.__cause__ is None

    def test_a_column_of_another_name_is_a_bug(self, tmp_path):
        with pytest.raises(KeyError, match="'colour' is no column"):
            Rows(tmp_path / "rows.jsonl", KEY).add({"colour": "red"})


class TestCsv:
    def test_it_has_the_columns_that_are_needed_and_keeps_older_ones(self, tmp_path):
        path = tmp_path / "rows.csv"
        path.write_text("model,method,share,lpips\nsdxl,fast,plan,0.1\n")
        Rows(path).add({"model": "sdxl", "method": "faster", "psnr": 30})
        with path.open(newline="") as file:
            assert next(csv.reader(file)) == ["model", "method", "psnr", "lpips", "share"]
        assert [each["share"] for each in Rows(path)] == ["plan", ""]

    def test_processes_that_share_a_file_lose_no_row(self, tmp_path):
        one, other = (Rows(tmp_path / "rows.csv", ("title",)) for _ in range(2))
        one.add({"model": "m", "method": "a", "title": "one"})
        other.add({"model": "m", "method": "b", "title": "other"})
        one.add({"model": "m", "method": "c", "title": "one"})
        assert [(each["title"], each["method"]) for each in Rows(tmp_path / "rows.csv")] == [
            ("one", "c"),
            ("other", "b"),
        ]

    def test_a_file_of_something_else_is_refused_and_stays(self, tmp_path):
        path = tmp_path / "rows.csv"
        path.write_text("name,price\napple,1\n")
        with pytest.raises(UsageError, match=r"rows\.csv' holds no rows of ours .*give another file"):
            Rows(path)
        assert path.read_text() == "name,price\napple,1\n"

    def test_settings_come_back_as_they_were(self, tmp_path):
        cells = {"model": "a, b", "method": "fast", "settings": json.dumps({"computed": [0, 1]})}
        write_csv(tmp_path / "rows.csv", [cells])
        assert read_csv(tmp_path / "rows.csv") == [cells]
