"""ToMeSD: the same tokens as the authors' package merges, for the same state of the generator.

What that package (tomesd 0.1.3) gets wrong on the diffusers of today is pinned in `TestWhatThePackageGetsWrong`; each
of these is also said in docs/other-methods.md.
"""

import inspect

import pytest
import tomesd
import torch
from observe import attention_lengths, same_picture
from pairs import pairwise
from tiny import FAMILIES, pixart_transformer, sd3_transformer, sd15_unet, sdxl_unet
from tomesd.merge import bipartite_soft_matching_random2d
from torch import Tensor, nn

from toma_diffusion import Action, Grid, ToMeSDConfig, apply_toma
from toma_diffusion.others.tomesd import CellSampler, MatchingPlan

BY_NAME = {family.name: family for family in FAMILIES}
GRIDS = [(16, 16), (12, 20), (13, 17), (2, 7)]
SAME_SETTINGS = [
    ({}, {}),
    ({"max_downsample": 2}, {"max_downsample": 2}),
    ({"sites": ("attn", "cross_attn", "ff")}, {"merge_crossattn": True, "merge_mlp": True}),
    ({"random": False}, {"use_rand": False}),
]
"""Ours, and what the package calls the same."""


def matched(tokens: Tensor, grid: tuple[int, int], seed: int = 5, joint: bool = False, **settings) -> MatchingPlan:
    config = ToMeSDConfig(seed=seed, **settings)
    plan = MatchingPlan(Grid(*grid), config=config, sampler=CellSampler(seed), batch_size=len(tokens), joint=joint)
    plan.begin_call()
    plan.update(tokens, Action.SELECT)
    return plan


def rows_in_order(tokens: Tensor) -> Tensor:
    """The tokens of each sample, sorted by their first channel."""
    return torch.stack([sample[sample[:, 0].argsort()] for sample in tokens])


def call(model: nn.Module, inputs: dict) -> Tensor:
    """With the sample by position, as the package needs it."""
    name = "sample" if "sample" in inputs else "hidden_states"
    others = {key: value for key, value in inputs.items() if key != name}
    with torch.no_grad():
        return model(inputs[name], **others, return_dict=False)[0]


class TestAgainstThePackage:
    @pytest.mark.parametrize(("grid", "ratio", "random"), pairwise(GRIDS, (0.1, 0.5, 0.75), (True, False)))
    def test_merges_and_restores_the_same_tokens(self, grid, ratio, random):
        """Bit for bit, once the matching is the same: so that is made in float64, where rounding turns no match."""
        height, width = grid
        metric, tokens = torch.randn(2, height * width, 16).double(), torch.randn(2, height * width, 5)
        merge, unmerge = bipartite_soft_matching_random2d(
            metric,
            w=width,
            h=height,
            sx=2,
            sy=2,
            r=int(height * width * ratio),
            no_rand=not random,
            generator=torch.Generator().manual_seed(5),
        )
        plan = matched(metric, grid, ratio=ratio, random=random)
        # The package sorts destinations in no order that it promises; the tokens are the same ones.
        assert torch.equal(rows_in_order(plan.merge(tokens)), rows_in_order(merge(tokens)))
        assert torch.equal(plan.unmerge(plan.merge(tokens)), unmerge(merge(tokens)))
        assert plan.merge(tokens).shape[1] == plan.num_destinations == height * width - int(height * width * ratio)

    def test_other_cells(self):
        metric = torch.randn(2, 12 * 15, 16).double()
        merge, unmerge = bipartite_soft_matching_random2d(
            metric, w=15, h=12, sx=4, sy=3, r=150, generator=torch.Generator().manual_seed(5)
        )
        plan = matched(metric, (12, 15), ratio=150 / 180, cell=(3, 4))
        assert torch.equal(plan.unmerge(plan.merge(metric)), unmerge(merge(metric)))

    @pytest.mark.parametrize(("batch", "size", "both"), pairwise([2, 3], [(16, 16), (13, 17)], SAME_SETTINGS))
    def test_a_patched_unet(self, batch, size, both):
        """In float64, where sums in another order agree to 1e-12. An odd batch is never random in either."""
        family, (settings, theirs) = BY_NAME["sd15"], both
        inputs = family.inputs(batch=batch, height=size[0], wide=size[1])
        inputs |= {name: value.double() for name, value in inputs.items() if value.is_floating_point()}
        patched, ours, whole = (sd15_unet().double() for _ in range(3))
        tomesd.apply_patch(patched, ratio=0.5, **theirs)
        apply_toma(ours, "tomesd", ratio=0.5, **settings)
        torch.manual_seed(7)
        expected = [call(patched, inputs | {"sample": inputs["sample"] + step}) for step in range(2)]
        torch.manual_seed(7)
        output = [call(ours, inputs | {"sample": inputs["sample"] + step}) for step in range(2)]
        for one, other in zip(output, expected, strict=True):  # two steps: draws go on from one to the next
            assert torch.allclose(one, other, rtol=0, atol=1e-12)
        assert (output[0] - call(whole, inputs)).abs().max() > 1e-3


class TestPlan:
    def test_the_most_similar_sources_merge_as_a_mean(self):
        """Token 1 lies near its destination 0, the others are far from each other: written out by hand."""
        tokens = torch.eye(16)[None].clone()
        tokens[0, 1, 0] = 1.0
        plan = matched(tokens, (4, 4), ratio=1 / 16)
        assert torch.equal(plan.unmerge(plan.merge(tokens))[0, 0], (tokens[0, 0] + tokens[0, 1]) / 2)
        restored = plan.unmerge(plan.merge(tokens))
        assert torch.equal(restored[0, 0], restored[0, 1])
        assert torch.equal(restored[0, 2:], tokens[0, 2:])

    def test_positions_are_those_of_the_merged_tokens(self):
        tokens = torch.randn(2, 64, 8)
        plan = matched(tokens, (8, 8))
        numbers = torch.arange(64.0)
        kept = plan.unmerge(plan.gather(numbers)[:, :, None])[:, :, 0] == numbers
        assert (kept.sum(dim=1) == plan.num_destinations).all()

    def test_a_batch_that_shares_its_positions_shares_its_matching(self):
        first, second = torch.randn(2, 64, 8).double()
        together = matched(torch.stack([first, second]), (8, 8), joint=True)
        assert together.gather(torch.arange(64)).shape == (32,)
        twice = matched(torch.stack([first, first]), (8, 8), joint=True)
        alone = matched(torch.stack([first, second]), (8, 8))
        assert torch.equal(twice.gather(torch.arange(64)), alone.gather(torch.arange(64))[0])
        assert not torch.equal(together.gather(torch.arange(64)), alone.gather(torch.arange(64))[0])

    def test_a_grid_smaller_than_a_cell_is_left_whole(self):
        plan = MatchingPlan(Grid(1, 9), config=ToMeSDConfig(), sampler=CellSampler(0), batch_size=2)
        assert plan.is_identity
        assert "smaller than a cell" in plan.describe()

    def test_tokens_of_zero_length(self):
        """The package's similarities become NaN, and half of the image merges into such a destination."""
        tokens = torch.randn(2, 64, 8)
        tokens[:, 0] = 0
        plan = matched(tokens, (8, 8), ratio=0.25, random=False)
        assert ((plan.unmerge(plan.gather(torch.arange(64.0))[:, :, None]) == 0).sum(dim=1) == 1).all()

    def test_half_precision(self):
        tokens = torch.randn(2, 64, 8).half()
        plan = matched(tokens, (8, 8))
        assert plan.merge(tokens).dtype == torch.float16
        assert plan.unmerge(plan.merge(tokens)).isfinite().all()

    def test_merging_before_matching(self):
        plan = MatchingPlan(Grid(8, 8), config=ToMeSDConfig(), sampler=CellSampler(0), batch_size=2)
        with pytest.raises(RuntimeError, match="not matched yet"):
            plan.merge(torch.randn(2, 64, 8))

    def test_gradients_pass(self):
        """Every block has new indices, so that one block's backward never finds those of another."""
        model = sd15_unet().requires_grad_(True)
        apply_toma(model, "tomesd", max_downsample=2)
        inputs = BY_NAME["sd15"].inputs()
        model(**inputs).sample.square().mean().backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


class TestLevels:
    @pytest.mark.parametrize(("max_downsample", "merged"), [(1, {64}), (2, {64, 16})])
    def test_counted_from_the_first_level_with_attention(self, max_downsample, merged):
        """SDXL has none at its highest resolution."""
        model = sdxl_unet(
            block_out_channels=(32, 64, 64),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=(1, 1, 2),
            attention_head_dim=(2, 4, 4),
        )
        family = BY_NAME["sdxl"]
        handle = apply_toma(model, "tomesd", ratio=0.5, max_downsample=max_downsample)
        lengths = {query for query, key in attention_lengths(lambda: family.call(model)) if key == query}
        assert lengths == {length // 2 for length in merged} | ({64, 16} - merged)
        assert bool(handle.summary().left_alone) == (max_downsample == 1)


class TestWhatThePackageGetsWrong:
    """If one of these fails, the package or diffusers has changed: mend docs/other-methods.md."""

    def test_its_default_does_nothing_on_sdxl(self):
        family, model = BY_NAME["sdxl"], sdxl_unet()
        before = call(model, family.inputs())
        tomesd.apply_patch(model, ratio=0.5)
        same_picture(call(model, family.inputs()), before)
        ours = sdxl_unet()
        apply_toma(ours, "tomesd", ratio=0.5)
        assert not torch.equal(call(ours, family.inputs()), before)

    def test_it_cannot_be_called_by_keyword(self):
        model = sd15_unet()
        tomesd.apply_patch(model)
        with pytest.raises(IndexError):
            BY_NAME["sd15"].call(model)

    def test_it_drops_gligen(self):
        """At ratio 0, where nothing is merged, the output is that without the boxes."""
        model, family = sd15_unet(attention_type="gated"), BY_NAME["sd15"]
        for module in model.modules():
            if type(module).__name__ == "GatedSelfAttentionDense":
                module.alpha_attn.fill_(1.0)
        boxes = {"boxes": torch.rand(2, 3, 4), "positive_embeddings": torch.randn(2, 3, 32), "masks": torch.ones(2, 3)}
        inputs = family.inputs()

        def guided() -> dict:
            return inputs | {"cross_attention_kwargs": {"gligen": dict(boxes)}}  # the model takes it apart

        with_boxes, without = call(model, guided()), call(model, inputs)
        assert not torch.equal(with_boxes, without)
        tomesd.apply_patch(model, ratio=0.0)
        same_picture(call(model, guided()), without)
        tomesd.remove_patch(model)
        apply_toma(model, "tomesd", ratio=0.0)
        assert torch.equal(call(model, guided()), with_boxes)

    def test_it_drops_added_conditions_and_chunking(self):
        model, lengths = sd15_unet(), []
        tomesd.apply_patch(model, ratio=0.0)
        block = model.down_blocks[0].attentions[0].transformer_blocks[0]
        assert "added_cond_kwargs" not in inspect.signature(block.forward).parameters
        block.set_chunk_feed_forward(chunk_size=8, dim=1)
        block.ff.register_forward_hook(lambda module, args, output: lengths.append(args[0].shape[1]))
        call(model, BY_NAME["sd15"].inputs())
        assert lengths == [256]

    def test_it_breaks_pixart_and_does_nothing_on_sd3(self):
        pixart = pixart_transformer()
        tomesd.apply_patch(pixart, ratio=0.5)
        with pytest.raises(AttributeError, match="norm3"):
            call(pixart, BY_NAME["pixart"].inputs())
        sd3 = sd3_transformer()
        before = call(sd3, BY_NAME["sd3"].inputs())
        tomesd.apply_patch(sd3, ratio=0.5, max_downsample=8)
        same_picture(call(sd3, BY_NAME["sd3"].inputs()), before)

    def test_it_hides_blocks_from_regional_compilation(self):
        model = sd15_unet()
        tomesd.apply_patch(model)
        with pytest.raises(ValueError, match="not found in the model"):
            model.compile_repeated_blocks()

    def test_it_caps_the_ratio_without_a_word(self):
        tokens = torch.randn(2, 64, 8)
        merge, _ = bipartite_soft_matching_random2d(tokens, 8, 8, 2, 2, r=int(64 * 0.9), no_rand=True)
        assert merge(tokens).shape[1] == 16

    def test_a_zero_token_attracts_all_that_merges(self):
        tokens = torch.randn(2, 64, 8)
        tokens[:, 0] = 0
        merge, unmerge = bipartite_soft_matching_random2d(tokens, 8, 8, 2, 2, r=16, no_rand=True)
        restored = unmerge(merge(torch.randn(2, 64, 1)))[:, :, 0]
        assert (restored == restored[:, :1]).sum(dim=1).tolist() == [17, 17]
