"""Video models: only generated frames are merged, wherever they lie in a sequence; the rest stays as it is."""

import copy

import pytest
import torch
from observe import Graphs, attention_lengths, bookkeeping, inputs_of, our_hooks, same_picture, state_of
from pairs import named, pairwise
from peft import LoraConfig
from tiny import SCOPES, SETTINGS, STRIDED
from tiny_video import AUDIO_TOKENS, TEXT_TOKENS, VIDEO, chosen, h3_inputs, h3_positions
from torch import Tensor, nn

from toma_diffusion import Skip, ToMAConfig, UsageError, apply_toma, remove_toma
from toma_diffusion.engine.arguments import given_to
from toma_diffusion.families import find_adapter, video_from_ids
from toma_diffusion.merge.sites import Site

FRAMES, FRAME = 4, 16
"""Of the default inputs, and tokens of a frame."""
families = pytest.mark.parametrize("family", VIDEO, ids=named)
scopes = pytest.mark.parametrize("scope", SCOPES)


def both(model: nn.Module, inputs: dict) -> list[Tensor]:
    """All that the model returns: also audio."""
    with torch.no_grad():
        return list(model(**inputs, return_dict=False))


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def merged_tokens(family) -> int:
    """Of the frames that are generated, at ratio 0.5."""
    return (FRAMES - family.given) * FRAME // 2


def kept_rows(family, model: nn.Module, frames: int = FRAMES, whole: int | None = None) -> Tensor:
    """[B, rows]: which rows of the first block's sequence are left, by the plan and the layout of the family.

    Args:
        whole: frames at the beginning that are left whole. By default those that are given.
    """
    plan = state_of(model).slots[0].plan
    start = family.before + (family.given if whole is None else whole) * FRAME
    before, after = torch.arange(start), torch.arange(family.after) + family.before + frames * FRAME
    return torch.stack([torch.cat([before, start + chosen, after]) for chosen in plan.positions])


@families
@scopes
class TestMerging:
    def test_attention_sees_half_of_the_generated_frames(self, family, scope):
        model = family.build()
        whole = attention_lengths(lambda: family.call(model))
        apply_toma(model, **SETTINGS, scope=scope)
        merged = attention_lengths(lambda: family.call(model))
        removed = (FRAMES - family.given) * FRAME - merged_tokens(family)

        def reduced(queries: int, keys: int) -> tuple[int, int]:
            audio_asks = queries == AUDIO_TOKENS and scope == "module"  # then it sees the whole video
            return tuple(
                length - removed if length >= FRAMES * FRAME and not (side and audio_asks) else length
                for side, length in enumerate((queries, keys))
            )

        assert any(queries >= FRAMES * FRAME for queries, _ in whole)
        assert merged == [reduced(*lengths) for lengths in whole]

    def test_removal_and_ratio_zero_are_exact(self, family, scope):
        model, inputs = family.build(), family.inputs()
        before, whole = bookkeeping(model), both(model, inputs)
        with apply_toma(model, **SETTINGS | {"ratio": 0}, scope=scope):
            assert equal(both(model, inputs), whole)
        handle = apply_toma(model, **SETTINGS, scope=scope)
        merged = both(model, inputs)
        assert all(
            each.isfinite().all() and each.shape == of_whole.shape for each, of_whole in zip(merged, whole, strict=True)
        )
        assert not torch.allclose(merged[0], whole[0], atol=1e-3)
        handle.enabled = False
        assert equal(both(model, inputs), whole)
        remove_toma(model)
        assert equal(both(model, inputs), whole)
        assert bookkeeping(model) == before

    def test_summary_names_the_frames(self, family, scope):
        model = family.build()
        handle = apply_toma(model, **SETTINGS, scope=scope)
        family.call(model)
        frames = FRAMES - family.given
        found = [(kind.grid, kind.tokens_before, kind.tokens_after) for kind in handle.summary().kinds]
        assert found == [(f"{frames}×4×4", frames * FRAME, merged_tokens(family))] * family.kinds

    def test_other_arguments_carry_the_rows_of_destinations(self, family, scope):
        check_rows(family, scope, family.inputs(), FRAMES, family.given, **SETTINGS)


def check_rows(family, scope: str, inputs: dict, frames: int, whole: int, **settings) -> None:
    """Whatever has a row for every token has those of destinations; all other arguments of blocks and self-attention
    are untouched."""
    model = family.build()
    watched = family.block(model) if scope != "module" else getattr(family.block(model), family.attention)
    rows = family.block_rows if scope != "module" else family.attention_rows
    (original,) = inputs_of(watched, lambda: both(model, inputs))
    apply_toma(model, **settings, scope=scope)
    (merged,) = inputs_of(watched, lambda: both(model, inputs))
    kept, length = kept_rows(family, model, frames, whole), family.before + frames * FRAME + family.after
    given, reduced = given_to(watched, *original), given_to(watched, *merged)
    for name in {*given.names, *given.kwargs} - {"hidden_states"}:
        for one, other in zip(tensors(given[name]), tensors(reduced[name]), strict=True):
            assert torch.equal(other, taken(one, rows.get(name, ()), kept, length)), name
    outside = [*range(family.before + whole * FRAME), *range(-family.after, 0)]
    assert torch.equal(reduced.tokens[:, outside], given.tokens[:, outside])
    assert reduced.tokens.shape[1] == kept.shape[1] < length


def tensors(value) -> list[Tensor]:
    return [each for each in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(each, Tensor)]


def taken(table: Tensor, dims: tuple[int, ...], kept: Tensor, length: int) -> Tensor:
    """The kept of `length` rows of a table, and what comes after them: text in a mask."""
    for dim in dims:
        if dim == 0:  # one table for all samples: they share their rows, or each gets a table
            return table[kept[0]] if (kept == kept[0]).all() else torch.stack([table[rows] for rows in kept])
        after = torch.arange(length, table.shape[dim])
        samples = table.expand(len(kept), *table.shape[1:])
        table = torch.stack(
            [one.index_select(dim - 1, torch.cat([rows, after])) for one, rows in zip(samples, kept, strict=True)]
        )
    return table


ROTARY = [family for family in VIDEO if not family.name.startswith("cogvideox")]
"""Those that compute positions themselves."""


@pytest.mark.parametrize("family", ROTARY, ids=named)
def test_a_merged_token_has_the_coordinate_of_its_destination(family):
    check_coordinates(family, family.inputs(), FRAMES, family.given, **SETTINGS)


def check_coordinates(family, inputs: dict, frames: int, whole: int, **settings) -> None:
    """Positions are replaced by the number of the token: what attention gets are numbers of destinations."""
    model = family.build()
    (dim,) = family.attention_rows[family.rotary]

    def number(module, args, output):
        return tuple(
            torch.arange(each.shape[dim], dtype=each.dtype)
            .reshape(-1, *[1] * (each.ndim - dim - 1))
            .expand(each.shape)
            .clone()
            for each in output
        )

    model.rope.register_forward_hook(number)
    apply_toma(model, **settings, scope="block")
    attention = getattr(family.block(model), family.attention)
    ((args, kwargs),) = inputs_of(attention, lambda: both(model, inputs))
    kept = kept_rows(family, model, frames, whole)
    assert len({*kept[0].tolist()}) == kept.shape[1] < family.before + frames * FRAME + family.after
    for table in given_to(attention, args, kwargs)[family.rotary]:
        numbers = table.movedim(dim, -1).reshape(-1, table.shape[dim]) if not (dim == 0 and table.ndim == 4) else None
        if numbers is None:  # [batch, tokens, heads, channels]
            numbers = table.movedim(1, -1).reshape(-1, table.shape[1])
        expected = kept if len(numbers) == len(kept) else kept.repeat_interleave(len(numbers) // len(kept), 0)
        assert torch.equal(numbers, (kept[:1] if family.joint else expected).to(numbers).expand_as(numbers))


@pytest.mark.parametrize("family", chosen("wan-ti2v", "ltx2-given", "hunyuan-replace"), ids=named)
@scopes
def test_a_given_frame_is_never_merged(family, scope):
    """Its tokens go into attention and MLP one by one, as they are, at the beginning."""
    model = family.build()
    block = family.block(model)
    (whole,) = inputs_of(getattr(block, family.attention), lambda: family.call(model))
    apply_toma(model, **SETTINGS, scope=scope)
    attention = getattr(block, family.attention)
    (merged,) = inputs_of(attention, lambda: family.call(model))
    given, reduced = (given_to(attention, *each).tokens[:, :FRAME] for each in (whole, merged))
    assert torch.equal(given, reduced)
    assert given_to(attention, *merged).tokens.shape[1] == FRAME + merged_tokens(family) + family.after


def test_a_single_given_frame_is_refused():
    (family,) = chosen("hunyuan-replace")
    model = family.build()
    apply_toma(model, **SETTINGS)
    with pytest.raises(UsageError, match="one frame that is given"):
        both(model, family.sized(1, 4, 4))


SIZES = [(1, 4, 4), (3, 5, 3), (5, 7, 1), (2, 4, 6)]
"""Frames, height and width in tokens: one frame, odd ones, primes."""
SIZED = [case for case in pairwise(VIDEO, SCOPES, SIZES) if (case[0].name, case[2][0]) != ("hunyuan-replace", 1)]


@pytest.mark.parametrize(("family", "scope", "size"), SIZED, ids=named)
def test_sizes_may_change_from_call_to_call(family, scope, size):
    frames, height, width = size
    model = family.build()
    handle = apply_toma(model, **SETTINGS, scope=scope)
    family.call(model)
    assert all(each.isfinite().all() for each in both(model, family.sized(frames, height, width)))
    merged = frames - family.given if frames > 1 else frames
    grid = f"{merged}×{height}×{width}" if merged > 1 else f"{height}×{width}"
    for kind in handle.summary().kinds:
        assert kind.grid == grid
        assert kind.tokens_after < kind.tokens_before == merged * height * width
    family.call(model)
    assert handle.summary().kinds[0].tokens_before == (FRAMES - family.given) * FRAME


@pytest.mark.parametrize("family", chosen("wan", "ltx2", "hunyuan15"), ids=named)
@scopes
def test_one_frame_is_merged_as_an_image(family, scope):
    """Whatever concerns frames does not count, bit for bit."""
    inputs, outputs = family.sized(1, 4, 4), []
    for changes in ({}, {"region_frames": 1, "frame_weight": 0.0}, {"region_frames": 8, "frame_weight": 2.0}):
        model = family.build()
        apply_toma(model, ratio=0.5, region_tokens=8, selection_tokens=4, skip_blocks=(), scope=scope, **changes)
        outputs.append(both(model, inputs))
    assert equal(outputs[0], outputs[1])
    assert equal(outputs[0], outputs[2])


@pytest.mark.parametrize("family", chosen("wan", "hunyuan"), ids=named)
def test_regions_may_go_over_frames_or_not(family):
    """With one frame a region, tokens of a frame are mixed with none of another."""
    model = family.build()
    handle = apply_toma(model, ratio=0.5, region_tokens=8, selection_tokens=8, region_frames=1, skip_blocks=())
    family.call(model)
    assert "1×" in handle.summary().kinds[0].regions
    plan = state_of(model).slots[0].plan
    frame = torch.zeros(2, FRAMES * FRAME, 1)
    frame[:, :FRAME] = 1
    assert set(plan.merge(frame).round(decimals=5).unique().tolist()) == {0.0, 1.0}
    remove_toma(model)
    apply_toma(model, ratio=0.5, region_tokens=32, selection_tokens=32, region_frames=4, scale=1.0, skip_blocks=())
    family.call(model)
    merged = state_of(model).slots[0].plan.merge(frame)
    assert ((merged > 0.01) & (merged < 0.99)).any()


@pytest.mark.parametrize("family", [family for family in VIDEO if not family.joint])
@scopes
def test_a_batch_is_its_samples(family, scope):
    model, inputs = family.build(), family.inputs()
    apply_toma(model, **STRIDED | {"guidance_parts": 1}, scope=scope)
    together = both(model, inputs)
    for index in range(2):
        alone = {key: one_of(value, index) for key, value in inputs.items()}
        for ours, theirs in zip(both(model, alone), together, strict=True):
            same_picture(ours, theirs[index : index + 1])


def one_of(value, index: int):
    return value[index : index + 1] if isinstance(value, Tensor) and len(value) == 2 else value


@families
def test_joint_is_what_the_adapter_says(family):
    model = family.build()
    apply_toma(model, **SETTINGS)
    family.call(model)
    assert find_adapter(model).is_joint(model) == family.joint == state_of(model).slots[0].plan.joint


@pytest.mark.parametrize(
    ("family", "scope"), [(family, SCOPES[index % 3]) for index, family in enumerate(VIDEO)], ids=named
)
class TestComposition:
    def test_copies_merge_on_their_own(self, family, scope):
        model, inputs = family.build(), family.inputs()
        whole = both(model, inputs)
        apply_toma(model, **SETTINGS, scope=scope)
        merged = both(model, inputs)
        copied = copy.deepcopy(model)
        remove_toma(model)
        assert equal(both(model, inputs), whole)
        assert equal(both(copied, inputs), merged)
        remove_toma(copied)
        assert equal(both(copied, inputs), whole)
        assert not our_hooks(copied)

    def test_lora(self, family, scope):
        model, inputs = family.build(), family.inputs()
        apply_toma(model, **SETTINGS, scope=scope)
        merged = both(model, inputs)
        torch.manual_seed(1)
        config = LoraConfig(r=2, target_modules=["to_q", "to_k", "proj_out"], init_lora_weights=False)
        model.add_adapter(config)
        with_lora = both(model, inputs)
        assert not torch.allclose(with_lora[0], merged[0], atol=1e-3)
        assert attention_lengths(lambda: both(model, inputs)) != attention_lengths(lambda: family.call(family.build()))
        model.delete_adapters(["default"])
        same_picture(both(model, inputs)[0], merged[0])


@pytest.fixture
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    ("family", "scope"), [(*chosen("wan-ti2v"), "stage"), (*chosen("ltx2-given"), "module")], ids=named
)
def test_compiled_blocks_are_not_compiled_again(family, scope):
    check_compiled(family, scope, FRAMES, **STRIDED)


def check_compiled(family, scope: str, frames: int, **settings) -> None:
    """Steps of another generation run in the code of the first, and compute what a model that is not compiled does."""
    graphs = Graphs()
    models = [family.build(num_layers=2) for _ in range(2)]
    for model in models:
        apply_toma(model, **settings, scope=scope, select_every=1, reweigh_every=1)
    for block in find_adapter(models[0]).blocks(models[0]):
        block.module.compile(fullgraph=True, backend=graphs)
    first, second = (family.sized(frames, 4, 4, seed=seed) for seed in range(2))
    same_picture(*(torch.stack(steps(model, first)) for model in models))
    assert graphs.count
    with torch.compiler.set_stance("fail_on_recompile"):
        same_picture(*(torch.stack(steps(model, second)) for model in models))


def steps(model: nn.Module, inputs: dict, number: int = 3) -> list[Tensor]:
    return [both(model, inputs | {"hidden_states": inputs["hidden_states"] + 0.01 * step})[0] for step in range(number)]


def watched(model: nn.Module, inputs: dict) -> tuple[list[Tensor], list[tuple[int, int]]]:
    """What a model returns, and the lengths that its attention sees."""
    outputs: list[Tensor] = []
    return outputs, attention_lengths(lambda: outputs.extend(both(model, inputs)))


@families
class TestSkippedSteps:
    def test_computed_steps_are_the_original_and_others_run_no_block(self, family):
        model = family.build()
        originals = [both(model, family.inputs(seed=step)) for step in range(4)]
        handle = apply_toma(model, ToMAConfig(ratio=0, skip=Skip(computed=(0, 2))))
        handle.begin(4)
        for step in range(4):
            handle.step(step)
            outputs, attended = watched(model, family.inputs(seed=step))
            assert equal(outputs, originals[step - step % 2])
            assert bool(attended) == (step in (0, 2))
        assert handle.summary().steps == (2, 2)
        remove_toma(model)
        assert equal(both(model, family.inputs(seed=0)), originals[0])

    def test_with_merging(self, family):
        model = family.build()
        handle = apply_toma(model, **SETTINGS, scope="stage", skip=Skip(computed=(0, 1)))
        handle.begin(3)
        outputs = []
        for step in range(3):
            handle.step(step)
            outputs.append(both(model, family.inputs(seed=step)))
            assert all(each.isfinite().all() for each in outputs[-1])
        assert equal(outputs[2], outputs[1])
        assert handle.summary().steps == (2, 1)


OVER_TIME = {"ratio": 0.5, "region_tokens": 8, "selection_tokens": 8, "region_frames": 2, "skip_blocks": ()}
"""Regions of 2×2×2. They divide 6 frames, but not 7."""
APART = "note: the first of 7 frames was left whole: 7 frames cannot be divided into regions of about 2 frames, the"
NOT_GIVEN = [family for family in VIDEO if not family.given]
frames_apart = pytest.mark.parametrize(("family", "scope"), pairwise(NOT_GIVEN, SCOPES), ids=named)


def seven(family, **arguments) -> dict:
    return family.sized(7, 4, 4, **arguments)


class TestFirstFrame:
    """If the frames cannot be divided, the first is left whole, and the others merge over time."""

    @pytest.mark.parametrize("family", chosen("wan", "hunyuan15"), ids=named)
    @scopes
    def test_without_it_tokens_merge_over_time(self, family, scope):
        model = family.build()
        handle = apply_toma(model, **OVER_TIME, scope=scope)
        regions = []
        for why in (None, state_of(model).why_first_frame_whole):  # as it was, as it is
            state_of(model).why_first_frame_whole = why
            assert APART not in str(handle.summary())
            both(model, seven(family))
            regions += [(kind.grid, kind.regions) for kind in handle.summary().kinds]
        assert regions == [("7×4×4", "14 tiles of 1×2×4"), ("6×4×4", "12 tiles of 2×2×2")]
        assert APART in " ".join(str(handle.summary()).split())
        plan = state_of(model).slots[0].plan
        frame = torch.zeros(2, 6 * FRAME, 1)
        frame[:, :FRAME] = 1
        merged = plan.merge(frame)
        assert ((merged > 0.01) & (merged < 0.99)).any()  # with tokens of the next frame

    @frames_apart
    def test_it_is_untouched_and_the_others_keep_their_places(self, family, scope):
        check_rows(family, scope, seven(family), 7, 1, **OVER_TIME)

    @pytest.mark.parametrize("family", [family for family in ROTARY if not family.given], ids=named)
    def test_coordinates(self, family):
        check_coordinates(family, seven(family), 7, 1, **OVER_TIME)

    @frames_apart
    def test_numbers_of_tokens_stay_in_their_boxes(self, family, scope):
        """Tokens that are their numbers: those outside come back as they are, the others as a mean of their box."""
        model = family.build()
        apply_toma(model, **OVER_TIME, scope=scope)
        both(model, seven(family))
        state = state_of(model)
        site, plan = Site(state, state.slots[0]), state.slots[0].plan
        length = family.before + 7 * FRAME + family.after
        numbers = torch.arange(length).float().reshape(1, -1, 1).repeat(2, 1, 1)
        merged = site.merge(plan, numbers)
        returned = site.unmerge(plan, merged)
        assert merged.shape[1] == length - 3 * FRAME
        start = family.before + FRAME
        video, outside = slice(start, start + 6 * FRAME), [*range(start), *range(length - family.after, length)]
        assert torch.equal(returned[:, outside], numbers[:, outside])
        assert torch.equal(merged[:, :start], numbers[:, :start])
        assert not torch.equal(returned[:, video], numbers[:, video])
        boxes, of_boxes = (plan.regions.split(each[:, video]) for each in (numbers, returned))
        least, most = boxes.amin(1, keepdim=True), boxes.amax(1, keepdim=True)
        assert (most - least >= FRAME).all()
        assert ((of_boxes >= least - 1e-3) & (of_boxes <= most + 1e-3)).all()

    @frames_apart
    def test_removal_and_ratio_zero_are_exact(self, family, scope):
        model, inputs = family.build(), seven(family)
        whole = both(model, inputs)
        with apply_toma(model, **OVER_TIME | {"ratio": 0}, scope=scope) as handle:
            assert equal(both(model, inputs), whole)
            assert not handle.summary().notes
        handle = apply_toma(model, **OVER_TIME, scope=scope)
        merged = both(model, inputs)
        assert not torch.allclose(merged[0], whole[0], atol=1e-3)
        family.call(model)  # of another size
        assert equal(both(model, inputs), merged)
        handle.enabled = False
        assert equal(both(model, inputs), whole)
        remove_toma(model)
        assert equal(both(model, inputs), whole)

    @pytest.mark.parametrize(("family", "frames"), pairwise(VIDEO, [1, 2, 3, 4, 5, 8, 9, 12]), ids=named)
    def test_frames_that_can_be_divided_are_as_before(self, family, frames):
        """Bit for bit; and so is what cannot be divided either way."""
        if (family.name, frames) == ("hunyuan-replace", 1):
            return
        found = []
        for changes in ({}, {"region_frames": 1}):
            for is_new in (True, False):
                model = family.build()
                handle = apply_toma(model, **OVER_TIME | {"region_frames": 4} | changes)
                if not is_new:
                    state_of(model).why_first_frame_whole = None
                found.append((both(model, family.sized(frames, 4, 4)), handle.summary().kinds))
        for (ours, kinds), (theirs, kinds_before) in (found[:2], found[2:]):
            assert equal(ours, theirs)
            assert kinds == kinds_before

    @pytest.mark.parametrize("family", [family for family in NOT_GIVEN if not family.joint], ids=named)
    def test_a_batch_is_its_samples(self, family):
        model, inputs = family.build(), seven(family)
        apply_toma(model, **OVER_TIME, selection="strided", guidance_parts=1, scope="stage")
        together = both(model, inputs)
        for index in range(2):
            alone = {key: one_of(value, index) for key, value in inputs.items()}
            same_picture(both(model, alone)[0], together[0][index : index + 1])

    @pytest.mark.usefixtures("_fresh_compiler")
    @pytest.mark.parametrize(
        ("family", "scope"), [(*chosen("mochi"), "module"), (*chosen("hunyuan15"), "stage")], ids=named
    )
    def test_compiled_blocks_are_not_compiled_again(self, family, scope):
        check_compiled(family, scope, 7, **OVER_TIME | {"selection": "strided"})


@families
@pytest.mark.parametrize("method", ["tomesd", "tofu"])
def test_other_methods_merge_within_frames(family, method):
    model, inputs = family.build(), family.inputs()
    whole = both(model, inputs)
    handle = apply_toma(model, method, ratio=0.5)
    assert not torch.allclose(both(model, inputs)[0], whole[0], atol=1e-3)
    frames = FRAMES - family.given
    for kind in handle.summary().kinds:
        assert (kind.grid, kind.tokens_after) == (f"{frames}×4×4", merged_tokens(family))
    remove_toma(model)
    assert equal(both(model, inputs), whole)


class TestPositionsOfVideo:
    """MiniMax-H3 passes no size: it is in the positions."""

    @pytest.mark.parametrize("keyframes", [0, 1, 2])
    @pytest.mark.parametrize("size", [(1, 4, 4), (5, 3, 7), (2, 1, 5), (3, 4, 1)])
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

    @pytest.mark.parametrize("family", chosen("h3"), ids=named)
    def test_they_are_read_once(self, family, monkeypatch):
        model, inputs = family.build(), h3_inputs()
        apply_toma(model, **SETTINGS)
        reads = []
        to_cpu = Tensor.cpu
        monkeypatch.setattr(Tensor, "cpu", lambda tensor: reads.append(1) or to_cpu(tensor))
        for _ in range(3):
            both(model, inputs)
        assert len(reads) == 1

    @pytest.mark.parametrize("family", chosen("h3"), ids=named)
    @scopes
    def test_latents_may_have_another_precision_than_tokens(self, family, scope):
        """As in its checkpoints: latents, and the layers that take them in, are float32."""
        model = family.build().to(torch.bfloat16)
        for name in ("proj_in", "audio_proj_in", "proj_out", "audio_proj_out", "time_embedder"):
            getattr(model, name).float()
        handle = apply_toma(model, **SETTINGS, scope=scope, skip=Skip(computed=(0,)))
        handle.begin(2)
        for step in range(2):
            handle.step(step)
            assert all(each.isfinite().all() for each in both(model, h3_inputs()))
        assert state_of(model).slots[0].plan.weights.dtype == torch.bfloat16


class TestRefused:
    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("LatteTransformer3DModel", "space and time in turn"),
            ("SanaVideoTransformer3DModel", "attention is linear"),
            ("WanVACETransformer3DModel", "added to all tokens"),
            ("AllegroTransformer3DModel", "this video model is not supported yet"),
        ],
    )
    def test_others_by_their_reason(self, name, reason):
        model = type(name, (nn.Module,), {})()
        with pytest.raises(UsageError, match=reason):
            apply_toma(model)

    @pytest.mark.parametrize("family", chosen("ltx2"), ids=named)
    def test_ltx2_without_its_size(self, family):
        model = family.build()
        apply_toma(model, **SETTINGS)
        with pytest.raises(UsageError, match="num_frames, height and width"):
            both(model, family.inputs() | {"num_frames": None})
        with pytest.raises(UsageError, match="64 tokens are fewer than a video of 5×4×4"):
            both(model, family.inputs() | {"num_frames": 5})
