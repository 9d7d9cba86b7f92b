"""The command `toma tune` on tiny pipelines of clips: its answer, its page, its file, and a search that is killed."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from test_page import Elements
from test_tune import invoke, set_speeds
from tiny_clips import FRAMES, SIZE, array, clip_folder, clip_pipeline
from tiny_text import PROMPTS, pipeline_folder
from tiny_weights import lpips_file
from toma_lab.pipelines.clips import ClipRequest, latents_of, read_clip, settings_path
from toma_lab.tune.folder import ORIGINAL, TuneFolder
from toma_lab.tune.outcome import Outcome
from toma_lab.tune.plan import class_of_denoisers

from toma_diffusion import UsageError, speed_up
from toma_diffusion.tuned import ClipSize, Tuned

STEPS = 4
MERGING = "toma-stage 0.5, num_regions=4"
SPEEDS = {"2 steps": 2.0, MERGING: 1.5, "fast, computed=3": 1.2}
METHODS = "steps:50%,toma-stage:num_regions=4@0.5,fast:computed=3,deepcache:interval=2"
SMALL = ("--size", f"{SIZE[0]}x{SIZE[1]}", "--frames", str(FRAMES), "--steps", str(STEPS))


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    prompts = tmp_path_factory.mktemp("given") / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    return lambda output, *more, kind="text": [
        *("tune", "--device", "cpu", "--model", str(clip_folder(kind)), "--prompts", str(prompts), *SMALL),
        *("--methods", METHODS, "--output", str(output), "--commit", "abc", *map(str, more)),
    ]


@pytest.fixture(scope="module")
def first(command, tmp_path_factory):
    """A search with the times that it took, and what was printed."""
    output = tmp_path_factory.mktemp("tune") / "first"
    result = invoke(command(output, "--min-psnr", "5"))
    assert result.exit_code in (0, 1), result.output
    return output, result.output


@pytest.fixture(scope="module")
def whole(first, command, tmp_path_factory):
    """The same, with times as a large model would have them."""
    output = tmp_path_factory.mktemp("tune") / "whole"
    shutil.copytree(first[0], output)
    set_speeds(TuneFolder(output), SPEEDS)
    result = invoke(command(output, "--min-psnr", "5"))
    assert result.exit_code == 0, result.output
    return output, result.output


class TestAnswer:
    def test_it_is_printed_and_written(self, whole):
        output, printed = whole
        assert "The answer to “the fastest with PSNR ≥ 5 dB” is 2 steps: 2.00× as fast, PSNR " in printed
        assert "flicker ↓" in printed
        tuned = Tuned.read(output / "tuned.json")
        assert (tuned.model_class, tuned.num_steps, tuned.steps_left) == ("WanTransformer3DModel", STEPS, 2)
        assert tuned.clip == ClipSize(FRAMES, *SIZE)
        assert tuned.measured["flicker"] > 0

    def test_clips_are_estimated_at_the_start_and_the_budget_is_said(self, first, whole):
        """Three candidates on two clips each, and every second time the original."""
        assert "Estimate: about 9 clips of 4 steps" in first[1]
        assert "the search measures up to 1 of each candidate, and up to 3 finalists on 1 more" in first[1]
        assert "Estimate" not in whole[1]  # its candidates were known

    def test_distances_are_those_of_all_frames(self, first):
        folder = TuneFolder(first[0])
        for result in Outcome.read(folder).results:
            (item,) = folder.plan.final_items
            original, made = (
                array(read_clip(folder.picture(variant, item))).astype(float) for variant in (ORIGINAL, result.column)
            )
            assert original.shape == (FRAMES, SIZE[1], SIZE[0], 3)
            found = folder.item_row(result.column, item)
            assert found["psnr"] == pytest.approx(10 * np.log10(255**2 / ((made - original) ** 2).mean()), rel=1e-3)
            changes = np.diff(made, axis=0) - np.diff(original, axis=0)
            assert found["flicker"] == pytest.approx(np.abs(changes).mean(), rel=1e-3) == result.figures.flicker


class TestPage:
    def test_it_plays_clips_side_by_side(self, whole):
        text = (whole[0] / "tune.html").read_text(encoding="utf-8")
        elements = Elements(text)
        assert elements.open == []
        ids = [attributes["id"] for _, attributes in elements.tags if "id" in attributes]
        assert len(ids) == len(set(ids))
        assert {"left", "right", "play", "frame"} <= set(ids)
        assert "cut" not in ids  # the slider over a picture
        assert text.count(f'data-frames="{FRAMES}"') == 4  # the original and three finalists, of one clip
        for part in (
            "Clips of 9 frames of 64×48 pixels, 4 steps",
            "Flicker ↓",
            "clip = pipe(prompt, num_inference_steps=2, num_frames=9).frames[0]",
            "One clock moves all of them",
        ):
            assert part in text


@pytest.fixture(scope="module")
def merging(whole, command, tmp_path_factory):
    """A file tuned.json with merging."""
    output = tmp_path_factory.mktemp("tune") / "merging"
    shutil.copytree(whole[0], output)
    set_speeds(TuneFolder(output), SPEEDS | {MERGING: 3.0})
    assert invoke(command(output, "--min-psnr", "5")).exit_code == 0
    return output / "tuned.json"


class TestUse:
    def generate(self, config, path, *more, model=None):
        where = ["--model", model or str(clip_folder()), "--device", "cpu", "--output", str(path)]
        return invoke(["generate", "a red apple", *where, "--config", str(config), *map(str, more)])

    def test_toma_generate_takes_it(self, whole, tmp_path):
        size = ("--width", SIZE[0], "--height", SIZE[1])
        result = self.generate(whole[0] / "tuned.json", tmp_path / "a.mp4", *size, "--frames", 5)
        assert result.exit_code == 0, result.output
        assert f"2 steps are taken in place of {STEPS}." in result.output
        assert "note: the setting was measured on clips of 9 frames of 64×48" in result.output
        assert json.loads(settings_path(tmp_path / "a.mp4").read_text())["steps"] == 2

    def test_compared_with_the_original(self, merging, tmp_path):
        size = ("--width", SIZE[0], "--height", SIZE[1], "--frames", FRAMES)
        result = self.generate(merging, tmp_path / "a.mp4", *size, "--compare")
        assert result.exit_code == 0, result.output
        assert "50% of the tokens are removed by merging (ToMA)" in result.output
        assert "note:" not in result.output
        assert {path.name for path in tmp_path.glob("*.mp4")} == {"a.mp4", "a-original.mp4", "a-accelerated.mp4"}
        original = json.loads((tmp_path / "a-original.mp4.json").read_text())
        assert (original["column"], original["frames"]) == (None, FRAMES)

    def test_it_is_refused_for_other_steps_and_other_things(self, whole, tmp_path):
        config = whole[0] / "tuned.json"
        for path, more, model, message in (
            ("a.mp4", ("--steps", 9), None, "was found for 4 steps, not for 9"),
            (
                "a.png",
                (),
                str(pipeline_folder()),
                "was found for clips, and a StableDiffusionPipeline generates images",
            ),
        ):
            refused = self.generate(config, tmp_path / path, *more, model=model)
            assert (refused.exit_code, message in refused.output) == (2, True), refused.output

    def test_speed_up_takes_it(self, merging):
        pipe = clip_pipeline()
        request = ClipRequest("a red apple", steps=STEPS, width=SIZE[0], height=SIZE[1], frames=FRAMES)
        plain = latents_of(pipe, request)
        with speed_up(pipe, merging) as handle:
            merge = handle.summary().merge.config
            merged = latents_of(pipe, request)
            with pytest.raises(UsageError, match="4 steps"):
                latents_of(pipe, ClipRequest("a red apple", steps=2, width=SIZE[0], height=SIZE[1], frames=FRAMES))
        assert (merge.ratio, merge.num_regions) == (0.5, 4)
        assert not torch.equal(merged, plain)


class TestAgain:
    @pytest.mark.parametrize(
        ("more", "message"),
        [
            (("--frames", "5"), "Its frames is 9, this command has 5"),
            (("--frames", "1"), "frames=1 is not allowed"),
            (("--image", "x.png"), "cannot be given to a WanPipeline"),
        ],
    )
    def test_mistakes_are_named(self, whole, command, more, message):
        result = invoke(command(whole[0], *more))
        assert (result.exit_code, message in result.output) == (2, True)

    def test_pipelines_of_images_refuse_what_is_for_clips(self, tmp_path):
        model = ("--model", str(pipeline_folder()), "--device", "cpu", "--output", str(tmp_path / "run"))
        result = invoke(["tune", *model, "--frames", "9"])
        assert (result.exit_code, "frames='9' is for clips" in result.output) == (2, True)


def test_clips_that_begin_with_an_image_and_lpips_over_frames(command, tmp_path):
    Image.new("RGB", SIZE, "orange").save(tmp_path / "orange.png")
    more = ("--methods", "steps:50%", "--steps", 2, "--frames", 5, "--lpips-weights", lpips_file(tmp_path))
    lacking = invoke(command(tmp_path / "run", *more, kind="image"))
    assert (lacking.exit_code, "begins with an image" in lacking.output) == (2, True)
    result = invoke(command(tmp_path / "run", *more, "--image", tmp_path / "orange.png", kind="image"))
    assert result.exit_code in (0, 1), result.output
    folder = TuneFolder(tmp_path / "run")
    assert folder.plan.image.startswith("orange.png ")
    assert str(tmp_path) not in (folder.path / "run.json").read_text()
    assert folder.plan.lpips.startswith("lpips.safetensors ")
    assert Outcome.read(folder).results[0].figures.lpips > 0


class TestTwoDenoisers:
    def test_both_are_searched(self, command, tmp_path):
        methods = "steps:50%,toma-stage:num_regions=4@0.5,first-block-cache:threshold=0.5,magcache:threshold=0.06"
        result = invoke(command(tmp_path / "run", "--min-psnr", "5", "--methods", methods, kind="two"))
        assert result.exit_code in (0, 1), result.output
        outcome = Outcome.read(TuneFolder(tmp_path / "run"))
        assert [each.failure for each in outcome.results] == [""] * 3
        assert "'magcache:threshold=0.06' cannot be used with 2 denoisers that take turns" in outcome.left_out[0]

    def test_of_different_kinds_they_are_refused(self):
        pipe = clip_pipeline("two")
        assert class_of_denoisers(pipe) == "WanTransformer3DModel"
        pipe.transformer_2.blocks = pipe.transformer_2.blocks[:2]
        with pytest.raises(UsageError, match=r"denoisers of different kinds .* with 3 .* with 2 transformer blocks"):
            class_of_denoisers(pipe)
