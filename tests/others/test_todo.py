"""ToDo: queries whole, keys and values from every n-th row and column."""

import pytest
import torch
from observe import attention_lengths, inputs_of
from tiny import FAMILIES, TODAY, sd15_unet, sdxl_unet
from torch.nn import functional

from toma_diffusion import Grid, ToDoConfig, apply_toma, remove_toma
from toma_diffusion.others.todo import DownsamplePlan

BY_NAME = {family.name: family for family in FAMILIES}


class TestPlan:
    @pytest.mark.parametrize("factor", [2, 3, 4])
    @pytest.mark.parametrize("grid", [(16, 16), (12, 24), (13, 17), (7, 5)])
    def test_nearest_neighbour_as_torch_interpolates(self, factor, grid):
        height, width = grid
        tokens = torch.randn(2, height * width, 3)
        image = tokens.mT.reshape(2, 3, height, width)
        smaller = functional.interpolate(image, size=(height // factor, width // factor), mode="nearest")
        plan = DownsamplePlan(Grid(height, width), factor=factor, batch_size=2)
        assert torch.equal(plan.merge(tokens), smaller.flatten(2).mT)

    def test_every_other_row_and_column(self):
        plan = DownsamplePlan(Grid(4, 6), factor=2, batch_size=1)
        numbers = torch.arange(24)
        assert plan.gather(numbers).tolist() == [0, 2, 4, 12, 14, 16]

    def test_a_side_shorter_than_the_factor_keeps_one(self):
        assert DownsamplePlan(Grid(1, 8), factor=2, batch_size=1).num_destinations == 4


class TestFormula:
    @pytest.mark.parametrize(("ratio", "factor"), [(0.75, 2), (0.9375, 4)])
    def test_attention_written_out(self, ratio, factor):
        """softmax(Q Kᵀ / √d) V with Q of all tokens, K and V of every n-th row and column: of one real block."""
        model, family = sd15_unet(), BY_NAME["sd15"]
        apply_toma(model, "todo", ratio=ratio)
        attention = model.down_blocks[0].attentions[0].transformer_blocks[0].attn1
        outputs = []
        attention.register_forward_hook(lambda module, args, output: outputs.append(output))
        (args, kwargs), *_ = inputs_of(attention, lambda: family.call(model))
        tokens = args[0]
        fewer = tokens.reshape(2, 16, 16, 32)[:, ::factor, ::factor].reshape(2, -1, 32)
        assert torch.equal(kwargs["encoder_hidden_states"], fewer)

        def heads(projected):
            return projected.reshape(2, -1, attention.heads, 32 // attention.heads).transpose(1, 2)

        query, key, value = heads(attention.to_q(tokens)), heads(attention.to_k(fewer)), heads(attention.to_v(fewer))
        weights = (query @ key.mT / query.shape[-1] ** 0.5).softmax(dim=-1)
        expected = attention.to_out[0]((weights @ value).transpose(1, 2).flatten(2))
        assert torch.allclose(outputs[0], expected, atol=1e-6)

    def test_nothing_else_is_passed(self):
        model, family = sd15_unet(), BY_NAME["sd15"]
        attention = model.down_blocks[0].attentions[0].transformer_blocks[0].attn1
        (args, kwargs), *_ = inputs_of(attention, lambda: family.call(model))
        apply_toma(model, "todo")
        (new_args, new_kwargs), *_ = inputs_of(attention, lambda: family.call(model))
        torch.testing.assert_close(new_args[0], args[0])
        assert new_kwargs.keys() == kwargs.keys()
        assert {name for name in kwargs if new_kwargs[name] is not kwargs[name]} == {"encoder_hidden_states"}


class TestLevels:
    @pytest.mark.parametrize("settings", [{}, {"deeper_factors": (2,)}, {"ratio": 0.9375}])
    def test_counted_from_the_first_level_with_attention(self, settings):
        model, family = (
            sdxl_unet(
                block_out_channels=(32, 64, 64),
                down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
                up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
                transformer_layers_per_block=(1, 1, 1),
                attention_head_dim=(2, 4, 4),
            ),
            BY_NAME["sdxl"],
        )
        handle = apply_toma(model, "todo", **settings)
        lengths = {pair for pair in attention_lengths(lambda: family.call(model)) if pair[1] != 7}
        deeper = settings.get("deeper_factors", (1,))[0]
        first = 2 if "ratio" not in settings else 4
        assert lengths == {(64, 64 // first**2), (16, 16 // deeper**2)}
        assert any("factor" in reason for _, reason in handle.summary().left_alone) == (deeper == 1)

    def test_factors_in_the_summary(self):
        handle = apply_toma(sd15_unet(), "todo", deeper_factors=(3,))
        assert "downsampled by 2, 3; queries whole" in str(handle.summary())
        BY_NAME["sd15"].call(handle.model)
        assert [(kind.tokens_before, kind.tokens_after) for kind in handle.summary().kinds] == [(256, 64), (64, 4)]


class TestErrors:
    @pytest.mark.parametrize("family", [BY_NAME["flux"], BY_NAME["sd3"], *TODAY], ids=lambda family: family.name)
    def test_joint_attention(self, family):
        with pytest.raises(ValueError, match=r"queries and keys from the same tokens.*Use it on a UNet or PixArt"):
            apply_toma(family.build(), "todo", skip_blocks=())

    def test_fused_projections(self):
        model, family = sd15_unet(), BY_NAME["sd15"]
        apply_toma(model, "todo")
        model.fuse_qkv_projections()
        with pytest.raises(ValueError, match="unfuse_qkv_projections"):
            family.call(model)
        model.unfuse_qkv_projections()
        assert family.call(model).isfinite().all()

    def test_blocks_that_attend_to_text_alone(self):
        model, family = sd15_unet(only_cross_attention=(True, False)), BY_NAME["sd15"]
        apply_toma(model, "todo")
        with pytest.raises(ValueError, match="name it in skip_blocks"):
            family.call(model)
        remove_toma(model)
        with pytest.raises(ValueError, match="nothing would be merged"):
            apply_toma(model, "todo", skip_blocks=(0, 2, 3))

    @pytest.mark.parametrize("ratio", [0.5, 0.7, 0.8])
    def test_ratios_in_between(self, ratio):
        with pytest.raises(ValueError, match=rf"ratio={ratio} is not allowed: every n-th row and column stays"):
            ToDoConfig(ratio=ratio)

    @pytest.mark.parametrize(("ratio", "factor"), [(0, 1), (0.75, 2), (1 - 1 / 9, 3), (0.889, 3), (0.9375, 4)])
    def test_ratios_that_have_a_factor(self, ratio, factor):
        assert ToDoConfig(ratio=ratio).factors == (factor,)
