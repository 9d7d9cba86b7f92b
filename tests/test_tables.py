"""Measured figures on the pages: every cell of every table is that of the rows in benchmarks/results/."""

import importlib
import re
from itertools import combinations
from pathlib import Path

import pytest
from tiny import sdxl_unet

from toma_diffusion.evaluation.variants import UNMERGED, VariantSpec, variants_of

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


class TestEqualTime:
    @pytest.fixture
    def rows(self, tables, tmp_path, monkeypatch):
        """Rows as quality.py writes them, of a model that is called `tiny`."""
        quality = importlib.import_module("quality")
        at = quality.Rows(tmp_path / "quality_tiny.csv")
        common = {"steps": "20", "images": "32", "guidance": "4", "gpu": "a GPU", "commit": "abc"}
        methods = (
            "steps:16",
            "fast:select_every=1;scale=inf",
            "fast:select_every=1+steps:16",
            "toma-tile:select_every=1",
        )
        found = [VariantSpec.parse(text) for text in methods]
        variants = [*UNMERGED, *variants_of(sdxl_unet(), found, [0.5])]
        runs = ["reference"] * 2 + ["steps"] + ["presets"] * 3
        for run, variant in zip(runs, variants, strict=True):
            row = quality.row_of(run, variant, common)
            at.add(row | {"lpips": "0.1234", "gain": "1.45", "gain_source": "sdxl"})
        monkeypatch.setattr(tables, "RESULTS", tmp_path)

    def test_a_table_at_one_number_of_steps(self, tables, rows):
        text = tables.rewritten("<!-- rows: quality of steps and presets on tiny at 20 steps -->\n<!-- end -->")
        assert "| `fewer steps` | 16 | 1.45× | 0.1234 |  |  |" in text
        assert "| `fast`, `select_every=1`, `scale=inf` | 0.5 | 1.45× | 0.1234 |  |  |" in text
        assert "| `fast`, `select_every=1` + `steps:16` | 0.5 |" in text

    def test_what_all_rows_share_is_said_once(self, tables, rows):
        text = tables.rewritten("<!-- rows: quality of presets on tiny at 20 steps -->\n<!-- end -->")
        assert "All with `select_every=1`." in text
        assert "| `toma-tile` | 0.5 |" in text

    def test_facts(self, tables, rows):
        text = tables.rewritten("<!-- rows: quality facts of tiny -->\n<!-- end -->")
        assert "32 prompts, guidance 4," in text
        assert "Gains are those of sdxl." in text

    def test_a_table_without_rows_is_an_error(self, tables, rows):
        with pytest.raises(ValueError, match=r"quality_tiny\.csv has no rows of caches at 20 steps"):
            tables.rewritten("<!-- rows: quality of caches on tiny at 20 steps -->\n<!-- end -->")


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
