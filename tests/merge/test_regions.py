"""Grids cut into regions: every token is in one, tiles are boxes, and the shape nearest to what was asked is taken."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pairs import pairwise

from toma_diffusion.merge import Grid, Regions
from toma_diffusion.merge.config import REGIONS

GRIDS = [(64, 64), (48, 84), (31, 17), (1, 7), (8, 12, 6), (5, 7, 3), (4, 6, 7)]
"""Rows, columns and, of a video, frames: some prime, some odd."""
grids = st.builds(Grid, st.integers(1, 24), st.integers(1, 24)) | st.builds(
    Grid, st.integers(1, 12), st.integers(1, 12), st.integers(1, 9)
)
frames = st.integers(1, 6)
any_regions = st.builds(
    Regions.divide, grids, st.sampled_from(REGIONS), count=st.integers(1, 80), frames=frames
) | st.builds(Regions.divide, grids, st.sampled_from(REGIONS), tokens=st.integers(1, 300), frames=frames)


def coordinates(grid: Grid, batch: int = 1) -> torch.Tensor:
    """[B, N, 4]: every token says which sample, frame, row and column it is."""
    sides = (batch, grid.frames, grid.height, grid.width)
    places = torch.meshgrid(*(torch.arange(side) for side in sides), indexing="ij")
    return torch.stack(places, dim=-1).reshape(batch, grid.num_tokens, 4)


def everything(regions: Regions) -> torch.Tensor:
    """The indices of all tokens inside each region."""
    return torch.arange(regions.size).expand(regions.count, -1)


class TestSplitAndJoin:
    @given(any_regions, st.integers(1, 3))
    def test_join_inverts_split_and_positions_say_where_a_token_came_from(self, regions, batch):
        assert regions.count * regions.size == regions.grid.num_tokens
        tokens = torch.arange(batch * regions.grid.num_tokens * 2).reshape(batch, -1, 2)
        assert torch.equal(regions.join(regions.split(tokens)), tokens)
        numbers = torch.arange(regions.grid.num_tokens)[None, :, None]
        assert torch.equal(regions.positions(everything(regions)), regions.split(numbers).flatten())

    @pytest.mark.parametrize("shape", GRIDS)
    def test_tiles_are_boxes_of_one_sample(self, shape):
        grid = Grid(*shape)
        regions = Regions.divide(grid, "tile", count=min(64, grid.num_tokens // 4), frames=2)
        for tile in regions.split(coordinates(grid, batch=2)):
            sides = tile.amax(dim=0) - tile.amin(dim=0) + 1
            assert sides.tolist() == [1, regions.depth, regions.height, regions.width]
            assert tile.unique(dim=0).shape[0] == regions.size

    @pytest.mark.parametrize(("shape", "kind"), pairwise(GRIDS, ["stripe", "global"]))
    def test_runs_of_the_sequence_are_views(self, shape, kind):
        grid = Grid(*shape)
        tokens = torch.arange(grid.num_tokens)[None, :, None]
        split = Regions.divide(grid, kind, count=64).split(tokens)
        assert split.data_ptr() == tokens.data_ptr()
        assert torch.equal(split.flatten(), tokens.flatten())


class TestShapeTaken:
    @pytest.mark.parametrize(
        ("grid", "asked", "taken"),
        [
            (Grid(64, 64), {"count": 64}, "64 tiles of 8×8"),
            (Grid(64, 64), {"kind": "stripe", "count": 64}, "64 stripes of length 64"),
            (Grid(64, 64), {"kind": "global", "count": 64}, "the whole grid"),
            (Grid(48, 84), {"count": 64}, "56 tiles of 6×12"),
            (Grid(96, 168), {"count": 64}, "64 tiles of 12×21"),
            (Grid(63, 63), {"count": 64}, "63 tiles of 7×9"),
            (Grid(31, 17), {"count": 64}, "31 tiles of 1×17"),
            (Grid(31, 17), {"kind": "stripe", "count": 64}, "31 stripes of length 17"),
            (Grid(1, 7), {"count": 64}, "1 tile of 1×7"),
            (Grid(1, 1), {"count": 64}, "1 tile of 1×1"),
            (Grid(64, 64), {}, "16 tiles of 16×16"),
            (Grid(8, 8), {}, "1 tile of 8×8"),
            (Grid(64, 64), {"tokens": 16}, "256 tiles of 4×4"),
            (Grid(96, 168), {}, "72 tiles of 16×14"),
            (Grid(64, 64), {"kind": "stripe"}, "16 stripes of length 256"),
            (Grid(31, 17), {}, "1 tile of 31×17"),
            (Grid(32, 48, 16), {}, "96 tiles of 4×8×8"),
            (Grid(30, 52, 21), {}, "140 tiles of 3×6×13"),  # Wan, 480p
            (Grid(45, 80, 21), {}, "280 tiles of 3×9×10"),  # Wan, 720p
            (Grid(22, 40, 31), {}, "124 tiles of 1×11×20"),  # a prime number of frames
            (Grid(32, 48, 16), {"frames": 1}, "96 tiles of 1×16×16"),
            (Grid(32, 48, 16), {"kind": "stripe"}, "96 stripes of length 256"),
            (Grid(8, 8, 16), {"kind": "global"}, "the whole grid"),
        ],
    )
    def test_nearest_that_divides(self, grid, asked, taken):
        asked = {"kind": "tile", "frames": 4} | ({} if "count" in asked else {"tokens": 256}) | asked
        assert Regions.divide(grid, **asked).describe() == taken

    @given(grids, st.sampled_from(REGIONS), st.integers(1, 80), frames)
    def test_a_region_can_always_merge(self, grid, kind, count, frames):
        """But for tiles that stay inside their frame, if that has one token."""
        stays = kind == "tile" and frames == 1
        least = min(2, grid.height * grid.width if stays else grid.num_tokens)
        assert Regions.divide(grid, kind, count=count, frames=frames).size >= least
        assert Regions.divide(grid, kind, tokens=count, frames=frames).size >= least

    @pytest.mark.parametrize("kind", ["tile", "stripe"])
    @pytest.mark.parametrize("shape", [(64, 64), (63, 63), (48, 84), (31, 17), (61, 67), (52, 77)])
    def test_size_stays_within_a_factor_of_what_was_asked(self, shape, kind):
        grid = Grid(*shape)
        size = Regions.divide(grid, kind, count=64).size
        assert abs(math.log(size / (grid.num_tokens / 64))) <= math.log(3)

    @given(any_regions)
    def test_a_video_of_one_frame_is_cut_as_the_image_is(self, regions):
        grid = Grid(regions.grid.height, regions.grid.width)
        asked = {"kind": regions.kind, "tokens": regions.size}
        assert Regions.divide(grid, **asked, frames=5) == Regions.divide(grid, **asked)


class TestParts:
    def test_go_over_as_many_frames(self):
        regions = Regions.divide(Grid(32, 48, 16), "tile", tokens=256, frames=4)
        assert regions.subdivide(64).describe() == "384 tiles of 4×4×4"

    @given(any_regions, st.integers(1, 64))
    def test_indices_inside_the_outer_region_lead_to_the_same_tokens(self, outer, tokens):
        parts = outer.subdivide(tokens)
        inside = parts.inside(outer, everything(parts))
        assert torch.equal(inside.sort(dim=-1).values, everything(outer))
        # In the same order as the parts: those of one region one after another.
        ours = outer.tiling.positions(inside).unflatten(1, (-1, parts.size)).flatten(0, 1)
        theirs = parts.tiling.positions(everything(parts))
        assert {frozenset(each.tolist()) for each in ours} == {frozenset(each.tolist()) for each in theirs}


@given(any_regions, st.sampled_from([0.0, 0.3]))
def test_distance_is_between_places_in_the_video(regions, distance_weight):
    place = regions.split(coordinates(regions.grid))[..., 1:].float()  # [R, n, 3]
    frames, rows, columns = ((place[:, :, None] - place[:, None]) ** 2).unbind(-1)
    expected = distance_weight * ((rows + columns) / (regions.height * regions.width) + frames / regions.depth**2)
    measured = regions.tiling.penalty(everything(regions), torch.arange(regions.size), distance_weight)
    torch.testing.assert_close(measured, expected, rtol=1e-5, atol=1e-5)
    assert measured.max() <= regions.tiling.largest_penalty(distance_weight) + 1e-5


def test_wrong_kinds_counts_and_grids_are_quoted():
    with pytest.raises(ValueError, match="'hexagon' is not known: use one of 'tile', 'stripe', 'global'"):
        Regions.divide(Grid(4, 4), "hexagon", count=4)
    with pytest.raises(ValueError, match="count=0"):
        Regions.divide(Grid(4, 4), "tile", count=0)
    with pytest.raises(ValueError, match="0 frames of 4×7"):
        Grid(4, 7, 0)
