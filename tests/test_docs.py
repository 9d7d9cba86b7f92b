"""Every example in the docstrings, in the README and in docs/ runs; every command and link on these pages is right."""

import doctest
import importlib
import pkgutil
import re
import shlex
from dataclasses import fields
from functools import partialmethod
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer
from diffusers import (
    DiffusionPipeline,
    FluxPipeline,
    ModelMixin,
    SchedulerMixin,
    StableDiffusionXLPipeline,
    WanPipeline,
)
from tiny_checkpoints import checkpoint
from tiny_clips import clip_folder
from toma_lab.cli import app
from torch import nn

import toma_diffusion
from toma_diffusion import Merge, Skip, families
from toma_diffusion import others as methods
from toma_diffusion.families.refused import REFUSED

ROOT = Path(__file__).parent.parent
OTHERS = ("CONTRIBUTING.md", "SECURITY.md", "examples/README.md")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *(ROOT / name for name in OTHERS)]
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
HUB = {
    "stabilityai/stable-diffusion-xl-base-1.0": "sdxl",
    "stable-diffusion-v1-5/stable-diffusion-v1-5": "sd15",
    "black-forest-labs/FLUX.1-dev": "flux",
}
HUB_CLIPS = "Wan-AI/Wan2.1-T2V-14B-Diffusers"
"""The models that pages load from the hub, and the tiny ones that take their place here."""
MODULES = [
    name
    for _, name, _ in pkgutil.walk_packages(toma_diffusion.__path__, "toma_diffusion.")
    if not name.endswith("__main__") and ("triton_" not in name or find_spec("triton"))
]


class FencedParser(doctest.DocTestParser):
    """Examples stand between Markdown fences, which are not part of what they print."""

    def parse(self, string, name="<string>"):
        return super().parse(re.sub(r"```\w*", "", string), name)


def examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(parser=FencedParser(), exclude_empty=True)
    return [test for name in MODULES for test in finder.find(importlib.import_module(name)) if test.examples]


@pytest.mark.parametrize("test", examples(), ids=lambda test: test.name)
def test_docstring_example(test):
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed == 0


def blocks(page: Path, language: str) -> list[str]:
    """The code of that language on a page."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.fixture
def tiny_hub(monkeypatch, tmp_path):
    """Pages load real models onto a GPU and compile them. Here tiny ones on the CPU stand in. They generate images in a
    fifth of the steps (four by default) and are not compiled to machine code."""

    def put_tiny_in_place(model_class):
        load = model_class.from_pretrained.__func__

        def from_pretrained(cls, name, *, subfolder=None, torch_dtype=None, **settings):
            settings |= {} if subfolder is None else {"subfolder": subfolder}
            if name == HUB_CLIPS:
                name = clip_folder()
            return load(cls, checkpoint(HUB[name]) if name in HUB else name, **settings)

        monkeypatch.setattr(model_class, "from_pretrained", classmethod(from_pretrained))

    def take_few_steps(pipeline_class):
        generate = pipeline_class.__call__

        def few_steps(self, *args, num_inference_steps=20, **settings):
            return generate(self, *args, num_inference_steps=num_inference_steps // 5, **settings)

        monkeypatch.setattr(pipeline_class, "__call__", few_steps)

    for model_class in (DiffusionPipeline, ModelMixin, SchedulerMixin):
        put_tiny_in_place(model_class)
    for pipeline_class in (StableDiffusionXLPipeline, FluxPipeline):
        take_few_steps(pipeline_class)
    small = {"num_inference_steps": 2, "height": 32, "width": 32}
    monkeypatch.setattr(WanPipeline, "__call__", partialmethod(WanPipeline.__call__, **small))
    monkeypatch.setattr(DiffusionPipeline, "to", lambda self, *args, **kwargs: self)
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    monkeypatch.chdir(tmp_path)  # for the images that they save


@pytest.fixture
def registries():
    """What pages register is forgotten after them."""
    families_before, methods_before, settings_before = [*families.FAMILIES], [*methods._METHODS], {**methods._SETTINGS}
    yield
    families.FAMILIES[:], methods._METHODS[:] = families_before, methods_before
    methods._SETTINGS.clear()
    methods._SETTINGS.update(settings_before)


@pages
@pytest.mark.filterwarnings("ignore:CUDA graphs cannot be used here")
def test_page_examples(page, tiny_hub, registries):
    """In the order of the page: a later one may use what an earlier one has made."""
    names: dict = {}
    for index, code in enumerate(blocks(page, "python")):
        exec(compile(code, f"{page.name}, example {index}", "exec"), names)


def test_the_readme_begins_with_an_example():
    assert "speed_up(pipe)" in blocks(ROOT / "README.md", "python")[0]
    assert len(commands(ROOT / "README.md")) >= 3


def commands(page: Path) -> list[list[str]]:
    """Every call of `toma` in the shell code of a page, as words."""
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    calls = [shlex.split(line, comments=True) for line in lines]
    starts = (["toma"], [".venv/bin/toma"])
    found = [call[1:] for call in calls if call[:1] in starts]
    return found + [call[call.index("toma_lab.cli") + 1 :] for call in calls if "toma_lab.cli" in call]


@pages
def test_commands_have_the_options_that_pages_name(page):
    known = typer.main.get_command(app).commands
    for call in commands(page):
        options = {option for parameter in known[call[0]].params for option in parameter.opts}
        assert [word for word in call if word.startswith("--") and word not in options] == []


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text())
    local = [(page.parent / link if link else page, anchor) for link, anchor in links if "://" not in link]
    assert [str(target) for target, _ in local if not target.exists()] == []
    assert [(str(target), anchor) for target, anchor in local if anchor and anchor not in anchors(target)] == []


@pytest.mark.parametrize("settings", [Merge, Skip], ids=lambda settings: settings.__name__)
def test_the_table_of_settings_has_every_field(settings):
    """And no other."""
    page = (ROOT / "docs" / "usage.md").read_text()
    table = page.partition(f"| field of `{settings.__name__}` |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == {each.name for each in fields(settings)}


def test_every_family_is_listed():
    page = (ROOT / "docs" / "families.md").read_text()
    supported = [family.model_class for family in families.FAMILIES]
    assert [name for name in supported if f"`{name}`" not in page] == []
    assert [name for name, reason in REFUSED.items() if f"| `{name}` | {reason} |" not in page] == []
