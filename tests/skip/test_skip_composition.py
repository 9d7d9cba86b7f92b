"""Skipped steps together with the rest: adapters, copies, merging, switching off, removal."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import add_lora, load_unet_ip_adapter
from observe import bookkeeping, our_hooks, same_picture, state_of
from pairs import named
from skipping import BY_NAME, FOLLOWED, call, counts, equal, followed, generate, plain, skipping
from tiny import Family
from torch import nn

from toma_diffusion import Handle, Merge, Skip, speed_up
from toma_diffusion.merge.base import Merging
from toma_diffusion.others import METHODS

SD15, FLUX = BY_NAME["sd15"], BY_NAME["flux"]
FAMILIES = pytest.mark.parametrize("family", [SD15, BY_NAME["z-image"]], ids=named)
with_lora = partial(add_lora, targets=["to_q", "to_v"])
SMALL_REGIONS = Merge(num_regions=4, skip_blocks=(), select_every=1)


@pytest.mark.parametrize(
    ("family", "adapt", "extra", "adapted_first"),
    [
        (SD15, with_lora, {}, True),
        (FLUX, with_lora, {}, False),
        (SD15, load_unet_ip_adapter, {"added_cond_kwargs": {"image_embeds": [torch.ones(2, 1, 16)]}}, True),
        (SD15, load_unet_ip_adapter, {"added_cond_kwargs": {"image_embeds": [torch.ones(2, 1, 16)]}}, False),
    ],
    ids=["lora-sd15", "lora-flux", "ip-adapter", "ip-adapter-later"],
)
def test_adapters(family: Family, adapt: Callable[..., None], extra: dict[str, Any], adapted_first: bool) -> None:
    original, model = family.build(), family.build()
    adapt(original)
    if adapted_first:
        adapt(model)
    handle = skipping(model, 0, 2)
    if not adapted_first:
        adapt(model)
    whole = [call(family, original, step, **extra) for step in range(4)]
    assert all(equal(generate(family, model, handle, **extra), [whole[step] for step in FOLLOWED]))
    handle.remove()
    assert torch.equal(call(family, model, **extra), whole[0])


def test_adapters_are_exchanged_half_way() -> None:
    """The next computed step is that of the other one."""
    original, model = FLUX.build(), FLUX.build()
    for each in (original, model):
        with_lora(each, name="one")
        with_lora(each, name="two", seed=1)
    handle = skipping(model, 0, 2)
    handle.begin(4)
    for step, source in enumerate(FOLLOWED):
        handle.step(step)
        for each in (original, model):
            each.set_adapter("one" if step < 2 else "two")
        assert torch.equal(call(FLUX, model, step), call(FLUX, original, source))


@FAMILIES
class TestCopies:
    @pytest.mark.parametrize(
        "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
    )
    def test_they_skip_for_themselves(self, family: Family, copied: Callable[[nn.Module], nn.Module]) -> None:
        """In the middle of a generation, too: a copy begins its own, and holds no output."""
        model = family.build()
        handle = skipping(model, 0, 2)
        handle.begin(4)
        outputs = []
        for step in range(4):
            if step == 1:
                twin = copied(model)
                other = Handle.of(twin)
                same_picture(torch.stack(generate(family, twin, other, seed=9)), torch.stack(followed(family, 9)))
            handle.step(step)
            outputs.append(call(family, model, step))
        assert all(equal(outputs, followed(family)))
        assert counts(handle) == counts(other) == (2, 2)
        other.remove()
        same_picture(call(family, twin), plain(family, 1)[0])

    def test_a_saved_model_is_plain(self, family: Family, tmp_path: Path) -> None:
        model: Any = family.build()
        weights = {key: value.clone() for key, value in model.state_dict().items()}
        generate(family, model, skipping(model, 0, 2), 2)
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path)
        assert not our_hooks(loaded)
        assert loaded.state_dict().keys() == weights.keys()
        assert all(torch.equal(value, weights[key]) for key, value in loaded.state_dict().items())


@FAMILIES
class TestOffAndOn:
    def test_removal_leaves_nothing(self, family: Family) -> None:
        model = family.build()
        before, own = bookkeeping(model), [set(vars(module)) for module in model.modules()]
        handle = skipping(model, 0)
        generate(family, model, handle, 3)
        handle.remove()
        assert bookkeeping(model) == before
        assert [set(vars(module)) for module in model.modules()] == own
        assert all(equal([call(family, model, step) for step in range(4)], plain(family)))

    def test_switched_off_is_the_original_and_switched_on_computes_first(self, family: Family) -> None:
        """What is kept is from long ago."""
        model, whole = family.build(), plain(family)
        handle = skipping(model, 0)
        handle.begin(4)
        outputs = []
        for step in range(4):
            handle.step(step)
            handle.enabled = step != 1
            outputs.append(call(family, model, step))
        assert all(equal(outputs, [whole[step] for step in (0, 1, 2, 2)]))
        handle.enabled = False
        assert all(equal(generate(family, model, handle), whole))


def test_what_is_kept_is_counted_and_freed() -> None:
    model = FLUX.build()
    handle = skipping(model, 0, 2)
    outputs = generate(FLUX, model, handle)
    held = handle.summary().skip
    assert held is not None
    assert (held.num_bytes, held.computed) == (outputs[0].nbytes, (0, 2))  # the last output, without noise levels
    handle.reset()
    assert handle.summary() == skipping(FLUX.build(), 0, 2).summary()


def test_a_skipped_step_has_no_gradient() -> None:
    """It says so; switched off, gradients are those of the original."""
    model, inputs = FLUX.build(), FLUX.inputs()
    inputs["hidden_states"].requires_grad_()
    handle = skipping(model, 0)
    handle.begin(2)
    handle.step(0)
    model(**inputs).sample.sum().backward()
    gradient = inputs["hidden_states"].grad.clone()
    handle.step(1)
    with pytest.raises(RuntimeError, match=r"no gradient: run under torch\.no_grad\(\), or switch handle\.enabled off"):
        model(**inputs)
    handle.enabled = False
    inputs["hidden_states"].grad = None
    model(**inputs).sample.sum().backward()
    assert torch.equal(inputs["hidden_states"].grad, gradient)


class TestWithMerging:
    @pytest.mark.parametrize(
        ("family", "merge"),
        [
            (SD15, SMALL_REGIONS),
            (FLUX, Merge(num_regions=4, skip_blocks=(), scope="module", select_every=1)),
            *((SD15, each(skip_blocks=())) for each in METHODS.values()),
        ],
        ids=["sd15", "flux", *METHODS],
    )
    def test_computed_steps_are_merged(self, family: Family, merge: Merging) -> None:
        """As they would be without skipped ones."""
        merged, model = family.build(), family.build()
        speed_up(merged, merge=merge)
        handle = speed_up(model, merge=merge, skip=Skip(computed=(0, 2)))
        torch.manual_seed(0)  # some methods draw their destinations
        whole = [call(family, merged, step) for step in range(4)]
        torch.manual_seed(0)
        outputs = generate(family, model, handle)
        assert torch.equal(outputs[0], whole[0])
        assert not torch.equal(outputs[0], plain(family, 1)[0])
        assert equal(outputs[1:], outputs[:-1]) == [True, False, True]
        assert counts(handle) == (2, 2)
        handle.remove()
        assert torch.equal(call(family, model), plain(family, 1)[0])

    def test_only_computed_steps_count_for_choices(self) -> None:
        """Destinations are selected in every second step that is computed: in steps 0 and 5 of these."""
        model = SD15.build()
        merge = Merge(num_regions=4, skip_blocks=(), select_every=2, reweigh_every=1)
        handle = speed_up(model, merge=merge, skip=Skip(computed=(0, 2, 5)))
        actions: list[str] = []
        model.register_forward_hook(lambda *_: actions.append(state_of(model).action.value))
        generate(SD15, model, handle, 7)
        assert actions == ["select", "reweigh", "select"]
