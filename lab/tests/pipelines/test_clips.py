"""Clips of tiny pipelines of Wan: generated, written, read."""

import json
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest
from PIL import Image
from tiny_clips import FRAMES, SIZE, array, clip_folder, moving
from tiny_text import text_pipeline
from toma_lab.pipelines import clips
from toma_lab.pipelines.checkpoints import load_pipeline
from toma_lab.pipelines.clips import (
    Clip,
    ClipRequest,
    generate,
    latents_of,
    read_clip,
    settings_path,
    write_lossless,
    write_mp4,
)
from toma_lab.pipelines.generation import ImageRequest, makes_clips, read_settings

from toma_diffusion import Merge, UsageError, speed_up

FEW = {"steps": 2, "width": SIZE[0], "height": SIZE[1], "frames": FRAMES}


@pytest.fixture(scope="module")
def pipe():
    return load_pipeline(str(clip_folder()), "cpu")


@pytest.fixture(scope="module")
def from_image():
    return load_pipeline(str(clip_folder("image")), "cpu")


@pytest.fixture
def picture(tmp_path) -> Path:
    pixels = np.random.default_rng(0).integers(256, size=(40, 60, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "picture.png")
    return tmp_path / "picture.png"


def generate_clip(pipe, request: ClipRequest, *on_step) -> Clip:
    (clip,) = generate(pipe, [request], *on_step)
    return clip


def decoded(path: Path) -> np.ndarray:
    reader = imageio_ffmpeg.read_frames(str(path))
    width, height = next(reader)["size"]
    return np.stack([np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader])


class TestGenerate:
    def test_which_pipelines_make_clips(self, pipe):
        assert makes_clips(pipe)
        assert not makes_clips(text_pipeline())

    def test_a_seed_is_a_clip(self, pipe):
        steps: list[int] = []
        first = generate_clip(pipe, ClipRequest("a red apple", 1, **FEW), steps.append)
        assert array(first).shape == (FRAMES, SIZE[1], SIZE[0], 3)
        assert first.fps == 16
        assert steps == [0, 1]
        again, other = (generate_clip(pipe, ClipRequest("a red apple", seed, **FEW)) for seed in (1, 2))
        assert np.array_equal(array(first), array(again))
        assert not np.array_equal(array(first), array(other))

    def test_merging_changes_it_and_off_it_does_not(self, pipe):
        request = ClipRequest("a red apple", **FEW)
        plain = array(generate_clip(pipe, request))
        with speed_up(pipe, merge=Merge(num_regions=4)) as handle:
            merged = array(generate_clip(pipe, request))
            assert handle.summary().merge.kinds[0].tokens_before == 36  # 3 × 3 × 4 of all latent frames
            handle.enabled = False
            assert np.array_equal(array(generate_clip(pipe, request)), plain)
        assert not np.array_equal(merged, plain)

    def test_from_an_image(self, from_image, picture, tmp_path):
        first = array(generate_clip(from_image, ClipRequest("a red apple", image=picture, **FEW)))
        Image.new("RGB", (60, 40), "blue").save(tmp_path / "blue.png")
        other = array(generate_clip(from_image, ClipRequest("a red apple", image=tmp_path / "blue.png", **FEW)))
        assert first.shape == (FRAMES, SIZE[1], SIZE[0], 3)
        assert not np.array_equal(first, other)

    def test_the_frame_rate_is_given_or_that_of_the_model(self, pipe):
        class LTX2Pipeline:
            def __call__(self, prompt, num_frames=None, frame_rate=25.0):
                """Takes one."""

        class WanPipeline:
            config = {"expand_timesteps": True}  # noqa: RUF012

            def __call__(self, prompt, num_frames=None):
                """As Wan 2.2 TI2V-5B."""

        assert clips.frame_rate(pipe, ClipRequest("", fps=5)) == 5
        usual = [clips.frame_rate(each, ClipRequest("")) for each in (pipe, LTX2Pipeline(), WanPipeline())]
        assert usual == [16, 25, 24]

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"frames": 1}, "frames=1 is not allowed: a clip has 2 or more"),
            ({"fps": 0}, "fps=0 is not allowed"),
            ({"width": 64}, "width=64, height=None is not allowed"),
        ],
    )
    def test_wrong_values(self, settings, message):
        with pytest.raises(UsageError, match=message):
            ClipRequest("a shoe", **settings)

    def test_what_a_pipeline_does_not_take_or_lacks(self, pipe, from_image, picture):
        with pytest.raises(UsageError, match=r"picture.png' cannot be given to a WanPipeline.*image-to-video"):
            generate_clip(pipe, ClipRequest("a shoe", image=picture, **FEW))
        with pytest.raises(UsageError, match="a WanImageToVideoPipeline begins with an image: give one with --image"):
            generate_clip(from_image, ClipRequest("a shoe", **FEW))
        with pytest.raises(UsageError, match=r"nowhere.png' cannot be read"):
            generate_clip(from_image, ClipRequest("a shoe", image=Path("nowhere.png"), **FEW))
        with pytest.raises(UsageError, match="frames='9' is for clips, and a StableDiffusionPipeline generates images"):
            generate_clip(text_pipeline(), ClipRequest("a shoe", frames=9))
        with pytest.raises(UsageError, match="a WanPipeline generates clips, not images"):
            latents_of(pipe, ImageRequest("a shoe"))
        with pytest.raises(UsageError, match="frames=3 gives a single frame with a WanPipeline"):
            generate_clip(pipe, ClipRequest("a shoe", **FEW | {"frames": 3}))

    def test_a_package_that_diffusers_calls_without_looking_for_it(self, from_image, picture, monkeypatch):
        monkeypatch.delattr("diffusers.pipelines.wan.pipeline_wan_i2v.ftfy", raising=False)
        with pytest.raises(
            UsageError, match=r"a WanImageToVideoPipeline needs the package ftfy: pip install .*\[video\]"
        ):
            generate_clip(from_image, ClipRequest("a shoe", image=picture, **FEW))


class TestFiles:
    def test_mp4(self, tmp_path):
        """33 pixels wide: H.264 has no odd sizes."""
        path, settings = tmp_path / "new" / "clip.mp4", {"prompt": "“é” 苹果", "ratio": 0.5}
        write_mp4(moving(), path, settings)
        found = decoded(path)
        assert found.shape == (6, 24, 34, 3)
        found, expected = found[:, :, :33].astype(int), array(moving()).astype(int)
        assert np.abs(found - expected).mean() < 5  # colours have half the resolution
        assert np.abs(found[1:] - expected[:-1]).mean() > 8
        assert json.loads(settings_path(path).read_text(encoding="utf-8")) == settings
        assert sorted(each.name for each in path.parent.iterdir()) == ["clip.mp4", "clip.mp4.json"]

    def test_lossless(self, tmp_path):
        path = tmp_path / "clip.png"
        write_lossless(moving(), path, {"seed": 3})
        clip = read_clip(path)
        assert np.array_equal(array(clip), array(moving()))
        assert clip.fps == 12
        assert read_settings(path) == {"seed": 3, "frames": 6, "fps": 12.0}

    @pytest.mark.parametrize("fps", [7.0, 16.0, 23.976, 120.0])
    def test_frames_that_stand_still_are_all_there(self, fps, tmp_path):
        one, two, three = moving(3).frames
        for number, frames in enumerate([(one, one, two, two, two, three), (one,) * 81, (one, two, one, one)]):
            path = tmp_path / f"{number}.png"
            write_lossless(Clip(frames, fps), path, {})
            assert np.array_equal(array(read_clip(path)), array(Clip(frames, fps)))

    def test_without_ffmpeg(self, monkeypatch):
        def missing():
            raise RuntimeError("none found")

        monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", missing)
        with pytest.raises(UsageError, match=r"needs imageio-ffmpeg \(none found\): pip install '.*\[video\]'"):
            clips.check_ffmpeg()
