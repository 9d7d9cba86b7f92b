"""Generate images for a list of prompts on several GPUs, one process per GPU.

accelerate launch --multi_gpu --num_processes 4 examples/several_gpus.py --prompts prompts.txt --output images
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from diffusers import DiffusionPipeline

from toma_diffusion import speed_up

PROMPTS = ("a red apple", "a blue shoe", "a green tree", "a castle on a hill")


def main() -> None:
    """Every process loads the model, and generates its share of the images."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, help="a text file with one prompt per line")
    parser.add_argument("--model", default="stabilityai/stable-diffusion-xl-base-1.0", help="hub id or folder")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", type=Path, default=Path("images"), help="a folder")
    args = parser.parse_args()
    prompts = args.prompts.read_text().splitlines() if args.prompts else list(PROMPTS)

    state = PartialState(cpu=not torch.cuda.is_available())
    dtype = torch.float16 if state.device.type == "cuda" else torch.float32
    pipe: Any = DiffusionPipeline.from_pretrained(args.model, torch_dtype=dtype).to(state.device)
    pipe.set_progress_bar_config(disable=not state.is_main_process)
    handle = speed_up(pipe)

    args.output.mkdir(parents=True, exist_ok=True)
    with state.split_between_processes(list(enumerate(prompts))) as share:
        for index, prompt in share:
            # One seed per prompt, so that the images do not depend on the number of processes.
            generator = torch.Generator("cpu").manual_seed(index)
            image = pipe(prompt, num_inference_steps=args.steps, generator=generator).images[0]
            image.save(args.output / f"{index:03d}.png")

    state.wait_for_everyone()
    if state.is_main_process:
        print(handle.summary())
        print(f"{len(prompts)} images in {args.output}, {state.num_processes} processes")
    state.destroy_process_group()


if __name__ == "__main__":
    main()
