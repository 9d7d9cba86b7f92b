"""CUDA graphs of a generation, on a GPU."""

import csv

import pytest
import torch
from toma_lab.cli import app
from typer.testing import CliRunner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("model", ["sdxl", "flux"])
@pytest.mark.parametrize("compiled", ["none", "block"])
def test_every_method_is_captured_and_timed(model, compiled, tmp_path):
    path = tmp_path / "rows.csv"
    arguments = (
        f"bench --model {model} --size small --steps 6 --repeats 2 --ratios 0.5 --modes graph --compile {compiled}"
    )
    methods = "toma:select_every=4;reweigh_every=2,toma-stage:select_every=4;reweigh_every=2"
    result = CliRunner().invoke(app, [*arguments.split(), "--methods", methods, "--output", str(path)])
    assert result.exit_code == 0, result.output
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows].count("baseline") == 1
    assert {"toma", "toma-stage", "lower-bound", "floor"} < {row["method"] for row in rows}
    assert all(float(row["step_ms"]) > 0 and float(row["peak_mib"]) > 0 for row in rows)
    assert "not finite" not in result.output
