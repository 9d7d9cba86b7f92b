"""Measured figures on the pages: every cell of every table is that of the rows in benchmarks/results/."""

import importlib
import re
from itertools import combinations
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
pages = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
MARKED = re.compile(r"<!-- rows: (.*?) -->\n(.*?)<!-- end -->", re.DOTALL)
MEASURED = re.compile(r"PSNR|SSIM|LPIPS|FID|speed-up|\bms\b|µs|seconds|memory", re.IGNORECASE)
FIGURE = re.compile(r"\d\.\d")


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("tables")


def grids(text: str) -> list[list[list[str]]]:
    """The cells of all Markdown tables of a text, their heads first."""
    found = re.findall(r"(?:^\|.*\|[ \t]*\n)+", text, re.MULTILINE)
    return [[re.split(r"(?<!\\)\|", line.strip())[1:-1] for line in table.splitlines()] for table in found]


def marked_tables() -> list:
    return [
        pytest.param(path, name, id=f"{path.name}-{name}")
        for path in PAGES
        for name, text in MARKED.findall(path.read_text())
        if grids(text)
    ]


@pages
def test_marked_tables_are_those_of_the_rows(path, tables):
    """If it fails: `python benchmarks/tables.py` writes them anew."""
    page = path.read_text()
    assert tables.rewritten(page) == page


@pages
def test_no_other_table_has_measured_figures(path):
    """Or nothing would hold them to the rows."""
    others = grids(MARKED.sub("", path.read_text()))
    measured = [table for table in others if MEASURED.search(" ".join(table[0])) or "×**" in str(table)]
    assert [table[0] for table in measured if FIGURE.search(str(table[2:]))] == []


def test_the_readme_and_the_pages_have_such_tables():
    assert {path.values[0].name for path in marked_tables()} >= {
        "README.md",
        "speed.md",
        "quality.md",
        "other-methods.md",
    }


@pytest.mark.parametrize(("path", "name"), marked_tables())
def test_two_cells_that_are_swapped_are_seen(path, name, tables):
    """In every column that has two different figures, two of them change places."""
    page = path.read_text()
    text = dict(MARKED.findall(page))[name]
    lines = text.splitlines()
    head, _, *body = grids(text)[0]
    swapped = 0
    for column in range(len(head)):
        pairs = combinations(range(len(body)), 2)
        pair = next((pair for pair in pairs if len({body[row][column] for row in pair}) == 2), None)
        if pair is None:
            continue
        changed = [list(row) for row in body]
        first, second = pair
        changed[first][column], changed[second][column] = body[second][column], body[first][column]
        wrong = page.replace(text, "\n".join([*lines[:2], *(f"|{'|'.join(row)}|" for row in changed)]) + "\n")
        assert wrong != page
        assert tables.rewritten(wrong) == page
        swapped += 1
    assert swapped


def test_the_default_stands_first_and_every_speed_has_its_quality(tables):
    head, _, first, *others = grids(tables.headline_table() + "\n")[0]
    assert [title.strip() for title in head[-2:]] == ["LPIPS", "PSNR, dB"]
    assert "`balanced` (default)" in first[0]
    for row in (first, *others):
        assert any("×" in cell for cell in row[2:-2])
        assert all(float(cell) for cell in row[-2:])


class TestRewritten:
    def test_a_cell_without_a_row_has_a_dash(self, tables, monkeypatch):
        monkeypatch.setattr(tables, "HEADLINE_SETTINGS", {"`fast`": ("0.9",)})
        assert tables.headline_table().endswith("| `fast` | 90% | — | — | — | — |")

    def test_the_newest_row_counts(self, tables):
        for group in tables.HEADLINE_MODELS.values():
            rows = [*tables.read("denoiser_h200.csv"), *tables.read("methods_h200.csv")]
            same = [row for row in rows if group.items() <= row.items() and row["method"] == "fast"]
            for row in same:
                assert row["date"] <= tables._newest(group)["`fast`", row["ratio"]]["date"]

    @pytest.mark.parametrize(
        ("page", "message"),
        [
            ("<!-- rows: nothing -->\n<!-- end -->", "names no table; use one of headline"),
            ("<!-- rows: facts -->\n", "needs its `<!-- end -->`"),
        ],
    )
    def test_mistakes_are_named(self, page, message, tables):
        with pytest.raises(ValueError, match=message):
            tables.rewritten(page)
