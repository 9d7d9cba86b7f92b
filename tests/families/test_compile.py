"""torch.compile: the whole denoiser in one graph per action, blocks in a bounded number, results equal eager."""

import gc

import pytest
import torch
from merging import merged, remove, steady
from observe import Graphs, attention_lengths, compile_blocks, same_picture
from pairs import named
from tiny import ALL, TODAY, one, output_of, sd15_unet, with_sample
from torch import nn

from toma_diffusion import Skip, UsageError, speed_up
from toma_diffusion.api import graphs_obstacle
from toma_diffusion.families import find_family

SCHEDULE = {"select_every": 4, "reweigh_every": 2}
TWO_ACTIONS = {"select_every": 2}
"""To compile less: every step selects, or uses the last selection."""


@pytest.fixture(autouse=True)
def _fresh_compiler():
    gc.freeze()  # torch collects often while it compiles: without this, each time through what earlier tests left
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    gc.unfreeze()


def pair(family, changes=None, merge=steady, **settings) -> tuple[nn.Module, nn.Module]:
    """Two equal models: one to be compiled, one to stay eager."""
    models = [family.build(**changes or {}) for _ in range(2)]
    for model in models:
        merge(model, **settings)
    return models[0], models[1]


def generate(family, model: nn.Module, seed: int, steps: int = 6) -> torch.Tensor:
    inputs = family.inputs(seed=seed)
    calls = [with_sample(inputs, lambda sample, step=step: sample + 0.01 * step) for step in range(steps)]
    return torch.stack([output_of(model, call) for call in calls])


def same_steps(family, model: nn.Module, eager: nn.Module, seed: int, steps: int = 6) -> None:
    same_picture(generate(family, model, seed, steps), generate(family, eager, seed, steps))


# Compiling takes seconds a layer. Most families are compiled here or below, as a whole or by block, and every scope
# several times. Torch's autograd compiler (it turns the plans' updates in place into results) takes as long
# again, and a greedy choice cannot be compared: both meet several families and scopes.
@pytest.mark.parametrize(
    ("name", "scope", "backend", "merge", "actions"),
    [
        ("sd15", "stage", "eager", merged, 3),
        ("sdxl", "module", "aot_eager", steady, 3),
        ("flux", "stage", "aot_eager", steady, 3),
        ("sd3", "block", "aot_eager", steady, 3),
        ("pixart", "stage", "aot_eager", merged, 3),
        ("krea2", "block", "eager", steady, 2),
    ],
)
def test_a_whole_denoiser_has_one_graph_per_action(name, scope, backend, merge, actions):
    graphs, family = Graphs(backend), one(name)
    schedule = SCHEDULE if actions == 3 else TWO_ACTIONS
    model, eager = pair(family, family.shallow, merge, **schedule, scope=scope)
    model.compile(fullgraph=True, backend=graphs)
    for seed in range(2):
        if merge is steady:
            same_steps(family, model, eager, seed)
        else:
            assert generate(family, model, seed).isfinite().all()
        assert graphs.count == actions


# In module scope: for every kind of block three for the first of its kind (select, reweigh, reuse) and one for the
# others. Outside the blocks' own code, in scopes block and stage, the hooks are compiled on their own.
@pytest.mark.parametrize(
    ("name", "scope", "most"),
    [
        ("sdxl", "module", 4),
        ("flux", "module", 8),
        ("pixart", "module", 4),
        ("sdxl", "stage", 16),
        ("flux3", "block", 14),
        ("z-image", "stage", 12),
        ("mochi", "module", 8),
    ],
)
def test_blocks_have_a_bounded_number_of_graphs(name, scope, most):
    graphs, family = Graphs(), one(name)
    early = name in ("sdxl", "flux", "pixart")
    model, eager = pair(family, None if early else family.shallow, **SCHEDULE if early else TWO_ACTIONS, scope=scope)
    for block in find_family(model).blocks(model):
        block.module.compile(fullgraph=True, backend=graphs)
    steps = 6 if early else 3
    same_steps(family, model, eager, 0, steps)
    assert graphs.count == most if scope == "module" and early else 0 < graphs.count <= most
    with torch.compiler.set_stance("fail_on_recompile"):
        same_steps(family, model, eager, 1, steps)


@pytest.mark.parametrize("family", [family for family in ALL if family in TODAY], ids=named)
def test_where_torch_cannot_trace_a_whole_call(family):
    """CUDA graphs then give way to blocks, with a warning that says why."""
    model = family.build(**family.shallow)
    obstacle = graphs_obstacle(model)
    assert (obstacle is not None) == (family.name in ("z-image", "qwen-image-21"))
    if obstacle is None:
        return
    with pytest.raises(torch._dynamo.exc.Unsupported):
        family.call(torch.compile(family.build(**family.shallow), fullgraph=True, backend="eager"))
    handle = steady(model)
    with pytest.warns(UserWarning, match=f"CUDA graphs cannot be used here: {obstacle}. Compiling block by block"):
        assert handle.compile("graphs", backend="eager") == "blocks"
    assert family.call(model).isfinite().all()


class TestLate:
    """Hooks put in or taken out after a compiled call: torch would not look again by itself."""

    family = one("pixart")

    def test_applied_after_the_first_compiled_call_it_takes_effect(self):
        compiled = torch.compile(self.family.build(**self.family.shallow), backend="eager")
        whole = self.family.call(compiled)
        merged(compiled)
        assert not torch.allclose(self.family.call(compiled), whole, atol=1e-3)
        remove(compiled)
        same_picture(self.family.call(compiled), whole)

    def test_switched_off_is_one_more_graph(self):
        """The same graph runs outside the window."""
        graphs = Graphs()
        model, eager, plain = (self.family.build(**self.family.shallow) for _ in range(3))
        handle, _ = (steady(each, **SCHEDULE) for each in (model, eager))
        model.compile(fullgraph=True, backend=graphs)
        same_steps(self.family, model, eager, 0)
        assert graphs.count == 3
        for seed, enabled in ((1, False), (2, True), (3, False)):
            handle.enabled = enabled
            same_steps(self.family, model, eager if enabled else plain, seed)
        assert graphs.count == 4


class TestBlocksWithoutHooks:
    """Blocks share their class's code: what is compiled for one without hooks must not serve one that has them."""

    @pytest.mark.parametrize(("name", "scope"), [("flux", "block"), ("sdxl", "stage")])
    def test_a_block_left_whole_does_not_lend_its_code(self, name, scope):
        family = one(name)
        model, eager = pair(family, skip_blocks=(0,), scope=scope)
        compile_blocks(model, fullgraph=True, backend="eager")
        same_steps(family, model, eager, 0, steps=2)

    def test_nor_does_another_model_of_the_same_class(self):
        family = one("sdxl")
        whole, (model, eager) = family.build(), pair(family)
        for each in (whole, model):
            compile_blocks(each, fullgraph=True, backend="eager")
        generate(family, whole, 0, steps=2)
        same_steps(family, model, eager, 0, steps=2)


def test_sd35_by_block_with_changing_sizes():
    """Three shapes of block, three actions and two sizes pass torch's default limit of 8; all must be compiled."""
    graphs, family = Graphs(), one("sd3")
    model, eager = pair(family, **SCHEDULE)
    compile_blocks(model, fullgraph=True, dynamic=False, backend=graphs)
    same_steps(family, model, eager, 0)
    assert graphs.count == 6
    for _ in range(2):
        same_picture(*(family.call(each, height=24, wide=24) for each in (model, eager)))
    assert graphs.count > 8
    with torch.compiler.set_stance("fail_on_recompile"):
        same_steps(family, model, eager, 2)


def test_two_passes_share_the_graphs():
    """The plans of the two passes are different objects of the same shape: no further graph."""
    graphs, family = Graphs(), one("flux")
    model = family.build(**family.shallow)
    merged(model, **SCHEDULE)
    model.compile(fullgraph=True, backend=graphs)
    prompts = [family.inputs(seed=seed) for seed in range(2)]
    for _ in range(6):
        latent = torch.randn_like(prompts[0]["hidden_states"])
        for prompt in prompts:
            output_of(model, prompt | {"hidden_states": latent, "img_ids": prompts[0]["img_ids"]})
    assert graphs.count == 3


@pytest.mark.parametrize(("name", "scope"), [("qwen-image-21", "stage"), ("chroma", "block")])
def test_together_with_skipped_steps(name, scope):
    family = one(name)
    models = [family.build(**family.shallow) for _ in range(2)]
    handles = [steady(model, Skip(computed=(0, 2)), scope=scope) for model in models]
    compile_blocks(models[0], fullgraph=True, backend="eager")

    def same_generation(seed: int) -> None:
        for step in range(4):
            for handle in handles:
                handle.step(step)
            same_picture(*(family.call(model, seed=seed + step) for model in models))

    for handle in handles:
        handle.begin(4)
    same_generation(0)
    with torch.compiler.set_stance("fail_on_recompile"):
        same_generation(9)


class TestHandle:
    """`handle.compile`. On a GPU it is tested in tests/gpu."""

    def test_without_a_gpu_graphs_fall_back_with_a_warning(self):
        model = sd15_unet()
        handle = merged(model)
        with pytest.warns(UserWarning, match=r"CUDA graphs cannot be used here: they need a model on a CUDA device"):
            assert handle.compile("graphs", backend="eager") == "blocks"
        assert any(module._compiled_call_impl is not None for module in model.modules())
        remove(model)
        assert all(module._compiled_call_impl is None for module in model.modules())

    @pytest.mark.parametrize("mode", ["blocks", "whole"])
    def test_compiled_is_as_merged(self, mode):
        family = one("sd15")
        model = family.build(**family.shallow)
        plain = family.call(model)
        handle = steady(model)
        expected = family.call(model)
        handle.reset()
        assert handle.compile(mode, backend="eager") == mode
        same_picture(family.call(model), expected)
        handle.remove()
        assert torch.equal(family.call(model), plain)

    def test_whole_after_whole_takes_no_code_of_another_setting(self):
        """Compiled as a whole it is not checked that modules without hooks have none; the hooks themselves are."""
        family = one("sdxl")
        model, other = family.build(**family.shallow), family.build(**family.shallow)
        lengths = []
        for settings in ({"skip_blocks": (0,)}, {"skip_blocks": (1,)}, {"ratio": 0.75}):
            handle = merged(model, **{"scope": "block"} | settings)
            expected = attention_lengths(lambda: family.call(model))
            handle.compile("whole", backend="eager")
            assert attention_lengths(lambda: family.call(model)) == expected
            lengths.append(tuple(expected))
            handle.remove()
        assert len(set(lengths)) == 3
        other.compile(backend="eager")
        assert attention_lengths(lambda: family.call(other)) == attention_lengths(lambda: family.call(model))

    def test_unknown_modes(self):
        with pytest.raises(UsageError, match="mode='toma-stage' is not known: use one of 'blocks', 'whole', 'graphs'"):
            speed_up(sd15_unet()).compile("toma-stage")
