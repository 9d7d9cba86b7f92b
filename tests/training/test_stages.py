"""All stages in small on a CPU, from pictures to a pipeline that draws; killed and resumed; too large and refused."""

import csv
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionPipeline
from PIL import Image

from training import export, run
from training.diffusion import Batches, loss_weight, spread_timesteps
from training.latents import normalise
from training.loop import Budget, Place, learning_rate
from training.models import build_scheduler, build_unet, build_vae
from training.settings import FULL, TINY

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
pytestmark = pytest.mark.slow  # they train


def rows(work, stage):
    with (work / f"{stage}.csv").open() as file:
        return list(csv.DictReader(file))


def checkpoint(work, stage):
    return torch.load(work / f"{stage}.pt", weights_only=True)


@pytest.mark.parametrize("stage", ["vae", "diffusion"])
def test_a_stage_logs_and_ends_annealed(trained, stage):
    log = rows(trained, stage)
    assert list(log[0]) == ["step", "loss", "images_per_second", "learning_rate", "seconds"]
    assert log[-1]["step"] == "25"
    assert float(log[-1]["loss"]) < float(log[0]["loss"])
    assert float(log[-1]["learning_rate"]) < 0.01 * FULL.diffusion_rate


def test_pipeline_loads_without_arguments_and_draws(trained):
    pipeline = StableDiffusionPipeline.from_pretrained(trained / "pipeline", local_files_only=True)
    image = pipeline("3d emoji of a red apple", num_inference_steps=2).images[0]
    assert image.size == (64, 64)
    assert pipeline.scheduler.config.prediction_type == "v_prediction"
    assert pipeline.safety_checker is None
    assert not any("_name_or_path" in path.read_text() for path in (trained / "pipeline").rglob("*.json"))


def test_files_are_in_half_precision(trained):
    pipeline = StableDiffusionPipeline.from_pretrained(trained / "pipeline", local_files_only=True)
    networks = (pipeline.unet, pipeline.vae, pipeline.text_encoder)
    parameters = sum(weight.numel() for network in networks for weight in network.parameters())
    stored = sum(path.stat().st_size for path in (trained / "pipeline").rglob("*.safetensors"))
    assert 2 * parameters < stored < 2.5 * parameters


def test_model_card_is_filled_in(trained):
    card = (trained / "pipeline" / "README.md").read_text()
    assert "$" not in card
    assert "16 captioned images" in card
    assert "| UNet and text encoder | " in card
    assert " | 25 | 100 of 16 | 75% | CPU, torch " in card


def test_samples_are_a_grid_of_64(trained):
    with Image.open(trained / "samples.png") as image:
        assert image.size == (8 * 64, 8 * (64 + 34))


def test_reconstructions_stand_under_the_images(trained):
    with Image.open(trained / "reconstructions.png") as image:
        assert image.size == (8 * 64, 2 * 2 * 64)  # sixteen images in two rows


def test_export_refuses_what_is_too_large(trained, tmp_path):
    work = tmp_path / "work"
    shutil.copytree(trained, work)
    before = (work / "pipeline" / "README.md").stat().st_mtime_ns
    with pytest.raises(export.ModelTooLargeError, match=r"0\.\d MiB, and at most 0\.1 are allowed"):
        export.export(TINY, Place(work, CPU), max_mib=0.1)
    assert (work / "pipeline" / "README.md").stat().st_mtime_ns == before


def test_a_finished_stage_is_not_trained_again(trained, command, capsys):
    before = checkpoint(trained, "vae")
    run.main(command("vae", trained, "--steps", "25"))
    after = checkpoint(trained, "vae")
    assert "finished already, at step 25" in capsys.readouterr().out
    assert after["step"] == 25
    assert all(torch.equal(after["average"][name], weight) for name, weight in before["average"].items())


def test_a_resumed_training_keeps_its_vocabulary_and_latents(trained, command):
    before = {name: (trained / name).stat().st_mtime_ns for name in ("latents.pt", "tokenizer/vocab.json")}
    run.main(command("latents", trained))
    assert {name: (trained / name).stat().st_mtime_ns for name in before} == before


def test_an_exported_pipeline_is_trained_further(trained, command, tmp_path):
    start = ("--start", str(trained / "pipeline"))
    for stage in ("latents", "diffusion"):
        run.main(command(stage, tmp_path, "--steps", "1", *start))
    before = StableDiffusionPipeline.from_pretrained(trained / "pipeline", local_files_only=True).unet.state_dict()
    average = checkpoint(tmp_path, "diffusion")["average"]
    changes = [(average[f"unet.{name}"] - weight).abs().max().item() for name, weight in before.items()]
    assert 0 < max(changes) < 1e-3  # one warm-up step away, not new
    run.main(command("export", tmp_path))
    history = json.loads((tmp_path / "pipeline" / "training.json").read_text())
    assert [chapter["stage"] for chapter in history] == ["autoencoder", *["UNet and text encoder"] * 2]
    assert [chapter["steps"] for chapter in history] == [25, 25, 1]


def test_what_cannot_be_started_from_is_named(trained, command, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run.main(command("diffusion", tmp_path, "--start", str(tmp_path)))
    assert "is no exported unet: it has no unet/" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run.main(command("vae", tmp_path, "--start", str(trained / "pipeline")))
    assert "there is no stage vae" in capsys.readouterr().err


def test_other_settings_are_not_mixed_in(trained, command):
    with pytest.raises(ValueError, match="other settings"):
        run.main(command("diffusion", trained, "--seed", "1"))


def test_killed_it_goes_on(command, tmp_path, capsys):
    arguments = [sys.executable, "-m", "training.run", *command("vae", tmp_path, "--checkpoint-seconds", "0.2")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(arguments, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    while not (tmp_path / "vae.csv").exists():  # however long a busy machine takes
        assert process.poll() is None, "it ended too early"
        time.sleep(0.05)
    process.kill()
    process.wait()

    killed_at = checkpoint(tmp_path, "vae")["step"]
    assert killed_at > 0
    run.main(command("vae", tmp_path, "--steps", str(killed_at + 20)))
    assert f"going on at step {killed_at}" in capsys.readouterr().out
    resumed = checkpoint(tmp_path, "vae")
    assert resumed["step"] == killed_at + 20
    steps = [int(row["step"]) for row in rows(tmp_path, "vae")]
    assert steps == sorted(set(steps))
    assert steps[-1] == killed_at + 20


@pytest.mark.parametrize("stage", ["latents", "diffusion", "export", "samples"])
def test_a_stage_names_the_one_before_it(command, tmp_path, stage):
    with pytest.raises(OSError, match=r"run the stage|tokenizer"):
        run.main(command(stage, tmp_path))


@pytest.mark.parametrize(
    ("option", "value"),
    [("--minutes", "0"), ("--minutes", "nan"), ("--steps", "0"), ("--batch", "-4"), ("--limit", "0")],
)
def test_numbers_that_mean_nothing_are_refused(command, tmp_path, capsys, option, value):
    with pytest.raises(SystemExit):
        run.main(command("vae", tmp_path, option, value))
    assert f"argument {option}: {value} is not allowed" in capsys.readouterr().err


def test_normalising_changes_latents_and_not_pictures():
    torch.manual_seed(0)
    vae = build_vae(TINY).eval().requires_grad_(False)
    images = torch.rand(3, 3, 64, 64) * 2 - 1
    latents = torch.stack([vae.encode(images).latent_dist.mean, vae.encode(images.flip(-1)).latent_dist.mean], dim=1)
    pictures = vae.decode(latents[:, 0]).sample
    deviation = vae.encode(images).latent_dist.std / latents.std(dim=(0, 1, 3, 4))[:, None, None]

    normalised = normalise(vae, latents)
    torch.testing.assert_close(normalised.mean(dim=(0, 1, 3, 4)), torch.zeros(4), atol=1e-4, rtol=0)
    torch.testing.assert_close(normalised.std(dim=(0, 1, 3, 4)), torch.ones(4), atol=1e-4, rtol=0)
    posterior = vae.encode(images).latent_dist
    torch.testing.assert_close(posterior.mean, normalised[:, 0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(posterior.std, deviation, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(vae.decode(posterior.mean).sample, pictures, atol=1e-4, rtol=1e-4)


def test_batches_mirror_and_drop_captions_as_told(trained):
    batches = Batches.load(Place(trained, CPU))
    generator = torch.Generator().manual_seed(0)
    _, tokens = batches.draw(400, 0.25, generator)
    dropped = (tokens == batches.no_caption).all(dim=1).float().mean().item()
    assert dropped == pytest.approx(0.25, abs=0.06)
    batches.mirror.zero_()
    latents, _ = batches.draw(8, 0.0, generator)
    whole = batches.latents[:, 0].float()
    assert all((whole == latent).flatten(1).all(dim=1).any() for latent in latents)


def test_timesteps_cover_all_noise_levels():
    timesteps = spread_timesteps(10, 1000, torch.Generator().manual_seed(0))
    assert (timesteps // 100).tolist() == list(range(10))


def test_pure_noise_is_trained_and_nothing_weighs_more():
    signal = build_scheduler().alphas_cumprod
    assert signal[-1].item() == pytest.approx(0, abs=1e-6)
    weights = loss_weight(signal)
    assert weights[-1].item() == 1
    assert (weights[:-1] <= weights[1:]).all()
    assert weights[0] > 0


def test_compiling_does_not_lower_the_rate():
    budget = Budget(minutes=10)
    assert budget.done(1, seconds=240, setup=240) == 0
    assert budget.done(1, seconds=420, setup=240) == 0.5
    assert budget.done(1, seconds=600, setup=240) == 1
    assert budget.done(1, seconds=700, setup=700) == 1


def test_learning_rate_follows_the_clock():
    budget = Budget(minutes=10)
    rates = [learning_rate(1.0, 1000, 200, budget.done(1000, seconds)) for seconds in (0, 300, 600)]
    assert rates == pytest.approx([1, 0.5, 0])
    assert learning_rate(1.0, 99, 200, 0.0) == 0.5


def test_the_full_unet_sees_1024_tokens_and_fits_the_package():
    with torch.device("meta"):
        unet, vae = build_unet(FULL), build_vae(FULL)
    assert unet.config.sample_size**2 == 1024
    assert unet.config.use_linear_projection
    millions = sum(weight.numel() for network in (unet, vae) for weight in network.parameters()) / 1e6
    assert 15 < millions < 18
