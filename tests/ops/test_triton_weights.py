"""The weights kernel against float32."""

import pytest
import torch
from kernel_cases import DTYPES, assert_as_exact_as_torch, chosen, pairs_of_cases, tokens_and_regions

from toma_diffusion.ops import mean_weights, merge_weights, nearest_destinations
from toma_diffusion.ops.backend import LARGEST_WEIGHED
from toma_diffusion.ops.regional import Nearness, assign_nearest, weigh
from toma_diffusion.ops.tiles import Tiling

kernels = pytest.importorskip("toma_diffusion.ops.triton_weights")


SIZES = ("whole regions", "pieces of regions")


@pytest.fixture
def problem(case, dtype, size, monkeypatch):
    if size != "whole regions":
        monkeypatch.setattr(kernels, "LARGEST_WHOLE", 0)
        monkeypatch.setattr(kernels, "MOST_ELEMENTS", 1)
    tokens, regions = tokens_and_regions(case, dtype)
    if regions.size > LARGEST_WEIGHED:
        pytest.skip("too large for one program")
    return tokens, regions, chosen(regions, len(tokens))


@pairs_of_cases("dtype, size, scale", DTYPES, SIZES, [3.0, 1000.0])
def test_weights_and_means(problem, scale):
    tokens, regions, destinations = problem
    split = regions.split(tokens)
    truth = merge_weights(split.double(), destinations, scale).float()
    theirs = merge_weights(split, destinations, scale)
    weights, means = (torch.full_like(theirs, float("nan")) for _ in range(2))
    weights, means = weights.contiguous(), means.contiguous()
    kernels.weigh(tokens, destinations, regions.tiling, scale=scale, weights=weights, means=means)
    rounding = 5e-7 * scale  # of cosines near 1, times the scale
    assert_as_exact_as_torch(weights, theirs, truth, rounding)
    assert_as_exact_as_torch(means, mean_weights(theirs), mean_weights(truth), rounding)


@pairs_of_cases("dtype, size", DTYPES, SIZES)
def test_nearest(problem):
    tokens, regions, destinations = problem
    nearest = torch.full(tokens.shape[:2], -1, dtype=torch.int64, device=tokens.device)
    kernels.weigh(tokens, destinations, regions.tiling, nearest=nearest)
    count = destinations.shape[1]
    local = regions.split(nearest[:, :, None])[:, :, 0]
    first = torch.arange(regions.count, device=tokens.device).repeat(len(tokens))[:, None] * count
    assert torch.equal(local - first, nearest_destinations(regions.split(tokens), destinations))


def weights_by(backend, tokens, regions, destinations, nearness, scale):
    """A and M of plain torch or of the kernel."""
    shape = (nearness.parts * len(destinations), destinations.shape[1], regions.size)
    weights, means = (torch.full(shape, float("nan"), dtype=tokens.dtype, device=tokens.device) for _ in range(2))
    weigh(tokens, destinations, regions.tiling, nearness, scale=scale, weights=weights, means=means, backend=backend)
    return weights, means


@pairs_of_cases("dtype, size, scale", DTYPES, SIZES, [30.0, 1000.0])
def test_distance_in_every_precision(problem, scale):
    """In half precision on a GPU, single tokens once went elsewhere."""
    (ours, _), (theirs, _) = (weights_by(backend, *problem, Nearness(0.3), scale) for backend in ("triton", "torch"))
    rounding = torch.finfo(ours.dtype).eps  # both may round to neighbouring numbers
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=rounding, atol=2e-3 if scale > 100 else 5e-4)


@pairs_of_cases("dtype, size, weight", [torch.float32], SIZES, [0.0, 0.5])
def test_parts_and_distance_as_in_plain_torch(problem, weight):
    tokens, regions, destinations = problem
    tokens, nearness = torch.cat([tokens, torch.randn_like(tokens)]), Nearness(weight, 2)
    ours, theirs = (
        weights_by(backend, tokens, regions, destinations, nearness, 30.0) for backend in ("triton", "torch")
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert torch.equal(*ours[0].chunk(2))  # both parts have the same
    nearest = [torch.full(tokens.shape[:2], -1, device=tokens.device) for _ in range(2)]
    for backend, found in zip(("triton", "torch"), nearest, strict=True):
        assign_nearest(tokens, destinations, regions.tiling, nearness, nearest=found, backend=backend)
    assert torch.equal(*nearest)


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_equal_and_bad_tokens_stay_in_bounds(value):
    tokens = torch.full((1, 16, 8), value)
    tokens = tokens.to("cuda" if torch.cuda.is_available() else "cpu")
    destinations = torch.tensor([[3, 1, 7], [0, 5, 2]], device=tokens.device)
    nearest = torch.full((1, 16), -1, dtype=torch.int64, device=tokens.device)
    kernels.weigh(tokens, destinations, Tiling(16, 1, 8, 1, 16, 1), nearest=nearest)
    assert ((nearest >= 0) & (nearest < 6)).all()
    assert nearest[0, [3, 1, 7]].tolist() == [0, 1, 2]
