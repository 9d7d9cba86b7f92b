"""The Flux-class model in small on a CPU: trained, exported in 8 bits, loaded, and drawing."""

import csv
import json

import pytest
import torch
from diffusers import FluxPipeline
from safetensors.torch import load_file
from toma_diffusion_demo.loading import WEIGHTS, dequantised, flux_pipeline

from training import export, export_flux, probe, run
from training.attention import KERNELS, norm_in_one_precision, use_attention
from training.export_flux import quantised
from training.flux import noise_levels, positions
from training.loop import Place
from training.models import build_flow_scheduler, build_flux, build_vae
from training.settings import FLUX, TINY_FLUX

CPU = torch.device("cpu")
pytestmark = pytest.mark.slow  # they train


@pytest.fixture(scope="module")
def text(trained):
    """The pipeline whose text encoder the model reads."""
    return trained / "pipeline"


@pytest.fixture(scope="module")
def work(command, text, tmp_path_factory):
    """The work folder after `all`."""
    work = tmp_path_factory.mktemp("flux")
    options = ("--model", "flux", "--text", str(text), "--steps", "25", "--sample-steps", "2")
    run.main(command("all", work, *options))
    return work


@pytest.fixture(scope="module")
def pipe(work, text):
    pipe = flux_pipeline(torch.float32, work / "pipeline", text)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize("stage", ["vae", "diffusion"])
def test_a_stage_learns_and_ends_annealed(work, stage):
    with (work / f"{stage}.csv").open() as file:
        log = list(csv.DictReader(file))
    assert log[-1]["step"] == "25"
    assert float(log[-1]["loss"]) < float(log[0]["loss"]) * 1.1
    assert float(log[-1]["learning_rate"]) < 0.01 * FLUX.diffusion_rate


def test_it_sees_small_latents_first_and_whole_ones_last(work):
    state = torch.load(work / "diffusion.pt", weights_only=True)
    small, large = TINY_FLUX.batch, TINY_FLUX.large_batch
    first = large + small  # a step of each
    assert state["images"] == first + 13 * small + 10 * large  # of 25 steps, 60 % end with the 15th


def test_it_loads_as_a_flux_pipeline_and_draws(pipe):
    assert isinstance(pipe, FluxPipeline)
    assert not pipe.transformer.config.guidance_embeds
    prompt = "3d emoji of a red apple"
    plain, guided = (
        pipe(prompt, num_inference_steps=2, generator=torch.Generator().manual_seed(0), **more).images[0]
        for more in ({}, {"true_cfg_scale": 4.0, "negative_prompt": ""})
    )
    assert plain.size == guided.size == (TINY_FLUX.image_size,) * 2
    assert plain.tobytes() != guided.tobytes()


def test_half_precision_is_the_usual_one_of_flux(work, text):
    pipe = flux_pipeline(folder=work / "pipeline", text=text)
    assert {pipe.transformer.dtype, pipe.vae.dtype, pipe.text_encoder.dtype} == {torch.bfloat16}


def test_matrices_are_stored_in_8_bits(work):
    stored = load_file(work / "pipeline" / "transformer" / WEIGHTS)
    kinds = {tensor.dtype for tensor in stored.values() if tensor.ndim == 2}
    assert kinds == {torch.int8}
    assert not any("_name_or_path" in path.read_text() for path in (work / "pipeline").rglob("*.json"))


def test_a_stored_matrix_is_off_by_half_a_step_of_its_row_at_most():
    torch.manual_seed(0)
    weights = {"layer.weight": torch.randn(8, 32) * torch.logspace(-3, 1, 8)[:, None], "layer.bias": torch.randn(8)}
    weights["layer.weight"][3] = 0
    back = dequantised(quantised(weights))
    assert set(back) == set(weights)
    step = weights["layer.weight"].abs().amax(dim=1, keepdim=True) / 127
    assert ((back["layer.weight"] - weights["layer.weight"]).abs() <= 0.51 * step).all()
    torch.testing.assert_close(back["layer.bias"], weights["layer.bias"], atol=2e-3, rtol=1e-3)


@pytest.fixture(scope="module")
def further(command, work, text, tmp_path_factory):
    """The work folder of a training that went on from the exported model for one step."""
    further = tmp_path_factory.mktemp("further") / "new"
    options = ("--model", "flux", "--text", str(text), "--start", str(work / "pipeline"))
    run.main(command("all", further, *options, "--steps", "1", "--sample-steps", "1"))
    return further


def test_an_exported_model_is_trained_further(work, further):
    before = dequantised(load_file(work / "pipeline" / "transformer" / WEIGHTS))
    average = torch.load(further / "diffusion.pt", weights_only=True)["average"]
    changes = [(average[name] - weight).abs().max().item() for name, weight in before.items()]
    assert 0 < max(changes) < 1e-3  # one warm-up step away, not new
    assert not (further / "vae.pt").exists()
    vae = "vae/diffusion_pytorch_model.safetensors"
    assert (further / "pipeline" / vae).read_bytes() == (work / "pipeline" / vae).read_bytes()


def test_what_went_before_is_told(further):
    history = json.loads((further / "pipeline" / "training.json").read_text())
    assert [(chapter["stage"], chapter["steps"]) for chapter in history] == [
        ("autoencoder", 25),
        ("transformer", 25),
        ("transformer", 1),
    ]
    assert (further / "pipeline" / "README.md").read_text().count("| transformer | ") == 2


def test_what_cannot_be_started_from_is_named(command, text, work, tmp_path, capsys):
    for model, start, message in (
        ("flux", text, "is no exported flux: it has no transformer/"),
        ("4step", work / "pipeline", "--start is for --model unet and flux"),
    ):
        with pytest.raises(SystemExit):
            run.main(command("all", tmp_path, "--model", model, "--text", str(text), "--start", str(start)))
        assert message in capsys.readouterr().err


def test_without_an_autoencoder_to_train_its_time_is_the_transformer_s(work, text):
    options = ("all", "--model", "flux", "--text", str(text), "--data", "data", "--work", "work")
    assert run.shares(run.parse([*options, "--start", str(work / "pipeline")])) == {
        "latents": 1.0,
        "diffusion": pytest.approx(0.85),
        "export": 1.0,
        "samples": 1.0,
    }


def test_export_refuses_what_is_too_large(work, text):
    with pytest.raises(export.ModelTooLargeError, match=r"at most 0\.01 are allowed"):
        export_flux.export_flux(TINY_FLUX, Place(work, CPU, text=text), max_mib=0.01)


def test_the_text_encoder_must_be_named(command, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run.main(command("diffusion", tmp_path, "--model", "flux"))
    assert "needs --text" in capsys.readouterr().err


def test_noise_is_drawn_as_sampling_visits_it():
    levels = noise_levels(1000, FLUX.shift, torch.Generator().manual_seed(0))
    scheduler = build_flow_scheduler(FLUX)
    scheduler.set_timesteps(sigmas=torch.linspace(1, 0.001, 1000).tolist())
    torch.testing.assert_close(levels.flip(0), scheduler.sigmas[:-1], atol=5e-3, rtol=0)


def test_the_full_transformer_sees_2304_tokens_and_fits_the_package():
    with torch.device("meta"):
        transformer, vae = build_flux(FLUX, 192), build_vae(FLUX)
    assert (FLUX.latent_size // 2) ** 2 == 2304
    assert sum(transformer.config.axes_dims_rope) == transformer.config.attention_head_dim == 64
    count = [sum(weight.numel() for weight in network.parameters()) for network in (transformer, vae)]
    assert count[0] / 2**20 < 12
    assert (count[0] + 2 * count[1]) / 2**20 < 12.7


def test_an_untrained_block_changes_nothing():
    torch.manual_seed(0)
    transformer = build_flux(TINY_FLUX, 8)
    out = transformer(
        hidden_states=torch.randn(1, 4, 16),
        encoder_hidden_states=torch.randn(1, 3, 8),
        pooled_projections=torch.randn(1, 8),
        timestep=torch.ones(1),
        txt_ids=torch.zeros(3, 3),
        img_ids=positions(2, 1, CPU),
    ).sample
    assert (out == 0).all()


def test_queries_and_keys_have_the_precision_of_the_values():
    transformer = build_flux(TINY_FLUX, 8)
    names = list(transformer.state_dict())
    norm_in_one_precision(transformer)
    assert list(transformer.state_dict()) == names
    norm = transformer.transformer_blocks[0].attn.norm_q
    x = torch.randn(2, 4, TINY_FLUX.head_channels)
    assert norm(x.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, x.shape[-1:], norm.weight, norm.eps))


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_kernel_is_faster_than_the_one_allowed(kernel):
    flags = torch.backends.cuda
    use_attention(kernel)
    assert not flags.cudnn_sdp_enabled()
    assert flags.math_sdp_enabled()
    assert [flags.flash_sdp_enabled(), flags.mem_efficient_sdp_enabled()] == [kernel == "flash", kernel != "math"]
    use_attention("flash")


def test_the_probe_tells_the_speed_of_both_sizes(text, capsys):
    probe.main(["--text", str(text), "--tiny", "--device", "cpu", "--steps", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" images/s")[0].split(":")[1] for line in lines] == [
        " 16×16 latents, 4 images a step",
        " 8×8 latents, 8 images a step",
    ]
