"""ToMeSD: the same tokens as the authors' package merges, for the same state of the generator."""

import pytest
import tomesd
import torch
from observe import attention_lengths, same_picture
from pairs import in_turn
from tiny import one, sd15_unet, sdxl_unet
from tomesd.merge import bipartite_soft_matching_random2d
from torch import Tensor, nn

from toma_diffusion import speed_up
from toma_diffusion.merge import Action, Grid
from toma_diffusion.others import ToMeSD
from toma_diffusion.others.tomesd import CellSampler, MatchingPlan

SAME_SETTINGS = [
    ({}, {}),
    ({"max_downsample": 2}, {"max_downsample": 2}),
    ({"sites": ("attn", "cross_attn", "ff")}, {"merge_crossattn": True, "merge_mlp": True}),
    ({"random": False}, {"use_rand": False}),
]
"""Ours, and what the package calls the same."""


def matched(tokens: Tensor, grid: tuple[int, int], seed: int = 5, joint: bool = False, **settings) -> MatchingPlan:
    config = ToMeSD(seed=seed, **settings)
    plan = MatchingPlan(Grid(*grid), config=config, sampler=CellSampler(seed), batch_size=len(tokens), joint=joint)
    plan.begin_call()
    plan.update(tokens, Action.SELECT)
    return plan


def rows_in_order(tokens: Tensor) -> Tensor:
    """The tokens of each sample, sorted by their first channel."""
    return torch.stack([sample[sample[:, 0].argsort()] for sample in tokens])


def call(model: nn.Module, inputs: dict, change: float = 0.0) -> Tensor:
    """With the sample by position, as the package needs it."""
    others = {key: value for key, value in inputs.items() if key != "sample"}
    with torch.no_grad():
        return model(inputs["sample"] + change, **others, return_dict=False)[0]


class TestAgainstThePackage:
    @pytest.mark.parametrize(
        ("grid", "cell", "ratio", "random"),
        [
            *in_turn([(16, 16), (12, 20), (13, 17), (2, 7)], [(2, 2), (2, 1)], (0.1, 0.5, 0.5), (True, False, False)),
            ((12, 15), (3, 4), 150 / 180, True),
            ((16, 16), (2, 2), 0.75, True),
        ],
    )
    def test_merges_and_restores_the_same_tokens(self, grid, cell, ratio, random):
        """Bit for bit, once the matching is the same: so that is made in float64, where rounding turns no match."""
        height, width = grid
        metric, tokens = torch.randn(2, height * width, 16).double(), torch.randn(2, height * width, 5)
        removed = int(round(height * width * ratio, 6))
        generator = torch.Generator().manual_seed(5)
        merge, unmerge = bipartite_soft_matching_random2d(
            metric, w=width, h=height, sx=cell[1], sy=cell[0], r=removed, no_rand=not random, generator=generator
        )
        plan = matched(metric, grid, ratio=ratio, random=random, cell=cell)
        # The package sorts destinations in no order that it promises; the tokens are the same ones.
        assert torch.equal(rows_in_order(plan.merge(tokens)), rows_in_order(merge(tokens)))
        assert torch.equal(plan.unmerge(plan.merge(tokens)), unmerge(merge(tokens)))
        assert plan.merge(tokens).shape[1] == plan.num_destinations == height * width - removed

    @pytest.mark.parametrize(("both", "size", "batch"), in_turn(SAME_SETTINGS, [(16, 16), (13, 17)], [2, 3]))
    def test_a_patched_unet(self, batch, size, both):
        """In float64, where sums in another order agree to 1e-12. An odd batch is never random in either."""
        settings, theirs = both
        inputs = one("sd15").inputs(batch=batch, height=size[0], wide=size[1])
        inputs |= {name: value.double() for name, value in inputs.items() if value.is_floating_point()}
        patched, ours, whole = (sd15_unet().double() for _ in range(3))
        tomesd.apply_patch(patched, ratio=0.5, **theirs)
        speed_up(ours, merge=ToMeSD(ratio=0.5, **settings))
        torch.manual_seed(7)
        expected = [call(patched, inputs, step) for step in range(2)]
        torch.manual_seed(7)
        output = [call(ours, inputs, step) for step in range(2)]
        for ours_now, theirs_now in zip(output, expected, strict=True):  # random numbers go on from step to step
            assert torch.allclose(ours_now, theirs_now, rtol=0, atol=1e-12)
        assert (output[0] - call(whole, inputs)).abs().max() > 1e-3


class TestPlan:
    def test_the_most_similar_sources_merge_as_a_mean(self):
        """Token 1 lies near its destination 0, the others are far from each other: written out by hand."""
        tokens = torch.eye(16)[None].clone()
        tokens[0, 1, 0] = 1.0
        plan = matched(tokens, (4, 4), ratio=1 / 16)
        restored = plan.unmerge(plan.merge(tokens))
        assert torch.equal(restored[0, :2], ((tokens[0, 0] + tokens[0, 1]) / 2).expand(2, -1))
        assert torch.equal(restored[0, 2:], tokens[0, 2:])

    def test_positions_are_those_of_the_merged_tokens(self):
        plan, numbers = matched(torch.randn(2, 64, 8), (8, 8)), torch.arange(64.0)
        kept = plan.unmerge(plan.gather(numbers)[:, :, None])[:, :, 0] == numbers
        assert (kept.sum(dim=1) == plan.num_destinations).all()

    def test_a_batch_that_shares_its_positions_shares_its_matching(self):
        first, second = torch.randn(2, 64, 8).double()
        alone = matched(torch.stack([first, second]), (8, 8)).gather(torch.arange(64))[0]
        twice = matched(torch.stack([first, first]), (8, 8), joint=True).gather(torch.arange(64))
        together = matched(torch.stack([first, second]), (8, 8), joint=True).gather(torch.arange(64))
        assert torch.equal(twice, alone)
        assert not torch.equal(together, alone)

    def test_a_grid_smaller_than_a_cell_is_left_whole(self):
        plan = MatchingPlan(Grid(1, 9), config=ToMeSD(), sampler=CellSampler(0), batch_size=2)
        assert plan.is_identity
        assert "smaller than a cell" in plan.describe()

    def test_tokens_of_zero_length_attract_nothing(self):
        """The package's similarities become NaN, and half of the image merges into such a destination."""
        tokens = torch.randn(2, 64, 8)
        tokens[:, 0] = 0
        plan = matched(tokens, (8, 8), ratio=0.25, random=False)
        assert ((plan.unmerge(plan.gather(torch.arange(64.0))[:, :, None]) == 0).sum(dim=1) == 1).all()

    def test_precision(self):
        """Half precision stays, and autocast changes no match."""
        tokens = torch.randn(2, 256, 32)
        half = matched(tokens.half(), (16, 16))
        assert half.merge(tokens.half()).dtype == torch.float16
        expected = matched(tokens, (16, 16)).merge(tokens)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(matched(tokens, (16, 16)).merge(tokens), expected)

    def test_merging_before_matching(self):
        plan = MatchingPlan(Grid(8, 8), config=ToMeSD(), sampler=CellSampler(0), batch_size=2)
        with pytest.raises(RuntimeError, match="not matched yet"):
            plan.merge(torch.randn(2, 64, 8))

    def test_gradients_pass(self):
        """Every block has new indices, so that one block's backward never finds those of another."""
        model = sd15_unet().requires_grad_(True)
        speed_up(model, merge=ToMeSD(max_downsample=2))
        model(**one("sd15").inputs()).sample.square().mean().backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize(("max_downsample", "merged"), [(1, {64}), (2, {64, 16})])
def test_levels_are_counted_from_the_first_with_attention(max_downsample, merged):
    """SDXL has none at its highest resolution."""
    model = sdxl_unet(
        block_out_channels=(32, 64, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 1, 2),
        attention_head_dim=(2, 4, 4),
    )
    handle = speed_up(model, merge=ToMeSD(max_downsample=max_downsample))
    lengths = {query for query, key in attention_lengths(lambda: one("sdxl").call(model)) if key == query}
    assert lengths == {length // 2 for length in merged} | ({64, 16} - merged)
    assert bool(handle.summary().merge.left_whole) == (max_downsample == 1)


def test_the_packages_default_does_nothing_on_sdxl():
    """Said in docs/other-methods.md. If this fails, the package has changed."""
    model, inputs = sdxl_unet(), one("sdxl").inputs()
    before = call(model, inputs)
    tomesd.apply_patch(model, ratio=0.5)
    same_picture(call(model, inputs), before)
