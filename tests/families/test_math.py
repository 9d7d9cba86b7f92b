"""Merging is exact: against the method written out with whole matrices, on real blocks of two families."""

import pytest
import torch
from merging import merged, remove
from observe import inputs_of, state_of
from tiny import flux_inputs, flux_transformer, sd15_unet, unet_inputs

from toma_diffusion.merge import MergePlan


def matrices(plan: MergePlan, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """M and Aᵀ as whole matrices, [B, D, N] and [B, N, D], from the destinations and the tokens they come from."""
    height, width = plan.grid.height, plan.grid.width
    index = torch.arange(height * width)
    tile = (index // width) // (height // 2) * 2 + (index % width) // (width // 2)  # 2 × 2 tiles
    merges, unmerges = [], []
    for sample in range(tokens.shape[0]):
        unit = torch.nn.functional.normalize(tokens[sample], dim=-1)
        chosen = plan.positions[sample]
        distance = (index[chosen][:, None] // width - index // width) ** 2 + (
            index[chosen][:, None] % width - index % width
        ) ** 2
        logits = 1000.0 * (unit[chosen] @ unit.T - plan.config.distance_weight * distance / (height * width / 4))
        logits[tile[chosen][:, None] != tile[None]] = -torch.inf
        weights = logits.softmax(dim=0)
        merges.append(weights / weights.sum(dim=1, keepdim=True))
        unmerges.append(weights.T)
    return torch.stack(merges), torch.stack(unmerges)


def outputs_of(module, call):
    seen = []
    handle = module.register_forward_hook(lambda m, a, output: seen.append(output))
    with torch.no_grad():
        call()
    handle.remove()
    return seen[0]


def test_unet_block():
    model = sd15_unet()
    block = model.down_blocks[0].attentions[0].transformer_blocks[0]
    inputs = unet_inputs(32)()
    merged(model)
    (args, kwargs) = inputs_of(block, lambda: model(**inputs))[0]
    result = outputs_of(block, lambda: model(**inputs))
    plan = state_of(model).current["level 0"]
    remove(model)

    with torch.no_grad():
        x, text = args[0], kwargs["encoder_hidden_states"]
        normalized = block.norm1(x)
        merge, unmerge = matrices(plan, normalized)
        x = x + unmerge @ block.attn1(merge @ normalized)
        x = x + unmerge @ block.attn2(merge @ block.norm2(x), encoder_hidden_states=text)
        x = x + unmerge @ block.ff(merge @ block.norm3(x))
    torch.testing.assert_close(result, x, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scope", ["block", "stage"])
def test_change_is_unmerged_not_the_result(scope):
    """X + U(block(M X) − M X); destinations chosen after the first norm."""
    model = sd15_unet(transformer_layers_per_block=2)
    blocks = model.down_blocks[0].attentions[0].transformer_blocks
    transformer = model.down_blocks[0].attentions[0]
    inputs = unet_inputs(32)()
    merged(model, scope=scope)
    before = outputs_of(transformer.proj_in, lambda: model(**inputs)).permute(0, 2, 3, 1).reshape(2, 256, 32)
    after = inputs_of(transformer.proj_out, lambda: model(**inputs))[0][0][0].permute(0, 2, 3, 1).reshape(2, 256, 32)
    plan = state_of(model).current["level 0"]
    remove(model)

    text = inputs["encoder_hidden_states"]
    with torch.no_grad():
        merge, unmerge = matrices(plan, blocks[0].norm1(before))
        x = before
        for run in [blocks] if scope == "stage" else [[block] for block in blocks]:
            fewer = changed = merge @ x
            for block in run:
                changed = block(changed, encoder_hidden_states=text)
            x = x + unmerge @ (changed - fewer)
    torch.testing.assert_close(after, x, atol=1e-5, rtol=1e-5)


def rows_of_destinations(tables, plan, text_length):
    positions = plan.positions[0]
    return tuple(torch.cat([table[:text_length], table[text_length:][positions]]) for table in tables)


def test_flux_joint_block():
    model = flux_transformer()
    block = model.transformer_blocks[0]
    inputs = flux_inputs()
    merged(model)
    _, kwargs = inputs_of(block, lambda: model(**inputs))[0]
    result_text, result = outputs_of(block, lambda: model(**inputs))
    plan = state_of(model).current["joint"]
    remove(model)

    with torch.no_grad():
        x, text, temb = kwargs["hidden_states"], kwargs["encoder_hidden_states"], kwargs["temb"]
        normalized, gate, shift_mlp, scale_mlp, gate_mlp = block.norm1(x, emb=temb)
        text_normalized, text_gate, text_shift, text_scale, text_gate_mlp = block.norm1_context(text, emb=temb)
        merge, unmerge = matrices(plan, normalized)
        rotary = rows_of_destinations(kwargs["image_rotary_emb"], plan, text.shape[1])
        image_attention, text_attention = block.attn(merge @ normalized, text_normalized, image_rotary_emb=rotary)
        x = x + gate[:, None] * (unmerge @ image_attention)
        x = x + gate_mlp[:, None] * (
            unmerge @ block.ff(merge @ (block.norm2(x) * (1 + scale_mlp[:, None]) + shift_mlp[:, None]))
        )
        text = text + text_gate[:, None] * text_attention
        text_mlp = block.ff_context(block.norm2_context(text) * (1 + text_scale[:, None]) + text_shift[:, None])
        text = text + text_gate_mlp[:, None] * text_mlp
    torch.testing.assert_close(result, x, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(result_text, text, atol=1e-5, rtol=1e-5)


def test_flux_single_block():
    model = flux_transformer()
    block = model.single_transformer_blocks[0]
    inputs = flux_inputs()
    merged(model)
    _, kwargs = inputs_of(block, lambda: model(**inputs))[0]
    result_text, result = outputs_of(block, lambda: model(**inputs))
    plan = state_of(model).current["single"]
    remove(model)

    with torch.no_grad():
        text_length = kwargs["encoder_hidden_states"].shape[1]
        x = torch.cat([kwargs["encoder_hidden_states"], kwargs["hidden_states"]], dim=1)
        normalized, gate = block.norm(x, emb=kwargs["temb"])
        merge, unmerge = matrices(plan, normalized[:, text_length:])
        fewer = torch.cat([normalized[:, :text_length], merge @ normalized[:, text_length:]], dim=1)
        rotary = rows_of_destinations(kwargs["image_rotary_emb"], plan, text_length)
        attention = block.attn(fewer, image_rotary_emb=rotary)
        projected = block.proj_out(torch.cat([attention, block.act_mlp(block.proj_mlp(fewer))], dim=2))
        whole = torch.cat([projected[:, :text_length], unmerge @ projected[:, text_length:]], dim=1)
        x = x + gate[:, None] * whole
    torch.testing.assert_close(result_text, x[:, :text_length], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(result, x[:, text_length:], atol=1e-5, rtol=1e-5)
