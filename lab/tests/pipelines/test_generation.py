"""Generating an image, and images with their settings inside."""

import numpy as np
import pytest
from PIL import Image
from tiny_pipelines import embeds, flux_pipeline
from tiny_text import text_pipeline
from toma_lab.pipelines.clips import generate
from toma_lab.pipelines.generation import ImageRequest, generate_image, read_settings, write_png

from toma_diffusion import UsageError, speed_up
from toma_diffusion.merge.variants import VARIANTS


class TestGenerateImage:
    def test_the_same_again_and_another_seed_differs(self):
        pipe = text_pipeline()
        first, again, other = (
            np.asarray(generate_image(pipe, ImageRequest("a shoe", seed=seed, steps=2))) for seed in (1, 1, 2)
        )
        assert np.array_equal(first, again)
        assert not np.array_equal(first, other)

    def test_size_guidance_and_negative_prompt_reach_the_pipeline(self):
        pipe = text_pipeline()
        plain = generate_image(pipe, ImageRequest("a shoe", steps=2, width=80, height=64))
        guided = generate_image(pipe, ImageRequest("a shoe", steps=2, width=80, height=64, guidance=1.0))
        negative = generate_image(pipe, ImageRequest("a shoe", steps=2, width=80, height=64, negative_prompt="a tree"))
        assert plain.size == (80, 64)
        assert np.asarray(plain).tobytes() not in (np.asarray(guided).tobytes(), np.asarray(negative).tobytes())

    def test_steps_are_reported(self):
        steps = []
        generate_image(text_pipeline(), ImageRequest("a shoe", steps=3), steps.append)
        assert steps == [0, 1, 2]

    def test_what_a_pipeline_does_not_take_is_refused(self):
        class Plain:
            def __call__(self, prompt, num_inference_steps, generator): ...

        with pytest.raises(ValueError, match="negative_prompt='x' cannot be given to a Plain"):
            generate_image(Plain(), ImageRequest("a shoe", negative_prompt="x"))

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"steps": 0}, "steps=0 is not allowed"),
            ({"guidance": float("nan")}, "guidance=nan is not allowed: it must be 0 or more"),
            ({"guidance": -1.0}, "guidance=-1.0 is not allowed"),
            ({"seed": 2**64}, "seed=18446744073709551616 is not allowed"),
            ({"width": 80}, "width=80, height=None is not allowed: give both"),
            ({"height": 80}, "width=None, height=80 is not allowed: give both"),
        ],
    )
    def test_mistakes_are_named(self, settings, message):
        with pytest.raises(ValueError, match=message):
            ImageRequest("a shoe", **settings)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"width": 81, "height": 64}, "StableDiffusionPipeline does not accept these settings: .*divisible by 8"),
            ({"steps": 1001}, "StableDiffusionPipeline does not accept these settings: .*1001 cannot be larger"),
        ],
    )
    def test_what_diffusers_refuses_is_the_user_s_mistake(self, settings, message):
        with pytest.raises(UsageError, match=message):
            generate_image(text_pipeline(), ImageRequest("a shoe", **settings))

    def test_any_other_error_stays_what_it_is(self):
        pipe = text_pipeline()

        def fail(*_):
            raise ValueError("broken")

        pipe.unet.conv_out.register_forward_hook(fail)
        with pytest.raises(ValueError, match="broken") as caught:
            generate_image(pipe, ImageRequest("a shoe", steps=1))
        assert not isinstance(caught.value, UsageError)


class TestBatches:
    REQUESTS = tuple(
        ImageRequest(prompt, seed, steps=3) for prompt, seed in (("a shoe", 1), ("a tree", 7), ("a cap", 1))
    )

    @pytest.mark.parametrize("variant", [None, "toma-once", "toma-stage"])
    def test_a_batch_equals_single_images_up_to_rounding(self, variant):
        """With local assignment: two tokens that cover each other best are equally good destinations, and rounding
        decides. Inside a region both give the same cluster, over the whole image others may join the one or the other.
        """
        pipe = text_pipeline()
        if variant:
            divided = {"num_regions": 4, "region_tokens": None, "selection_tokens": None}
            speed_up(pipe, merge=VARIANTS[variant].changed(divided))
        together = generate(pipe, self.REQUESTS)
        assert len(together) == 3
        for request, image in zip(self.REQUESTS, together, strict=True):
            alone = np.asarray(generate_image(pipe, request)).astype(int)
            assert np.abs(np.asarray(image).astype(int) - alone).max() <= 1

    def test_other_settings_need_a_call_of_their_own(self):
        with pytest.raises(UsageError, match=r"steps=4.* has other settings than .*steps=3"):
            generate(text_pipeline(), [self.REQUESTS[0], ImageRequest("a shoe", steps=4)])


def test_a_flux_without_an_input_for_guidance_is_guided_by_a_second_pass():
    pipe, calls = flux_pipeline(), []
    pipe.transformer.register_forward_pre_hook(lambda *_: calls.append(1))
    text = {name: value for name, value in embeds(pipe).items() if "prompt" in name}

    class Embedded:
        transformer = pipe.transformer

        def __call__(self, prompt, num_inference_steps, generator, true_cfg_scale=1.0, negative_prompt=None):
            assert negative_prompt in (None, "")
            settings = {"num_inference_steps": num_inference_steps, "height": 128, "width": 128}
            return pipe(**settings, **text, generator=generator, true_cfg_scale=true_cfg_scale)

    for guidance, expected in ((None, 2), (4.0, 4)):
        calls.clear()
        generate_image(Embedded(), ImageRequest("", steps=2, guidance=guidance))
        assert len(calls) == expected


class TestSettings:
    def test_they_come_back_whatever_is_in_them(self, tmp_path):
        settings = {"prompt": "<b>“é” 苹果</b>", "seed": 3, "config": {"ratio": 0.5, "window": [0.0, 1.0]}}
        path = tmp_path / "new" / "image.png"
        write_png(Image.new("RGB", (8, 8), "red"), path, settings)
        assert read_settings(path) == settings
        assert Image.open(path).getpixel((0, 0)) == (255, 0, 0)
        assert [file.name for file in path.parent.iterdir()] == ["image.png"]

    def test_another_image_has_none(self, tmp_path):
        Image.new("RGB", (8, 8)).save(tmp_path / "other.png")
        with pytest.raises(ValueError, match="holds no settings"):
            read_settings(tmp_path / "other.png")
