"""Opening pipelines, drawing, and images that carry their settings."""

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tiny_pipelines import embeds, pixart_pipeline
from tiny_text import pipeline_folder, text_pipeline

from toma_diffusion import generation
from toma_diffusion.generation import Drawing, draw, load_pipeline, read_settings, write_png


class TestLoad:
    def test_a_folder_draws_at_once(self, capfd):
        pipe = load_pipeline(str(pipeline_folder()), device="cpu")
        assert {part.dtype for part in (pipe.unet, pipe.vae, pipe.text_encoder)} == {torch.float32}
        capfd.readouterr()
        assert draw(pipe, Drawing("a red apple", steps=1)).size == (64, 64)
        assert "%|" not in capfd.readouterr().err  # no progress bar

    def test_a_precision_can_be_asked_for(self):
        pipe = load_pipeline(str(pipeline_folder()), device="cpu", dtype="bfloat16")
        assert {part.dtype for part in (pipe.unet, pipe.vae, pipe.text_encoder)} == {torch.bfloat16}

    def test_the_bundled_model_is_a_folder_of_the_package(self, monkeypatch, tmp_path):
        monkeypatch.setattr(generation, "__file__", str(tmp_path / "generation.py"))
        with pytest.raises(FileNotFoundError, match="bundled model is not in this installation"):
            load_pipeline("bundled")
        (tmp_path / "bundled").symlink_to(pipeline_folder())
        assert generation.bundled_model() == tmp_path / "bundled"
        assert load_pipeline("bundled", device="cpu").unet.config.sample_size == 8

    @pytest.mark.parametrize(
        ("model", "message"),
        [("no such folder", "'no such folder' is not known"), (".", "no diffusers pipeline could be loaded")],
    )
    def test_what_is_no_model_is_quoted(self, model, message):
        with pytest.raises(ValueError, match=message):
            load_pipeline(model, device="cpu")

    def test_dtype_is_checked(self):
        with pytest.raises(ValueError, match="'half' is not known: use one of float16"):
            load_pipeline(str(pipeline_folder()), dtype="half")

    @pytest.mark.parametrize(
        ("weights", "expected"),
        [
            (("model.diffusion_model.double_blocks.0.img_attn.qkv.weight",), "FluxPipeline"),
            (("model.diffusion_model.joint_blocks.0.x_block.attn.qkv.weight",), "StableDiffusion3Pipeline"),
            (
                ("model.diffusion_model.input_blocks.0.0.weight", "conditioner.embedders.1.model.ln_final.weight"),
                "StableDiffusionXLPipeline",
            ),
            (("model.diffusion_model.input_blocks.0.0.weight",), "StableDiffusionPipeline"),
        ],
    )
    def test_a_single_file_is_recognised_by_its_weights(self, weights, expected, tmp_path, monkeypatch):
        path = tmp_path / "checkpoint.safetensors"
        save_file({name: torch.zeros(1) for name in weights}, path)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(ValueError, match=f"the {expected} in it could not be loaded"):
            load_pipeline(str(path), device="cpu")

    def test_a_file_of_something_else_is_refused(self, tmp_path):
        path = tmp_path / "lora.safetensors"
        save_file({"lora.weight": torch.zeros(1)}, path)
        with pytest.raises(ValueError, match="no whole model that is known"):
            load_pipeline(str(path), device="cpu")
        with pytest.raises(ValueError, match=r"not a \.safetensors file"):
            load_pipeline(__file__, device="cpu")


class TestDraw:
    def test_the_same_again_and_another_seed_differs(self):
        pipe = text_pipeline()
        first, again, other = (np.asarray(draw(pipe, Drawing("a shoe", seed=seed, steps=2))) for seed in (1, 1, 2))
        assert np.array_equal(first, again)
        assert not np.array_equal(first, other)

    def test_size_guidance_and_negative_prompt_reach_the_pipeline(self):
        pipe = text_pipeline()
        plain = draw(pipe, Drawing("a shoe", steps=2, width=80, height=64))
        guided = draw(pipe, Drawing("a shoe", steps=2, width=80, height=64, guidance=1.0))
        negative = draw(pipe, Drawing("a shoe", steps=2, width=80, height=64, negative_prompt="a tree"))
        assert plain.size == (80, 64)
        assert np.asarray(plain).tobytes() not in (np.asarray(guided).tobytes(), np.asarray(negative).tobytes())

    def test_steps_are_reported(self):
        steps = []
        draw(text_pipeline(), Drawing("a shoe", steps=3), steps.append)
        assert steps == [0, 1, 2]

    def test_steps_are_reported_by_older_pipelines_too(self):
        pipe, steps = pixart_pipeline(), []
        prompts = embeds(pipe)
        draw(with_embeddings(pipe, prompts), Drawing("", steps=2), steps.append)
        assert steps == [0, 1]

    def test_what_a_pipeline_does_not_take_is_refused(self):
        class Plain:
            def __call__(self, prompt, num_inference_steps, generator): ...

        with pytest.raises(ValueError, match="negative_prompt='x' cannot be given to a Plain"):
            draw(Plain(), Drawing("a shoe", negative_prompt="x"))

    def test_steps_are_checked(self):
        with pytest.raises(ValueError, match="steps=0 is not allowed"):
            Drawing("a shoe", steps=0)


def with_embeddings(pipe, prompts):
    """The pipeline with its prompt given as embeddings, for it has no text encoder."""

    class Embedded:
        device = pipe.device

        def __call__(self, prompt, num_inference_steps, generator, callback):
            return pipe(
                num_inference_steps=num_inference_steps, generator=generator, callback=callback,
                height=128, width=128, **prompts,
            )  # fmt: skip

    return Embedded()


class TestSettings:
    def test_they_come_back_whatever_is_in_them(self, tmp_path):
        settings = {"prompt": "<b>“é” 苹果</b>", "seed": 3, "config": {"ratio": 0.5, "window": [0.0, 1.0]}}
        path = tmp_path / "new" / "image.png"
        write_png(Image.new("RGB", (8, 8), "red"), path, settings)
        assert read_settings(path) == settings
        assert Image.open(path).getpixel((0, 0)) == (255, 0, 0)
        assert [file.name for file in path.parent.iterdir()] == ["image.png"]

    def test_a_failure_leaves_the_old_file(self, tmp_path):
        path = tmp_path / "image.png"
        write_png(Image.new("RGB", (8, 8)), path, {"seed": 1})

        class Broken:
            def save(self, file, **options):
                file.write(b"half")
                raise OSError("disk full")

        with pytest.raises(OSError, match="disk full"):
            write_png(Broken(), path, {"seed": 2})
        assert read_settings(path) == {"seed": 1}
        assert [file.name for file in tmp_path.iterdir()] == ["image.png"]

    def test_another_image_has_none(self, tmp_path):
        Image.new("RGB", (8, 8)).save(tmp_path / "other.png")
        with pytest.raises(ValueError, match="holds no settings"):
            read_settings(tmp_path / "other.png")
