"""The denoisers to time: of the published sizes, and small ones that run."""

from collections.abc import Iterator
from math import prod
from typing import Any

import diffusers
import pytest
import torch
from checkpoint import save_checkpoint
from tiny_clips import clip_folder
from toma_lab.bench.measure import attention_of
from toma_lab.bench.zoo import MODELS, build, build_empty, fill, load

from toma_diffusion import UsageError, apply_toma
from toma_diffusion.families import find_family

CPU = torch.device("cpu")
HERE = [name for name, model in MODELS.items() if hasattr(diffusers, model["class"])]
"""Older versions of diffusers do not have all."""
GIB = {
    **{"sdxl": 4.78, "sd15": 1.60, "flux": 22.17, "sd35": 15.01, "flux2": 60.0, "flux2-klein": 16.9},
    **{"flux2-klein-4b": 7.2, "flux3": 10.3, "qwen-image": 38.1, "qwen-image-21": 13.3, "z-image": 11.5},
    **{"krea2": 23.9, "chroma": 16.6, "auraflow": 12.8, "wan": 26.6, "wan-480p": 26.6, "wan-ti2v-5b": 9.3},
    **{"ltx2": 35.2, "h3": 61.7, "hunyuan15": 15.5},
}
"""The weights in half precision, of as many parameters as the model cards say: 2.6 B, 0.86 B, 11.9 B, 8.1 B, 32 B, …"""
TOKENS_OF_CLIPS = {
    "wan": {(1280, 720, 81): 75_600, (832, 480, 81): 32_760},
    "wan-480p": {(832, 480, 81): 32_760},
    "wan-ti2v-5b": {(1280, 704, 121): 27_280},
    "ltx2": {(768, 512, 121): 6_144, (1536, 1024, 121): 24_576},
    "h3": {(1344, 768, 124): 37_296, (1344, 768, 345): 102_816},
    "hunyuan15": {(848, 480, 121): 49_290, (1280, 720, 121): 111_600},
}
"""At width, height and frames. The first is the default."""


@pytest.mark.parametrize("name", HERE)
def test_published_size(name):
    model = build(name, small=False, device=CPU).model
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    size = sum(parameter.numel() for parameter in model.parameters()) * 2 / 2**30
    assert size == pytest.approx(GIB[name], rel=0.005)


@pytest.mark.parametrize("name", HERE)
class TestSmall:
    def test_output_is_finite_and_tokens_are_merged(self, name):
        denoiser = small(name)
        if find_family(denoiser.model) is None:
            pytest.skip(f"there is no family for {type(denoiser.model).__name__}")
        inputs = denoiser.inputs(2, 192, 128)
        with torch.no_grad(), apply_toma(denoiser.model, "toma", ratio=0.5) as handle:
            output = as_one(denoiser.model(**inputs, return_dict=False)[0])
            tokens = [(kind.tokens_before, kind.tokens_after) for kind in handle.summary().merge.kinds]
        sample = as_one(inputs[denoiser.family.sample])
        if name == "qwen-image-21":  # which returns the text too
            output = output[:, -sample.shape[1] :]
        if name == "hunyuan15":  # which gets a given image and its mask as channels
            sample = sample[:, :32]
        assert output.shape == sample.shape
        assert torch.isfinite(output).all()
        assert output.std() > 1e-4
        assert any(after < before for before, after in tokens)

    def test_tables_are_those_of_a_model_that_was_built_on_the_cpu(self, name):
        """Positions and times: under `torch.device("meta")` they were lost, or stayed there."""
        model = MODELS[name]
        config = model["config"] | model["small"]["config"]
        found, expected = build_empty(model["class"], config), getattr(diffusers, model["class"]).from_config(config)
        fill(found, CPU, torch.float32)
        tables = dict(tables_of(expected))
        if name in ("sd35", "qwen-image", "qwen-image-21", "chroma"):
            assert tables
        for key, table in tables_of(found):
            torch.testing.assert_close(table, tables.pop(key))
        assert not tables


@pytest.mark.parametrize("name", [name for name in HERE if name not in TOKENS_OF_CLIPS])
def test_resolution_is_width_by_height(name):
    inputs = (denoiser := build(name, small=True, device=CPU)).inputs(3, 256, 128)
    sample = as_one(inputs[denoiser.family.sample])
    assert sample.shape[0] == 3
    ids = inputs.get("img_ids", inputs.get("position_ids"))
    if ids is not None:
        assert ids.amax(dim=0).tolist()[:3] == [0, 7, 15]
    elif "img_shapes" in inputs:
        assert inputs["img_shapes"] == [[(1, 8, 16)]] * 3
        assert sample.shape[1] == 8 * 16
    else:
        assert sample.shape[-2:] == (16, 32)


class TestClips:
    @pytest.mark.parametrize("name", [name for name in HERE if name in TOKENS_OF_CLIPS])
    def test_published_tokens(self, name):
        denoiser = build(name, small=False, device=CPU)
        assert denoiser.default_size == next(iter(TOKENS_OF_CLIPS[name]))
        for size, tokens in TOKENS_OF_CLIPS[name].items():
            inputs = denoiser.inputs(1, *size)
            sample = inputs["hidden_states"]
            patch = 4 if name.startswith("wan") else 1
            assert (sample.shape[1] if sample.ndim == 3 else prod(sample.shape[2:]) // patch) == tokens
            if name == "h3":
                positions = inputs["position_ids"][inputs["video_indices"]]
                frames, rows, columns = (len(set(axis.tolist())) for axis in positions.unbind(1))
                assert (rows, columns, frames * rows * columns) == (24, 42, tokens)
            if name == "wan-ti2v-5b":
                assert inputs["timestep"].shape == (1, tokens)

    def test_a_decoder_that_makes_sixteen_pixels_of_a_latent(self):
        with pytest.raises(UsageError, match="'48x32' is not allowed: this model takes multiples of 32"):
            build("wan-ti2v-5b", small=True, device=CPU).inputs(1, 48, 32)


class TestLoaded:
    def test_takes_the_denoiser_of_a_folder(self, tmp_path):
        save_checkpoint(tmp_path / "tiny-model")
        denoiser = load(str(tmp_path / "tiny-model"), device=CPU)
        assert (denoiser.name, denoiser.default_size[:2]) == ("tiny-model", (128, 128))
        denoiser.materialize()
        assert denoiser.model(**denoiser.inputs(2, 128, 128), return_dict=False)[0].shape == (2, 4, 16, 16)

    def test_clips_have_the_size_of_their_pipeline(self):
        assert load(str(clip_folder()), device=CPU).default_size == (832, 480, 81)

    def test_what_is_no_model_is_quoted(self, tmp_path):
        for name in ("sdxxl", str(tmp_path / "not-there")):
            with pytest.raises(UsageError, match=f"'{name}' is not known: use one of auraflow, .*, sdxl, "):
                load(name, device=CPU)
        with pytest.raises(UsageError, match=f"'{tmp_path}' could not be loaded as a diffusers pipeline"):
            load(str(tmp_path), device=CPU)


@pytest.mark.skipif("krea2" not in HERE, reason="needs a newer diffusers")
def test_what_diffusers_keeps_in_float32_is_so_here():
    model = build("krea2", small=True, device=CPU, dtype=torch.bfloat16).model
    fill(model, CPU, torch.bfloat16)
    block = model.transformer_blocks[0]
    assert {block.norm1.weight.dtype, block.attn.norm_q.weight.dtype} == {torch.float32}
    assert {block.attn.to_q.weight.dtype, block.scale_shift_table.dtype} == {torch.bfloat16}


def test_a_family_that_diffusers_does_not_have_is_named():
    with pytest.raises(UsageError, match="has no Flux9Transformer2DModel: install a newer one"):
        build_empty("Flux9Transformer2DModel", {})


def test_attention_is_named():
    assert attention_of(build("sd15", small=True, device=CPU).model) == "sdpa"
    assert attention_of(build("flux", small=True, device=CPU).model) == "sdpa:native"


def small(name: str):
    denoiser = build(name, small=True, device=CPU)
    denoiser.materialize()
    return denoiser


def as_one(samples: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples) if isinstance(samples, list) else samples


def tables_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors that are no parameters: buffers, plain attributes, and lists of tensors."""
    for name, module in model.named_modules():
        yield from tensors_in(name, module._buffers)
        yield from tensors_in(name, {key: value for key, value in vars(module).items() if not key.startswith("_")})


def tensors_in(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(f"{name}.{key}", item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from tensors_in(f"{name}.{index}", item)
