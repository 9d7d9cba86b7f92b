"""Merge plans: which tokens are destinations, what they merge into, and what is kept from step to step."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from merging import SteadyPlan
from pairs import named, pairwise

from toma_diffusion import Merge, ops
from toma_diffusion.merge import Action, Grid, MergePlan, Regions, num_destinations, why_first_frame_whole
from toma_diffusion.merge.config import ASSIGNMENTS, REGIONS

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def selected(tokens, grid, *, joint=False, parts=1, plan_class=MergePlan, **settings) -> MergePlan:
    settings = {"num_regions": 4, **settings} if settings.get("region") != "global" else settings
    plan = plan_class(
        grid,
        Merge(**settings),
        batch_size=len(tokens),
        dtype=tokens.dtype,
        device=tokens.device,
        joint=joint,
        parts=parts,
    )
    plan.update(tokens, Action.SELECT)
    return plan


def same_choice(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two choices [B, D] are the same but for ties. Two tokens that cover none but each other tie exactly, at
    ratio 0.5 in every tenth pick, and rounding decides between them. Choices of other tokens share a half."""
    pairs = zip(first.tolist(), second.tolist(), strict=True)
    return all(len(set(one) & set(other)) > 0.8 * len(one) for one, other in pairs)


@st.composite
def cases(draw):
    grid = Grid(draw(st.integers(1, 12)), draw(st.integers(1, 12)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    shape = (draw(st.integers(1, 3)), grid.num_tokens, draw(st.integers(1, 8)))
    tokens = torch.randn(shape, generator=generator).to(draw(st.sampled_from(DTYPES)))
    region = draw(st.sampled_from(REGIONS))
    return (
        tokens,
        grid,
        {
            "joint": draw(st.booleans()),
            "ratio": draw(st.floats(0.01, 0.99)),
            "region": region,
            "assign": draw(st.sampled_from(ASSIGNMENTS)),
            "scale": draw(st.sampled_from([10.0, 1000.0, math.inf])),
        }
        | ({} if region == "global" else {"num_regions": draw(st.integers(1, 20))}),
    )


@given(cases())
def test_any_plan(case):
    """Shapes and dtypes stay, destinations are distinct and equally many in every region, and a constant comes back."""
    tokens, grid, settings = case
    plan = selected(tokens, grid, **settings)
    merged = plan.merge(tokens)
    assert merged.shape == (len(tokens), plan.num_destinations, tokens.shape[-1])
    assert plan.unmerge(merged).shape == tokens.shape
    assert merged.dtype == plan.unmerge(merged).dtype == tokens.dtype
    chosen = torch.zeros(len(tokens), grid.num_tokens, 1).scatter_(1, plan.positions[:, :, None], 1.0)
    expected = num_destinations(plan.regions.size, settings["ratio"])
    assert (plan.regions.split(chosen).sum(dim=(1, 2)) == expected).all()
    ones = torch.ones_like(tokens)
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}[tokens.dtype]
    torch.testing.assert_close(plan.unmerge(plan.merge(ones)), ones, atol=tolerance, rtol=0)


class TestBatch:
    @pytest.mark.parametrize("region", REGIONS)
    def test_every_sample_chooses_for_itself_unless_all_choose_together(self, region):
        grid = Grid(16, 12)
        tokens = torch.randn(4, grid.num_tokens, 32)
        alone = torch.cat([selected(sample[None], grid, region=region).positions for sample in tokens])
        assert same_choice(selected(tokens, grid, region=region).positions, alone)
        assert not same_choice(selected(tokens, grid, region=region, joint=True).positions, alone)

    @pytest.mark.parametrize(("dtype", "region", "assign"), pairwise(DTYPES, REGIONS, ASSIGNMENTS), ids=named)
    def test_batch_of_four_equals_four_batches_of_one(self, dtype, region, assign):
        grid = Grid(16, 12)
        tokens = torch.randn(4, grid.num_tokens, 32).to(dtype)
        settings = {"region": region, "assign": assign, "plan_class": SteadyPlan}
        together = selected(tokens, grid, **settings)
        restored = together.unmerge(together.merge(tokens))
        for index in range(4):
            sample = tokens[index : index + 1]
            alone = selected(sample, grid, **settings)
            near = {"atol": 4 * torch.finfo(dtype).eps, "rtol": 1e-2 if dtype == torch.bfloat16 else 1e-3}
            torch.testing.assert_close(together.weights.unflatten(0, (4, -1))[index], alone.weights, **near)
            torch.testing.assert_close(restored[index : index + 1], alone.unmerge(alone.merge(sample)), **near)

    @pytest.mark.parametrize("assign", ASSIGNMENTS)
    def test_joint_selection_is_one_choice_by_the_sum_of_gains(self, assign):
        grid = Grid(6, 8)
        tokens = torch.randn(3, grid.num_tokens, 10, dtype=torch.float64)
        plan = selected(tokens, grid, joint=True, assign=assign, distance_weight=0)
        similarity = ops.cosine_similarity(plan.regions.split(tokens)).unflatten(0, (3, -1))
        side_by_side = similarity.permute(1, 2, 0, 3).flatten(2)  # [R, n, 3 · n]
        expected = plan.regions.positions(ops.facility_location(side_by_side, plan.destinations_per_region))
        assert torch.equal(plan.positions, expected.expand(3, -1))
        weights = plan.weights.unflatten(0, (3, -1))
        assert not torch.equal(weights[0], weights[1])  # those stay each sample's own

    def test_parts_of_one_picture_share_destinations_and_weights(self):
        grid = Grid(8, 8)
        halves = torch.randn(2, 1, 64, 16, dtype=torch.float64)
        plan = selected(torch.cat([*halves]), grid, parts=2, distance_weight=0)
        similarity = torch.stack([ops.cosine_similarity(plan.regions.split(half)) for half in halves]).mean(dim=0)
        expected = plan.regions.positions(ops.facility_location(similarity, plan.destinations_per_region))
        assert torch.equal(plan.positions, expected.expand(2, -1))
        assert torch.equal(*plan.weights.chunk(2))


class TestFormula:
    @pytest.mark.parametrize("assign", ASSIGNMENTS)
    def test_merging_and_unmerging_written_out(self, assign):
        grid = Grid(4, 6)
        tokens = torch.randn(2, 24, 6, dtype=torch.float64)
        plan = selected(tokens, grid, assign=assign, scale=20.0, distance_weight=0)
        region = plan.regions.join(torch.arange(4).repeat_interleave(6).repeat(2)[:, None])[0, :, 0]
        for sample in range(2):
            positions = plan.positions[sample]
            unit = tokens[sample] / tokens[sample].norm(dim=-1, keepdim=True)
            logits = 20.0 * unit[positions] @ unit.T
            if assign == "local":
                logits[region[positions][:, None] != region[None]] = -torch.inf
            weights = logits.softmax(dim=0)
            merged = plan.merge(tokens)
            expected = weights / weights.sum(dim=1, keepdim=True) @ tokens[sample]
            torch.testing.assert_close(merged[sample], expected)
            torch.testing.assert_close(plan.unmerge(merged)[sample], weights.T @ merged[sample])

    @pytest.mark.parametrize(("assign", "region"), pairwise(ASSIGNMENTS, REGIONS))
    def test_gathered_rows_are_those_of_the_destinations(self, assign, region):
        """In the hard limit a destination that is alone in its cluster keeps its own coordinates when merged."""
        plan = selected(torch.randn(2, 60, 64), Grid(6, 10), region=region, assign=assign, scale=1e6)
        table = torch.stack(torch.meshgrid(torch.arange(6), torch.arange(10), indexing="ij"), dim=-1).reshape(60, 2)
        rows, coordinates = plan.gather(table), plan.merge(table.float().expand(2, -1, -1))
        assert rows.shape == (2, plan.num_destinations, 2)
        alone = plan.weights.sum(dim=-1).reshape(2, -1) == 1
        assert alone.any()
        assert torch.equal(coordinates[alone], rows[alone].float())

    def test_a_joint_choice_gives_one_table(self):
        plan = selected(torch.randn(3, 16, 8), Grid(4, 4), joint=True)
        table = torch.randn(16, 2, 5)
        assert torch.equal(plan.gather(table), table[plan.positions[0]])

    def test_autocast_changes_nothing(self):
        tokens = torch.randn(2, 256, 32)
        expected = selected(tokens, Grid(16, 16))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            plan = selected(tokens, Grid(16, 16))
            restored = plan.unmerge(plan.merge(tokens))
        assert torch.equal(plan.positions, expected.positions)
        assert torch.equal(restored, expected.unmerge(expected.merge(tokens)))


class TestIdentity:
    @pytest.mark.parametrize("settings", [{"ratio": 0.25, "num_regions": 8}, {"min_tokens": 17, "num_regions": 1}])
    def test_where_no_token_can_be_removed_the_input_is_returned(self, settings):
        tokens = torch.randn(2, 16, 8)
        plan = selected(tokens, Grid(4, 4), **settings)
        assert plan.is_identity
        assert plan.merge(tokens) is tokens
        assert plan.unmerge(tokens) is tokens
        assert torch.equal(plan.unmerge(tokens, tokens), 2 * tokens)
        assert torch.equal(plan.gather(torch.arange(16)), torch.arange(16).expand(2, -1))
        assert plan.describe().startswith("left whole")

    @pytest.mark.parametrize(
        ("size", "ratio", "left"),
        [(64, 0.5, 32), (64, 0.25, 48), (64, 0.75, 16), (100, 0.29, 71), (10, 0.7, 3), (9, 0.5, 5), (1, 0.9, 1)],
    )
    def test_number_of_destinations(self, size, ratio, left):
        assert num_destinations(size, ratio) == left


class TestMemory:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_plan_of_4096_tokens_stays_under_one_mebibyte_a_sample(self, dtype):
        plan = MergePlan(Grid(64, 64), Merge(num_regions=64), batch_size=4, dtype=dtype)
        assert plan.num_bytes / 4 < 2**20

    def test_plans_are_linear_in_tokens(self):
        """115,200 tokens, as of 14 seconds of video. Activations of a block: some 60 KB a token at a width of 5120."""
        small, large = (MergePlan(Grid(45, 80, n), Merge(), batch_size=1, dtype=torch.bfloat16) for n in (16, 32))
        assert large.grid.num_tokens == 115_200
        assert large.num_bytes <= min(2.01 * small.num_bytes, 0.01 * 60_000 * large.grid.num_tokens)


class TestUpdate:
    @pytest.mark.parametrize("action", [Action.REWEIGH, Action.REUSE])
    def test_reweighing_keeps_destinations_and_reuse_everything(self, action):
        plan = selected(torch.randn(1, 64, 8), Grid(8, 8))
        positions, weights = plan.positions.clone(), plan.weights.clone()
        plan.update(torch.randn(1, 64, 8), action)
        assert torch.equal(plan.positions, positions)
        assert torch.equal(plan.weights, weights) == (action is Action.REUSE)

    @pytest.mark.parametrize("action", [Action.REWEIGH, Action.REUSE])
    @pytest.mark.parametrize("is_new", [True, False])
    def test_a_plan_that_is_new_or_forgot_selects_whatever_the_action(self, action, is_new):
        tokens = torch.randn(1, 64, 8)
        plan = MergePlan(Grid(8, 8), Merge(num_regions=4), batch_size=1)
        if not is_new:
            plan.update(torch.randn(1, 64, 8), Action.SELECT)
            plan.forget()
        plan.update(tokens, action)
        assert same_choice(plan.positions, selected(tokens, Grid(8, 8)).positions)


@pytest.mark.parametrize(
    ("dtype", "assign", "bad", "everywhere"),
    pairwise(DTYPES, ASSIGNMENTS, (math.nan, math.inf, 0.0, 60000.0), (False, True)),
    ids=named,
)
def test_hostile_tokens_raise_no_error_and_stay_in_their_sample(dtype, assign, bad, everywhere):
    tokens = torch.randn(2, 64, 8).to(dtype)
    tokens[0, slice(None) if everywhere else 13] = bad
    plan = selected(tokens, Grid(8, 8), assign=assign)
    back = plan.unmerge(plan.merge(tokens))
    for row in plan.positions.tolist():
        assert len(set(row)) == 32
        assert 0 <= min(row) <= max(row) < 64
    assert back[1].isfinite().all()
    assert back.isfinite().all() or not math.isfinite(bad)


class TestErrors:
    def test_use_before_selection(self):
        plan = MergePlan(Grid(4, 4), Merge(num_regions=1), batch_size=1)
        uses = ((plan.merge, (1, 16, 2)), (plan.unmerge, (1, 8, 2)), (plan.gather, (16, 2)))
        for use, shape in uses:
            with pytest.raises(RuntimeError, match="call update"):
                use(torch.ones(shape))

    @pytest.mark.parametrize("shape", [(2, 16, 8), (1, 15, 8), (16, 8)])
    def test_tokens_of_another_shape(self, shape):
        plan = selected(torch.ones(1, 16, 8), Grid(4, 4))
        with pytest.raises(ValueError, match="this plan is for") as error:
            plan.update(torch.ones(shape), Action.SELECT)
        assert str(list(shape)) in str(error.value)
        with pytest.raises(ValueError, match=r"shape \[17, 2\].*16 tokens of a 4×4 grid"):
            plan.gather(torch.ones(17, 2))
        with pytest.raises(ValueError, match="3 samples cannot be 2 parts"):
            MergePlan(Grid(4, 4), Merge(), batch_size=3, parts=2)


class TestVideo:
    def test_tokens_of_neighbouring_frames_merge(self):
        """A picture that stands still for four frames needs a quarter of its tokens."""
        grid = Grid(8, 8, 4)
        tokens = torch.randn(1, 64, 32).repeat(1, 4, 1)
        plan = selected(tokens, grid, ratio=0.75, scale=math.inf, num_regions=None)
        assert plan.describe() == "1 tile of 4×8×8, selected in 4 tiles of 4×4×4"
        torch.testing.assert_close(plan.unmerge(plan.merge(tokens)), tokens)
        within = selected(tokens, grid, ratio=0.75, scale=math.inf, num_regions=None, region_frames=1)
        assert (within.unmerge(within.merge(tokens)) - tokens).abs().mean() > 0.1

    def test_nearness_in_time_counts(self):
        """Where all tokens are alike, those of near frames merge with a weight on distances, and else any."""
        tokens, frame = torch.ones(1, 32, 8) + 1e-4 * torch.randn(1, 32, 8), torch.arange(32) // 4

        def moved(distance_weight):
            settings = {"ratio": 0.75, "scale": math.inf, "num_regions": 1, "distance_weight": distance_weight}
            plan = selected(tokens, Grid(2, 2, 8), **settings)
            return (plan.positions[0, plan.assignment.targets[0]] // 4 - frame).abs().float().mean()

        assert moved(10.0) < 0.75 * moved(0.0)


class TestFirstFrame:
    """Of videos whose first frame may be left whole: it is, where only the others can be divided over frames."""

    def test_frames_that_only_the_others_divide(self):
        left = [frames for frames in range(1, 62) if why_first_frame_whole(Grid(22, 40, frames), Merge())]
        assert left == [11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61]
        assert why_first_frame_whole(Grid(22, 40, 31), Merge()) == (
            "31 frames cannot be divided into regions of about 4 frames, the other 30 can"
        )
        plan = MergePlan(Grid(22, 40, 31).without_first_frame, Merge(), batch_size=1)
        assert plan.assign_regions.describe() == "100 tiles of 3×11×8"

    @pytest.mark.parametrize(
        "changes", [{"region": "stripe"}, {"region": "global"}, {"region_frames": 1}, {"min_tokens": 1950}]
    )
    def test_is_merged_where_nothing_would_be_gained(self, changes):
        assert why_first_frame_whole(Grid(8, 8, 31), Merge()) is not None
        assert why_first_frame_whole(Grid(8, 8, 31), Merge(**changes)) is None

    @given(st.builds(Grid, st.integers(1, 60), st.integers(1, 60), st.integers(1, 60)), st.integers(1, 8))
    def test_is_left_only_for_regions_over_frames(self, grid, region_frames):
        if why_first_frame_whole(grid, Merge(region_frames=region_frames)) is not None:
            asked = {"kind": "tile", "tokens": 256, "frames": region_frames}
            assert Regions.divide(grid, **asked).depth == 1 < Regions.divide(grid.without_first_frame, **asked).depth
