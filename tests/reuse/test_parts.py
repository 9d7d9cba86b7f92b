"""Reuse on every family: computed steps are the original's, reused ones run nothing and add what is remembered."""

import pytest
import torch
from observe import bookkeeping, our_hooks, state_of
from parts import BY_NAME, OUTSIDE, PARTS, call, ends_of, generate, only_reuse, own_forwards, plain, reusing
from tiny import with_sample

from toma_diffusion import apply_toma, remove_toma

COMPUTED = (0, 1, 4)
"""Steps 2 and 3 follow a line through two neighbours, 5 and 6 one through steps that lie apart."""
every_part = pytest.mark.parametrize(("family", "part"), PARTS, ids=lambda value: getattr(value, "name", value))


def expected_change(ends, step: int, order: int) -> list[torch.Tensor]:
    """By the formula, from what our own hooks saw in computed steps."""
    *_, before, last = [None, *(each for each in COMPUTED if each < step)]
    if order == 0 or before is None:
        return list(ends.change(last))
    slope = (step - last) / (last - before)
    return [new + (new - old) * slope for old, new in zip(ends.change(before), ends.change(last), strict=True)]


@every_part
@pytest.mark.parametrize("order", [0, 1])
def test_computed_and_reused_steps(family, part, order):
    model = family.build()
    handle = apply_toma(model, only_reuse(computed=COMPUTED, order=order, part=part))
    ends = ends_of(model)
    outputs, original = generate(family, model, handle, 7), plain(family, 7)
    for step in range(7):
        assert torch.equal(outputs[step], original[step]) == (step in COMPUTED)
        for each in ends.values():
            if step in COMPUTED:
                assert each.layers[step] > 0
                continue
            assert each.layers[step] == 0
            change = expected_change(each, step, order)
            for index, remembered in enumerate(change):
                whole = 0 if each.deep else each.inputs[step][index]
                torch.testing.assert_close(each.outputs[step][index], whole + remembered, atol=1e-5, rtol=1e-5)


@every_part
def test_reused_steps_still_follow_their_input(family, part):
    """What lies outside of the parts is computed."""
    model = family.build()
    handle = apply_toma(model, only_reuse(computed=(0,), order=0, part=part))
    _, second, third = generate(family, model, handle, 3)
    assert not torch.allclose(second, third, atol=1e-3)


NAMES = {
    ("sd15", "blocks"): [
        "down_blocks.0.attentions.0.transformer_blocks.0",
        "mid_block.attentions.0.transformer_blocks.0",
        "up_blocks.1.attentions.0.transformer_blocks.0",
        "up_blocks.1.attentions.1.transformer_blocks.0",
    ],
    ("sdxl", "blocks"): [
        "down_blocks.1.attentions.0",
        "mid_block.attentions.0",
        "up_blocks.0.attentions.0",
        "up_blocks.0.attentions.1",
    ],
    ("flux", "blocks"): ["transformer_blocks", "single_transformer_blocks"],
    ("sd3", "blocks"): ["transformer_blocks"],
    ("pixart", "blocks"): ["transformer_blocks"],
    ("flux2", "blocks"): ["transformer_blocks", "single_transformer_blocks"],
    ("flux3", "blocks"): ["mode_blocks.image", "single_transformer_blocks"],
    ("qwen-image", "blocks"): ["transformer_blocks"],
    ("qwen-image-21", "blocks"): ["transformer_blocks"],
    ("z-image", "blocks"): ["layers"],
    ("krea2", "blocks"): ["transformer_blocks"],
    ("chroma", "blocks"): ["transformer_blocks", "single_transformer_blocks"],
    ("auraflow", "blocks"): ["joint_transformer_blocks", "single_transformer_blocks"],
    ("sd15", "deep"): [
        "down_blocks.0.attentions.0.transformer_blocks.0",
        "up_blocks.1.attentions.0.transformer_blocks.0",
        "up_blocks.1.attentions.1.transformer_blocks.0",
        "below level 0",
    ],
    ("sdxl", "deep"): ["below level 0"],
}


@every_part
def test_names(family, part):
    model = family.build()
    handle = apply_toma(model, only_reuse(part=part))
    assert list(handle.summary().parts) == NAMES[family.name, part]


@every_part
def test_every_block_is_in_one_part(family, part):
    model = family.build()
    apply_toma(model, only_reuse(part=part))
    inside = [id(each) for part in state_of(model).parts for module in part.modules for each in module.modules()]
    blocks = [
        each
        for name, each in model.named_modules()
        if type(each).__name__.endswith("TransformerBlock") and not name.startswith(OUTSIDE)
    ]
    assert len(inside) == len(set(inside))
    assert {id(block) for block in blocks} <= set(inside)


class TestKeep:
    @pytest.mark.parametrize("keep", [("mid",), ("up_blocks.1", "down")], ids=str)
    def test_kept_parts_are_computed(self, keep):
        family = BY_NAME["sd15"]
        model = family.build()
        handle = apply_toma(model, only_reuse(computed=(0,), keep=keep))
        blocks = {
            name: module for name, module in model.named_modules() if type(module).__name__ == "BasicTransformerBlock"
        }
        ran = []
        for name, block in blocks.items():
            block.ff.register_forward_hook(lambda *_, name=name: ran.append(name))
        generate(family, model, handle, 2)
        assert sorted(ran) == sorted([*blocks, *(name for name in blocks if name.startswith(keep))])
        assert len(ran) > len(blocks)


@every_part
def test_removal_leaves_nothing(family, part):
    model = family.build()
    before, original = bookkeeping(model), call(family, model)
    handle = apply_toma(model, only_reuse(start=0, part=part))
    assert own_forwards(model)
    generate(family, model, handle, 2)  # the last step reused
    remove_toma(model)
    assert not own_forwards(model)
    assert not our_hooks(model)
    assert bookkeeping(model) == before
    assert torch.equal(call(family, model), original)


@every_part
def test_period_1_is_the_original(family, part):
    assert all(map(torch.equal, reusing(family, period=1, part=part), plain(family)))


@every_part
def test_switched_off_is_the_original(family, part):
    model = family.build()
    handle = apply_toma(model, only_reuse(start=0, part=part))
    generate(family, model, handle, 2)
    handle.enabled = False
    assert all(map(torch.equal, generate(family, model, handle, 4), plain(family)))


@pytest.mark.parametrize("family", [BY_NAME["sd15"], BY_NAME["flux"]], ids=lambda family: family.name)
def test_switched_on_again_computes_first(family):
    """What is remembered is from long ago."""
    model = family.build()
    handle = apply_toma(model, only_reuse(computed=(0,), order=0))
    original = plain(family, 6)
    handle.begin(6)
    for step in range(6):
        handle.enabled = step not in (2, 3)
        handle.step(step)
        assert torch.equal(call(family, model, step), original[step]) == (step in (0, 2, 3, 4))


def test_switched_off_needs_no_number_of_steps():
    family = BY_NAME["sd15"]
    model = family.build()
    handle = apply_toma(model, only_reuse())  # start=0.2
    with pytest.raises(RuntimeError, match=r"start=0\.2.*handle\.begin\(num_steps\)"):
        call(family, model)
    handle.enabled = False
    assert torch.equal(call(family, model), plain(family, 1)[0])


class TestUNets:
    @pytest.mark.parametrize(("name", "order"), [("sd15", 0), ("sdxl", 1)])
    def test_odd_sizes(self, name, order):
        family = BY_NAME[name]
        model, original = family.build(), family.build()
        handle = apply_toma(model, only_reuse(computed=(0, 2), part="deep", order=order))
        for height, wide in family.odd:
            handle.begin(4)
            for step in range(4):
                handle.step(step)
                size = {"height": height, "wide": wide, "seed": step}
                output = family.call(model, **size)
                assert output.shape[-2:] == (height, wide)
                assert torch.equal(output, family.call(original, **size)) == (step in (0, 2))

    def test_one_level_alone_has_nothing_below_it(self):
        family = BY_NAME["sdxl"]
        model = family.build(**family.shallow)
        handle = apply_toma(model, only_reuse(computed=(0,), part="deep"))
        assert list(handle.summary().parts) == ["down_blocks.0.attentions.0"]
        first, second = generate(family, model, handle, 2)
        assert not torch.equal(first, second)

    @pytest.mark.parametrize("padding", [0, 1])
    def test_three_levels_without_a_middle(self, padding):
        """What stands for blocks has their shapes, also where the padding rounds odd sizes up or down."""
        family = BY_NAME["sd15"]
        changes = {
            "block_out_channels": (32, 32, 64),
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            "mid_block_type": None,
            "downsample_padding": padding,
        }
        model, original = family.build(**changes), family.build(**changes)
        handle = apply_toma(model, only_reuse(computed=(0,), order=0, part="deep"))
        (ends,), shapes = ends_of(model).values(), []
        for block in model.down_blocks:
            block.register_forward_hook(lambda _, __, out: shapes.append([out[0].shape, *(x.shape for x in out[1])]))
        handle.begin(2)
        for step in range(2):
            handle.step(step)
            output = family.call(model, height=13, wide=18, seed=step)
            assert torch.equal(output, family.call(original, height=13, wide=18, seed=step)) == (step == 0)
        assert shapes[3:] == shapes[:3]
        assert torch.equal(ends.outputs[1][0], ends.outputs[0][0])
        assert ends.layers[0] > ends.layers[1] == 0

    def test_freeu_changes_nothing_that_is_remembered(self):
        """It works in place, on what comes up from below."""
        family = BY_NAME["sd15"]
        model = family.build()
        model.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
        handle = apply_toma(model, only_reuse(computed=(0,), order=0, part="deep"))
        handle.begin(4)
        outputs = []
        for step in range(4):
            handle.step(step)
            outputs.append(call(family, model, seed=min(step, 1)))
        assert torch.equal(outputs[1], outputs[2])
        assert torch.equal(outputs[2], outputs[3])


@every_part
def test_gradients_reach_the_input(family, part):
    """And none goes back into an earlier step."""
    model = family.build()
    handle = apply_toma(model, only_reuse(computed=(0, 2), part=part))
    handle.begin(4)
    for step in range(4):
        handle.step(step)
        noisy: list[torch.Tensor] = []

        def noise(sample, noisy=noisy):
            noisy.append(torch.randn_like(sample).requires_grad_())
            return noisy[-1]

        output = model(**with_sample(family.inputs(), noise), return_dict=False)[0]
        sum(each.square().sum() for each in output).backward()
        for each in noisy:
            assert each.grad.isfinite().all()
            assert each.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("name", "dtype"), [("sd15", torch.bfloat16), ("flux", torch.float16), ("sd3", torch.bfloat16)], ids=str
)
def test_half_precision(name, dtype):
    family = BY_NAME[name]
    model = family.build().to(dtype)
    handle = apply_toma(model, only_reuse(computed=(0, 1)))
    handle.begin(3)
    outputs = []
    for step in range(3):
        handle.step(step)
        outputs.append(family.call(model, seed=step))
    assert all(output.dtype == dtype and output.isfinite().all() for output in outputs)
    assert {buffer.dtype for memory in state_of(model)._memories.values() for buffer in memory.buffers[:-2]} == {dtype}


def test_not_finite_once_is_not_finite_for_one_generation():
    family = BY_NAME["pixart"]
    model = family.build()
    handle = apply_toma(model, only_reuse(start=0))
    expected = generate(family, model, handle, 4)
    handle.begin(4)
    for step in range(4):
        handle.step(step)
        call(family, model, hidden_states=torch.full((2, 4, 16, 16), torch.nan))
    assert all(map(torch.equal, generate(family, model, handle, 4), expected))
