"""The command line: `python -m training.run vae|latents|diffusion|export|samples|all --data DIR --work DIR`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import diffusers
import torch
import transformers

from training.diffusion import train_diffusion
from training.export import export
from training.latents import prepare_latents
from training.loop import Budget, Place
from training.samples import generate_samples
from training.settings import FULL, TINY
from training.vae import train_vae

STAGES = ("vae", "latents", "diffusion", "export", "samples")
SHARES = {"vae": 0.22, "diffusion": 0.70}
"""Of the minutes of `all`; what is left is for reading, encoding, exporting and sampling."""


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
    parser.add_argument("stage", choices=(*STAGES, "all"))
    parser.add_argument("--data", type=Path, help="folder of fluent_emoji.npz and clothing.npz (stages vae, latents)")
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints, logs and results")
    parser.add_argument("--start", type=Path, help="an exported pipeline to train further (stages latents, diffusion)")
    parser.add_argument("--minutes", type=duration, default=12.0, help="for this stage, or for all of them together")
    parser.add_argument("--steps", type=whole, help="stop after so many steps even if minutes are left")
    parser.add_argument("--batch", type=whole, help=f"images a step in the stage diffusion (default {FULL.batch})")
    parser.add_argument("--seed", type=int, default=FULL.seed)
    parser.add_argument("--checkpoint-seconds", type=float, default=60.0, help="what a killed run loses at most")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="compile the networks: a minute or two, then faster")
    parser.add_argument("--tiny", action="store_true", help="networks and images small enough for a test on a CPU")
    parser.add_argument("--limit", type=whole, help="take only so many images of each set, to try things out")
    parser.add_argument("--sample-steps", type=whole, default=20)
    parser.add_argument("--guidance", type=float, default=4.0)
    options = parser.parse_args(arguments)
    if options.stage in ("vae", "latents", "all") and options.data is None:
        parser.error(f"the stage {options.stage} needs --data")
    if options.start and options.stage in ("vae", "all"):
        parser.error("--start takes the autoencoder as it is: run the stages latents, diffusion, export one by one")
    if options.start and not (options.start / "model_index.json").exists():
        parser.error(f"--start {options.start} is no exported pipeline: it has no model_index.json")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one stage or all of them. A stage that was interrupted goes on; one that is finished is not trained again."""
    options = parse(arguments)
    settings = replace(TINY if options.tiny else FULL, seed=options.seed)
    if options.batch:
        settings = replace(settings, batch=options.batch)
    place = Place(
        options.work, torch.device(options.device), options.compile, options.checkpoint_seconds, options.start
    )
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True

    for stage in STAGES if options.stage == "all" else (options.stage,):
        share = SHARES.get(stage, 1.0) if options.stage == "all" else 1.0
        budget = Budget(options.minutes * share, options.steps)
        if stage == "vae":
            train_vae(options.data, settings, place, budget, options.limit)
        elif stage == "latents":
            prepare_latents(options.data, settings, place, options.limit)
        elif stage == "diffusion":
            train_diffusion(settings, place, budget)
        elif stage == "export":
            export(settings, place)
        else:
            generate_samples(settings, place, options.sample_steps, options.guidance)


if __name__ == "__main__":
    main()
