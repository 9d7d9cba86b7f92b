"""A search for the page, on a tiny pipeline."""

import json

import pytest
import torch
from tiny_text import pipeline_folder
from tiny_weights import lpips_file
from toma_lab.metrics import Weights
from toma_lab.playground import html
from toma_lab.playground.models import Models
from toma_lab.playground.search import LIMIT, SPEED, Searches, StoppedError, Wish

from toma_diffusion import UsageError

MODEL = str(pipeline_folder())
METHODS = "toma-stage@0.5, steps:50%"
WISH = Wish(MODEL, SPEED, None, 1.01, 4, None, 2, "small", METHODS)


def models_with(weights):
    return Models(MODEL, torch.device("cpu"), None, weights)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return models_with(Weights(lpips=lpips_file(tmp_path_factory.mktemp("weights"))))


def ignore(what, share):
    pass


@pytest.fixture(scope="module")
def finished(models, tmp_path_factory):
    """Stopped once, and started again."""
    searches = Searches(models, tmp_path_factory.mktemp("page") / "tune")
    reports = []

    def stop_in_the_search(what, share):
        reports.append((what, share))
        if what.startswith("search, 2"):
            raise StoppedError("stopped")

    with pytest.raises(StoppedError):
        searches.run(WISH, stop_in_the_search)
    measured = {path: path.stat().st_mtime_ns for path in searches.folder.rglob("images/**/*.png")}
    folder, outcome = searches.run(WISH, lambda what, share: reports.append((what, share)))
    return searches, folder, outcome, reports, measured


def test_it_reports_how_far_it_is(finished):
    *_, reports, _ = finished
    stages = [what.partition(",")[0] for what, _ in reports]
    assert list(dict.fromkeys(stages))[:3] == ["loading the model", "search", "finalists"]
    assert all(0 <= share <= 1 for _, share in reports)
    assert any("left" in what for what, _ in reports)
    assert reports[-1][1] > 0.5


def test_it_writes_the_answer_below_its_folder(finished):
    searches, folder, outcome, _, _ = finished
    assert folder.path.parent == searches.folder
    assert json.loads(folder.tuned_path.read_text())["num_steps"] == 4
    assert (folder.path / "tune.html").exists()
    assert len(outcome.results) == 2


def test_one_that_was_stopped_goes_on_where_it_was(finished):
    *_, measured = finished
    assert measured
    assert {path: path.stat().st_mtime_ns for path in measured} == measured


def test_the_answer_in_words_and_as_a_plot(finished):
    _, folder, outcome, _, _ = finished
    page = html.answer(folder, outcome)
    assert "1.01× the speed" in page
    assert "<svg" in page


def test_another_wish_has_another_folder(finished, models):
    searches, *_ = finished
    other = Wish(MODEL, SPEED, None, 1.01, 4, None, 1, "small", METHODS)

    def stop(what, share):
        if what != "loading the model":
            raise StoppedError("stopped")

    with pytest.raises(StoppedError):
        searches.run(other, stop)
    assert len([path for path in searches.folder.iterdir() if path.is_dir()]) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speed_up": None}, "the speed-up is empty"),
        ({"want": LIMIT}, "the limit is empty"),
        ({"speed_up": 0.5}, r"speed_up=0\.5 is not allowed"),
        ({"want": LIMIT, "limit": -1.0}, r"max_lpips=-1\.0 is not allowed"),
        ({"prompts": 0}, "prompts=0 is not allowed"),
        ({"prompts": None}, "prompts=None is not allowed"),
        ({"steps": 0}, "steps=0 is not allowed"),
        ({"methods": "nonsense"}, "nonsense"),
        ({"budget": "huge"}, "budget='huge' is not known"),
    ],
)
def test_a_wrong_wish_is_refused_before_anything_is_written(models, tmp_path, changes, message):
    searches = Searches(models, tmp_path / "tune")
    with pytest.raises(UsageError, match=message):
        searches.run(Wish(**{**WISH.__dict__, **changes}), ignore)
    assert not (tmp_path / "tune").exists()


def test_without_weights_a_limit_is_one_of_psnr(models, tmp_path):
    assert Searches(models, tmp_path).measures_lpips
    searches = Searches(models_with(Weights()), tmp_path)
    assert not searches.measures_lpips
    with pytest.raises(UsageError, match=r"min_psnr=-1\.0"):
        searches.run(Wish(**{**WISH.__dict__, "want": LIMIT, "limit": -1.0}), ignore)
