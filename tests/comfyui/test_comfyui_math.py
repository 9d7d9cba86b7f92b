"""What merged blocks of ComfyUI's models compute, against the formula, with blocks that ComfyUI itself runs."""

from contextlib import contextmanager

import pytest
import torch
from observe import inputs_of, state_of
from tiny_comfy import FAMILIES, TEXT, patcher_of, qwen_image, sample, wan_config

from toma_diffusion import Merge
from toma_diffusion.api import speed_up_model
from toma_diffusion.comfyui.families import find_comfy_family
from toma_diffusion.engine.arguments import parameter_names
from toma_diffusion.engine.install import find_root
from toma_diffusion.families import Given
from toma_diffusion.merge.state import image_start
from toma_diffusion.presets import Chosen

pytestmark = pytest.mark.usefixtures("loaded_nodes")

SETTINGS = {"ratio": 0.5, "region_tokens": 16, "skip_blocks": ()}
POSITIONS = {"flux": ("pe", 2), "flux2": ("pe", 2), "qwen-image": ("image_rotary_emb", 2), "wan": ("freqs", 1)}
"""The argument of a block that holds the positions, and the dimension of its rows."""
TEXT_STREAM = {"flux": "txt", "flux2": "txt", "qwen-image": "encoder_hidden_states"}
"""The argument of a block that is the stream of text."""


def copied(value):
    return value.clone() if isinstance(value, torch.Tensor) else value


def first_call(patcher, family):
    """The arguments of the first call of a model in a sampling."""
    model = patcher.model.diffusion_model
    args, kwargs = inputs_of(model, lambda: sample(patcher, family, steps=1))[0]
    return model, lambda: model(*args, **kwargs | {"transformer_options": {}})


@contextmanager
def merged(model, **settings):
    with speed_up_model(find_comfy_family(model), model, Chosen(merge=Merge(**SETTINGS | settings))):
        yield


def reduced(plan, tokens, start, dim=1, how="merge"):
    """A sequence with its image merged, or unmerged, or with the rows of the destinations."""
    length = plan.num_destinations if how == "unmerge" else plan.grid.num_tokens
    before, image, after = tokens.split([start, length, tokens.shape[dim] - start - length], dim=dim)
    changed = image.index_select(dim, plan.positions[0]) if how == "gather" else getattr(plan, how)(image)
    return torch.cat([before, changed, after], dim=dim)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scope", ["block", "stage"])
def test_change_is_unmerged_not_the_result(family, scope):
    """X + U(blocks(M X) − M X), with the positions of the destinations, of the first block or the first run of them."""
    model, call = first_call(FAMILIES[family].make(), family)
    every = find_comfy_family(model).blocks(model)
    run = [block for block in every if block.stage == every[0].stage][: None if scope == "stage" else 1]
    first, last, seen = run[0], run[-1], {}

    def before(module, args, kwargs):
        arguments = [copied(each) for each in args], {name: copied(each) for name, each in kwargs.items()}
        seen.setdefault("given", Given(parameter_names(module), tuple(arguments[0]), arguments[1]))

    first.module.register_forward_pre_hook(before, with_kwargs=True)
    with merged(model, scope=scope):
        after = last.module.register_forward_hook(
            lambda module, args, output: seen.setdefault("output", copied_output(output))
        )
        call()
        after.remove()
        state = state_of(model)
        plan, image_at = state.plan_of(first.kind), state.image_at
    given = seen["given"]
    whole = given.tokens
    start = image_start(whole.shape[1], image_at, plan.grid)
    small = reduced(plan, whole, start)
    if family in POSITIONS:
        name, dim = POSITIONS[family]
        table = given[name]
        rows = reduced(plan, table, image_start(table.shape[dim], image_at, plan.grid), dim, "gather")
        given = given.with_argument(name, rows)
    tokens = small
    for block in run:
        given = given.with_tokens(tokens.clone())
        output = block.module(*given.args, **given.kwargs)
        tokens = output if block.stream is None else output[block.stream]
        if block.stream is not None:
            given = given.with_argument(TEXT_STREAM[family], output[1 - block.stream])
    expected = whole + reduced(plan, tokens - small, start, how="unmerge")
    result = seen["output"] if last.stream is None else seen["output"][last.stream]
    assert not torch.equal(result, whole)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


def notes_of(model):
    return find_root(model).session.notes


def tokens_of(module, args, kwargs):
    return Given(parameter_names(module), args, kwargs).tokens.clone()


def copied_output(output):
    return tuple(copied(each) for each in output) if isinstance(output, tuple) else copied(output)


@pytest.mark.parametrize("family", POSITIONS)
@pytest.mark.parametrize("scope", ["module", "block", "stage"])
def test_a_merged_token_has_the_position_of_its_destination(family, scope, monkeypatch):
    model, call = first_call(FAMILIES[family].make(), family)
    name, dim = POSITIONS[family]
    whole, inside = [], []
    blocks = [block.module for block in find_comfy_family(model).blocks(model)]
    blocks[0].register_forward_pre_hook(lambda module, args, kwargs: whole.append(kwargs[name]), with_kwargs=True)
    if name == "pe":  # attention is a function there
        from comfy.ldm.flux import layers

        attention = layers.attention

        def note(q, k, v, pe, **kwargs):
            inside.append((q.shape[2], pe))
            return attention(q, k, v, pe=pe, **kwargs)

        monkeypatch.setattr(layers, "attention", note)
    with merged(model, scope=scope, share_plan=True):
        if name != "pe":
            for block in blocks:
                module = block.attn if family == "qwen-image" else block.self_attn
                names = parameter_names(module)
                module.register_forward_pre_hook(
                    lambda module, args, kwargs, names=names: inside.append((None, Given(names, args, kwargs)[name])),
                    with_kwargs=True,
                )
        call()
        state = state_of(model)
        kinds = [block.kind for block in find_comfy_family(model).blocks(model)]
        plans = [state.plan_of(kind) for kind in kinds]
    assert len(inside) == len(blocks)
    table = whole[0]
    for plan, (queries, rows) in zip(plans, inside, strict=True):
        start = image_start(table.shape[dim], state.image_at, plan.grid)
        assert torch.equal(rows, reduced(plan, table, start, dim, "gather"))
        assert queries in (None, rows.shape[dim])


class TestReferences:
    """Reference images come after the image in its stream. They stay whole."""

    REFERENCE = 8 * 6
    """Tokens of one of 16 × 12."""

    def call(self, family, **changes):
        """A model, and a call of it with a reference."""
        patcher = FAMILIES[family].make()
        model = patcher.model.diffusion_model
        args, kwargs = inputs_of(model, lambda: sample(patcher, family, steps=1))[0]
        reference = torch.randn(*args[0].shape[:-1], 12)
        changes = {"transformer_options": changes, "ref_latents": [reference]}
        return model, lambda: model(*args, **kwargs | changes)

    @pytest.mark.parametrize("family", ["flux", "qwen-image"])
    @pytest.mark.parametrize("scope", ["module", "block", "stage"])
    def test_lengths(self, family, scope):
        lengths = []

        def override(attention, *args, **kwargs):
            lengths.append(args[0].shape[-2])
            return attention(*args, **kwargs)

        model, call = self.call(family, optimized_attention_override=override)
        with merged(model, scope=scope):
            assert call().isfinite().all()
        assert set(lengths) == {TEXT + 64 // 2 + self.REFERENCE}

    @pytest.mark.parametrize("family", ["flux", "qwen-image"])
    def test_only_the_image_is_merged(self, family):
        model, call = self.call(family)
        blocks = [block.module for block in find_comfy_family(model).blocks(model)]
        before, after = [], []
        for block in (blocks[0], blocks[-1]):
            block.register_forward_pre_hook(lambda *seen: before.append(tokens_of(*seen)), with_kwargs=True)
        with merged(model, scope="block"):
            for block in (blocks[0], blocks[-1]):
                block.register_forward_pre_hook(lambda *seen: after.append(tokens_of(*seen)), with_kwargs=True)
            call()
        for whole, reduced_tokens in zip(before, after, strict=True):
            text = whole.shape[1] - 64 - self.REFERENCE  # in the last block of Flux it is in the same sequence
            assert reduced_tokens.shape[1] == text + 32 + self.REFERENCE
            assert torch.equal(reduced_tokens[:, -self.REFERENCE :], whole[:, -self.REFERENCE :])
            assert torch.equal(reduced_tokens[:, :text], whole[:, :text])

    def test_references_with_a_time_of_their_own(self):
        """Whole blocks cannot be merged then, their modules can."""
        patcher = qwen_image(default_ref_method="index_timestep_zero")
        model, _ = first_call(patcher, "qwen-image")
        args, kwargs = inputs_of(model, lambda: sample(patcher, "qwen-image", steps=1))[0]
        reference = torch.randn(args[0].shape)
        extra = {"transformer_options": {}, "ref_latents": [reference]}
        whole = model(*args, **kwargs | extra)
        with merged(model, scope="block"):
            assert torch.equal(model(*args, **kwargs | extra), whole)
            assert any("a time of their own" in note for note in notes_of(model))
        with merged(model, scope="module"):
            assert not torch.equal(model(*args, **kwargs | extra), whole)

    def test_reference_frames_of_wan(self):
        patcher = FAMILIES["wan"].make()
        model, _ = first_call(patcher, "wan")
        args, kwargs = inputs_of(model, lambda: sample(patcher, "wan", steps=1))[0]
        frames = torch.randn(args[0].shape)[:, :, :1]
        for scope in ("module", "block", "stage"):
            with merged(model, scope=scope):
                result = model(*args, **kwargs | {"transformer_options": {}, "time_dim_concat": frames})
                assert state_of(model).plan_of("block").grid.num_tokens == 48
            assert result.shape == args[0].shape


def test_residuals_of_a_controlnet_for_qwen_image():
    """They are added after every block: a run of blocks is then merged block by block."""
    patcher = FAMILIES["qwen-image"].make()
    model = patcher.model.diffusion_model
    args, kwargs = inputs_of(model, lambda: sample(patcher, "qwen-image", steps=1))[0]
    residuals = [torch.randn(args[0].shape[0], 64, 32) for _ in model.transformer_blocks]

    def call():
        return model(*args, **kwargs | {"transformer_options": {}, "control": {"input": residuals}})

    whole, results = call(), {}
    assert not torch.equal(whole, model(*args, **kwargs | {"transformer_options": {}}))
    for scope in ("block", "stage"):
        with merged(model, scope=scope):
            results[scope] = call()
            assert any("block by block" in note for note in notes_of(model)) == (scope == "stage")
    assert torch.equal(results["block"], results["stage"])
    assert not torch.equal(results["block"], whole)
    assert torch.equal(call(), whole)


@pytest.mark.parametrize("scope", ["module", "block", "stage"])
def test_wan_from_an_image(scope):
    """It attends to the picture too, and gets it with the noise."""
    from comfy import supported_models

    config = wan_config() | {"model_type": "i2v", "in_dim": 36}
    model, call = first_call(patcher_of(supported_models.WAN21_I2V(config)), "wan")
    whole = call()
    with merged(model, scope=scope):
        result = call()
        plan = state_of(model).plan_of("block")
    assert (plan.grid.num_tokens, plan.num_destinations) == (48, 24)
    assert result.shape == whole.shape
    assert not torch.equal(result, whole)
    assert torch.equal(call(), whole)


def test_frames_with_a_time_of_their_own():
    """As in Wan 2.2 5B from an image: only modules are merged then."""
    patcher = FAMILIES["wan"].make()
    model, _ = first_call(patcher, "wan")
    args, kwargs = inputs_of(model, lambda: sample(patcher, "wan", steps=1))[0]
    times = args[1][:, None].repeat(1, 3) * torch.tensor([0.0, 1.0, 1.0])
    whole = model(args[0], times, **kwargs | {"transformer_options": {}})
    with merged(model, scope="block"):
        assert torch.equal(model(args[0], times, **kwargs | {"transformer_options": {}}), whole)
    with merged(model, scope="module"):
        assert not torch.equal(model(args[0], times, **kwargs | {"transformer_options": {}}), whole)
