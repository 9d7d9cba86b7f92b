"""Clips on the page of a run."""

import base64
import io

import numpy as np
from PIL import Image
from run_folders import FACTS, VARIANTS, finished_run
from tiny_clips import array, moving
from toma_lab.evaluation import Plan, RunFolder, Scores
from toma_lab.evaluation.table import COLUMNS, rows_of
from toma_lab.pipelines.clips import Clip, write_lossless
from toma_lab.report.page import MOST_CLIPS, write_report
from toma_lab.report.pictures import film_of

COLORS = [(250, 220, 30), (250, 220, 30), (30, 220, 250), (200, 90, 30), (90, 200, 30), (220, 30, 220)]


def opened(uri: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))).astype(int)


def test_every_frame_is_at_its_place_of_the_film(tmp_path):
    clip = moving(7, (48, 32))
    write_lossless(clip, tmp_path / "clip.png", {})
    film = film_of(tmp_path / "clip.png", 100)
    assert (film.width, film.height, film.frames, film.columns, film.rows, film.fps) == (48, 32, 7, 3, 3, 12.0)
    sheet = opened(film.uri)
    assert sheet.shape == (96, 144, 3)
    for number, frame in enumerate(array(clip).astype(int)):
        top, left = number // 3 * 32, number % 3 * 48
        found = sheet[top : top + 32, left : left + 48]
        distances = [np.abs(found - other).mean() for other in array(clip).astype(int)]
        assert int(np.argmin(distances)) == number
        assert np.abs(found - frame).mean() < 12


def test_frames_are_shrunk_alike(tmp_path):
    write_lossless(Clip(tuple(frame.resize((96, 64)) for frame in moving().frames), 8.0), tmp_path / "clip.png", {})
    film = film_of(tmp_path / "clip.png", 48)
    assert (film.width, film.height) == (48, 32)


def test_the_page_of_clips(tmp_path):
    settings = {"model": "a model", "seeds": tuple(range(6)), "metrics": ("psnr", "flicker"), "steps": 20}
    plan = Plan(prompts=("a <b> square",), variants=VARIANTS, clips=True, frames=5, **settings)
    folder = RunFolder.start(tmp_path / "run", plan, FACTS)
    for number, variant in enumerate(VARIANTS):
        for item in plan.items:
            write_lossless(moving(5, color=COLORS[number]), folder.image_path(variant, item), {})
            figures = {"psnr": 40.0 - 3 * number, "flicker": 0.5 * number} if number else {}
            folder.write_item_scores(variant, item, Scores(figures | {"seconds": 5.0 - 0.4 * number}, {}))
    folder.write_table(COLUMNS, rows_of(folder))
    page = write_report(folder).read_text(encoding="utf-8")
    assert page.count('data-frames="5"') == MOST_CLIPS * len(VARIANTS)
    assert f"{MOST_CLIPS} of 6 are shown" in page
    assert 'data-fps="12.0"' in page
    assert "Sec/clip ↓" in page
    assert "Flicker 0.50" in page
    assert "Figures of a clip are means over its frames" in page
    assert "a &lt;b&gt; square" in page
    assert "One clock moves all of them" in page


def test_the_page_of_images_has_none_of_it(tmp_path):
    page = write_report(finished_run(tmp_path / "run")).read_text(encoding="utf-8")
    assert "data-frames" not in page
    assert "Figures of a clip" not in page
    assert "One clock" not in page
    assert "Sec/img ↓" in page
