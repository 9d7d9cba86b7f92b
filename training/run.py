"""The command line: `python -m training.run STAGE --model unet|flux|4step|wan --work DIR`, with a stage of that model
or `all`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from training.attention import KERNELS, use_attention
from training.clip_latents import prepare_clips
from training.clip_samples import generate_clip_samples
from training.clip_vae import train_clip_vae
from training.diffusion import train_diffusion
from training.distill import train_four_step
from training.export import export, load_pipeline
from training.export_flux import export_flux, flux_arguments
from training.export_flux import load_exported as load_flux
from training.export_four_step import export_four_step
from training.export_four_step import load_exported as load_four_step
from training.export_wan import export_wan
from training.export_wan import load_exported as load_wan
from training.flux import train_flux
from training.latents import prepare_latents
from training.loop import Budget, Place
from training.samples import generate_samples
from training.settings import FLUX, FOUR_STEP, FULL, TINY, TINY_FLUX, TINY_FOUR_STEP, TINY_WAN, WAN
from training.vae import train_vae
from training.wan import train_wan

STAGES = {
    "unet": ("vae", "latents", "diffusion", "export", "samples"),
    "flux": ("vae", "latents", "diffusion", "export", "samples"),
    "4step": ("distill", "export", "samples"),
    "wan": ("vae", "latents", "diffusion", "export", "samples"),
}
SETTINGS = {
    "unet": (FULL, TINY),
    "flux": (FLUX, TINY_FLUX),
    "4step": (FOUR_STEP, TINY_FOUR_STEP),
    "wan": (WAN, TINY_WAN),
}
SHARES = {
    "unet": {"vae": 0.22, "diffusion": 0.70},
    "flux": {"vae": 0.11, "diffusion": 0.74},
    "4step": {"distill": 0.85},
    "wan": {"vae": 0.14, "diffusion": 0.7},
}
"""Of the minutes of `all`; what is left is for reading, encoding, exporting and sampling."""
DENOISERS = {"unet": "unet", "flux": "transformer", "wan": "transformer"}
"""The folder of an exported model that another training can start from."""
READS_DATA = ("vae", "latents", "distill")


def whole(text: str) -> int:
    """A number of things, at least one: 0 would otherwise count as not given."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not allowed: it must be 1 or more")
    return number


def duration(text: str) -> float:
    """Minutes, more than none."""
    minutes = float(text)
    if not 0 < minutes < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not allowed: it must be above 0, and finite")
    return minutes


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m training.run", description=__doc__)
    parser.add_argument(
        "stage", choices=(*dict.fromkeys(stage for stages in STAGES.values() for stage in stages), "all")
    )
    parser.add_argument("--model", choices=tuple(STAGES), default="unet", help="which model to train")
    parser.add_argument(
        "--data", type=Path, help=f"folder of fluent_emoji.npz and clothing.npz ({', '.join(READS_DATA)})"
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints, logs and results")
    parser.add_argument("--start", type=Path, help="an exported model to train further, without the stage vae")
    parser.add_argument("--text", type=Path, help="the demo model, of which all but unet use parts")
    parser.add_argument("--minutes", type=duration, default=12.0, help="for this stage, or for all of them together")
    parser.add_argument("--steps", type=whole, help="stop after so many steps even if minutes are left")
    parser.add_argument("--batch", type=whole, help="images or frames a step in the stages diffusion and distill")
    parser.add_argument("--seed", type=int, default=FULL.seed)
    parser.add_argument("--checkpoint-seconds", type=float, default=60.0, help="what a killed run loses at most")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="compile the networks: a minute or two, then faster")
    parser.add_argument("--attention", choices=KERNELS, default=KERNELS[0], help="the GPU's kernel, if one fails")
    parser.add_argument("--tiny", action="store_true", help="networks and images small enough for a test on a CPU")
    parser.add_argument("--limit", type=whole, help="take only so many images of each set, to try things out")
    parser.add_argument("--sample-steps", type=whole, help="default 20, of 4step 4")
    parser.add_argument("--guidance", type=float, help="default 4, of 4step 1: none")
    options = parser.parse_args(arguments)
    if options.stage not in (*STAGES[options.model], "all"):
        parser.error(f"{options.model} has no stage {options.stage}: {', '.join(STAGES[options.model])}")
    if options.model != "unet" and not (options.text and (options.text / "model_index.json").exists()):
        parser.error(f"--model {options.model} needs --text, an exported pipeline such as the demo model")
    if options.stage in (*READS_DATA, "all") and options.data is None:
        parser.error(f"the stage {options.stage} needs --data")
    if options.model == "unet" and options.text:
        parser.error("--text is for --model flux, 4step and wan: unet learns a text encoder of its own")
    if options.start and options.model not in DENOISERS:
        parser.error(f"--start is for --model {' and '.join(DENOISERS)}")
    if options.start and options.stage == "vae":
        parser.error("--start takes the autoencoder as it is: there is no stage vae")
    if options.start and not (options.start / DENOISERS[options.model]).exists():
        parser.error(f"--start {options.start} is no exported {options.model}: it has no {DENOISERS[options.model]}/")
    return options


def shares(options: argparse.Namespace) -> dict[str, float]:
    """The stages to run, and the share of the minutes each may train. One that is left out leaves its own to the
    denoiser."""
    if options.stage != "all":
        return {options.stage: 1.0}
    share = {stage: SHARES[options.model].get(stage, 1.0) for stage in STAGES[options.model]}
    if options.start:
        share["diffusion"] += share.pop("vae")
    return share


def run_unet(stage: str, settings: Any, place: Place, budget: Budget, options: argparse.Namespace) -> None:
    """One stage of the demo model."""
    if stage == "vae":
        train_vae(options.data, settings, place, budget, options.limit)
    elif stage == "latents":
        prepare_latents(options.data, settings, place, options.limit)
    elif stage == "diffusion":
        train_diffusion(settings, place, budget)
    elif stage == "export":
        export(settings, place)
    else:
        load = partial(load_pipeline, device=place.device)
        generate_samples(load, settings.seed, place, options.sample_steps or 20, options.guidance or 4.0)


def run_flux(stage: str, settings: Any, place: Place, budget: Budget, options: argparse.Namespace) -> None:
    """One stage of the Flux-class model."""
    if stage == "vae":
        train_vae(options.data, settings, place, budget, options.limit)
    elif stage == "latents":
        prepare_latents(options.data, settings, place, options.limit)
    elif stage == "diffusion":
        train_flux(settings, place, budget)
    elif stage == "export":
        export_flux(settings, place)
    else:
        steps, guidance = options.sample_steps or 20, options.guidance or 4.0
        generate_samples(partial(load_flux, place), settings.seed, place, steps, guidance, flux_arguments)


def run_four_step(stage: str, settings: Any, place: Place, budget: Budget, options: argparse.Namespace) -> None:
    """One stage of the four-step model."""
    if stage == "distill":
        train_four_step(options.data, settings, place, budget, options.limit)
    elif stage == "export":
        export_four_step(settings, place)
    else:
        steps, guidance = options.sample_steps or settings.steps, options.guidance or 1.0
        generate_samples(partial(load_four_step, place), settings.seed, place, steps, guidance)


def run_wan(stage: str, settings: Any, place: Place, budget: Budget, options: argparse.Namespace) -> None:
    """One stage of the video model."""
    if stage == "vae":
        train_clip_vae(options.data, settings, place, budget, options.limit)
    elif stage == "latents":
        prepare_clips(options.data, settings, place, options.limit)
    elif stage == "diffusion":
        train_wan(settings, place, budget)
    elif stage == "export":
        export_wan(settings, place)
    else:
        steps, guidance = options.sample_steps or 20, options.guidance or 4.0
        generate_clip_samples(load_wan(place, place.work / "pipeline"), settings, place, steps, guidance)


RUN = {"unet": run_unet, "flux": run_flux, "4step": run_four_step, "wan": run_wan}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one stage or all of them. A stage that was interrupted goes on; one that is finished is not trained again."""
    options = parse(arguments)
    full, tiny = SETTINGS[options.model]
    settings: Any = replace(tiny if options.tiny else full, seed=options.seed)
    if options.batch:
        settings = replace(settings, batch=options.batch)
    place = Place(
        options.work,
        torch.device(options.device),
        options.compile,
        options.checkpoint_seconds,
        options.start,
        options.text,
    )
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    use_attention(options.attention)

    for stage, share in shares(options).items():
        budget = Budget(options.minutes * share, options.steps)
        RUN[options.model](stage, settings, place, budget, options)


if __name__ == "__main__":
    main()
