"""Measured figures on the pages: every cell of every table is that of the rows in benchmarks/results/."""

import importlib
import re
from itertools import groupby
from pathlib import Path

import pytest
from tiny import sdxl_unet
from tiny_clips import clip_pipeline
from toma_lab.columns import UNCHANGED, ColumnSpec, columns_of
from toma_lab.costs import StepCosts
from toma_lab.rows import COLUMNS, Rows

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
pages = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
MARKED = re.compile(r"<!-- rows: (.*?) -->\n(.*?)<!-- end -->", re.DOTALL)
MEASURED = re.compile(r"PSNR|SSIM|LPIPS|FID|speed-up|\bms\b|µs|seconds|memory", re.IGNORECASE)
FIGURE = re.compile(r"\d\.\d")
ROW = dict.fromkeys(COLUMNS, "") | {"images": "32", "guidance": "4", "gpu": "a GPU", "commit": "abc", "blocks": "14"}


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("tables")


@pytest.fixture
def speeds(tables):
    return importlib.import_module("speed_tables")


@pytest.fixture
def cells(tables):
    return importlib.import_module("table_rows")


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


def test_every_speed_has_its_quality(tables):
    head, _, *rows = grids(tables.headline_table() + "\n")[0]
    assert [title.strip() for title in head[-3:]] == ["LPIPS", "PSNR, dB", "LPIPS, Flux-class model"]
    for row in rows:
        speeds, (unet, _, flux) = row[1:-3], [cell.strip() for cell in row[-3:]]
        assert any("×" in cell for cell in speeds)
        assert any(cell != "—" and float(cell) for cell in (unet, flux))


def test_gains_in_time_are_bold(cells):
    row = {"gain": "1.5", "gain_source": "flux"}
    assert cells.gain_of(row) == "**1.50×**"
    assert cells.gain_of(row | {"gain_source": "computed steps"}) == "1.50×"
    assert cells.gain_of(row | {"gain": ""}) == "—"


class TestTimed:
    """Rows of `toma bench`, as they are."""

    def test_every_model_and_setting_has_a_line(self, tables, speeds):
        lines = speeds.timed_table("today").splitlines()[2:]
        rows = [row for row in tables.read("today_h200.csv") if row["ratio"]]
        assert {line.split("|")[1].split(",")[0].strip() for line in lines} == {row["model"] for row in rows}
        assert len(lines) == len(set(lines)) <= len(rows)

    def test_of_rows_that_were_timed_again_the_last_counts(self, tables, speeds):
        rows = [row for row in tables.read("today_h200.csv") if (row["model"], row["ratio"]) == ("flux2", "0.5")]
        rows = [row for row in rows if row["resolution"] == "1024x1024"]
        assert len(rows) == 3
        (line,) = [
            each for each in speeds.timed_table("today").splitlines() if "flux2, 1024² | 4 | `toma-stage` | 50%" in each
        ]
        assert f"| {float(rows[-1]['step_ms']):.4g} |" in line

    def test_lines_of_a_model_stand_together(self, speeds):
        """Also those that were timed later than others."""
        models = [line.split("|")[1] for line in speeds.timed_table("video").splitlines()[2:]]
        assert len([*groupby(models)]) == len(set(models))

    def test_clips_say_their_frames_and_where_they_merge(self, speeds):
        text = speeds.timed_table("video")
        assert "| wan-480p, 832×480, 81 frames | 4 | `toma-stage`, within frames | 50% |" in text


class TestQuality:
    @pytest.fixture
    def add(self, cells, tmp_path, monkeypatch):
        """Writes rows as quality.py does: of a part, its methods at ratio 0.5, with one LPIPS after another."""
        quality = importlib.import_module("quality")
        monkeypatch.setattr(cells, "RESULTS", tmp_path)

        def write(model: str, steps: str, part: str, *methods: str, skipped: str = "", converged: str = "") -> None:
            at = Rows(tmp_path / f"quality_{model}.csv", quality.KEY)
            specs = map(ColumnSpec.parse, methods)
            columns = UNCHANGED if part == "reference" else columns_of(sdxl_unet(), specs, [0.5])
            for place, column in enumerate(columns):
                row = ROW | column.cells | {"run": part, "steps": steps, "lpips": f"{0.1 * (place + 1):.2f}"}
                row |= {"skipped": skipped, "lpips_converged": converged}
                if column.own is not None and column.skips(int(steps)):
                    row["computed"] = str(len(column.own.computed(int(steps))))
                at.add(row | quality.gain_of(row, column, StepCosts.load("sdxl")))

        return write

    def table(self, tables, name: str) -> str:
        return tables.rewritten(f"<!-- rows: {name} -->\n<!-- end -->")

    def test_equal_time(self, tables, add):
        add("tiny", "20", "steps", "steps:16", "steps:8")
        add("tiny", "4", "steps", "steps:3")
        add("tiny", "20", "presets", "tomesd", "toma-stage", "toma-stage:scale=inf")
        add("tiny", "20", "combined", "toma-stage:select_every=1+steps:16")
        text = self.table(tables, "equal time on tiny")
        assert "| | gain | LPIPS, 4 steps | LPIPS, 20 steps |" in text
        assert "| fewer steps | about 1.25× |  | 0.100 (16) |" in text
        assert "| fewer steps | about 1.33× | 0.100 (3) |  |" in text
        assert "| `toma-stage`, 50% removed | 1.38× |  | 0.200 |" in text  # in time, from the steps of SDXL
        assert "| `toma-stage`, 50% removed, and fewer steps | 1.73× |  | 0.100 (16) |" in text
        assert "scale" not in text

    def test_equal_cost(self, tables, add):
        """A line for every number of computed steps. Of caches those count that save about as much."""
        add("tiny", "20", "skip", "faster", "fast", "balanced")
        add("tiny", "20", "lists", "timesteps:computed=(0,1,2,3,6,9,13,18)")
        add("tiny", "20", "steps", "steps:12", "steps:8")
        add("tiny", "20", "solvers", "solver:name=unipc;steps=8", "solver:name=dpmpp-2m;steps=8")
        add("tiny", "20", "caches", "deepcache:interval=2", "deepcache:interval=3", skipped="0.6")
        (head, _, *rows), cache = grids(self.table(tables, "equal cost on tiny"))[0], "0.1000 (DeepCache, 2.50×)"
        ways = ["even steps", "best solver", "best cache", "list alone", "prediction"]  # nothing was learned
        assert [cell.strip() for cell in head] == ["steps", "preset", "computed", "gain", *ways]
        assert [[cell.strip() for cell in row] for row in rows] == [
            ["20", "`balanced`", "12 of 20", "1.67×", "0.1000", "—", cache, "—", "0.3000"],
            ["20", "`fast`", "8 of 20", "2.50×", "0.2000", "0.1000 (UniPC)", cache, "0.1000", "0.2000"],
            ["20", "`faster`", "6 of 20", "3.33×", "—", "—", "—", "—", "0.1000"],
        ]

    def test_equal_cost_to_the_converged_picture(self, tables, add):
        add("tiny", "20", "skip", "fast", converged="0.05")
        assert "| 20 | `fast` | 8 of 20 | 2.50× | 0.0500 |" in self.table(tables, "converged on tiny")
        assert "0.1000" in self.table(tables, "equal cost on tiny")

    def test_what_was_not_measured_has_no_column_and_no_table(self, tables, add):
        add("tiny", "20", "skip", "fast")
        assert "even steps" not in self.table(tables, "equal cost on tiny")
        assert "Not measured yet." in self.table(tables, "converged on tiny")

    def test_rows_of_a_gpu_come_before_those_of_a_cpu(self, tables, add):
        add("bundled", "20", "steps", "steps:8")
        add("bundled_cpu", "20", "skip", "faster", "fast")
        assert "0.2000" in self.table(tables, "equal cost on bundled")
        add("bundled", "20", "skip", "fast")
        assert "0.2000" not in self.table(tables, "equal cost on bundled")

    def test_equal_cost_of_all_networks(self, tables, add):
        assert self.table(tables, "equal cost") == "<!-- rows: equal cost -->\n<!-- end -->"
        add("bundled_cpu", "20", "skip", "fast")
        add("bundled_cpu", "8", "skip", "fast")
        add("flux_cpu", "20", "skip", "fast")
        lines = self.table(tables, "equal cost").splitlines()[3:-1]
        assert [line.split("|")[1].strip() for line in lines] == ["UNet, `fast`", "Flux-class, `fast`"]

    def test_presets_and_what_they_were(self, tables, add):
        before = "toma-stage:num_regions=64;distance_weight=0;guidance_parts=1;share_plan=True;skip_blocks=()"
        add("tiny", "20", "presets", "toma:scale=1000", "toma-stage", before)
        text = self.table(tables, "presets on tiny")
        assert "| LPIPS | 20 steps, 25% | 20 steps, 50% | 20 steps, 75% |" in text
        assert text.index("| `toma-stage` |  | 0.200 |") < text.index("| `toma-stage` as it was |  | 0.300 |")
        assert "| `toma`, `scale=1000` |  | 0.100 |  |" in text

    def test_a_setting_by_its_values(self, tables, add):
        shares = [
            f"toma-stage:region_tokens={tokens};share_plan={name}" for tokens in (64, 1024) for name in (False, True)
        ]
        add("bundled", "20", "sharing", *shares, "toma-stage:scope=block;region_tokens=64;share_plan=True")
        add("4step", "4", "sharing", *shares[:2])
        text = self.table(tables, "settings: sharing")
        assert "| LPIPS | | `share=plan` | `share=nothing` |" in text
        assert "| 20 steps | `region_tokens=64` | 0.200 | 0.100 |" in text
        assert "| 20 steps | `region_tokens=1024` | 0.400 | 0.300 |" in text
        assert "| 4-step model |" in text
        assert "scope" not in text

    def test_settings_of_several_kinds_by_steps(self, tables, add):
        add("bundled", "20", "where and when", "toma-stage:min_tokens=512", "toma-stage:window=(0.0,0.95)")
        add("4step", "4", "where and when", "toma-stage:min_tokens=512", "toma-stage:window=(0.0,0.75)")
        text = self.table(tables, "settings: where and when")
        assert "| `min_tokens=512` | — | 0.100 | — | — | 0.100 |" in text
        assert "| `window=[0.0, 0.95]` | — | 0.200 | — | — | — |" in text

    def test_a_table_without_rows_is_an_error(self, tables, add):
        add("bundled", "20", "steps", "steps:16")
        add("4step", "4", "steps", "steps:3")
        with pytest.raises(ValueError, match="there are no rows of sharing"):
            self.table(tables, "settings: sharing")


class TestClips:
    """Tables of quality_video.csv."""

    CHANGES = "skip_blocks=()"

    @pytest.fixture
    def add(self, cells, tmp_path, monkeypatch):
        """Writes rows of a tiny Wan, of which only fewer steps have a gain."""
        quality = importlib.import_module("quality")
        monkeypatch.setattr(cells, "RESULTS", tmp_path)
        model = clip_pipeline().transformer

        def write(steps: str, part: str, *methods: str, ratios: tuple[float, ...] = (0.5,)) -> None:
            at = Rows(tmp_path / "quality_video.csv", quality.KEY)
            common = ROW | {"images": "16", "frames": "16", "resolution": "256x256", "blocks": "8"}
            for place, column in enumerate(columns_of(model, map(ColumnSpec.parse, methods), ratios)):
                row = common | column.cells | {"run": part, "steps": steps}
                row |= {"lpips": f"{0.1 * (place + 1):.2f}", "flicker": steps}
                at.add(row | quality.gain_of(row, column, StepCosts("wan-480p", ())))

        return write

    def table(self, tables, name: str) -> str:
        return tables.rewritten(f"<!-- rows: {name} -->\n<!-- end -->")

    def test_all_methods_by_their_gain(self, tables, add):
        add("20", "presets", f"toma-stage:{self.CHANGES}")
        add("20", "steps", "steps:10", "steps:16")
        add("8", "steps", "steps:4")
        add("20", "caches", "magcache:threshold=0.06")
        _, *lines, _ = self.table(tables, "clips on video").splitlines()
        assert lines == [
            "| | 8 steps: gain, LPIPS, flicker | 20 steps: gain, LPIPS, flicker |",
            "|---|---|---|",
            "| MagCache, `threshold=0.06` |  | 1.00×, 0.100, 20.00 |",
            "| fewer steps, about 1.25× |  | 1.25×, 0.200, 20.00 (16) |",
            "| fewer steps, about 2.00× | 2.00×, 0.100, 8.00 (4) | 2.00×, 0.100, 20.00 (10) |",
            "| `toma-stage`, 50% removed |  | —, 0.100, 20.00 |",
        ]

    def test_regions_inside_a_frame_and_over_several(self, tables, add):
        shapes = [f"toma-stage:region_frames={frames};region_tokens=256;{self.CHANGES}" for frames in (16, 1)]
        for steps in ("8", "20"):
            add(steps, "frames", *shapes, ratios=(0.25, 0.5))
        text = self.table(tables, "frames on video")
        assert "| inside a frame | 25% | —, 0.300, 8.00 | —, 0.300, 20.00 |\n| over 16 frames | 25% | —, 0.100" in text
        assert text.index("| over 16 frames | 25% |") < text.index("| inside a frame | 50% | —, 0.400")


class TestRewritten:
    def test_the_newest_row_counts(self, tables, speeds):
        names = ("denoiser_h200.csv", "methods_h200.csv", "presets_h200.csv")
        for group in tables.HEADLINE_MODELS.values():
            newest = speeds.newest(group)
            for row in (row for name in names for row in tables.read(name)):
                if row["ratio"] and not row["cache"] and group.items() <= row.items():
                    assert row["date"] <= newest[speeds.label_of(row), row["ratio"]]["date"]

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
