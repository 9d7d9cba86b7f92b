"""The page of a run: whole, safe, and needing nothing else."""

import base64
import io
import re
from html.parser import HTMLParser

import pytest
from PIL import Image
from run_folders import COLUMNS, FACTS, finished_run
from toma_lab.cli import app
from toma_lab.evaluate import EvalFolder, EvalPlan
from toma_lab.report import page
from toma_lab.report.page import MERGE_MAP, MOST_CLIPS, choose_items, write_report
from typer.testing import CliRunner

NASTY = """<script>alert("x")</script> & "quotes' onload=alert(1) </title>"""


class Elements(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "img", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return finished_run(tmp_path_factory.mktemp("run"), prompts=(NASTY, "a blue shoe"), model="<i>model</i>")


@pytest.fixture(scope="module")
def text(run):
    path = write_report(run)
    assert path == run.path / "report.html"
    return path.read_text(encoding="utf-8")


class TestPage:
    def test_it_is_well_formed_and_ids_are_unique(self, text):
        elements = Elements(text)
        assert elements.open == []
        ids = [attributes["id"] for _, attributes in elements.tags if "id" in attributes]
        assert len(ids) == len(set(ids))
        targets = [each["href"] for each in elements.all("a")]
        assert {target.removeprefix("#") for target in targets} <= set(ids)

    def test_it_needs_nothing_else(self, text):
        elements = Elements(text)
        assert not elements.all("link")
        assert all("src" not in each for each in elements.all("script"))
        sources = [each["src"] for each in elements.all("img") if "src" in each]
        assert sources
        assert all(source.startswith("data:image/webp;base64,") for source in sources)
        assert not re.search(r"@import|url\((?!#)", text)
        policy = [each["content"] for each in elements.all("meta") if "http-equiv" in each]
        assert policy[0].startswith("default-src 'none'")

    def test_what_users_wrote_is_text_and_never_markup(self, text):
        elements = Elements(text)
        assert len(elements.all("script")) == 1  # our own
        assert not elements.all("i")
        assert not any(name.startswith("on") for _, attributes in elements.tags for name in attributes)
        assert f"{NASTY} " in elements.texts
        assert any(each.get("alt", "").startswith(NASTY) for each in elements.all("img"))
        assert "weights <b>" in elements.texts
        assert FACTS.gpu in elements.texts

    def test_every_image_is_there_once_with_its_figures(self, text, run):
        elements = Elements(text)
        sources = [each["src"] for each in elements.all("img") if "src" in each]
        assert len(sources) == len(COLUMNS) * 4
        opened = Image.open(io.BytesIO(base64.b64decode(sources[2].split(",")[1])))
        assert opened.size == (32, 32)
        assert all(abs(a - b) < 12 for a, b in zip(opened.getpixel((5, 5)), (60, 0, 0), strict=True))
        assert {"4.2 s", "PSNR 34.00 dB", "LPIPS 0.040"} <= set(elements.texts)

    def test_every_setting_is_there(self, text, run):
        spoken = "\n".join(Elements(text).texts)
        for variant in COLUMNS:
            assert variant.title in spoken
        assert '"distance_weight": 0.3' in spoken
        for word in ("0, 7", FACTS.commit, FACTS.torch, run.date, "psnr, lpips", "the pipeline’s own"):
            assert word in spoken

    def test_plots_follow_the_pages_colours_and_have_a_description(self, text):
        drawings = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
        assert len(drawings) == 2
        assert all("currentColor" in drawing and "#010203" not in drawing for drawing in drawings)
        labels = [each["aria-label"] for each in Elements(text).all("figure") if "aria-label" in each]
        assert labels[0].startswith("LPIPS (lower is better) against the gain in time. toma: 0.04 at 1.19× (0.25), ")
        assert labels[1].startswith("PSNR (higher is better) against the gain in time. toma: 34 at 1.19× (0.25), ")


class TestChoices:
    def test_of_many_images_some_are_shown_and_it_says_so(self, tmp_path):
        run = finished_run(tmp_path, prompts=tuple(f"prompt {n}" for n in range(20)))
        shown = choose_items(run)
        assert len(shown) == page.MOST_ITEMS
        assert shown[0].index == 0
        assert shown[-1].index > 15
        assert f"{page.MOST_ITEMS} of 40 are shown." in write_report(run).read_text(encoding="utf-8")

    def test_images_that_are_gone_are_left_out(self, tmp_path):
        run = finished_run(tmp_path)
        run.picture(COLUMNS[2], run.plan.items[0]).unlink()
        assert choose_items(run) == run.plan.items[1:]
        run.picture(COLUMNS[1], run.plan.items[1]).unlink()
        assert 'id="images"' not in write_report(run).read_text()

    def test_a_merge_map_is_shown_if_there_is_one(self, tmp_path):
        run = finished_run(tmp_path)
        assert 'id="merge-map"' not in write_report(run).read_text()
        Image.new("RGB", (60, 40)).save(tmp_path / MERGE_MAP)
        assert 'id="merge-map"' in write_report(run).read_text()


def test_clips(tmp_path):
    prompts = tuple(f"a <b> square {number}" for number in range(6))
    folder = finished_run(tmp_path / "run", prompts, seeds=(0,), clips=True, frames=5, metrics=("psnr", "flicker"))
    text = write_report(folder).read_text(encoding="utf-8")
    assert text.count('data-frames="5"') == MOST_CLIPS * len(COLUMNS)
    assert f"{MOST_CLIPS} of 6 are shown" in text
    for words in (
        'data-fps="12.0"',
        "Sec/clip ↓",
        "Flicker 0.50",
        "Figures of a clip are means",
        "a &lt;b&gt; square 0",
    ):
        assert words in text
    images = write_report(finished_run(tmp_path / "images")).read_text(encoding="utf-8")
    assert "data-frames" not in images
    assert "Figures of a clip" not in images


class TestCommand:
    def test_writes_to_the_given_file(self, tmp_path):
        run = finished_run(tmp_path / "run")
        result = CliRunner().invoke(app, ["report", str(run.path), "--output", str(tmp_path / "new" / "page.html")])
        assert result.exit_code == 0, result.output
        assert "page.html (0.1 MiB)" in result.output
        assert (tmp_path / "new" / "page.html").read_text().startswith("<!doctype html>")

    def test_what_is_no_finished_run_is_refused(self, tmp_path):
        result = CliRunner().invoke(app, ["report", str(tmp_path)], env={"COLUMNS": "300"})
        assert result.exit_code == 2
        assert "is not a run" in result.output
        plan = EvalPlan(model="m", prompts=("x",), seeds=(0,), columns=COLUMNS, steps=1)
        EvalFolder.start(tmp_path, plan, FACTS)
        result = CliRunner().invoke(app, ["report", str(tmp_path)], env={"COLUMNS": "300"})
        assert result.exit_code == 2
        assert "has no table yet" in result.output
