"""The distillation to four steps in small on a CPU: its geometry, its low-rank weights, and what is loaded of them."""

import json
from itertools import pairwise

import pytest
import torch
from diffusers import StableDiffusionPipeline
from safetensors.torch import save_file
from toma_diffusion_demo.loading import LOW_RANK_WEIGHTS, four_step_pipeline
from torch import nn

from training import run
from training.distill import Captions, LowRank, Schedule, Teacher, build_student, load_unet, low_rank_weights
from training.loop import Place
from training.models import build_scheduler
from training.settings import TINY_FOUR_STEP

CPU = torch.device("cpu")
pytestmark = pytest.mark.slow  # they train


@pytest.fixture(scope="module")
def place(trained, tmp_path_factory):
    return Place(tmp_path_factory.mktemp("four_step"), CPU, text=trained / "pipeline")


@pytest.fixture(scope="module")
def work(command, place):
    """The work folder after `all`."""
    run.main(command("all", place.work, "--model", "4step", "--text", str(place.text), "--steps", "8"))
    return place.work


@pytest.fixture
def student(place):
    torch.manual_seed(0)
    return build_student(TINY_FOUR_STEP, place)


@pytest.fixture(scope="module")
def schedule():
    return Schedule(build_scheduler().alphas_cumprod)


def output(unet):
    torch.manual_seed(1)
    size, channels = unet.config.sample_size, unet.config.cross_attention_dim
    with torch.no_grad():
        return unet(torch.randn(1, 4, size, size), torch.tensor([500]), torch.randn(1, 32, channels)).sample


def test_steps_are_those_of_the_scheduler(schedule):
    scheduler = build_scheduler()
    scheduler.set_timesteps(4)
    timesteps = schedule.timesteps(4)
    assert timesteps[:-1] == scheduler.timesteps.tolist()
    noisy, velocity = torch.randn(2, 1, 4, 8, 8)
    for start, end in pairwise(timesteps):
        ours = schedule.step(noisy, velocity, torch.tensor([start]), torch.tensor([end]))
        torch.testing.assert_close(ours, scheduler.step(velocity, start, noisy).prev_sample, atol=1e-5, rtol=0)
        back = schedule.velocity(noisy, ours, torch.tensor([start]), torch.tensor([end]))
        torch.testing.assert_close(back, velocity, atol=1e-4, rtol=0)


def test_a_new_student_is_the_teacher_and_only_its_changes_are_trained(student, place):
    torch.testing.assert_close(output(student), output(load_unet(place)))
    trained = [name for name, weight in student.named_parameters() if weight.requires_grad]
    assert trained
    assert all(".parametrizations.weight.0." in name for name in trained)


def test_loaded_weights_are_those_that_were_trained(student, place, tmp_path):
    for module in student.modules():
        if isinstance(module, LowRank):
            nn.init.normal_(module.up, std=0.1)
    save_file(low_rank_weights(student), tmp_path / LOW_RANK_WEIGHTS)
    changed = output(student)
    assert (changed - output(load_unet(place))).abs().max() > 1e-2
    ours = four_step_pipeline(torch.float32, tmp_path, place.text)
    torch.testing.assert_close(output(ours.unet), changed, atol=2e-3, rtol=0)
    theirs = StableDiffusionPipeline.from_pretrained(place.text, local_files_only=True)
    theirs.load_lora_weights(str(tmp_path))
    torch.testing.assert_close(output(theirs.unet), output(ours.unet), atol=1e-4, rtol=0)


def test_it_is_a_plain_unet(work, place):
    pipe = four_step_pipeline(torch.float32, work / "pipeline", place.text)
    plain = StableDiffusionPipeline.from_pretrained(place.text, local_files_only=True)
    assert [type(module) for module in pipe.unet.modules()] == [type(module) for module in plain.unet.modules()]
    assert pipe("3d emoji of a red apple", num_inference_steps=4, guidance_scale=1).images[0].size == (64, 64)


def test_the_teacher_goes_its_way_in_parts(data, place, schedule, student):
    captions = Captions.load(data, TINY_FOUR_STEP, place, None)
    teacher = Teacher(load_unet(place), schedule, captions, TINY_FOUR_STEP)
    lesson = teacher.teach(student, place, torch.Generator().manual_seed(0))
    assert lesson.start.tolist() == [999, 999, 749, 749, 499, 499, 249, 249]
    assert lesson.noisy.shape == lesson.velocity.shape == (8, 4, 8, 8)
    # With as many steps as the student, the teacher's step is its guided velocity.
    guided = teacher.predict(lesson.noisy[:2], lesson.start[:2], lesson.text[:2])
    torch.testing.assert_close(lesson.velocity[:2], guided, atol=1e-3, rtol=1e-3)


def test_card_and_history(work):
    card = (work / "pipeline" / "README.md").read_text()
    assert "$" not in card
    (chapter,) = json.loads((work / "pipeline" / "training.json").read_text())
    assert chapter["steps"] == 8
    assert chapter["images"] == 8 * TINY_FOUR_STEP.batch
    assert chapter["different_images"] == 2 * TINY_FOUR_STEP.trajectories


def test_it_has_no_stage_of_the_others(command, place, capsys):
    with pytest.raises(SystemExit):
        run.main(command("vae", place.work, "--model", "4step", "--text", str(place.text)))
    assert "4step has no stage vae" in capsys.readouterr().err
