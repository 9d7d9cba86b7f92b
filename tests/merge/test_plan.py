import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from observe import CountOperators
from pairs import named, pairwise

from toma_diffusion import Action, Grid, MergePlan, Schedule, ToMAConfig, ops
from toma_diffusion.merge import Regions, num_destinations, why_first_frame_whole
from toma_diffusion.merge.config import ASSIGNMENTS, REGIONS, SELECTIONS, UNMERGES

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def selected(tokens: torch.Tensor, grid: Grid, joint: bool = False, **settings) -> MergePlan:
    plan = MergePlan(
        grid, ToMAConfig(**settings), batch_size=len(tokens), dtype=tokens.dtype, device=tokens.device, joint=joint
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
    settings = {
        "ratio": draw(st.floats(0, 0.99)),
        "selection": draw(st.sampled_from(SELECTIONS)),
        "region": draw(st.sampled_from(REGIONS)),
        "num_regions": draw(st.integers(1, 20)),
        "assign": draw(st.sampled_from(ASSIGNMENTS)),
        "unmerge": draw(st.sampled_from(UNMERGES)),
        "scale": draw(st.sampled_from([10.0, 1000.0, math.inf])),
    }
    return tokens, grid, draw(st.booleans()), settings


class TestAnyPlan:
    @given(cases())
    def test_shapes_dtypes_and_destinations(self, case):
        tokens, grid, joint, settings = case
        plan = selected(tokens, grid, joint, **settings)
        merged = plan.merge(tokens)
        assert merged.shape == (len(tokens), plan.num_destinations, tokens.shape[-1])
        assert plan.unmerge(merged).shape == tokens.shape
        assert merged.dtype == plan.unmerge(merged).dtype == tokens.dtype
        for row in plan.positions.tolist():
            assert len(set(row)) == plan.num_destinations
            assert 0 <= min(row) <= max(row) < grid.num_tokens

    @given(cases())
    def test_constant_tokens_come_back(self, case):
        """A constant merges into itself whatever the plan, unless that drops tokens or is a random projection."""
        tokens, grid, joint, settings = case
        fixed = settings["selection"] in ("none", "slice")
        settings["selection"] = "facility-location" if fixed else settings["selection"]
        plan = selected(tokens, grid, joint, **settings | {"unmerge": "transpose"})
        ones = torch.ones_like(tokens)
        tolerance = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}[tokens.dtype]
        torch.testing.assert_close(plan.unmerge(plan.merge(ones)), ones, atol=tolerance, rtol=0)

    @given(cases())
    def test_destinations_are_equally_many_in_every_region(self, case):
        tokens, grid, joint, settings = case
        plan = selected(tokens, grid, joint, **settings)
        chosen = torch.zeros(len(tokens), grid.num_tokens, 1).scatter_(1, plan.positions[:, :, None], 1.0)
        per_region = plan.regions.split(chosen).sum(dim=(1, 2))
        if settings["selection"] == "slice":
            assert per_region.sum() == plan.num_destinations * len(tokens)
            return
        assert (per_region == num_destinations(plan.regions.size, settings["ratio"])).all()


class TestBatch:
    @pytest.mark.parametrize("region", REGIONS)
    def test_every_sample_chooses_for_itself(self, region):
        grid = Grid(16, 12)
        tokens = torch.randn(4, grid.num_tokens, 32)
        together = selected(tokens, grid, region=region, num_regions=16)
        alone = torch.cat([selected(sample[None], grid, region=region, num_regions=16).positions for sample in tokens])
        assert same_choice(together.positions, alone)
        assert not same_choice(selected(tokens, grid, joint=True, region=region, num_regions=16).positions, alone)

    @pytest.mark.parametrize(("dtype", "region", "assign"), pairwise(DTYPES, REGIONS, ASSIGNMENTS), ids=named)
    def test_batch_of_four_equals_four_batches_of_one(self, dtype, region, assign):
        """With destinations that do not depend on the tokens."""
        grid = Grid(16, 12)
        tokens = torch.randn(4, grid.num_tokens, 32).to(dtype)
        settings = {"region": region, "assign": assign, "num_regions": 16, "selection": "strided"}
        together = selected(tokens, grid, **settings)
        merged = together.merge(tokens)
        restored = together.unmerge(merged)
        near = {"atol": 4 * torch.finfo(dtype).eps, "rtol": 1e-2 if dtype == torch.bfloat16 else 1e-3}
        for index in range(4):
            sample = tokens[index : index + 1]
            alone = selected(sample, grid, **settings)
            torch.testing.assert_close(together.weights.unflatten(0, (4, -1))[index], alone.weights, **near)
            torch.testing.assert_close(merged[index : index + 1], alone.merge(sample), **near)
            torch.testing.assert_close(restored[index : index + 1], alone.unmerge(alone.merge(sample)), **near)

    def test_large_local_grid(self):
        grid = Grid(64, 64)
        tokens = torch.randn(4, grid.num_tokens, 64)
        together = selected(tokens, grid, selection="strided")
        back = together.unmerge(together.merge(tokens))
        for index in range(4):
            sample = tokens[index : index + 1]
            alone = selected(sample, grid, selection="strided")
            torch.testing.assert_close(
                back[index : index + 1], alone.unmerge(alone.merge(sample)), atol=1e-3, rtol=1e-3
            )

    @pytest.mark.parametrize("assign", ASSIGNMENTS)
    def test_joint_selection_is_one_choice_by_the_sum_of_gains(self, assign):
        grid = Grid(6, 8)
        tokens = torch.randn(3, grid.num_tokens, 10, dtype=torch.float64)
        plan = selected(tokens, grid, joint=True, region="tile", num_regions=4, assign=assign, distance_weight=0)
        assert all(torch.equal(plan.positions[0], other) for other in plan.positions)
        for region in range(plan.regions.count):
            similarity = ops.cosine_similarity(plan.regions.split(tokens)).unflatten(0, (3, -1))[:, region]
            side_by_side = torch.cat(list(similarity), dim=-1)[None]
            expected = plan.regions.positions(
                ops.facility_location(side_by_side, plan.destinations_per_region).expand(plan.regions.count, -1)
            ).unflatten(0, (plan.regions.count, -1))[region]
            assert torch.equal(plan.positions[0].unflatten(0, (plan.regions.count, -1))[region], expected)

    def test_joint_with_one_sample_is_the_ordinary_choice(self):
        grid = Grid(8, 8)
        tokens = torch.randn(1, 64, 16)
        joint, ordinary = (selected(tokens, grid, joint=joint, num_regions=4) for joint in (True, False))
        assert same_choice(joint.positions, ordinary.positions)

    def test_weights_stay_each_samples_own_when_destinations_are_joint(self):
        grid = Grid(8, 8)
        tokens = torch.randn(2, 64, 16)
        weights = selected(tokens, grid, joint=True, num_regions=4).weights.unflatten(0, (2, -1))
        assert not torch.equal(weights[0], weights[1])


class TestRegionsOfThePlan:
    def test_tokens_never_leave_their_region_locally(self):
        grid = Grid(8, 12)
        tokens = torch.randn(1, grid.num_tokens, 16)
        plan = selected(tokens, grid, num_regions=6)
        label = plan.regions.join(torch.arange(6.0).repeat_interleave(plan.regions.size)[:, None])
        torch.testing.assert_close(plan.unmerge(plan.merge(label)), label)

    @pytest.mark.parametrize("selection", ["facility-location", "strided"])
    def test_permuting_regions_permutes_results(self, selection):
        grid = Grid(16, 16)
        tokens = torch.randn(1, 256, 24)
        plan = selected(tokens, grid, num_regions=16, selection=selection)
        order = torch.randperm(plan.regions.count)
        shuffled = plan.regions.join(plan.regions.split(tokens)[order])
        other = selected(shuffled, grid, num_regions=16, selection=selection)
        first = torch.arange(16)[:, None] * 16  # of every region, so that all picks can be compared at once
        assert same_choice((other.destinations + first).view(1, -1), (plan.destinations[order] + first).view(1, -1))
        if selection == "strided":
            torch.testing.assert_close(other.weights, plan.weights[order], rtol=1e-3, atol=1e-3)

    def test_global_assignment_equals_the_formula(self):
        grid = Grid(8, 8)
        tokens = torch.randn(1, 64, 6, dtype=torch.float64)
        plan = selected(tokens, grid, num_regions=4, assign="global", scale=20.0, distance_weight=0)
        unit = tokens[0] / tokens[0].norm(dim=-1, keepdim=True)
        weights = (20.0 * unit[plan.positions[0]] @ unit.T).softmax(dim=0)
        merge_matrix = weights / weights.sum(dim=1, keepdim=True)
        torch.testing.assert_close(plan.merge(tokens)[0], merge_matrix @ tokens[0])
        merged = torch.randn(1, plan.num_destinations, 5, dtype=torch.float64)
        torch.testing.assert_close(plan.unmerge(merged)[0], weights.T @ merged[0])

    def test_local_assignment_equals_the_block_diagonal_formula(self):
        grid = Grid(4, 6)
        tokens = torch.randn(2, 24, 6, dtype=torch.float64)
        plan = selected(tokens, grid, num_regions=4, scale=20.0, distance_weight=0)
        region = plan.regions.join(torch.arange(4).repeat_interleave(6).repeat(2)[:, None])[0, :, 0]
        for sample in range(2):
            positions = plan.positions[sample]
            unit = tokens[sample] / tokens[sample].norm(dim=-1, keepdim=True)
            logits = 20.0 * unit[positions] @ unit.T
            logits[region[positions][:, None] != region[None]] = -torch.inf
            weights = logits.softmax(dim=0)
            merge_matrix = weights / weights.sum(dim=1, keepdim=True)
            torch.testing.assert_close(plan.merge(tokens)[sample], merge_matrix @ tokens[sample])
            merged = plan.merge(tokens)
            torch.testing.assert_close(plan.unmerge(merged)[sample], weights.T @ merged[sample])


class TestGather:
    @pytest.mark.parametrize("assign", ASSIGNMENTS)
    @pytest.mark.parametrize("region", REGIONS)
    def test_rows_are_those_of_the_destinations(self, assign, region):
        """In the hard limit a destination that is alone in its cluster keeps its own coordinates when merged."""
        grid = Grid(6, 10)
        tokens = torch.randn(2, 60, 64)
        plan = selected(tokens, grid, region=region, num_regions=4, assign=assign, scale=1e6)
        table = torch.stack(torch.meshgrid(torch.arange(6), torch.arange(10), indexing="ij"), dim=-1).reshape(60, 2)
        rows = plan.gather(table)
        assert rows.shape == (2, plan.num_destinations, 2)
        coordinates = plan.merge(table.float().expand(2, -1, -1))
        alone = plan.weights.sum(dim=-1).reshape(2, -1) == 1
        assert alone.any()
        assert torch.equal(coordinates[alone], rows[alone].float())

    def test_shared_destinations_give_one_table(self):
        grid = Grid(4, 4)
        plan = selected(torch.randn(3, 16, 8), grid, joint=True, num_regions=1)
        table = torch.randn(16, 2, 5)
        assert torch.equal(plan.gather(table), table[plan.positions[0]])

    def test_wrong_table(self):
        plan = selected(torch.randn(1, 16, 8), Grid(4, 4))
        with pytest.raises(ValueError, match=r"shape \[17, 2\].*16 tokens of a 4×4 grid"):
            plan.gather(torch.randn(17, 2))


class TestIdentity:
    @pytest.mark.parametrize(
        ("dtype", "region", "assign", "selection"), pairwise(DTYPES, REGIONS, ASSIGNMENTS, SELECTIONS), ids=named
    )
    def test_ratio_zero_returns_its_input(self, dtype, region, assign, selection):
        grid = Grid(6, 9)
        tokens = torch.randn(2, 54, 8).to(dtype)
        plan = selected(tokens, grid, ratio=0.0, region=region, assign=assign, selection=selection, num_regions=9)
        assert plan.is_identity
        assert plan.merge(tokens) is tokens
        assert plan.unmerge(tokens) is tokens
        assert torch.equal(plan.gather(torch.arange(54)), torch.arange(54).expand(2, -1))

    def test_ratio_too_small_for_the_regions_is_the_identity_too(self):
        assert MergePlan(Grid(4, 4), ToMAConfig(ratio=0.25, num_regions=8), batch_size=1).is_identity

    @pytest.mark.parametrize(("min_tokens", "left"), [(256, 128), (257, 256)])
    def test_small_grids_are_left_whole(self, min_tokens, left):
        plan = MergePlan(Grid(16, 16), ToMAConfig(ratio=0.5, num_regions=16, min_tokens=min_tokens), batch_size=1)
        assert plan.num_destinations == left

    def test_identity_holds_no_weights(self):
        plan = MergePlan(Grid(64, 64), ToMAConfig(ratio=0.0, assign="global"), batch_size=1)
        assert plan.num_bytes < 100_000

    @pytest.mark.parametrize(
        ("size", "ratio", "left"),
        [(64, 0.5, 32), (64, 0.25, 48), (64, 0.75, 16), (100, 0.29, 71), (10, 0.7, 3), (9, 0.5, 5), (1, 0.9, 1)],
    )
    def test_number_of_destinations(self, size, ratio, left):
        assert num_destinations(size, ratio) == left


class TestBuffers:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_plan_of_4096_tokens_stays_under_one_mebibyte_a_sample(self, dtype):
        plan = MergePlan(Grid(64, 64), ToMAConfig(ratio=0.5, num_regions=64), batch_size=4, dtype=dtype)
        assert plan.num_bytes / 4 < 2**20
        buffers = [value for holder in (plan, plan.assignment) for value in vars(holder).values()]
        buffers = [value for value in buffers if isinstance(value, torch.Tensor)]
        assert sum(buffer.nbytes for buffer in buffers) == plan.num_bytes

    def test_updates_happen_in_place(self):
        grid = Grid(8, 8)
        plan = selected(torch.randn(2, 64, 8), grid, num_regions=4)
        before = [buffer.data_ptr() for buffer in (plan.destinations, plan.positions, plan.weights)]
        old = plan.weights.clone()
        plan.update(torch.randn(2, 64, 8), Action.SELECT)
        assert [buffer.data_ptr() for buffer in (plan.destinations, plan.positions, plan.weights)] == before
        assert not torch.equal(plan.weights, old)


class TestUpdate:
    def test_reweigh_keeps_destinations(self):
        grid = Grid(8, 8)
        plan = selected(torch.randn(1, 64, 8), grid, num_regions=4)
        positions, weights = plan.positions.clone(), plan.weights.clone()
        plan.update(torch.randn(1, 64, 8), Action.REWEIGH)
        assert torch.equal(plan.positions, positions)
        assert not torch.equal(plan.weights, weights)

    def test_reuse_keeps_everything(self):
        plan = selected(torch.randn(1, 64, 8), Grid(8, 8), num_regions=4)
        positions, weights = plan.positions.clone(), plan.weights.clone()
        plan.update(torch.randn(1, 64, 8), Action.REUSE)
        assert torch.equal(plan.positions, positions)
        assert torch.equal(plan.weights, weights)

    @pytest.mark.parametrize("action", [Action.REWEIGH, Action.REUSE])
    def test_a_fresh_plan_selects_whatever_the_action(self, action):
        tokens = torch.randn(1, 64, 8)
        plan = MergePlan(Grid(8, 8), ToMAConfig(num_regions=4), batch_size=1)
        plan.update(tokens, action)
        assert same_choice(plan.positions, selected(tokens, Grid(8, 8), num_regions=4).positions)
        torch.testing.assert_close(plan.weights.sum(dim=-2), torch.ones(4, 16))

    @pytest.mark.parametrize("generations", [1, 2])
    def test_fifty_steps_make_five_selections_and_ten_weight_computations(self, generations):
        schedule = Schedule(select_every=10, reweigh_every=5)
        plan = MergePlan(Grid(8, 8), ToMAConfig(num_regions=4), batch_size=2)
        with CountOperators() as count:
            for _, step in itertools.product(range(generations), range(50)):
                tokens = torch.randn(2, 64, 8)
                plan.update(tokens, schedule.action(step, 50))
                plan.unmerge(plan.merge(tokens))
        assert count.calls == {
            "cosine_similarity": 5 * generations,
            "facility_location": 5 * generations,
            "merge_weights": 10 * generations,
            "merge": 50 * generations,
            "unmerge": 50 * generations,
        }

    def test_fixed_projection_computes_nothing(self):
        plan = MergePlan(Grid(8, 8), ToMAConfig(selection="none", num_regions=4), batch_size=2)
        weights = plan.weights.clone()
        with CountOperators() as count:
            plan.update(torch.randn(2, 64, 8), Action.SELECT)
            plan.merge(torch.randn(2, 64, 8))
        assert count.calls == {"merge": 1}
        assert torch.equal(plan.weights, weights)
        torch.testing.assert_close(weights.sum(dim=-2), torch.ones(8, 16))

    @pytest.mark.parametrize("selection", ["random", "strided", "none"])
    def test_fixed_choices_leave_the_users_random_state_alone(self, selection):
        state = torch.get_rng_state()
        first = selected(torch.ones(1, 64, 8), Grid(8, 8), selection=selection, num_regions=4)
        assert torch.equal(torch.get_rng_state(), state)
        again = selected(torch.ones(1, 64, 8), Grid(8, 8), selection=selection, num_regions=4)
        assert torch.equal(first.positions, again.positions)

    def test_gradients_reach_the_tokens_but_not_the_choice(self):
        tokens = torch.randn(1, 64, 8, requires_grad=True)
        plan = selected(tokens, Grid(8, 8), num_regions=4)
        assert not plan.weights.requires_grad
        plan.unmerge(plan.merge(tokens)).sum().backward()
        torch.testing.assert_close(tokens.grad.sum(), torch.tensor(64.0 * 8))


class TestHostileInput:
    @pytest.mark.parametrize(
        ("dtype", "assign", "bad", "everywhere"),
        pairwise(DTYPES, ASSIGNMENTS, (math.nan, math.inf, 0.0, 60000.0), (False, True)),
        ids=named,
    )
    def test_no_error_no_duplicate_nothing_out_of_bounds(self, dtype, assign, bad, everywhere):
        tokens = torch.randn(2, 64, 8).to(dtype)
        tokens[0, slice(None) if everywhere else 13] = bad
        plan = selected(tokens, Grid(8, 8), num_regions=4, assign=assign)
        back = plan.unmerge(plan.merge(tokens))
        for row in plan.positions.tolist():
            assert len(set(row)) == 32
            assert 0 <= min(row) <= max(row) < 64
        assert back[1].isfinite().all()
        if bad in (0.0, 60000.0):
            assert back.isfinite().all()


class TestErrors:
    def test_use_before_selection(self):
        plan = MergePlan(Grid(4, 4), ToMAConfig(num_regions=1), batch_size=1)
        with pytest.raises(RuntimeError, match="call update"):
            plan.merge(torch.ones(1, 16, 2))
        with pytest.raises(RuntimeError, match="call update"):
            plan.unmerge(torch.ones(1, 8, 2))
        with pytest.raises(RuntimeError, match="call update"):
            plan.gather(torch.ones(16, 2))

    @pytest.mark.parametrize("shape", [(2, 16, 8), (1, 15, 8), (16, 8)])
    def test_tokens_of_another_shape(self, shape):
        plan = MergePlan(Grid(4, 4), ToMAConfig(), batch_size=1)
        with pytest.raises(ValueError, match="this plan is for") as error:
            plan.update(torch.ones(shape), Action.SELECT)
        assert str(list(shape)) in str(error.value)


class TestCompile:
    @pytest.mark.parametrize("joint", [False, True])
    def test_at_most_one_graph_per_action_and_results_equal_eager(self, joint):
        graphs = []

        def backend(graph, inputs):
            graphs.append(graph)
            return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

        def make():
            return MergePlan(Grid(8, 8), ToMAConfig(num_regions=4), batch_size=2, joint=joint)

        def layer(plan, tokens, action):
            plan.update(tokens, action)
            return tokens + plan.unmerge(torch.tanh(plan.merge(tokens))), plan.gather(tokens[0])

        torch.compiler.reset()
        compiled = torch.compile(layer, fullgraph=True, backend=backend)
        schedule, plan, twin = Schedule(), make(), make()
        for step in range(50):
            tokens = torch.randn(2, 64, 8)
            action = schedule.action(step, 50)
            results = compiled(plan, tokens, action)
            layer(twin, tokens, action)
            assert same_choice(plan.positions, twin.positions)
            for ours, theirs in zip(plan.buffers, twin.buffers, strict=True):
                theirs.copy_(ours)  # ties may have been broken the other way
            for ours, eager in zip(results, layer(twin, tokens, Action.REUSE), strict=True):
                torch.testing.assert_close(ours, eager)
        assert len(graphs) == len(Action)


class TestVideo:
    def test_tokens_of_neighbouring_frames_merge(self):
        """A picture that stands still for four frames needs a quarter of its tokens."""
        grid = Grid(8, 8, 4)
        picture = torch.randn(1, 64, 32)
        tokens = picture.repeat(1, 4, 1)
        plan = selected(tokens, grid, ratio=0.75, scale=math.inf)
        assert plan.describe() == "1 tile of 4×8×8, selected in 4 tiles of 4×4×4"
        torch.testing.assert_close(plan.unmerge(plan.merge(tokens)), tokens)
        within = selected(tokens, grid, ratio=0.75, scale=math.inf, region_frames=1)
        assert (within.unmerge(within.merge(tokens)) - tokens).abs().mean() > 0.1

    def test_time_counts(self):
        """Where all tokens are alike, those of the same frame are nearest with a weight on frames, and else not."""
        grid = Grid(2, 2, 4)
        tokens = torch.ones(1, 16, 8) + 1e-4 * torch.randn(1, 16, 8)
        settings = {"ratio": 0.75, "scale": math.inf, "distance_weight": 0}
        plan = selected(tokens, grid, **settings, frame_weight=10.0)
        frame = torch.arange(16) // 4
        own = plan.positions[0, plan.assignment.targets[0]] // 4
        assert torch.equal(own, frame)

    def test_plans_are_small_and_linear_in_tokens(self):
        """115,200 tokens, as of 14 seconds of video. Activations of a block: some 60 KB a token at a width of 5120."""
        config = ToMAConfig(ratio=0.5)
        small, large = (
            MergePlan(Grid(45, 80, frames), config, batch_size=1, dtype=torch.bfloat16) for frames in (16, 32)
        )
        assert large.grid.num_tokens == 115_200
        assert large.num_bytes <= 2.01 * small.num_bytes
        assert large.num_bytes <= 0.01 * 60_000 * large.grid.num_tokens
        tokens = torch.randn(1, 115_200, 4, dtype=torch.bfloat16)
        large.update(tokens, Action.SELECT)
        assert large.merge(tokens).shape == (1, 57_600, 4)


class TestFirstFrame:
    """Of videos whose first frame may be left whole: it is, where only the others can be divided over frames."""

    def test_frames_that_only_the_others_divide(self):
        assert [frames for frames in range(1, 62) if why_first_frame_whole(Grid(22, 40, frames), ToMAConfig())] == [
            *(11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61)
        ]

    def test_says_why(self):
        assert why_first_frame_whole(Grid(22, 40, 31), ToMAConfig()) == (
            "31 frames cannot be divided into regions of about 4 frames, the other 30 can"
        )
        plan = MergePlan(Grid(22, 40, 31).without_first_frame, ToMAConfig(), batch_size=1)
        assert plan.assign_regions.describe() == "100 tiles of 3×11×8"

    @pytest.mark.parametrize(
        ("frames", "region_frames", "is_left"),
        [(31, 4, True), (7, 4, False), (7, 3, True), (7, 2, True), (5, 4, False), (5, 2, True), (3, 1, False)],
    )
    def test_counts_by_region_frames(self, frames, region_frames, is_left):
        """Up to twice the frames that are asked for make one region: 5 or 7 where 4 are."""
        grid, config = Grid(8, 8, frames), ToMAConfig(region_frames=region_frames)
        assert (why_first_frame_whole(grid, config) is not None) == is_left

    @pytest.mark.parametrize(
        "changes",
        [{"ratio": 0}, {"region": "stripe"}, {"region": "global"}, {"region_frames": 1}, {"min_tokens": 1950}],
    )
    def test_is_merged_where_nothing_would_be_gained(self, changes):
        grid = Grid(8, 8, 31)
        assert why_first_frame_whole(grid, ToMAConfig()) is not None
        assert why_first_frame_whole(grid, ToMAConfig(**changes)) is None

    @given(
        st.builds(Grid, st.integers(1, 60), st.integers(1, 60), st.integers(1, 15).map(lambda n: 4 * n) | st.just(21)),
        st.integers(2, 8),
    )
    def test_other_grids_are_as_before(self, grid, region_frames):
        assert why_first_frame_whole(grid, ToMAConfig(region_frames=region_frames)) is None

    @given(st.builds(Grid, st.integers(1, 60), st.integers(1, 60), st.integers(1, 60)), st.integers(1, 8))
    def test_is_left_only_for_regions_over_frames(self, grid, region_frames):
        config = ToMAConfig(region_frames=region_frames)
        if why_first_frame_whole(grid, config) is not None:
            asked = {"kind": "tile", "tokens": 256, "frames": region_frames}
            assert Regions.divide(grid, **asked).depth == 1 < Regions.divide(grid.without_first_frame, **asked).depth
