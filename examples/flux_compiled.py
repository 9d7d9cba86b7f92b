"""Generate images with Flux, with token merging, compiled.

python examples/flux_compiled.py "a red fox in the snow" --mode graphs
"""

import argparse
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from diffusers import FluxPipeline

from toma_diffusion import apply_toma


def main() -> None:
    """Generate the same image several times: the first call compiles, the later ones are fast."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="a red fox in the snow")
    parser.add_argument("--model", default="black-forest-labs/FLUX.1-dev", help="hub id or folder")
    parser.add_argument("--mode", default="blocks", help="blocks, whole or graphs: see docs/compile.md")
    parser.add_argument("--size", type=int, default=1024, help="height and width in pixels")
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--images", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("flux.png"))
    args = parser.parse_args()

    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    pipe: Any = FluxPipeline.from_pretrained(args.model, torch_dtype=dtype).to(device)

    handle = apply_toma(pipe, ratio=0.5)
    # Returns the mode that is used. Where CUDA graphs are not possible, "graphs" warns and becomes "blocks".
    print("compiled:", handle.compile(args.mode))

    for number in range(args.images):
        start = perf_counter()
        image = pipe(
            args.prompt,
            height=args.size,
            width=args.size,
            num_inference_steps=args.steps,
            generator=torch.Generator("cpu").manual_seed(0),
        ).images[0]
        print(f"image {number}: {perf_counter() - start:.2f} s" + (" (compiling)" if number == 0 else ""))
    image.save(args.output)
    print(handle.summary())


if __name__ == "__main__":
    main()
