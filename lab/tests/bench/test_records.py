"""The file of rows: what is written is read, and it is whole at every moment."""

import csv
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields

import pytest
from toma_lab.bench.records import COLUMNS, Records, Row, read
from toma_lab.experiments.facts import head_of_package

FIRST_COLUMNS = (
    "model method settings scope assign ratio resolution batch mode compile steps step_ms step_ms_p20 step_ms_p80 "
    "baseline_ms speedup lower_bound_ms over_lower_bound floor_ms over_floor peak_mib baseline_peak_mib pipeline_s "
    "baseline_pipeline_s cache cache_hits backend attention dtype gpu torch diffusers triton toma_diffusion commit "
    "date baseline_drift"
)
LATER_COLUMNS = " frames"
WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_records import row
from toma_lab.bench.records import Records
records = Records(Path({path!r}))
print("ready", flush=True)
for number in range(10**6):
    records.append(row(step_ms=float(number)))
"""


def row(**changes) -> Row:
    values = {field.name: "x" for field in fields(Row) if field.type == "str"}
    times = {"step_ms": 2.5, "step_ms_p20": 2.0, "step_ms_p80": 3.0, "baseline_ms": 5.0, "speedup": 2.0}
    return Row(**values | times | changes)


def test_columns_and_their_order():
    assert " ".join(COLUMNS) == FIRST_COLUMNS + LATER_COLUMNS


def test_a_file_from_before_there_were_clips_is_read_and_goes_on(tmp_path):
    path = tmp_path / "rows.csv"
    Records(path).append(row(frames=""))
    lines = path.read_text().splitlines()
    path.write_text("".join(f"{line.rpartition(',')[0]}\n" for line in lines))
    assert path.read_text().splitlines()[0] == FIRST_COLUMNS.replace(" ", ",")
    records = Records(path)
    records.append(row(frames="81"))
    assert [each["frames"] for each in read(path)] == ["", "81"]
    assert read(path)[0] | {"frames": "81"} == read(path)[1]


def test_round_trip(tmp_path):
    path = tmp_path / "new" / "rows.csv"
    records = Records(path)
    records.append(row(settings='{"scale":"inf","skip_blocks":[0,1]}', method="toma, odd\nname"))
    records.append(row(peak_mib=12.5))
    again = Records(path)
    assert again.rows == records.rows
    assert again.rows[0]["settings"] == '{"scale":"inf","skip_blocks":[0,1]}'
    assert again.rows[0]["peak_mib"] == ""
    assert [float(each["step_ms"]) for each in again.matching({"peak_mib": "12.5"})] == [2.5]
    assert list(path.parent.iterdir()) == [path]


def test_fresh_starts_over(tmp_path):
    path = tmp_path / "rows.csv"
    Records(path).append(row())
    assert Records(path, fresh=True).rows == []
    assert read(path) == []


@pytest.mark.parametrize("content", [b"something,else\n1,2\n", bytes(range(256))], ids=["other columns", "binary"])
def test_a_file_of_something_else_is_not_overwritten(tmp_path, content):
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"rows.csv' has other columns.*--fresh"):
        Records(path)
    assert path.read_bytes() == content


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "rows.csv"
    records = Records(path)
    records.append(row())
    before = path.read_bytes()

    def disk_is_full(descriptor):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", disk_is_full)
    with pytest.raises(OSError, match="no space left"):
        records.append(row())
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_killed_at_any_moment_the_file_is_whole(tmp_path):
    path = tmp_path / "rows.csv"
    code = WRITER.format(tests=os.path.dirname(__file__), path=str(path))
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert writer.stdout.readline() == "ready\n"
    deadline, numbers = time.monotonic() + 0.5, []
    while time.monotonic() < deadline or len(numbers) <= 10:  # at all these moments a reader sees whole rows
        assert writer.poll() is None
        numbers = [float(each["step_ms"]) for each in read(path)]
        assert numbers == [float(number) for number in range(len(numbers))]
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    rows = read(path)
    assert len(rows) > 10
    assert all(None not in each and None not in each.values() for each in rows)
    assert path.read_text().endswith("\n")
    assert len(list(csv.reader(path.open()))) == len(rows) + 1


def test_commit_is_that_of_the_package_whatever_the_folder(tmp_path, monkeypatch):
    here = head_of_package()
    monkeypatch.chdir(tmp_path)
    assert head_of_package() == here
    assert here
