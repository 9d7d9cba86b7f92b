import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pairs import pairwise

from toma_diffusion import Grid, Regions
from toma_diffusion.merge.config import REGIONS

GRIDS = [(64, 64), (48, 84), (31, 17), (1, 7), (8, 12, 6), (5, 7, 3), (4, 6, 7)]
"""Rows, columns and, of a video, frames: some prime, some odd."""


def coordinates(grid: Grid, batch: int = 1) -> torch.Tensor:
    """[B, N, 4]: every token says which sample, frame, row and column it is."""
    sides = (batch, grid.frames, grid.height, grid.width)
    places = torch.meshgrid(*(torch.arange(side) for side in sides), indexing="ij")
    return torch.stack(places, dim=-1).reshape(batch, grid.num_tokens, 4)


grids = st.builds(Grid, st.integers(1, 24), st.integers(1, 24)) | st.builds(
    Grid, st.integers(1, 12), st.integers(1, 12), st.integers(1, 9)
)
frames = st.integers(1, 6)
any_regions = st.builds(
    Regions.divide, grids, st.sampled_from(REGIONS), count=st.integers(1, 80), frames=frames
) | st.builds(Regions.divide, grids, st.sampled_from(REGIONS), tokens=st.integers(1, 300), frames=frames)


class TestSplitAndJoin:
    @pytest.mark.parametrize(("shape", "kind", "num_regions"), pairwise(GRIDS, REGIONS, (1, 4, 16, 64, 256)))
    def test_join_inverts_split(self, shape, kind, num_regions):
        grid = Grid(*shape)
        regions = Regions.divide(grid, kind, count=num_regions)
        tokens = coordinates(grid, batch=2)
        split = regions.split(tokens)
        assert split.shape == (2 * regions.count, regions.size, 4)
        assert torch.equal(regions.join(split), tokens)

    @pytest.mark.parametrize("shape", GRIDS)
    def test_tiles_are_rectangles_of_one_sample(self, shape):
        grid = Grid(*shape)
        regions = Regions.divide(grid, "tile", count=min(64, grid.num_tokens // 4), frames=2)
        for tile in regions.split(coordinates(grid, batch=2)):
            sample, frames, rows, columns = tile.unbind(dim=-1)
            assert sample.unique().numel() == 1
            assert frames.max() - frames.min() + 1 == regions.depth
            assert rows.max() - rows.min() + 1 == regions.height
            assert columns.max() - columns.min() + 1 == regions.width
            assert tile.unique(dim=0).shape[0] == regions.size

    @pytest.mark.parametrize("shape", GRIDS)
    @pytest.mark.parametrize("kind", ["stripe", "global"])
    def test_runs_of_the_sequence_are_views(self, shape, kind):
        grid = Grid(*shape)
        tokens = torch.arange(grid.num_tokens)[None, :, None]
        split = Regions.divide(grid, kind, count=64).split(tokens)
        assert split.data_ptr() == tokens.data_ptr()
        assert torch.equal(split.flatten(), tokens.flatten())

    @given(any_regions, st.integers(1, 3))
    def test_any_grid(self, regions, batch):
        tokens = torch.arange(batch * regions.grid.num_tokens * 2).reshape(batch, -1, 2)
        split = regions.split(tokens)
        assert regions.count * regions.size == regions.grid.num_tokens
        assert torch.equal(regions.join(split), tokens)

    @given(any_regions)
    def test_positions_say_where_a_token_came_from(self, regions):
        tokens = torch.arange(regions.grid.num_tokens)[None, :, None]
        everything = torch.arange(regions.size).expand(regions.count, -1)
        assert torch.equal(regions.positions(everything), regions.split(tokens).flatten())


class TestShapeTaken:
    @pytest.mark.parametrize(
        ("shape", "kind", "num_regions", "taken"),
        [
            ((64, 64), "tile", 64, "64 tiles of 8×8"),
            ((64, 64), "tile", 256, "256 tiles of 4×4"),
            ((64, 64), "stripe", 64, "64 stripes of length 64"),
            ((64, 64), "global", 64, "the whole grid"),
            ((48, 84), "tile", 64, "56 tiles of 6×12"),
            ((96, 168), "tile", 64, "64 tiles of 12×21"),
            ((63, 63), "tile", 64, "63 tiles of 7×9"),
            ((31, 17), "tile", 64, "31 tiles of 1×17"),
            ((31, 17), "stripe", 64, "31 stripes of length 17"),
            ((1, 7), "tile", 64, "1 tile of 1×7"),
            ((1, 1), "tile", 64, "1 tile of 1×1"),
        ],
    )
    def test_nearest_that_divides(self, shape, kind, num_regions, taken):
        assert Regions.divide(Grid(*shape), kind, count=num_regions).describe() == taken

    @pytest.mark.parametrize(
        ("shape", "kind", "tokens", "taken"),
        [
            ((64, 64), "tile", 256, "16 tiles of 16×16"),
            ((32, 32), "tile", 256, "4 tiles of 16×16"),
            ((16, 16), "tile", 256, "1 tile of 16×16"),
            ((8, 8), "tile", 256, "1 tile of 8×8"),
            ((64, 64), "tile", 16, "256 tiles of 4×4"),
            ((96, 168), "tile", 256, "72 tiles of 16×14"),
            ((64, 64), "stripe", 256, "16 stripes of length 256"),
            ((64, 64), "global", 256, "the whole grid"),
            ((31, 17), "tile", 256, "1 tile of 31×17"),
        ],
    )
    def test_nearest_to_a_number_of_tokens(self, shape, kind, tokens, taken):
        assert Regions.divide(Grid(*shape), kind, tokens=tokens).describe() == taken

    @given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5))
    def test_what_divides_is_taken_as_asked(self, height, width, per_side):
        grid = Grid(2 ** (height + per_side + 1), 2 ** (width + per_side))
        regions = Regions.divide(grid, "tile", count=4**per_side)
        assert (regions.height, regions.width) == (2 ** (height + 1), 2**width)

    @given(grids, st.sampled_from(REGIONS), st.integers(1, 80), frames)
    def test_a_region_can_always_merge(self, grid, kind, count, frames):
        """But for tiles that stay inside their frame, if that has one token."""
        stays = kind == "tile" and frames == 1
        tokens = grid.height * grid.width if stays else grid.num_tokens
        assert Regions.divide(grid, kind, count=count, frames=frames).size >= min(2, tokens)
        assert Regions.divide(grid, kind, tokens=count, frames=frames).size >= min(2, tokens)

    @pytest.mark.parametrize("kind", ["tile", "stripe"])
    @pytest.mark.parametrize("shape", [(64, 64), (63, 63), (48, 84), (31, 17), (61, 67), (52, 77)])
    def test_size_stays_within_a_factor_of_what_was_asked(self, shape, kind):
        grid = Grid(*shape)
        regions = Regions.divide(grid, kind, count=64)
        assert abs(math.log(regions.size / (grid.num_tokens / 64))) <= math.log(3)

    @pytest.mark.parametrize(
        ("grid", "asked", "taken"),
        [
            (Grid(8, 8, 16), {}, "4 tiles of 4×8×8"),
            (Grid(32, 48, 16), {}, "96 tiles of 4×8×8"),
            (Grid(30, 52, 21), {}, "140 tiles of 3×6×13"),  # Wan, 480p
            (Grid(45, 80, 21), {}, "280 tiles of 3×9×10"),  # Wan, 720p
            (Grid(22, 40, 31), {}, "124 tiles of 1×11×20"),  # a prime number of frames
            (Grid(8, 8, 16), {"frames": 1}, "16 tiles of 1×8×8"),
            (Grid(32, 48, 16), {"frames": 1}, "96 tiles of 1×16×16"),
            (Grid(32, 48, 16), {"kind": "stripe"}, "96 stripes of length 256"),
            (Grid(8, 8, 16), {"kind": "global"}, "the whole grid"),
        ],
    )
    def test_nearest_in_a_video(self, grid, asked, taken):
        assert Regions.divide(grid, **{"kind": "tile", "tokens": 256, "frames": 4} | asked).describe() == taken

    def test_parts_go_over_as_many_frames(self):
        regions = Regions.divide(Grid(32, 48, 16), "tile", tokens=256, frames=4)
        assert regions.subdivide(64).describe() == "384 tiles of 4×4×4"


class TestOneFrame:
    @given(any_regions)
    def test_is_an_image(self, regions):
        """A video of one frame is cut as the image is, whatever number of frames is asked for."""
        grid = Grid(regions.grid.height, regions.grid.width)
        asked = {"kind": regions.kind, "tokens": regions.size}
        assert Regions.divide(grid, **asked, frames=5) == Regions.divide(grid, **asked)


class TestInside:
    @given(any_regions, st.integers(1, 64))
    def test_indices_lead_to_the_same_tokens(self, outer, tokens):
        parts = outer.subdivide(tokens)
        everything = torch.arange(parts.size).expand(parts.count, -1)
        inside = parts.inside(outer, everything)
        assert inside.shape == (outer.count, outer.size)
        expected = torch.arange(outer.size).expand(outer.count, -1)
        assert torch.equal(inside.sort(dim=-1).values, expected)
        # In the same order as the parts: those of one region one after another.
        assert set(outer.positions(inside).tolist()) == set(range(outer.grid.num_tokens))
        place_of_part = parts.tiling.positions(everything)
        ours = {
            frozenset(each.tolist())
            for each in outer.tiling.positions(inside).unflatten(1, (-1, parts.size)).flatten(0, 1)
        }
        assert ours == {frozenset(each.tolist()) for each in place_of_part}


class TestDistances:
    @given(any_regions, st.sampled_from([0.0, 0.3]), st.sampled_from([0.0, 0.5]))
    def test_distance_is_between_places_in_the_video(self, regions, distance_weight, frame_weight):
        tiling = regions.tiling
        place = regions.split(coordinates(regions.grid))[..., 1:].float()  # [R, n, 3]
        frames, rows, columns = ((place[:, :, None] - place[:, None]) ** 2).unbind(-1)
        area = regions.height * regions.width
        expected = distance_weight * (rows + columns) / area + frame_weight * frames / regions.depth**2
        local = torch.arange(regions.size)
        measured = tiling.penalty(local.expand(regions.count, -1), local, distance_weight, frame_weight)
        torch.testing.assert_close(measured, expected, rtol=1e-5, atol=1e-5)
        assert measured.max() <= tiling.largest_penalty(distance_weight, frame_weight) + 1e-5


class TestErrors:
    def test_unknown_kind(self):
        with pytest.raises(ValueError, match="'hexagon' is not known: use one of 'tile', 'stripe', 'global'"):
            Regions.divide(Grid(4, 4), "hexagon", count=4)

    def test_no_regions(self):
        with pytest.raises(ValueError, match="count=0"):
            Regions.divide(Grid(4, 4), "tile", count=0)

    def test_empty_grid(self):
        with pytest.raises(ValueError, match="0×7"):
            Grid(0, 7)
        with pytest.raises(ValueError, match="0 frames of 4×7"):
            Grid(4, 7, 0)
