"""ToFu: prunes in some blocks and merges in others, without a loss of length."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from observe import inputs_of, state_of
from tiny import one, sd15_unet
from torch.nn import functional

from toma_diffusion import speed_up
from toma_diffusion.merge import Action, Grid
from toma_diffusion.others import ToFu
from toma_diffusion.others.tofu import FusionPlan, mlerp
from toma_diffusion.others.tomesd import CellSampler


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
                assert torch.allclose(result[sample, slot].norm(), group.norm(dim=-1).max(), rtol=1e-4)
                assert functional.cosine_similarity(result[sample, slot], group.mean(dim=0), dim=0) > 0.999

    def test_a_token_alone_stays_and_opposites_have_no_direction(self):
        kept = torch.randn(1, 4, 8)
        result = mlerp(kept, -kept[:, :1], torch.zeros(1, 1, 8, dtype=torch.int64))
        assert torch.equal(result[:, 0], torch.zeros(1, 8))
        assert torch.equal(result[:, 1:], kept[:, 1:])

    def test_half_precision_neither_overflows_nor_underflows(self):
        kept = torch.tensor([[[200.0, 1e-3] * 32]]).half()
        others = torch.tensor([[[-199.0, 1e-3] * 32]]).half()
        result = mlerp(kept, others, torch.zeros(1, 1, 64, dtype=torch.int64))
        assert torch.allclose(result.float().norm(), kept.float().norm(), rtol=1e-2)


@pytest.mark.parametrize("prune", [True, False])
def test_plan_written_out_as_a_matrix(prune):
    """Every merged token represents a group: its first token alone where sources are pruned, else all by MLERP."""
    tokens = torch.randn(2, 64, 8)
    plan = FusionPlan(Grid(8, 8), config=ToFu(seed=3), sampler=CellSampler(3), batch_size=2, prune=prune)
    plan.begin_call()
    plan.update(tokens, Action.SELECT)
    merged, first = plan.merge(tokens), plan.gather(torch.arange(64))
    group = plan.unmerge(torch.arange(32.0).expand(2, -1)[:, :, None])[:, :, 0]  # of every token
    for sample in range(2):
        for slot in range(32):
            members = tokens[sample, group[sample] == slot]
            mean = members.mean(dim=0)
            expected = tokens[sample, first[sample, slot]] if prune else mean / mean.norm() * members.norm(dim=1).max()
            torch.testing.assert_close(merged[sample, slot], expected)
    assert torch.equal(plan.unmerge(merged), merged.gather(1, group.long()[:, :, None].expand(-1, -1, 8)))


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
        speed_up(model, merge=ToFu(max_downsample=2, **settings))
        parents = [model.down_blocks[0], model.mid_block, model.up_blocks[1]]
        modules = [module for parent in parents for module in parent.modules()]
        blocks = [module for module in modules if type(module).__name__ == "BasicTransformerBlock"]
        for block, prunes in zip(blocks, expected, strict=True):
            normalized = []
            watch = block.norm1.register_forward_hook(lambda module, args, output, kept=normalized: kept.append(output))
            (args, _), *_ = inputs_of(block.attn1, lambda: one("sd15").call(model))
            watch.remove()
            seen = (args[0][:, :, None] == normalized[0][:, None]).all(dim=-1).any(dim=-1)
            assert bool(seen.all()) == prunes
        assert [plan.prune for plan in state_of(model).current.values()] == expected

    def test_the_summary_says_where(self):
        for settings, said in (
            ({"prune_share": 0.25}, "the first 25% of the"),
            ({"prune_blocks": (2, 0)}, "blocks 0, 2,"),
        ):
            handle = speed_up(sd15_unet(), merge=ToFu(**settings))
            assert f"pruned in {said}" in str(handle.summary())

    def test_a_block_that_is_not_there(self):
        with pytest.raises(ValueError, match=r"prune_blocks=\(7,\) names block 7, but this model has 4"):
            speed_up(sd15_unet(), merge=ToFu(prune_blocks=(7,)))
