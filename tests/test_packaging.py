"""What the two distributions contain and require."""

import io
import re
import zipfile
from pathlib import Path

import pytest
from toma_lab.cli.options import OPTIONAL_MODULES
from toma_lab.inspection.photograph import SAMPLE

import toma_diffusion

tomllib = pytest.importorskip("tomllib", reason="in the standard library since Python 3.11")

ROOT = Path(__file__).parents[1]
LIBRARY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEMO = tomllib.loads((ROOT / "demo-model" / "pyproject.toml").read_text())["project"]
MODULES = {"pillow": "PIL"}
"""Distributions whose module has another name."""


def name_of(requirement: str) -> str:
    return re.match(r"[\w-]+", requirement).group().lower()


def test_the_library_s_wheel_is_smaller_than_1_mib():
    """It holds the package, compressed: here as a zip file, which a wheel is."""
    files = [path for path in Path(toma_diffusion.__file__).parent.rglob("*") if path.is_file()]
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in files:
            if path.suffix != ".pyc":
                archive.write(path)
    assert len(wheel.getvalue()) < 2**20
    assert SAMPLE.stat().st_size < 60_000


def test_the_demo_model_has_the_library_s_version_and_licence_and_requires_nothing():
    assert DEMO["version"] == toma_diffusion.__version__
    assert DEMO["license"] == LIBRARY["license"]
    assert (ROOT / "demo-model" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert DEMO["dependencies"] == []


def test_extras():
    extras = LIBRARY["optional-dependencies"]
    assert extras["demo"] == ["toma-diffusion[metrics,report]", DEMO["name"]]
    names = {name_of(each) for extra in ("metrics", "report", "playground") for each in extras[extra]}
    assert {MODULES.get(name, name) for name in names - {"toma-diffusion"}} == set(OPTIONAL_MODULES)


def test_every_requirement_is_pinned():
    """Every install goes through constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {name_of(line) for line in lines if line and not line.startswith("#")}
    required = {name_of(each) for each in LIBRARY["dependencies"]}
    required |= {name_of(each) for extra in LIBRARY["optional-dependencies"].values() for each in extra}
    assert required - pinned == {"toma-diffusion", "toma-diffusion-demo"}
