"""ToFu: prunes in some blocks and merges in others, without a loss of length."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from observe import inputs_of, state_of
from tiny import FAMILIES, sd15_unet
from torch.nn import functional

from toma_diffusion import Action, Grid, ToFuConfig, ToMeSDConfig, apply_toma
from toma_diffusion.others.tofu import FusionPlan, mlerp
from toma_diffusion.others.tomesd import CellSampler, MatchingPlan

SD15 = next(family for family in FAMILIES if family.name == "sd15")


def fused(tokens, prune: bool, **settings) -> FusionPlan:
    plan = FusionPlan(
        Grid(8, 8), config=ToFuConfig(seed=3, **settings), sampler=CellSampler(3), batch_size=len(tokens), prune=prune
    )
    plan.begin_call()
    plan.update(tokens, Action.SELECT)
    return plan


class TestMLERP:
    @given(seed=st.integers(0, 10_000), members=st.integers(1, 12), log_scale=st.floats(-2, 2))
    def test_direction_of_the_mean_and_length_of_the_longest(self, seed, members, log_scale):
        generator = torch.Generator().manual_seed(seed)
        kept = torch.randn(2, 3, 8, generator=generator)
        others = torch.randn(2, members, 8, generator=generator) * 10**log_scale
        targets = torch.randint(3, (2, members), generator=generator)
        result = mlerp(kept, others, targets[:, :, None].expand(-1, -1, 8))
        for sample in range(2):
            for slot in range(3):
                group = torch.cat([kept[sample, slot][None], others[sample, targets[sample] == slot]])
                longest = group.norm(dim=-1).max()
                assert torch.allclose(result[sample, slot].norm(), longest, rtol=1e-4)
                assert functional.cosine_similarity(result[sample, slot], group.mean(dim=0), dim=0) > 0.999

    def test_a_token_alone_stays_as_it_is(self):
        kept = torch.randn(1, 4, 8)
        result = mlerp(kept, torch.randn(1, 2, 8), torch.zeros(1, 2, 8, dtype=torch.int64))
        assert torch.equal(result[:, 1:], kept[:, 1:])

    def test_opposites_have_no_direction(self):
        kept = torch.randn(1, 1, 8)
        assert torch.equal(mlerp(kept, -kept, torch.zeros(1, 1, 8, dtype=torch.int64)), torch.zeros(1, 1, 8))

    def test_half_precision_neither_overflows_nor_underflows(self):
        kept = torch.tensor([[[200.0, 1e-3] * 32]]).half()
        others = torch.tensor([[[-199.0, 1e-3] * 32]]).half()
        result = mlerp(kept, others, torch.zeros(1, 1, 64, dtype=torch.int64))
        assert torch.allclose(result.float().norm(), kept.float().norm(), rtol=1e-2)


class TestPlan:
    def test_pruned_tokens_leave_no_trace(self):
        tokens = torch.randn(2, 64, 8)
        plan = fused(tokens, prune=True)
        is_one_of_them = (plan.merge(tokens)[:, :, None] == tokens[:, None]).all(dim=-1).any(dim=-1)
        assert is_one_of_them.all()

    def test_the_mean_would_shorten_what_mlerp_keeps(self):
        """Unlike ToMeSD's, on the same matching."""
        tokens = torch.randn(2, 64, 8)
        average = MatchingPlan(Grid(8, 8), config=ToMeSDConfig(seed=3), sampler=CellSampler(3), batch_size=2)
        average.begin_call()
        average.update(tokens, Action.SELECT)
        plan = fused(tokens, prune=False)
        lengths, shorter = plan.merge(tokens).norm(dim=-1), average.merge(tokens).norm(dim=-1)
        destinations = slice(-16, None)
        assert (lengths[:, destinations] >= shorter[:, destinations] - 1e-5).all()
        assert (lengths[:, destinations] > shorter[:, destinations] * 1.05).any()
        assert lengths.max() <= tokens.norm(dim=-1).max() + 1e-4

    def test_restores_copies(self):
        tokens = torch.randn(2, 64, 8)
        for prune in (True, False):
            plan = fused(tokens, prune)
            merged = plan.merge(tokens)
            restored = plan.unmerge(merged)
            assert ((restored[:, :, None] == merged[:, None]).all(dim=-1).any(dim=-1)).all()


class TestDepth:
    @pytest.mark.parametrize(
        ("settings", "expected"),
        [
            ({}, [True, True, False, False]),
            ({"prune_share": 0}, [False] * 4),
            ({"prune_share": 1.0}, [True] * 4),
            ({"prune_share": 0.3}, [True, True, False, False]),
            ({"prune_blocks": (1, 3)}, [False, True, False, True]),
            ({"prune_blocks": ()}, [False] * 4),
        ],
    )
    def test_blocks_prune_or_merge_as_configured(self, settings, expected):
        """Seen at the input of self-attention: a pruned block sees tokens of its norm, a merged one new ones too."""
        model = sd15_unet()
        apply_toma(model, "tofu", ratio=0.5, max_downsample=2, **settings)
        blocks = [module for module in model.modules() if type(module).__name__ == "BasicTransformerBlock"]
        order = [model.down_blocks[0], model.mid_block, model.up_blocks[1]]
        blocks = [block for parent in order for block in parent.modules() if block in blocks]
        for block, prunes in zip(blocks, expected, strict=True):
            normalized = []
            watch = block.norm1.register_forward_hook(lambda module, args, output, kept=normalized: kept.append(output))
            (args, _), *_ = inputs_of(block.attn1, lambda: SD15.call(model))
            watch.remove()
            seen = (args[0][:, :, None] == normalized[0][:, None]).all(dim=-1).any(dim=-1)
            assert bool(seen.all()) == prunes
        assert [plan.prune for plan in state_of(model).current.values()] == expected

    def test_the_summary_says_where(self):
        assert "pruned in the first 25% of the blocks" in str(
            apply_toma(sd15_unet(), "tofu", prune_share=0.25).summary()
        )
        assert "pruned in blocks 0, 2," in str(apply_toma(sd15_unet(), "tofu", prune_blocks=(2, 0)).summary())

    def test_a_block_that_is_not_there(self):
        with pytest.raises(ValueError, match=r"prune_blocks=\(7,\) names block 7, but this model has 4"):
            apply_toma(sd15_unet(), "tofu", prune_blocks=(7,))
