"""The demo models: trained, small, and what their cards say."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import toma_diffusion_demo
from diffusers import StableDiffusionPipeline
from safetensors import safe_open
from toma_diffusion_demo import flux_folder, four_step_folder, video_folder
from toma_lab.pipelines.checkpoints import (
    FLUX,
    FOUR_STEP,
    MADE_FOR,
    VIDEO,
    bundled_model,
    load_pipeline,
)
from toma_lab.pipelines.clips import ClipRequest, generate
from toma_lab.pipelines.generation import ImageRequest, generate_image
from toma_lab.prompts import built_in_prompts

from toma_diffusion import apply_toma, speed_up

ROOT = Path(__file__).parents[1]
RED_HEART = ImageRequest("3d emoji of a red heart", steps=4)


@pytest.fixture(scope="module")
def pipe():
    pipe = StableDiffusionPipeline.from_pretrained(bundled_model(), local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def four_step():
    return load_pipeline(FOUR_STEP, device="cpu")


@pytest.fixture(scope="module")
def video():
    return load_pipeline(VIDEO, device="cpu")


@pytest.fixture(scope="module")
def moving_apple(video):
    return clip_of(video, "red apple")


@pytest.fixture(scope="module")
def red_heart(pipe):
    """Four steps give colours and outlines."""
    return generate_image(pipe, RED_HEART)


@pytest.fixture(scope="module")
def four_step_heart(four_step):
    """The same in the steps and with the guidance that the model is made for."""
    return generate_image(four_step, TestFourSteps.request(RED_HEART.prompt))


def clip_of(video, subject):
    """[frames, height, width, 3]. Four steps on four of the 16 frames give colours and outlines."""
    request = ClipRequest(f"3d emoji of a {subject}, moving left over a plain blue ground", steps=4, frames=4)
    (clip,) = generate(video, [request])
    return np.stack([np.asarray(frame, dtype=np.float64) for frame in clip.frames])


def colours(image):
    """The mean red, green and blue of an image's middle."""
    pixels = np.asarray(image, dtype=np.float64)
    side = len(pixels)
    return pixels[side // 4 : 3 * side // 4, side // 4 : 3 * side // 4].mean(axis=(0, 1))


@pytest.mark.parametrize(
    ("folder", "most"),
    [
        (Path(toma_diffusion_demo.__file__).parent, 76),
        (bundled_model(), 40),
        (four_step_folder(), 3),
        (flux_folder(), 13),
        (video_folder(), 20),
    ],
    ids=["package", "bundled", "four_step", "flux", "video"],
)
def test_sizes(folder, most):
    """In MiB."""
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= most * 2**20


def test_weights_are_in_half_precision():
    for path in bundled_model().rglob("*.safetensors"):
        with safe_open(path, framework="pt") as weights:
            assert {weights.get_slice(name).get_dtype() for name in weights.keys()} <= {"F16", "I64"}, path  # noqa: SIM118


def test_it_has_the_structure_of_sdxl_and_1024_tokens(pipe):
    assert pipe.unet.config.sample_size**2 == 1024
    assert pipe.unet.config.use_linear_projection
    assert set(pipe.unet.config.transformer_layers_per_block) == {2}
    assert pipe.scheduler.config.prediction_type == "v_prediction"


def test_images_show_what_the_prompt_says(pipe, red_heart):
    blue, dark, light = (
        generate_image(pipe, replace(RED_HEART, prompt=prompt))
        for prompt in ("3d emoji of a blue heart", "a photo of a black t-shirt", "a photo of a white t-shirt")
    )
    assert colours(red_heart)[0] > 2 * colours(red_heart)[2]
    assert colours(blue)[2] > 2 * colours(blue)[0]
    assert colours(light).mean() > 1.5 * colours(dark).mean()


def test_merging_half_of_the_tokens_keeps_the_picture(pipe, red_heart):
    whole = np.asarray(red_heart, dtype=np.float64)
    with apply_toma(pipe, "toma-late", ratio=0.5):
        merged = np.asarray(generate_image(pipe, RED_HEART), dtype=np.float64)
    assert 0 < np.square(merged - whole).mean() < 255**2 / 100  # above 20 dB
    assert np.array_equal(np.asarray(generate_image(pipe, RED_HEART)), whole)


class TestFourSteps:
    STEPS, GUIDANCE = MADE_FOR[FOUR_STEP]

    @classmethod
    def request(cls, prompt):
        return ImageRequest(prompt, steps=cls.STEPS, guidance=cls.GUIDANCE)

    def test_it_differs_from_the_demo_model_in_the_unet_alone(self, pipe, four_step):
        for name, same in (("unet", False), ("vae", True), ("text_encoder", True)):
            weights, others = (getattr(each, name).state_dict() for each in (pipe, four_step))
            assert all(weights[key].equal(others[key]) for key in weights) == same
            assert list(weights) == list(others)

    def test_images_show_what_the_prompt_says(self, four_step, four_step_heart):
        blue = generate_image(four_step, self.request("3d emoji of a blue heart"))
        assert colours(four_step_heart)[0] > 2 * colours(four_step_heart)[2]
        assert colours(blue)[2] > 2 * colours(blue)[0]

    def test_its_tokens_can_be_merged(self, four_step, four_step_heart):
        whole = np.asarray(four_step_heart, dtype=np.float64)
        with speed_up(four_step):
            merged = np.asarray(generate_image(four_step, self.request(RED_HEART.prompt)), dtype=np.float64)
        assert 0 < np.square(merged - whole).mean() < 255**2 / 100  # above 20 dB


@pytest.mark.slow
def test_the_flux_class_model_draws_what_it_is_asked_for():
    pipe = load_pipeline(FLUX, device="cpu")
    image = generate_image(pipe, ImageRequest("3d emoji of a blue heart", seed=0, steps=2, guidance=4.0))
    red, _, blue = colours(image)
    assert blue > 60 + red


class TestVideo:
    def test_clips_show_what_the_prompt_says(self, video, moving_apple):
        found = []
        for clip in (moving_apple, clip_of(video, "lemon")):
            ground = clip[:, :16].mean(axis=(0, 1, 2))
            assert ground[2] > 2 * ground[0]  # blue
            found.append(clip[np.abs(clip - ground).sum(axis=-1) > 150].mean(axis=0))
        (red, green, _), (yellow_red, yellow_green, yellow_blue) = found
        assert red > 2 * green
        assert min(yellow_red, yellow_green) > 1.5 * yellow_blue

    def test_skipped_steps_keep_the_clip(self, video, moving_apple):
        with speed_up(video, "fast"):
            faster = clip_of(video, "red apple")
        assert 0 < np.square(faster - moving_apple).mean() < 255**2 / 100  # above 20 dB

    def test_its_prompts_are_captions_by_which_no_quality_is_reported(self):
        known = (ROOT / "training" / "clip_prompts.txt").read_text().splitlines()
        reported = (ROOT / "benchmarks" / "quality_clip_prompts.txt").read_text().splitlines()
        prompts = built_in_prompts(VIDEO, clips=True)
        assert len({*prompts}) == len(prompts) == 8
        assert {*prompts} <= {*known} - {*reported}
