"""benchmarks/quality.py: sweeps that `toma eval` understands, and rows that stay."""

import csv
import importlib
from pathlib import Path

import pytest

from toma_diffusion.evaluation.variants import PAPER
from toma_diffusion.experiments.cells import MethodSpec
from toma_diffusion.experiments.parsing import split_list

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def quality(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("quality")


@pytest.mark.parametrize("sweep", ["CHANGES", "TOGETHER"])
def test_every_change_can_be_asked_for_once(quality, sweep):
    methods = split_list(quality.methods_of(getattr(quality, sweep)))
    assert len({MethodSpec.parse(method) for method in methods}) == len(methods) == len(getattr(quality, sweep))


def test_the_papers_tables_are_known(quality):
    named = {run for run in quality.RUNS if run.startswith("table")}
    assert named
    assert named <= set(PAPER)


def test_one_run_alone_leaves_the_others_rows(quality, tmp_path):
    path = tmp_path / "new" / "quality.csv"

    def row(run: str, psnr: str) -> dict[str, str]:
        return {"run": run, "psnr": psnr}

    quality.write([row("presets", "20"), row("settings", "21"), row("together", "22")], path)
    quality.write([row("settings", "31"), row("settings", "32")], path)
    with path.open(newline="") as file:
        assert list(csv.DictReader(file)) == [
            row("presets", "20"),
            row("settings", "31"),
            row("settings", "32"),
            row("together", "22"),
        ]
