"""Skip steps in a denoising loop of your own: a UNet and a scheduler, without a pipeline.

python examples/own_loop.py "a photo of an astronaut riding a horse"
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from diffusers.image_processor import VaeImageProcessor
from transformers import CLIPTextModel, CLIPTokenizer

from toma_diffusion import speed_up


@torch.no_grad()
def main() -> None:
    """Generate one image."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="a photo of an astronaut riding a horse")
    parser.add_argument("--model", default="stable-diffusion-v1-5/stable-diffusion-v1-5", help="hub id or folder")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--guidance", type=float, default=7.5)
    parser.add_argument("--output", type=Path, default=Path("own_loop.png"))
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer: Any = CLIPTokenizer.from_pretrained(args.model, subfolder="tokenizer")
    text_encoder: Any = CLIPTextModel.from_pretrained(args.model, subfolder="text_encoder").to(device).float()
    vae: Any = AutoencoderKL.from_pretrained(args.model, subfolder="vae").to(device).float()
    unet: Any = UNet2DConditionModel.from_pretrained(args.model, subfolder="unet").to(device).float()
    scheduler: Any = DDIMScheduler.from_pretrained(args.model, subfolder="scheduler")

    texts = tokenizer(["", args.prompt], padding="max_length", truncation=True, return_tensors="pt").input_ids
    unconditional, conditional = text_encoder(texts.to(device))[0].chunk(2)
    size = unet.config.sample_size
    latents = torch.randn(1, 4, size, size, generator=torch.Generator().manual_seed(0)).to(device)

    handle = speed_up(unet, "fast")
    scheduler.set_timesteps(args.steps, device=device)
    handle.begin(len(scheduler.timesteps), scheduler)  # how many steps there are, and their noise levels
    for step, timestep in enumerate(scheduler.timesteps):
        handle.step(step)  # the calls that follow belong to this step
        sample = scheduler.scale_model_input(latents, timestep)
        without_text = unet(sample, timestep, unconditional).sample  # two calls in one step
        with_text = unet(sample, timestep, conditional).sample
        noise = without_text + args.guidance * (with_text - without_text)
        latents = scheduler.step(noise, timestep, latents).prev_sample

    pixels = vae.decode(latents / vae.config.scaling_factor).sample
    VaeImageProcessor().postprocess(pixels)[0].save(args.output)
    print(handle.summary())


if __name__ == "__main__":
    main()
