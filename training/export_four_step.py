"""Stage `export` of the four-step model: low-rank weights that diffusers' `load_lora_weights` reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from string import Template
from typing import Any

import torch
from diffusers import StableDiffusionPipeline
from safetensors.torch import save_file
from toma_diffusion_demo.loading import LOW_RANK_WEIGHTS, four_step_pipeline

from training.distill import build_student, low_rank_weights
from training.export import ModelTooLargeError, folder_mib, load_pipeline
from training.loop import HISTORY, Place, averaged
from training.samples import decibels, draw, prompts
from training.settings import FourStepSettings

MAX_MIB = 3.0
CARD = Path(__file__).with_name("four_step_card.md")
COMPARED = 16
"""Prompts that teacher and student draw."""


def load_exported(place: Place, folder: Path) -> StableDiffusionPipeline:
    """The pipeline as a user loads it."""
    dtype = torch.float16 if place.device.type == "cuda" else torch.float32
    pipeline = four_step_pipeline(dtype, folder, place.text)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(place.device)


def chapter(settings: FourStepSettings, state: dict[str, Any], place: Place) -> dict[str, Any]:
    """What the stage did, for the history."""
    return {
        "stage": "distillation",
        "seconds": round(state["seconds"], 1),
        "steps": state["step"],
        "images": state["images"],
        "different_images": (1 + (state["step"] - 1) // settings.steps_between) * settings.trajectories,
        "device": torch.cuda.get_device_name() if place.device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "settings": state["settings"],
    }


def export_four_step(settings: FourStepSettings, place: Place, max_mib: float = MAX_MIB) -> Path:
    """Write the folder `pipeline`, unless it is too large or does not generate images.

    Raises:
        ModelTooLargeError: The folder would be larger than `max_mib`.
    """
    assert place.text is not None
    student = build_student(settings, place)
    state = averaged(student, place.work / "distill.pt")
    folder, unfinished = place.work / "pipeline", place.work / "pipeline.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    save_file(low_rank_weights(student), unfinished / LOW_RANK_WEIGHTS)
    (unfinished / LOW_RANK_WEIGHTS).chmod(0o644)  # safetensors writes it for the owner alone

    history = [chapter(settings, state, place)]
    (unfinished / HISTORY).write_text(json.dumps(history, indent=2) + "\n")
    texts, seed = prompts()[::4][:COMPARED], settings.seed
    teacher = load_pipeline(place.text, place.device)
    by_teacher = draw(teacher, texts, seed, settings.teacher_steps, settings.guidance)
    few_steps = draw(teacher, texts, seed, settings.steps, settings.guidance)
    by_student = draw(load_exported(place, unfinished), texts, seed, settings.steps, 1.0)
    before, after = decibels(few_steps, by_teacher), decibels(by_student, by_teacher)
    (unfinished / "README.md").write_text(
        Template(CARD.read_text()).substitute(
            rank=settings.rank,
            steps=settings.steps,
            teacher_steps=settings.teacher_steps,
            guidance=f"{settings.guidance:g}",
            own_share=f"{settings.own_share:.0%}",
            minutes=f"{history[0]['seconds'] / 60:.1f}",
            updates=f"{history[0]['steps']:,}",
            pictures=f"{history[0]['different_images']:,}",
            device=f"{history[0]['device']}, torch {history[0]['torch']}",
            compared=COMPARED,
            before=f"{before:.1f}",
            after=f"{after:.1f}",
        )
    )
    size = folder_mib(unfinished)
    if size > max_mib:
        raise ModelTooLargeError(f"{unfinished} has {size:.1f} MiB, and at most {max_mib:g} are allowed.")
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
    print(
        f"export: {folder}, {size:.1f} of at most {max_mib:g} MiB; "
        f"against the teacher: {after:.1f} dB, its own {settings.steps} steps {before:.1f} dB",
        flush=True,
    )
    return folder
