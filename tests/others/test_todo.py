"""ToDo: queries whole, keys and values from every n-th row and column."""

import pytest
import torch
from observe import attention_lengths, inputs_of
from tiny import one, sd15_unet, sdxl_unet
from torch.nn import functional

from toma_diffusion import speed_up
from toma_diffusion.merge import Grid
from toma_diffusion.others import ToDo
from toma_diffusion.others.todo import DownsamplePlan

SD15 = one("sd15")


class TestPlan:
    @pytest.mark.parametrize(("factor", "grid"), [(2, (16, 16)), (3, (13, 17)), (4, (7, 5))])
    def test_nearest_neighbour_as_torch_interpolates(self, factor, grid):
        height, width = grid
        tokens = torch.randn(2, height * width, 3)
        image = tokens.mT.reshape(2, 3, height, width)
        smaller = functional.interpolate(image, size=(height // factor, width // factor), mode="nearest")
        plan = DownsamplePlan(Grid(height, width), factor=factor, batch_size=2)
        assert torch.equal(plan.merge(tokens), smaller.flatten(2).mT)

    def test_every_other_row_and_column_and_one_of_a_side_that_is_shorter(self):
        plan = DownsamplePlan(Grid(4, 6), factor=2, batch_size=1)
        assert plan.gather(torch.arange(24)).tolist() == [0, 2, 4, 12, 14, 16]
        assert DownsamplePlan(Grid(1, 8), factor=2, batch_size=1).num_destinations == 4


@pytest.mark.parametrize(("ratio", "factor"), [(0.75, 2), (0.9375, 4)])
def test_attention_written_out(ratio, factor):
    """softmax(Q Kᵀ / √d) V with Q of all tokens, K and V of every n-th row and column: of one real block."""
    model = sd15_unet()
    attention = model.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    (before, given), *_ = inputs_of(attention, lambda: SD15.call(model))
    speed_up(model, merge=ToDo(ratio=ratio))
    outputs = []
    attention.register_forward_hook(lambda module, args, output: outputs.append(output))
    ((tokens,), kwargs), *_ = inputs_of(attention, lambda: SD15.call(model))
    fewer = tokens.reshape(2, 16, 16, 32)[:, ::factor, ::factor].reshape(2, -1, 32)
    assert torch.equal(kwargs["encoder_hidden_states"], fewer)
    torch.testing.assert_close(tokens, before[0])
    assert {name for name in given if kwargs[name] is not given[name]} == {"encoder_hidden_states"}

    def heads(projected):
        return projected.reshape(2, -1, attention.heads, 32 // attention.heads).transpose(1, 2)

    query, key, value = heads(attention.to_q(tokens)), heads(attention.to_k(fewer)), heads(attention.to_v(fewer))
    weights = (query @ key.mT / query.shape[-1] ** 0.5).softmax(dim=-1)
    expected = attention.to_out[0]((weights @ value).transpose(1, 2).flatten(2))
    assert torch.allclose(outputs[0], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "expected", "leaves"),
    [
        ({}, {(64, 16), (16, 16)}, True),
        ({"deeper_factors": (2,)}, {(64, 16), (16, 4)}, False),
        ({"ratio": 0.9375}, {(64, 4), (16, 16)}, True),
    ],
)
def test_levels_are_counted_from_the_first_with_attention(settings, expected, leaves):
    model = sdxl_unet(
        block_out_channels=(32, 64, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 1, 1),
        attention_head_dim=(2, 4, 4),
    )
    handle = speed_up(model, merge=ToDo(**settings))
    lengths = {pair for pair in attention_lengths(lambda: one("sdxl").call(model)) if pair[1] != 7}
    assert lengths == expected
    assert any("factor" in reason for _, reason in handle.summary().merge.left_whole) == leaves


def test_factors_in_the_summary():
    handle = speed_up(sd15_unet(), merge=ToDo(deeper_factors=(3,)))
    assert "downsampled by 2, 3; queries whole" in str(handle.summary())
    SD15.call(handle.model)
    kinds = handle.summary().merge.kinds
    assert [(kind.tokens_before, kind.tokens_after) for kind in kinds] == [(256, 64), (64, 4)]


class TestErrors:
    @pytest.mark.parametrize("family", [one("flux"), one("z-image")], ids=lambda family: family.name)
    def test_joint_attention(self, family):
        with pytest.raises(ValueError, match=r"queries and keys from the same tokens.*Use it on a UNet or PixArt"):
            speed_up(family.build(), merge=ToDo(skip_blocks=()))

    def test_fused_projections(self):
        model = sd15_unet()
        speed_up(model, merge=ToDo())
        model.fuse_qkv_projections()
        with pytest.raises(ValueError, match="unfuse_qkv_projections"):
            SD15.call(model)
        model.unfuse_qkv_projections()
        assert SD15.call(model).isfinite().all()

    def test_blocks_that_attend_to_text_alone(self):
        model = sd15_unet(only_cross_attention=(True, False))
        handle = speed_up(model, merge=ToDo())
        with pytest.raises(ValueError, match="name it in skip_blocks"):
            SD15.call(model)
        handle.remove()
        with pytest.raises(ValueError, match="nothing would be merged"):
            speed_up(model, merge=ToDo(skip_blocks=(0, 2, 3)))

    @pytest.mark.parametrize(("ratio", "factor"), [(0.75, 2), (1 - 1 / 9, 3), (0.889, 3), (0.9375, 4)])
    def test_ratios_that_have_a_factor(self, ratio, factor):
        assert ToDo(ratio=ratio).factors == (factor,)
        with pytest.raises(ValueError, match="every n-th row and column stays"):
            ToDo(ratio=ratio - 0.05)
