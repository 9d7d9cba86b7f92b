"""What a family says of its blocks is what the blocks really do."""

import pytest
import torch
from merging import merged
from observe import state_of
from pairs import named
from tiny import ALL, FRAME, Family, flux2_edit, one, output_of, qwen21_edit, qwen_edit
from torch import nn

from toma_diffusion.engine.arguments import Given, given_to
from toma_diffusion.families import find_family

families = pytest.mark.parametrize("family", ALL, ids=named)
ATTENTION = ("attn1", "attn", "attention")
OTHER_INPUTS = [
    (one("flux2"), {}, flux2_edit(10)),
    (one("qwen-image"), {"zero_cond_t": True}, qwen_edit((4, 6))),
    (one("qwen-image-21"), {}, qwen21_edit()),
]


def attention_of(block: nn.Module) -> nn.Module:
    return next(getattr(block, name) for name in ATTENTION if hasattr(block, name))


def calls_of(modules: list[nn.Module], model: nn.Module, inputs: dict) -> dict[nn.Module, Given]:
    """The arguments of the first call of every module."""
    seen: dict[nn.Module, Given] = {}
    for module in modules:
        module.register_forward_pre_hook(
            lambda module, args, kwargs: seen.setdefault(module, given_to(module, args, kwargs)) and None,
            with_kwargs=True,
        )
    output_of(model, inputs)
    return seen


def check_first_input(family: Family, model: nn.Module, inputs: dict) -> None:
    """Destinations are selected among what `normalize` computes before a block runs. That is bit for bit what the
    block computes for its own attention, with the weights and the modulation of every single block."""
    blocks = find_family(model).blocks(model)
    assert len({block.kind for block in blocks}) == family.kinds
    seen = calls_of([each for block in blocks for each in (block.module, attention_of(block.module))], model, inputs)
    for block in blocks:
        given, attended = seen[block.module], seen[attention_of(block.module)].tokens
        with torch.no_grad():
            normalized = block.normalize(block.module, given)
        assert normalized.shape == given.tokens.shape
        before = attended.shape[1] - normalized.shape[1]  # text, which single blocks of Flux join to the image
        assert torch.equal(normalized, attended[:, before:]), block.name
        assert block.width == normalized.shape[-1]


@families
def test_destinations_are_selected_among_what_the_first_layer_gets(family):
    check_first_input(family, family.build(), family.inputs())


@pytest.mark.parametrize(("family", "changes", "inputs"), OTHER_INPUTS, ids=named)
def test_so_they_are_with_given_pictures(family, changes, inputs):
    check_first_input(family, family.build(**changes), inputs)


@families
def test_a_block_says_which_output_is_the_image(family):
    model = family.build()
    blocks, outputs = find_family(model).blocks(model), {}
    for block in blocks:
        block.module.register_forward_hook(lambda module, args, output: outputs.setdefault(module, output))
    seen = calls_of([block.module for block in blocks], model, family.inputs())
    for block in blocks:
        output = outputs[block.module]
        assert isinstance(output, tuple) == (block.stream is not None)
        image = output if block.stream is None else output[block.stream]
        assert image.shape == seen[block.module].tokens.shape


@families
def test_samples_share_destinations_where_they_share_positions(family):
    model = family.build()
    merged(model)
    family.call(model)
    plans = list(state_of(model).current.values())
    assert {plan.joint for plan in plans} == {find_family(model).is_joint(model)} == {family.one_table}
    assert all(torch.equal(plan.positions[0], plan.positions[1]) for plan in plans) == family.one_table
    assert family.given in (0, 1)
    assert family.start is None or family.start >= family.given * FRAME
