"""The command `toma playground` in a real browser, as wide as a desktop and as a phone."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_text import pipeline_folder
from tiny_weights import lpips_file

pytest.importorskip("gradio")
sync_api = pytest.importorskip("playwright.sync_api")

CHROMIUM = shutil.which(os.environ.get("TOMA_BROWSER", ""))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs TOMA_BROWSER=chromium (make test-browser)"),
]

ROOT = Path(__file__).parents[3]
SOURCES = os.pathsep.join([str(ROOT / "src"), str(ROOT / "lab" / "src")])
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}
PATIENCE = 40_000
"""In milliseconds, as long as a test waits for anything: nothing here takes so long."""
LONG = 200
"""Steps of a generation that others have to wait for."""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """All that the server may find: the folders of a user, of temporary files, and of its work."""
    home = tmp_path_factory.mktemp("machine")
    for name in ("home", "tmp", "work"):
        (home / name).mkdir()
    return home


@pytest.fixture(scope="module")
def address(home, tmp_path_factory):
    """The command in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    weights = lpips_file(tmp_path_factory.mktemp("weights"))
    command = [
        *(sys.executable, "-m", "toma_lab.cli", "playground", "--port", str(port), "--output", "out"),
        *("--model", str(pipeline_folder()), "--device", "cpu", "--lpips-weights", str(weights)),
    ]
    folders = {"HOME": str(home / "home"), "TMPDIR": str(home / "tmp")}
    environment = {**os.environ, **folders, "PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    for name in ("GRADIO_TEMP_DIR", "MPLCONFIGDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        environment.pop(name, None)
    with subprocess.Popen(command, cwd=home / "work", env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert f"Open http://127.0.0.1:{port}/" in server.stdout.readline()
        yield f"http://127.0.0.1:{port}/"
        server.terminate()


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, address):
    """A function that opens the page for one more user."""
    contexts = []

    def open_one(width="desktop"):
        wide, high = WIDTHS[width]
        context = browser.new_context(viewport={"width": wide, "height": high})
        context.set_default_timeout(PATIENCE)
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        contexts.append(context)
        page = context.new_page()
        page.seen, page.errors = [], []
        page.on("request", lambda request: page.seen.append(request.url))
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.goto(address)
        page.locator("#code", has_text="speed_up").wait_for()  # it has asked the server for it
        page.fill("#steps input", "4")
        return page

    yield open_one
    for context in contexts:
        context.close()


def choose(page, method):
    page.click("#method input")
    page.get_by_role("option", name=method, exact=True).click()
    page.locator("#code", has_text="Merge()" if method == "toma-stage" else f'"{method}"').wait_for()


def message(page):
    """The text of the message on the page."""
    page.wait_for_selector(".toast-body")
    return page.inner_text(".toast-body")


def does_not_scroll_sideways(page):
    return page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.parametrize("width", WIDTHS)
def test_a_picture_and_all_that_is_said_about_it(open_page, width):
    page = open_page(width)
    choose(page, "toma-stage")
    page.click("#compare")
    page.wait_for_selector("#figures .cards")
    figures = page.inner_text("#figures")
    for word in ("speed-up", "PSNR", "SSIM", "LPIPS", "original", "accelerated", "4 computed on merged tokens"):
        assert word in figures
    page.wait_for_function(
        "[...document.querySelectorAll('#pictures img')].filter(each => each.naturalWidth == 64).length == 2"
    )
    page.wait_for_selector("#maps img")
    page.get_by_text("What was done, in detail").click()
    assert "ToMA, ratio 0.5" in page.inner_text("#summary")
    assert does_not_scroll_sideways(page)
    assert page.errors == []


def test_the_code_can_be_copied_and_runs(open_page, tmp_path):
    page = open_page()
    choose(page, "fast")
    page.fill("#prompt textarea", 'a "red" apple')
    page.locator("#code", has_text='\\"red\\"').wait_for()
    page.locator("#code button").last.click()
    page.wait_for_function("navigator.clipboard.readText().then(text => text.includes('speed_up'))")
    code = page.evaluate("navigator.clipboard.readText()")
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=False, env={**os.environ, "PYTHONPATH": SOURCES}
    )
    assert run.returncode == 0
    assert (tmp_path / "toma.png").exists()


@pytest.mark.parametrize("width", WIDTHS)
def test_bad_input_gives_a_message(open_page, width):
    page = open_page(width)
    page.fill("#steps input", "0")
    page.click("#compare")
    assert "steps=0 is not allowed: it must be a whole number of 1 or more." in message(page)
    assert does_not_scroll_sideways(page)


def test_a_message_shows_signs_as_they_were_written(open_page):
    page = open_page()
    page.get_by_role("tab", name="Tune").click()
    page.get_by_text("Own candidates").click()
    page.fill("#methods textarea, #methods input", "<b>x</b>")
    page.click("#tune")
    assert "<b>x</b>" in message(page)


def test_a_second_user_waits(open_page):
    first, second = open_page(), open_page("phone")
    for page, prompt in ((first, "one"), (second, "another")):
        page.fill("#prompt textarea", prompt)
        page.fill("#steps input", str(LONG))
        page.locator("#code", has_text=f'"{prompt}"').wait_for()
    first.click("#compare")
    first.get_by_text("original -").wait_for()
    second.click("#compare")
    second.get_by_text("queue: 1/").wait_for()
    assert first.locator("#figures .cards").count() == 0  # it waits for what still runs
    first.wait_for_selector("#figures .cards")
    second.wait_for_selector("#figures .cards")


@pytest.mark.parametrize("width", WIDTHS)
def test_a_search(open_page, width):
    page = open_page(width)
    page.get_by_role("tab", name="Tune").click()
    page.get_by_text("Own candidates").click()
    page.fill("#methods textarea, #methods input", "toma-stage@0.5, steps:50%")
    page.fill("#tune-steps input", "4" if width == "desktop" else "6")  # a search of its own
    page.get_by_label("the nearest at a speed").check()
    page.get_by_label("Times as fast").fill("1.01")
    page.click("#tune")
    page.wait_for_selector("#answer .answer")
    assert "1.01× the speed" in page.inner_text("#answer")
    page.wait_for_selector("#answer svg")
    with page.expect_download() as download:
        page.click("#files a[href$='tuned.json']")
    assert '"num_steps"' in Path(download.value.path()).read_text()
    assert does_not_scroll_sideways(page)
    assert page.errors == []


def test_a_search_is_stopped_by_its_own_user_alone(open_page):
    page, other = open_page(), open_page()
    for each in (page, other):
        each.get_by_role("tab", name="Tune").click()
    page.fill("#tune-steps input", "50")
    page.click("#tune")
    page.get_by_text("learning to predict skipped steps").wait_for()
    other.click("#stop")
    assert "No search of yours is running" in message(other)
    page.click("#stop")
    page.locator(".toast-body", has_text="The search was stopped").wait_for()
    assert page.get_by_text("Error", exact=True).count() == 0


def test_it_asks_no_other_server_and_writes_nothing_outside_its_folder(open_page, home, address):
    page = open_page()
    page.click("#compare")
    page.wait_for_selector("#figures .cards")
    elsewhere = [url for url in page.seen if not url.startswith((address, "data:", "blob:"))]
    assert elsewhere == []
    time.sleep(0.5)
    files = {path.relative_to(home) for path in home.rglob("*") if path.is_file()}
    assert files
    assert {path for path in files if path.parts[:2] != ("work", "out")} == set()
