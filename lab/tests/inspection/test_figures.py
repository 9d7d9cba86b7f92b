"""The paper's Figures 3, 4 and 9, and merge maps."""

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_text import text_pipeline
from toma_lab.inspection.clusters import ClusterRecorder, plot_clusters, recolor, short_name
from toma_lab.inspection.figures import choose_evenly
from toma_lab.inspection.merge_map import MergeMapRecorder, plot_merge_maps, targets_of
from toma_lab.inspection.overlap import OverlapRecorder
from toma_lab.inspection.watch import BlockInput
from toma_lab.pipelines.generation import ImageRequest, generate_image

from toma_diffusion import Merge, speed_up
from toma_diffusion.merge import Action, Grid, MergePlan
from toma_diffusion.others import ToDo

GRID = Grid(8, 8)


def block_input(step: int, tokens: torch.Tensor, block: str = "a") -> BlockInput:
    return BlockInput(step, block, "level 0", GRID, tokens)


class TestOverlap:
    def test_compared_with_the_first_step_of_each_ten_block_by_block(self):
        tokens, others = torch.randn(2, 64, 16)
        recorder = OverlapRecorder(Merge(ratio=0.5, num_regions=4))
        for step in range(21):
            recorder(block_input(step, tokens if step < 5 else others))
            recorder(block_input(step, tokens, block="b"))
        shares = {(point.block, point.step): point.share for point in recorder.shares}
        assert all(shares["b", step] == 1 for step in range(21))
        assert all(shares["a", step] == 1 for step in (*range(5), *range(10, 21)))
        assert 0.3 < shares["a", 5] < 0.7  # by chance half
        assert shares["a", 5] == shares["a", 9]


class TestClusters:
    def test_clusters_take_the_colour_of_their_part_of_the_image(self):
        image = Image.new("RGB", (16, 16), "red")
        image.paste("blue", (8, 0, 16, 16))
        left = torch.arange(64) % 8 < 4
        tokens = torch.where(left[:, None], torch.tensor([5.0, 0.0]), torch.tensor([0.0, 5.0]))
        tokens = tokens + 0.01 * torch.randn(64, 2)
        recorder = ClusterRecorder([3], ["a"])
        for step in range(5):
            recorder(block_input(step, tokens))
            recorder(block_input(step, tokens, block="b"))
        assert list(recorder.labels) == [("a", 3)]
        grid, labels = recorder.labels["a", 3]
        recolored = recolor(image, grid, labels).reshape(64, 3)
        assert torch.allclose(recolored[left], torch.tensor([1.0, 0, 0]))
        assert torch.allclose(recolored[~left], torch.tensor([0, 0, 1.0]))

    def test_a_prompt_is_no_formula_and_is_not_cut(self, tmp_path):
        recorder = ClusterRecorder([0], ["a"])
        recorder(block_input(0, torch.randn(64, 2)))
        image = Image.new("RGB", (16, 16), "red")
        for name, title in (("short.png", "bills"), ("long.png", r"bills of $5 and $\5_{ dollars " * 4)):
            plot_clusters(image, recorder, title, tmp_path / name)
        # The long one takes several lines above pictures that are smaller for it; at both sides there is white.
        columns = np.asarray(Image.open(tmp_path / "long.png").convert("L")).min(axis=0)
        assert columns[0] == columns[-1] == 255

    def test_a_few_of_many(self):
        assert choose_evenly(range(3), 6) == [0, 1, 2]
        assert choose_evenly(range(50), 6) == [0, 10, 20, 29, 39, 49]

    @pytest.mark.parametrize(
        ("name", "short"),
        [
            ("down_blocks.0.attentions.1.transformer_blocks.0", "down 0.1.0"),
            ("mid_block.attentions.0.transformer_blocks.1", "mid 0.1"),
            ("transformer_blocks.3", "transformer 3"),
            ("single_transformer_blocks.12", "single 12"),
        ],
    )
    def test_short_names(self, name, short):
        assert short_name(name) == short


class TestMergeMap:
    @pytest.mark.parametrize("assign", ["local", "global"])
    @pytest.mark.parametrize("region", ["tile", "stripe", "global"])
    @pytest.mark.parametrize("scale", [1e6, float("inf")])
    def test_targets_are_what_unmerging_copies_from(self, region, assign, scale):
        divided = {} if region == "global" else {"num_regions": 4}
        config = Merge(region=region, assign=assign, scale=scale, **divided)
        plan = MergePlan(GRID, config, batch_size=2)
        tokens = torch.randn(2, 64, 16)
        plan.update(tokens, Action.SELECT)
        targets = targets_of(plan)
        kept = plan.positions[-1]
        assert set(targets.tolist()) == set(kept.tolist())
        assert torch.equal(targets[kept], kept)  # a destination is merged into itself
        # Every destination hands its own number back to the tokens that were merged into it.
        spread = plan.unmerge(plan.positions[:, :, None].float())
        assert torch.allclose(spread[-1, :, 0], targets.float(), atol=0.5)

    def test_plans_are_noted_when_they_change(self, tmp_path):
        pipe = text_pipeline()
        with speed_up(pipe, merge=Merge(num_regions=4, select_every=4)) as handle:
            recorder = MergeMapRecorder(handle)
            image = generate_image(pipe, ImageRequest("a shoe", steps=9), recorder)
        assert [(one.kind, one.step) for one in recorder.maps if one.kind == "level 0"] == [
            ("level 0", 0),
            ("level 0", 4),
            ("level 0", 8),
        ]
        assert {(one.kind, one.grid.num_tokens, int(one.kept.sum())) for one in recorder.maps} == {
            ("level 0", 64, 32),
            ("level 1", 16, 8),
        }
        plot_merge_maps(image, recorder.maps, "title").savefig(tmp_path / "map.png", dpi=130)
        assert Image.open(tmp_path / "map.png").width > 800

    def test_other_methods_are_refused(self):
        pipe = text_pipeline()
        with speed_up(pipe, merge=ToDo()) as handle, pytest.raises(ValueError, match="ToDo has no destinations"):
            generate_image(pipe, ImageRequest("a shoe", steps=1), MergeMapRecorder(handle))
