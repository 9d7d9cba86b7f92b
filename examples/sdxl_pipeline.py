"""Generate an image with SDXL, faster and as it is.

python examples/sdxl_pipeline.py "a photo of an astronaut riding a horse"
"""

import argparse
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from diffusers import StableDiffusionXLPipeline

from toma_diffusion import speed_up


def main() -> None:
    """Write two images and print what was skipped and merged."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="a photo of an astronaut riding a horse")
    parser.add_argument("--model", default="stabilityai/stable-diffusion-xl-base-1.0", help="hub id or folder")
    parser.add_argument("--preset", default="balanced", help="fast and faster save more time and change the image more")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", type=Path, default=Path("sdxl.png"))
    args = parser.parse_args()

    device, dtype = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)
    pipe: Any = StableDiffusionXLPipeline.from_pretrained(args.model, torch_dtype=dtype).to(device)

    def generate() -> Any:
        start = perf_counter()
        generator = torch.Generator("cpu").manual_seed(0)  # the same noise for both images
        image = pipe(args.prompt, num_inference_steps=args.steps, generator=generator).images[0]
        return image, perf_counter() - start

    handle = speed_up(pipe, args.preset)
    generate()  # warm-up: the first image compiles kernels and allocates memory
    image, seconds = generate()
    image.save(args.output)
    print(handle.summary())  # how many steps were computed, and how the others were predicted

    handle.enabled = False  # the original model: same output, bit for bit
    image, baseline_seconds = generate()
    image.save(args.output.with_stem(f"{args.output.stem}-original"))
    print(f"{seconds:.2f} s with {args.preset}, {baseline_seconds:.2f} s without it")
    handle.remove()


if __name__ == "__main__":
    main()
