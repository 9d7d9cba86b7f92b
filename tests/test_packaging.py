"""What the three distributions contain and require."""

import io
import re
import zipfile
from pathlib import Path

import pytest
import toma_lab

import toma_diffusion

tomllib = pytest.importorskip("tomllib", reason="in the standard library since Python 3.11")

ROOT = Path(__file__).parents[1]
LIBRARY, LAB, DEMO = (
    tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"] for folder in (".", "lab", "demo-model")
)
OURS = {LIBRARY["name"], LAB["name"], DEMO["name"]}


def name_of(requirement: str) -> str:
    return re.match(r"[\w-]+", requirement).group()


@pytest.mark.parametrize("package", [toma_diffusion, toma_lab])
def test_a_wheel_is_smaller_than_1_mib(package):
    """It holds the package, compressed: here as a zip file, which a wheel is."""
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in Path(package.__file__).parent.rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                archive.write(path)
    assert len(wheel.getvalue()) < 2**20


def test_the_library_requires_torch_and_what_pipelines_need_to_load():
    assert {name_of(each) for each in LIBRARY["dependencies"]} == {
        *("torch", "diffusers", "transformers", "accelerate", "rich")
    }


def test_any_later_torch_will_do():
    """Or installing replaces a build of torch for the user's CUDA."""
    (torch,) = (each for each in LIBRARY["dependencies"] if name_of(each) == "torch")
    assert re.fullmatch(r"torch>=[\d.]+", torch)


def test_all_have_one_version_and_licence():
    assert DEMO["version"] == toma_lab.__version__ == toma_diffusion.__version__
    for project, folder in ((LAB, "lab"), (DEMO, "demo-model")):
        assert project["license"] == LIBRARY["license"]
        assert (ROOT / folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_the_demo_models_require_nothing():
    assert DEMO["dependencies"] == []


def test_every_requirement_is_pinned():
    """Every install goes through constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {name_of(line) for line in lines if line and not line.startswith("#")}
    required = {
        name_of(each)
        for project in (LIBRARY, LAB)
        for requirements in (project["dependencies"], *project["optional-dependencies"].values())
        for each in requirements
    }
    assert required - pinned - OURS == set()
