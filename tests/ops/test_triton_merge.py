"""The merge and unmerge kernels against float32."""

import pytest
import torch
from kernel_cases import (
    DEVICE,
    DTYPES,
    assert_as_exact_as_torch,
    chosen,
    every_dtype,
    pairs_of_cases,
    tokens_and_regions,
)

from toma_diffusion.ops import mean_weights, merge_weights, reference

kernels = pytest.importorskip("toma_diffusion.ops.triton_merge")


@pytest.fixture
def problem(case, dtype):
    tokens, regions = tokens_and_regions(case, dtype)
    weights = merge_weights(regions.split(tokens), chosen(regions, len(tokens)), 3.0).contiguous()
    return tokens, regions, weights


@pairs_of_cases("dtype", DTYPES)
def test_merge(problem):
    tokens, regions, weights = problem
    means = mean_weights(weights)
    split = regions.split(tokens)
    truth = (means.double() @ split.double()).reshape(len(tokens), -1, tokens.shape[2])
    theirs = (means @ split).reshape(truth.shape)
    assert_as_exact_as_torch(kernels.merge(tokens, means, regions.tiling), theirs, truth)


@pairs_of_cases("dtype, with_residual", DTYPES, [False, True])
def test_unmerge(problem, with_residual):
    tokens, regions, weights = problem
    destinations = regions.count * weights.shape[1]
    sequence = torch.randn(len(tokens), destinations + 4, tokens.shape[2], device=DEVICE).to(tokens.dtype)
    merged = sequence[:, 2:-2]
    blocks = merged.reshape(weights.shape[0], weights.shape[1], -1)
    truth = regions.join(reference.unmerge(blocks.double(), weights.double()))
    theirs = regions.join(reference.unmerge(blocks, weights))
    residual = tokens if with_residual else None
    if with_residual:
        truth, theirs = truth + tokens.double(), theirs + tokens
    assert_as_exact_as_torch(kernels.unmerge(merged, weights, regions.tiling, residual), theirs, truth)


@every_dtype
@pytest.mark.parametrize(("length", "width"), [(40, 24), (9, 600), (70, 1100)])
def test_members(dtype, length, width):
    """Of one to many members, and one destination without any."""
    tokens = torch.randn(2, length + 2, width, device=DEVICE).to(dtype)[:, 1:-1]
    counts = torch.tensor([1, 0, 2, 3, length - 6]).repeat(2).to(DEVICE)
    members = torch.cat([torch.randperm(length, device=DEVICE) + sample * length for sample in range(2)])
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    merged = kernels.merge_members(tokens, members, offsets, 5)
    rows = tokens.reshape(-1, width).double()[members].split(counts.tolist())
    truth = torch.stack([row.sum(dim=0) / max(1, len(row)) for row in rows]).reshape(2, 5, width)
    assert_as_exact_as_torch(merged, truth.to(dtype), truth)
