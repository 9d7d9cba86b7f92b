"""benchmarks/quality.py: sweeps that `toma eval` understands, and rows that stay."""

import csv
import importlib
from pathlib import Path

import pytest

from toma_diffusion.bench.scenario import Method, split_list

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def quality(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("quality")


def test_every_sweep_can_be_asked_for_and_has_no_row_twice(quality):
    for changes in quality.CHANGES.values():
        methods = [f"{quality.BASE};{change}" for change in changes]
        assert split_list(",".join(methods)) == methods
        assert len({Method.parse(method) for method in methods}) == len(methods)


def test_one_sweep_alone_leaves_the_others_rows(quality, tmp_path):
    path = tmp_path / "new" / "quality.csv"

    def row(sweep: str, psnr: str) -> dict[str, str]:
        return {"sweep": sweep, "psnr": psnr}

    quality.write([row("presets", "20"), row("scope", "21"), row("rotation", "22")], path)
    quality.write([row("scope", "31"), row("scope", "32")], path)
    with path.open(newline="") as file:
        assert list(csv.DictReader(file)) == [
            row("presets", "20"),
            row("scope", "31"),
            row("scope", "32"),
            row("rotation", "22"),
        ]
