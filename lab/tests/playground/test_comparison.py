"""Both pictures of a tiny pipeline, what is said about them, and the code that generates the second again."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_text import pipeline_folder
from tiny_weights import lpips_file
from toma_lab.metrics import Weights
from toma_lab.pipelines.generation import ImageRequest, generate_image
from toma_lab.playground import html
from toma_lab.playground.choice import COMPUTED, MERGED, SKIPPED, Choice, as_code
from toma_lab.playground.comparison import Comparer
from toma_lab.playground.models import Models

MODEL = str(pipeline_folder())
REQUEST = ImageRequest('a "red" apple\\', seed=3, steps=4, guidance=3.0)
STAGE = Choice.of("toma-stage", 0.25, 4, 4)
FAST = Choice.of("fast", 0.0, 4, 6)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    weights = Weights(lpips=lpips_file(tmp_path_factory.mktemp("weights")))
    return Models(MODEL, torch.device("cpu"), None, weights)


@pytest.fixture
def comparer(models):
    return Comparer(models)


def difference(ours, theirs):
    """Mean over all values, from 0 to 255."""
    return np.abs(np.asarray(ours, dtype=float) - np.asarray(theirs, dtype=float)).mean()


def compare(comparer, choice=STAGE, request=REQUEST, *, again=False, maps=True):
    reports = []
    found = comparer.compare(
        MODEL, request, choice, lambda what, share: reports.append((what, share)), again=again, maps=maps
    )
    return found, reports


def test_both_pictures_and_their_figures(comparer):
    found, reports = compare(comparer)
    pipe = comparer.models.pipe(MODEL)
    assert difference(found.original.image, generate_image(pipe, REQUEST)) < 0.01
    assert difference(found.original.image, found.accelerated.image) > 0.1
    assert set(found.scores) == {"psnr", "ssim", "lpips"}
    assert 0 < found.scores["psnr"] < 100
    assert found.speed_up == found.original.seconds / found.accelerated.seconds
    assert found.steps == (MERGED,) * 4
    assert {(each.step, each.kind) for each in found.maps} >= {(0, "level 0"), (3, "level 0")}
    assert int(found.maps[0].kept.sum()) == 48  # of 64
    assert "ToMA, ratio 0.25" in found.summary
    assert found.notes == ()
    assert ("original", 1.0) in reports
    assert ("accelerated", 1.0) in reports


def test_the_model_is_left_as_it_was(comparer):
    found, _ = compare(comparer)
    again, reports = compare(comparer, again=True, maps=False)
    assert difference(found.original.image, again.original.image) < 0.01
    assert again.is_original_new
    assert again.original.seconds != found.original.seconds
    assert ("original", 1.0) in reports


def test_an_equal_request_has_the_earlier_original_and_its_time(comparer):
    found, _ = compare(comparer)
    later, reports = compare(comparer, Choice.of("fast", 0.0, 3, 4))
    assert later.original is found.original
    assert found.is_original_new
    assert not later.is_original_new
    assert "original" not in {what for what, _ in reports}
    assert f"measured at {found.original.at}, not generated again" in html.result(later)
    assert "not generated again" not in html.result(found)


@pytest.mark.parametrize("change", [{"prompt": "x"}, {"seed": 4}, {"steps": 3}, {"guidance": 2.0}])
def test_another_request_has_another_original(comparer, change):
    compare(comparer, maps=False)
    assert compare(comparer, request=replace(REQUEST, **change), maps=False)[0].is_original_new


def test_a_step_is_computed_merged_or_skipped(comparer):
    found, _ = compare(comparer, FAST, replace(REQUEST, steps=6))
    computed = [step for step, kind in enumerate(found.steps) if kind == COMPUTED]
    assert len(computed) == 4
    listed = ", ".join(map(str, computed))
    assert f"4 of 6 steps were computed ({listed}), 2 skipped" in found.summary  # what the model itself has counted
    assert found.maps == ()
    late = Choice.of("toma-late", 0.5, 10, 20)
    assert set(late.steps_of(20)) == {COMPUTED, MERGED, SKIPPED}


def test_other_methods_have_no_map(comparer):
    found, _ = compare(comparer, Choice.of("tomesd", 0.5, 4, 4))
    assert found.maps == ()
    assert any("no map is shown" in note for note in found.notes)


def test_without_weights_it_is_said_that_lpips_is_missing():
    comparer = Comparer(Models(MODEL, torch.device("cpu"), None, Weights()))
    found, _ = compare(comparer, maps=False)
    assert set(found.scores) == {"psnr", "ssim"}
    assert any(note.startswith("Not measured: lpips") for note in found.notes)


@pytest.mark.parametrize(
    "choice",
    [STAGE, Choice.of("toma-late", 0.5, 3, 4), Choice.of("fast", 0.25, 2, 4), Choice.of("tofu", 0.5, 4, 4)],
    ids=lambda choice: choice.name,
)
def test_the_code_generates_the_same_picture(comparer, choice, tmp_path, monkeypatch):
    found, _ = compare(comparer, choice, maps=False)
    monkeypatch.chdir(tmp_path)
    exec(as_code(MODEL, "cpu", "float32", REQUEST, choice), {})
    off = difference(Image.open("toma.png"), found.accelerated.image)
    assert off < 0.1 * difference(found.original.image, found.accelerated.image)  # not 0: greedy choices may differ


def test_everything_on_the_page_is_escaped(comparer):
    found, _ = compare(comparer, maps=False)
    page = html.result(replace(found, notes=("<script>",)))
    assert "&lt;script&gt;" in page
    assert "<script>" not in page
    assert html.preformatted("<b>") == '<pre class="summary" tabindex="0">&lt;b&gt;</pre>'
