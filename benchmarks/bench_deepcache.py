"""Time a step of SDXL that DeepCache skips, as a share of a whole one: the rows of results/deepcache_h200.csv.

    python benchmarks/bench_deepcache.py [--output FILE] [--commit COMMIT]

Kernels alone, as CUDA-graph replay, not compiled: DeepCache replaces functions in Python. Without a GPU it runs a small
UNet, to try it out.
"""

import argparse
import csv
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import torch
from DeepCache import DeepCacheSDHelper
from operators import microseconds
from toma_lab.bench.zoo import Denoiser, build
from toma_lab.facts import gather_facts

from toma_diffusion.files import replacing

BRANCHES = (0, 3)
"""Of `deepcache:branch`."""


def milliseconds(denoiser: Denoiser, branch: int) -> tuple[float, float]:
    """Of a whole step, and of one that is skipped."""
    inputs = denoiser.inputs(denoiser.default_batch, *denoiser.default_size)
    helper = DeepCacheSDHelper(pipe=SimpleNamespace(unet=denoiser.model))
    helper.set_params(cache_interval=2, cache_branch_id=branch)
    helper.enable()
    forward = helper.function_dict["unet_forward"]  # without the look for the step, which waits for the GPU
    helper.start_timestep = 0
    times = []
    try:
        with torch.no_grad():
            for helper.cur_timestep in (0, 1):
                times.append(microseconds(lambda _: forward(**inputs, return_dict=False)) / 1e3)
    finally:
        helper.disable()
    return times[0], times[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/deepcache_h200.csv"))
    parser.add_argument("--commit", help="to record; default: that of the checkout")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    denoiser = build("sdxl", small=device.type == "cpu", device=device)
    denoiser.materialize()
    rows = []
    for branch in BRANCHES:
        whole, skipped = milliseconds(denoiser, branch)
        rows.append(
            {
                "model": denoiser.name,
                "branch": branch,
                "whole_ms": round(whole, 4),
                "skipped_ms": round(skipped, 4),
                "resolution": denoiser.default_size.width,
                "batch": denoiser.default_batch,
                "dtype": str(denoiser.dtype).removeprefix("torch."),
                **asdict(gather_facts(device, options.commit)),
            }
        )
        print(f"branch {branch}: whole {whole:.2f} ms, skipped {skipped:.2f} ms ({skipped / whole:.1%})")
    with replacing(options.output) as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"Wrote {options.output}")


if __name__ == "__main__":
    main()
