"""Videos: regions over frames, frames that are given or stand apart, sizes, positions that are read once."""

import pytest
import torch
from merging import merged, remove, steady
from observe import state_of
from pairs import in_turn, named, pairwise
from tiny import FRAME, FRAMES, SCOPES, TEXT_TOKENS, VIDEO, chosen, h3_inputs, h3_positions, one, outputs_of
from torch import Tensor, nn

from toma_diffusion import Merge, Skip, UsageError, speed_up
from toma_diffusion.families import video_from_ids
from toma_diffusion.merge.sites import Site

scopes = pytest.mark.parametrize("scope", SCOPES)


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(map(torch.equal, ours, theirs))


def over_time(model: nn.Module, **changes):
    """Regions of 2×2×2. They divide 6 frames, but not 7."""
    small = {"region_tokens": 8, "selection_tokens": 8, "region_frames": 2, "num_regions": None}
    return merged(model, **small | changes)


SIZES = [(1, 4, 4), (3, 5, 3), (5, 7, 1), (2, 4, 6)]
"""Frames, height and width in tokens: one frame, odd ones, primes."""
SIZED = pairwise(chosen("wan", "ltx2-given", "h3", "hunyuan", "mochi"), SCOPES, SIZES)


@pytest.mark.parametrize(
    ("family", "scope", "size"),
    pairwise(chosen("wan", "ltx2-given", "h3", "hunyuan", "mochi"), SCOPES, SIZES),
    ids=named,
)
def test_sizes_may_change_from_call_to_call(family, scope, size):
    frames, height, width = size
    model = family.build()
    handle = merged(model, scope=scope)
    family.call(model)
    assert all(each.isfinite().all() for each in outputs_of(model, family.sized(frames, height, width)))
    generated = frames - family.given if frames > 1 else frames
    grid = f"{generated}×{height}×{width}" if generated > 1 else f"{height}×{width}"
    for kind in handle.summary().merge.kinds:
        assert kind.grid == grid
        assert kind.tokens_after < kind.tokens_before == generated * height * width
    family.call(model)
    assert handle.summary().merge.kinds[0].grid == f"{FRAMES - family.given}×4×4"


@pytest.mark.parametrize("family", chosen("wan", "hunyuan"), ids=named)
def test_regions_may_go_over_frames_or_not(family):
    """With one frame a region, tokens of a frame are mixed with none of another."""
    model = family.build()
    frame = torch.zeros(2, FRAMES * FRAME, 1)
    frame[:, :FRAME] = 1
    handle = over_time(model, region_frames=1)
    family.call(model)
    assert "1×" in handle.summary().merge.kinds[0].regions
    plan = state_of(model).slots[0].plan
    assert set(plan.merge(frame).round(decimals=5).unique().tolist()) == {0.0, 1.0}
    remove(model)
    over_time(model, region_tokens=32, selection_tokens=32, region_frames=4, scale=1.0)
    family.call(model)
    mixed = state_of(model).slots[0].plan.merge(frame)
    assert ((mixed > 0.01) & (mixed < 0.99)).any()


NOT_GIVEN = [family for family in VIDEO if not family.given]
APART = "note: the first of 7 frames was left whole: 7 frames cannot be divided into regions of about 2 frames, the"


class TestFirstFrame:
    """If the frames cannot be divided, the first is left whole, and the others merge over time."""

    @pytest.mark.parametrize("family", chosen("wan", "hunyuan15"), ids=named)
    def test_without_it_tokens_merge_over_time(self, family):
        model = family.build()
        handle = over_time(model)
        outputs_of(model, family.sized(7, 4, 4))
        summary = handle.summary()
        assert [(kind.grid, kind.regions) for kind in summary.merge.kinds] == [("6×4×4", "12 tiles of 2×2×2")]
        assert APART in " ".join(str(summary).split())

    @pytest.mark.parametrize(("family", "scope"), in_turn(NOT_GIVEN, SCOPES), ids=named)
    def test_it_is_untouched_and_the_others_stay_in_their_boxes(self, family, scope):
        """Tokens that are their numbers: those outside come back as they are, the others as a mean of their box."""
        model, inputs = family.build(), family.sized(7, 4, 4)
        whole = outputs_of(model, inputs)
        handle = over_time(model, scope=scope)
        ours = outputs_of(model, inputs)
        assert not torch.allclose(ours[0], whole[0], atol=1e-3)
        state = state_of(model)
        site, plan = Site(state, state.slots[0]), state.slots[0].plan
        length = family.start + 7 * FRAME  # what comes before, and the video
        numbers = torch.arange(length).float().reshape(1, -1, 1).repeat(2, 1, 1)
        fewer = site.merge(plan, numbers)
        returned = site.unmerge(plan, fewer)
        start = family.start + FRAME
        assert fewer.shape[1] == length - 3 * FRAME
        assert torch.equal(returned[:, :start], numbers[:, :start])
        assert torch.equal(fewer[:, :start], numbers[:, :start])
        boxes, of_boxes = (plan.regions.split(each[:, start:]) for each in (numbers, returned))
        least, most = boxes.amin(1, keepdim=True), boxes.amax(1, keepdim=True)
        assert (most - least >= FRAME).all()
        assert ((of_boxes >= least - 1e-3) & (of_boxes <= most + 1e-3)).all()
        family.call(model)  # of another size
        assert equal(outputs_of(model, inputs), ours)
        handle.remove()
        assert equal(outputs_of(model, inputs), whole)

    def test_frames_that_can_be_divided_are_all_merged(self):
        family = one("wan")
        model = family.build()
        handle = over_time(model)
        outputs_of(model, family.sized(8, 4, 4))
        assert handle.summary().merge.kinds[0].grid == "8×4×4"
        assert not handle.summary().notes


@pytest.mark.parametrize("family", chosen("wan-ti2v", "hunyuan-replace"), ids=named)
def test_a_single_given_frame_is_refused(family):
    model = family.build()
    steady(model)
    if family.name == "wan-ti2v":  # a picture: its time is that of all tokens
        assert outputs_of(model, family.sized(1, 4, 4))[0].isfinite().all()
        return
    with pytest.raises(UsageError, match="one frame that is given"):
        outputs_of(model, family.sized(1, 4, 4))


class TestPositions:
    """MiniMax-H3 passes no size: it is in the positions."""

    @pytest.mark.parametrize(("size", "keyframes"), in_turn([(1, 4, 4), (5, 3, 7), (2, 1, 5), (3, 4, 1)], [0, 1, 2]))
    def test_sizes(self, size, keyframes):
        frames, height, width = size
        found = video_from_ids(h3_positions(*size, keyframes), (frames + keyframes) * height * width)
        assert (found.frames, found.height, found.width) == size

    def test_keyframes_next_to_the_video_do_not_belong_to_it(self):
        ids = h3_positions(3, 4, 4, keyframes=2)
        without_audio = torch.cat([ids[: TEXT_TOKENS + 32], ids[-48:]])
        assert video_from_ids(without_audio, 80).frames == 3

    def test_other_orders_are_refused(self):
        ids = h3_positions(3, 4, 4)
        with pytest.raises(UsageError, match="not frames of one row-major grid"):
            video_from_ids(torch.cat([ids[:-1], ids[-2:-1]]), 64)
        with pytest.raises(UsageError, match="not frames of one row-major grid"):
            video_from_ids(h3_positions(3, 4, 4, keyframes=0), 32)

    def test_they_are_read_once(self, monkeypatch):
        model, inputs = one("h3").build(), h3_inputs()
        merged(model)
        reads = []
        to_cpu = Tensor.cpu
        monkeypatch.setattr(Tensor, "cpu", lambda tensor: reads.append(1) or to_cpu(tensor))
        for _ in range(3):
            outputs_of(model, inputs)
        assert len(reads) == 1

    @scopes
    def test_latents_may_have_another_precision_than_tokens(self, scope):
        """As in its checkpoints: latents, and the layers that take them in, are float32."""
        model = one("h3").build().to(torch.bfloat16)
        for name in ("proj_in", "audio_proj_in", "proj_out", "audio_proj_out", "time_embedder"):
            getattr(model, name).float()
        handle = merged(model, Skip(computed=(0,)), scope=scope)
        handle.begin(2)
        for step in range(2):
            handle.step(step)
            assert all(each.isfinite().all() for each in outputs_of(model, h3_inputs()))
        assert state_of(model).slots[0].plan.weights.dtype == torch.bfloat16


def test_ltx2_without_its_size():
    family = one("ltx2")
    model = family.build()
    merged(model)
    with pytest.raises(UsageError, match="num_frames, height and width"):
        outputs_of(model, family.inputs() | {"num_frames": None})
    with pytest.raises(UsageError, match="64 tokens are fewer than a video of 5×4×4"):
        outputs_of(model, family.inputs() | {"num_frames": 5})


@pytest.mark.parametrize("name", ["AllegroTransformer3DModel", "SomeTransformer3DModel"])
def test_other_video_models_are_refused(name):
    with pytest.raises(UsageError, match="this video model is not supported yet"):
        speed_up(type(name, (nn.Module,), {})(), merge=Merge())
