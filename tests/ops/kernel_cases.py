"""Where kernel tests run, and on what: on a GPU if there is one, else in Triton's interpreter on small shapes."""

from collections.abc import Iterable
from itertools import product

import pytest
import torch
from pairs import in_turn, pairwise

from toma_diffusion.merge import Grid, Regions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])

CASES = {
    "tiles of 16": (Grid(8, 8), "tile", 4, 24, 2),
    "tiles of 4, taken four at a time": (Grid(8, 4), "tile", 8, 40, 2),
    "tiles of 2×3, an odd number of them": (Grid(6, 9), "tile", 9, 20, 1),
    "tiles of 1×3, taken five at a time": (Grid(3, 9), "tile", 9, 8, 2),
    "wide rectangles": (Grid(4, 20), "tile", 4, 130, 1),
    "stripes": (Grid(6, 10), "stripe", 4, 33, 3),
    "one region": (Grid(6, 6), "global", 1, 16, 2),
    "boxes of 2×2×3 in a video": (Grid(4, 6, 4), "tile", 8, 24, 2),
    "stripes of a video": (Grid(2, 5, 6), "stripe", 4, 16, 1),
}
if DEVICE == "cuda":
    CASES |= {
        "SDXL, first level": (Grid(64, 64), "tile", 64, 640, 2),
        "SDXL, second level": (Grid(32, 32), "tile", 256, 1280, 2),
        "Flux": (Grid(64, 64), "tile", 64, 3072, 1),
        "tiles of 100": (Grid(40, 40), "tile", 16, 96, 2),
        "tiles of 256": (Grid(64, 64), "tile", 16, 72, 1),
        "Wan, 480p": (Grid(30, 52, 21), "tile", 140, 5120, 1),
        "LTX-2": (Grid(16, 24, 16), "tile", 24, 4096, 1),
    }

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def pairs_of_cases(names: str, *lists: Iterable) -> pytest.MarkDecorator:
    """Every case once, and any two values of the lists; on a GPU all together. The interpreter takes a second each."""
    found = product(CASES, *lists) if DEVICE == "cuda" else [(a, *b) for a, b in in_turn(CASES, pairwise(*lists))]
    return pytest.mark.parametrize(
        f"case, {names}",
        [
            pytest.param(CASES[each[0]], *each[1:], id="-".join(str(value).removeprefix("torch.") for value in each))
            for each in found
        ],
    )


def tokens_and_regions(case, dtype: torch.dtype) -> tuple[torch.Tensor, Regions]:
    """Tokens that lie inside a longer sequence, as image tokens do behind text: their strides are not their shape's."""
    grid, kind, count, width, batch = case
    sequence = torch.randn(batch, grid.num_tokens + 5, width, device=DEVICE).to(dtype)
    return sequence[:, 3:-2], Regions.divide(grid, kind, count=count, frames=2 if grid.frames < 16 else 4)


def chosen(regions: Regions, batch: int, share: float = 0.5) -> torch.Tensor:
    """Random destinations, [B·R, k]."""
    count = max(1, int(regions.size * share))
    return torch.rand(batch * regions.count, regions.size, device=DEVICE).argsort(dim=-1)[:, :count].contiguous()


def assert_as_exact_as_torch(
    ours: torch.Tensor, theirs: torch.Tensor, truth: torch.Tensor, rounding: float = 2e-6
) -> None:
    """Our error is at most twice that of plain torch in the same precision, or float32's rounding.

    The truth is in float32, or in float64 where float32 itself is tested: the order of a sum changes its last bit.
    """
    assert ours.shape == truth.shape
    assert ours.dtype == theirs.dtype
    assert (ours - truth).abs().max() <= 2 * (theirs - truth).abs().max() + rounding
