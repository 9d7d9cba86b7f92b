"""Every example in the docstrings, in the README and in docs/ runs, and says what it says."""

import doctest
import importlib
import pkgutil
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import toma_diffusion

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = [
    pytest.param(code, id=f"{page.name}-{index}")
    for page in PAGES
    for index, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]
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
    assert doctest.DocTestRunner().run(test).failed == 0


def test_there_are_docstring_examples():
    assert len(examples()) >= 3


@pytest.mark.parametrize("code", CODE)
def test_page_example(code):
    exec(compile(code, "page", "exec"), {})


def test_page_examples_are_found():
    assert len(CODE) >= 3


def test_tables_are_those_of_the_rows(monkeypatch):
    """`python benchmarks/tables.py` writes them."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    tables = importlib.import_module("tables")
    for path in tables.PAGES:
        page = path.read_text()
        assert tables.rewritten(page) == page


def test_every_speed_up_in_the_readme_is_a_row():
    """Speed-ups are written as **1.23×** there and nowhere else."""
    readme = (ROOT / "README.md").read_text()
    page = (ROOT / "docs" / "speed.md").read_text()
    told = re.findall(r"\*\*\d\.\d\d×\*\*", readme)
    assert told
    assert [figure for figure in told if figure not in page] == []
