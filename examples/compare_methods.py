"""Compare token merging methods on one pipeline: time, and the images side by side.

python examples/compare_methods.py "a photo of an astronaut riding a horse" --ratio 0.5
"""

import argparse
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from diffusers import DiffusionPipeline
from PIL import Image, ImageDraw

from toma_diffusion import speed_up
from toma_diffusion.merge.variants import VARIANTS
from toma_diffusion.others import METHODS

COMPARED = ("toma-late", "toma-stage", "tomesd", "tofu")
"""Two variants of ToMA, and two other methods."""


def main() -> None:
    """Write one sheet of images, and print what each method merges."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="a photo of an astronaut riding a horse")
    parser.add_argument("--model", default="stabilityai/stable-diffusion-xl-base-1.0", help="hub id or folder")
    parser.add_argument("--ratio", type=float, default=0.5, help="fraction of the tokens to remove")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", type=Path, default=Path("methods.png"))
    args = parser.parse_args()

    device, dtype = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)
    pipe: Any = DiffusionPipeline.from_pretrained(args.model, torch_dtype=dtype).to(device)

    def generate(steps: int) -> tuple[Any, float]:
        torch.manual_seed(0)  # tomesd and tofu choose tokens at random
        start = perf_counter()
        generator = torch.Generator("cpu").manual_seed(0)
        return pipe(args.prompt, num_inference_steps=steps, generator=generator).images[0], perf_counter() - start

    generate(2)  # warm-up
    results = {"no merging": generate(args.steps)}
    for method in COMPARED:
        merge = METHODS[method]() if method in METHODS else VARIANTS[method]
        with speed_up(pipe, merge=replace(merge, ratio=args.ratio)) as handle:  # removed at the end of the block
            generate(2)
            results[method] = generate(args.steps)
            print(f"{method}\n{handle.summary()}\n")

    width, height = results["no merging"][0].size
    sheet = Image.new("RGB", (width * len(results), height + 20), "white")
    for column, (method, (image, seconds)) in enumerate(results.items()):
        sheet.paste(image, (column * width, 20))
        ImageDraw.Draw(sheet).text((column * width + 4, 4), f"{method}: {seconds:.2f} s", fill="black")
        print(f"{method}: {seconds:.2f} s")
    sheet.save(args.output)


if __name__ == "__main__":
    main()
