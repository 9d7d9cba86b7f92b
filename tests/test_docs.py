"""Every example in the docstrings and in the README runs, and says what it says."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import toma_diffusion

README = (Path(__file__).parent.parent / "README.md").read_text()
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


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_readme_example(code):
    exec(compile(code, "README.md", "exec"), {})


def test_readme_examples_are_found():
    assert "```python" in README
