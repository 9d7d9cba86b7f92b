"""The page without a browser: what it calls, where it can be reached, and what is said if it cannot start."""

import socket
import sys
import urllib.error
import urllib.request
from dataclasses import replace

import pytest
import torch
from tiny_text import pipeline_folder
from toma_lab.cli import app
from toma_lab.metrics import Weights
from toma_lab.playground.choice import Choice, request_of
from toma_lab.playground.comparison import Comparer
from toma_lab.playground.models import Models
from toma_lab.playground.own_folder import keep_files_in
from toma_lab.playground.search import Searches
from toma_lab.playground.server import POLICY, serve
from typer.testing import CliRunner

from toma_diffusion.errors import UsageError

MODEL = str(pipeline_folder())
GIVEN = (MODEL, "a red apple", 0, 2, None, "toma-stage", 0.5, 1)
"""Values of the controls of a comparison."""
KEPT = ("GRADIO_TEMP_DIR", "MPLCONFIGDIR", "GRADIO_ANALYTICS_ENABLED")


@pytest.fixture(autouse=True)
def _same_environment(monkeypatch):
    """What the server sets is taken back."""
    for name in KEPT:
        monkeypatch.setenv(name, "")


@pytest.fixture(scope="module")
def models():
    return Models(MODEL, torch.device("cpu"), None, Weights())


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture
def served(models, port, tmp_path):
    pytest.importorskip("gradio")
    keep_files_in(tmp_path / "out")
    page, address = serve(models, tmp_path / "out", port)
    yield address, port
    page.close()


def test_it_is_served_on_this_machine_only(served):
    address, port = served
    assert address == f"http://127.0.0.1:{port}/"
    with urllib.request.urlopen(address) as response:
        assert response.headers["Content-Security-Policy"] == POLICY
        assert "toma playground" in response.read().decode()
    others = {each[4][0] for each in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1"}
    for other in others:
        with socket.socket() as probe:
            assert probe.connect_ex((other, port)) != 0


def test_only_files_of_the_page_can_be_read(served, tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    address, _ = served
    for path in (tmp_path / "secret.txt", "/etc/passwd", tmp_path / "out" / "tune" / ".." / ".." / "secret.txt"):
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(f"{address}gradio_api/file={path}")
        assert error.value.code in (403, 404)


def test_a_port_that_is_taken_is_a_user_s_mistake(served, models, tmp_path):
    with pytest.raises(UsageError, match=r"cannot be used .*--port"):
        serve(models, tmp_path / "other", served[1])


def test_a_port_that_does_not_exist(models, tmp_path):
    with pytest.raises(UsageError, match="port 99999 is not allowed"):
        serve(models, tmp_path, 99999)


def test_without_gradio_it_is_said_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "gradio", None)
    result = CliRunner().invoke(app, ["playground", "--model", "not/loaded", "--output", str(tmp_path)])
    assert result.exit_code == 2
    assert "pip install 'toma-diffusion-lab[playground]'" in result.stderr


def test_a_model_that_cannot_be_opened_is_said_before_the_page_is_served(tmp_path):
    pytest.importorskip("gradio")
    result = CliRunner().invoke(app, ["playground", "--model", "no model", "--output", str(tmp_path)])
    assert result.exit_code == 2
    assert "model 'no model' is not known" in result.stderr


def test_models_of_clips_are_neither_offered_nor_taken(tmp_path):
    pytest.importorskip("gradio")
    assert "bundled-video" not in Models("bundled", torch.device("cpu"), None, Weights()).names
    options = ["--model", "bundled-video", "--device", "cpu", "--output", str(tmp_path)]
    result = CliRunner().invoke(app, ["playground", *options])
    assert result.exit_code == 2
    assert "'bundled-video' is a DemoWanPipeline, which generates clips" in result.stderr


class TestHandlers:
    """What gradio calls."""

    @pytest.fixture
    def page(self):
        pytest.importorskip("gradio")
        from toma_lab.playground import page

        return page

    @pytest.fixture
    def compare(self, page, models):
        """The handler of the button, as gradio calls it: by the names of the controls."""
        names = page.Controls(*page.Controls._fields)
        handler = page.compare_with(Comparer(models), names, "again", "maps")
        given = dict(zip(names, GIVEN, strict=True)) | {"again": False, "maps": True}
        return lambda **changes: handler(given | changes)

    def test_compare(self, compare):
        pictures, figures, merged, summary = compare()
        assert [picture.size for picture in pictures] == [(64, 64)] * 2
        assert "speed-up" in figures
        assert merged.visible
        assert "ToMA, ratio 0.5" in summary

    def test_a_mistake_becomes_a_message(self, page, compare):
        import gradio

        with pytest.raises(gradio.Error, match="the prompt is empty"):
            compare(prompt="")
        with pytest.raises(gradio.Error, match="&lt;b&gt;"), page.messages():
            raise UsageError("<b>")

    def test_what_merged_is_shown_and_what_was_left_whole_is_not(self, page, models):
        choice, request = Choice.of("toma-stage", 0.5, 2, 2), request_of("x", 0, 2, None)
        found = Comparer(models).compare(MODEL, request, choice, lambda *_: None, again=False, maps=True)
        whole = replace(found.maps[0], targets=torch.arange(64), kind="left whole")
        assert page.picture_of(replace(found, maps=(*found.maps, whole))).size == page.picture_of(found).size
        assert page.picture_of(replace(found, maps=(whole,))) is None

    def test_words_and_code_follow_the_controls(self, page, models):
        names = page.Controls(*page.Controls._fields)
        describe = page.describe_with(models, names)
        given = dict(zip(names, GIVEN, strict=True)) | {"steps": 20, "method": "fast", "ratio": 0.0, "computed": 6}
        words, code = describe(given)
        assert words.startswith("6 of 20 steps are computed, spread by the noise levels")
        assert "speed_up(pipe, skip=Skip(computed=6))" in code
        assert describe(given | {"prompt": ""})[1] == "# the prompt is empty: describe the picture."

    def test_the_sliders_follow_method_and_steps(self, page):
        ratio, slider = page.own_values("fast", 20)
        assert (ratio, slider.value, slider.maximum) == (0.0, 8, 20)
        ratio, slider = page.own_values("toma-stage", 30)
        assert (ratio, slider.value, slider.maximum) == (0.5, 30, 30)
        assert "value" not in page.own_values("fast", 0)[1]

    def test_all_that_runs_a_model_waits_in_one_queue(self, page, models, tmp_path):
        built = page.build_page(Comparer(models), Searches(models, tmp_path))
        waiting = [each for each in built.fns.values() if each.concurrency_id == "model"]
        assert {each.name for each in waiting} == {"compare", "search"}
        assert {each.concurrency_limit for each in waiting} == {1}
        assert not any(each.queue for each in built.fns.values() if each not in waiting and each.name != "stop")
