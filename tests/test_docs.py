"""Every example in the docstrings, in the README and in docs/ runs, and says what it says."""

import doctest
import importlib
import pkgutil
import re
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
    if not name.endswith("__main__")
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
