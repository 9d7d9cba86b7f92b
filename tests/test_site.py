"""The documentation as a site: built as `make docs` does, where a dead link is an error."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
commands = pytest.importorskip("mkdocs.commands.build", reason="needs mkdocs (extra docs)")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        commands.build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(folder)))
    return folder


def test_every_page_of_docs_is_in_the_navigation(site):
    shown = (site / "index.html").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f'href="{page.stem}/"' in shown, page.name


def test_the_readme_is_the_first_page(site):
    shown = (site / "index.html").read_text()
    assert "speed_up" in shown
    assert (site / "front_bundled.svg").is_file()
    assert "<!-- rows" not in shown


def test_rows_that_pages_link_to_are_there(site):
    assert (site / "benchmarks" / "results" / "presets_h200.csv").is_file()
    assert (site / "examples" / "sdxl_pipeline.py").is_file()


def test_the_reference_has_the_settings_with_their_effect(site):
    shown = (site / "reference" / "index.html").read_text()
    assert "region_tokens" in shown
    assert "Higher is faster and loses more detail" in shown


def test_nothing_is_loaded_from_elsewhere(site):
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="(https?://[^"]+)"', page.read_text())
        assert loaded == [], page
