"""Merged tokens correct what is remembered: the formula written out, on runs of blocks of every family."""

from dataclasses import dataclass, field

import pytest
import torch
from observe import attention_lengths, state_of
from pairs import named, pairwise
from parts import BY_NAME, call, ends_of, generate, own_forwards, plain
from tiny import FAMILIES, STRIDED

from toma_diffusion import Reuse, apply_toma, remove_toma
from toma_diffusion.hooks.sites import EnterBlock

EVERY = {"select_every": 1, "reweigh_every": 1, "scope": "stage"}


@dataclass
class Raw:
    """What the last blocks of runs return before they are unmerged: by hooks put in before ours."""

    outputs: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def watch(self, module) -> None:
        module.register_forward_hook(self)

    def __call__(self, module, args, output):
        image = output[-1] if isinstance(output, tuple) else output
        self.outputs.setdefault(id(module), []).append(image.clone())


def plan_of(first):
    (site,) = [hook.site for hook in first._forward_pre_hooks.values() if isinstance(hook, EnterBlock)]
    return site.slot.plan


def remembered(changes: dict[int, torch.Tensor], step: int, order: int) -> torch.Tensor:
    """What is to be expected in this step from those before it, computed or corrected."""
    *_, before, last = [None, *sorted(changes)]
    if order == 0 or before is None:
        return changes[last]
    return changes[last] + (changes[last] - changes[before]) * (step - last) / (last - before)


@pytest.mark.parametrize(
    ("family", "update", "order"), pairwise(FAMILIES, ("clusters", "destinations"), (0, 1)), ids=named
)
def test_the_formula(family, update, order):
    """Steps 2, 3 and 5 are corrected; each goes on from the last."""
    model, raw = family.build(), Raw()
    for module in model.modules():
        if type(module).__name__.endswith("TransformerBlock"):
            raw.watch(module)
    reuse = Reuse(computed=(0, 1, 4), order=order, update=update)
    handle = apply_toma(model, **STRIDED | EVERY, reuse=reuse)
    ends, original = ends_of(model), plain(family, 6)
    changes = {name: {} for name in ends}
    handle.begin(6)
    for step in range(6):
        handle.step(step)
        output = call(family, model, step)
        assert torch.equal(output, original[step]) == (step in reuse.computed)
        for name, each in ends.items():
            whole = each.inputs[step][0]
            if step not in reuse.computed:
                plan, change = plan_of(each.modules[0]), remembered(changes[name], step, order)
                merged = plan.merge(whole)
                new = raw.outputs[id(each.modules[-1])][step] - merged
                assert new.shape[1] == plan.num_destinations < whole.shape[1]
                if update == "clusters":
                    expected = whole + change + plan.unmerge(new - plan.merge(change))
                else:
                    rows = plan.positions[:, :, None].expand_as(new)
                    expected = whole + change.scatter(1, rows, new)
                torch.testing.assert_close(each.outputs[step][0], expected, atol=1e-4, rtol=1e-4)
            changes[name][step] = each.outputs[step][0] - whole


@pytest.mark.parametrize("family", FAMILIES, ids=named)
def test_blocks_see_merged_tokens_in_reused_steps_alone(family):
    model = family.build()
    whole = attention_lengths(lambda: call(family, model))
    handle = apply_toma(model, **STRIDED | EVERY, reuse=Reuse(computed=(0, 2), update="clusters"))
    handle.begin(4)
    seen = []
    for step in range(4):
        handle.step(step)
        seen.append(attention_lengths(lambda step=step: call(family, model, step)))
    assert seen[0] == seen[2] == whole
    assert seen[1] == seen[3]
    assert len(seen[1]) == len(whole)
    assert all(fewer < full for (fewer, _), (full, _) in zip(seen[1], whole, strict=True))
    assert handle.summary().steps == (2, 2)
    remove_toma(model)
    assert not own_forwards(model)


def test_outside_a_window_nothing_is_corrected():
    family = BY_NAME["pixart"]
    model = family.build()
    handle = apply_toma(model, **STRIDED | EVERY, window=(0.5, 1), reuse=Reuse(computed=(0,), update="clusters"))
    handle.begin(4)
    counts = []
    for step in range(4):
        handle.step(step)
        counts.append(len(attention_lengths(lambda step=step: call(family, model, step))))
    assert counts[1] == 0
    assert counts[0] == counts[2] == counts[3] > 0


@pytest.mark.parametrize("update", ["clusters", "destinations"])
def test_a_control_net_between_blocks_leaves_nothing_to_correct(update):
    """Runs are then merged block by block, and what is remembered is of runs: such steps are only reused."""
    family = BY_NAME["flux"]
    model = family.build()
    handle = apply_toma(model, **STRIDED | EVERY, reuse=Reuse(computed=(0,), update=update))
    residuals = {"controlnet_block_samples": [torch.randn(2, 64, 32) for _ in range(2)]}
    lengths = attention_lengths(lambda: generate(family, model, handle, 2, **residuals))
    assert lengths == attention_lengths(lambda: call(family, family.build(), **residuals))
    assert not state_of(model).correcting
