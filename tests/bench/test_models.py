"""The denoisers to time: of the published sizes, and small ones that run."""

import pytest
import torch
from checkpoint import save_checkpoint

from toma_diffusion import apply_toma
from toma_diffusion.bench.measure import attention_of
from toma_diffusion.bench.models import MODELS, build, load

CPU = torch.device("cpu")
PARAMETERS = {"sdxl": 2_567_463_684, "sd15": 859_520_964, "flux": 11_901_408_320, "sd35": 8_056_627_520}
"""As the model cards say: 2.6 B, 0.86 B, 11.9 B and 8.1 B."""


@pytest.mark.parametrize("name", MODELS)
def test_published_size(name):
    model = build(name, small=False, device=CPU).model
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(PARAMETERS[name], rel=0.001)


@pytest.mark.parametrize("name", MODELS)
class TestSmall:
    def test_output_is_finite_and_every_preset_family_default_merges(self, name):
        denoiser = build(name, small=True, device=CPU)
        denoiser.materialize()
        inputs = denoiser.inputs(2, 192, 128)
        with torch.no_grad(), apply_toma(denoiser.model, "toma", ratio=0.5) as handle:
            output = denoiser.model(**inputs, return_dict=False)[0]
            tokens = [(kind.tokens_before, kind.tokens_after) for kind in handle.summary().kinds]
        assert output.shape == inputs[denoiser.family.sample].shape
        assert torch.isfinite(output).all()
        assert output.std() > 1e-4
        assert any(after < before for before, after in tokens)

    def test_is_the_same_every_time(self, name):
        outputs = []
        for _ in range(2):
            denoiser = build(name, small=True, device=CPU)
            denoiser.materialize()
            with torch.no_grad():
                outputs.append(denoiser.model(**denoiser.inputs(1, 64, 64), return_dict=False)[0])
        torch.testing.assert_close(*outputs)

    def test_resolution_is_width_by_height(self, name):
        denoiser = build(name, small=True, device=CPU)
        sample = denoiser.inputs(3, 256, 128)[denoiser.family.sample]
        assert sample.shape[0] == 3
        if name == "flux":
            assert denoiser.inputs(1, 256, 128)["img_ids"].amax(dim=0).tolist() == [0, 7, 15]
        else:
            assert sample.shape[-2:] == (16, 32)


class TestLoaded:
    def test_takes_the_denoiser_of_a_folder(self, tmp_path):
        save_checkpoint(tmp_path / "tiny-model")
        denoiser = load(str(tmp_path / "tiny-model"), device=CPU)
        assert denoiser.name == "tiny-model"
        assert denoiser.default_resolution == 128
        denoiser.materialize()
        output = denoiser.model(**denoiser.inputs(2, 128, 128), return_dict=False)[0]
        assert output.shape == (2, 4, 16, 16)

    def test_what_is_no_model_is_quoted(self, tmp_path):
        for name in ("sdxxl", str(tmp_path / "not-there")):
            with pytest.raises(ValueError, match=f"'{name}' is not known: use one of sdxl, sd15, flux, sd35"):
                load(name, device=CPU)
        with pytest.raises(ValueError, match=f"'{tmp_path}' could not be loaded as a diffusers pipeline"):
            load(str(tmp_path), device=CPU)


def test_attention_is_told():
    assert attention_of(build("sd15", small=True, device=CPU).model) == "sdpa"
    assert attention_of(build("flux", small=True, device=CPU).model) == "sdpa:native"
