"""torch.compile on the newest families: by block and, where torch can trace a whole call, as a whole."""

import pytest
import torch
from observe import Graphs, compile_blocks, same_picture
from pairs import named
from tiny import STRIDED, output_of, with_sample
from tiny_today import TODAY
from torch import nn

from toma_diffusion import Skip, apply_toma, remove_toma
from toma_diffusion.api import graphs_obstacle

BY_NAME = {family.name: family for family in TODAY}
SCHEDULE = {"select_every": 2, "reweigh_every": 2}
"""Two actions, to compile less: every step selects, or uses the last selection."""
UNTRACEABLE = ("z-image", "qwen-image-21")
"""Merged or not, they read values of tensors in a call, or make tensors in a way that torch cannot follow."""


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def merged_pair(family, **settings) -> tuple[nn.Module, nn.Module]:
    """Two equal models: one to be compiled, one to stay eager."""
    models = [family.build(**family.shallow) for _ in range(2)]
    for model in models:
        apply_toma(model, **STRIDED | settings)
    return models[0], models[1]


def same_steps(family, model: nn.Module, eager: nn.Module, seed: int, steps: int = 3) -> None:
    inputs = family.inputs(seed=seed)
    calls = [with_sample(inputs, lambda sample, step=step: sample + 0.01 * step) for step in range(steps)]
    ours, theirs = ([output_of(each, call) for call in calls] for each in (model, eager))
    same_picture(torch.stack(ours), torch.stack(theirs))


# Compiling takes seconds: every family in one scope, here or below, and every scope on several families.
@pytest.mark.parametrize(
    ("family", "scope", "most"),
    [
        (BY_NAME["qwen-image-21"], "module", 3),  # the first block, when it selects and when it reuses, and the others
        # Merging around blocks is code of its own. Z-Image's refiners are of the same class, and are not merged.
        (BY_NAME["flux3"], "block", 10),
        (BY_NAME["flux2"], "stage", 10),
        (BY_NAME["z-image"], "stage", 9),
    ],
    ids=named,
)
def test_blocks_have_a_bounded_number_of_graphs(family, scope, most):
    graphs = Graphs()
    model, eager = merged_pair(family, **SCHEDULE, scope=scope)
    compile_blocks(model, fullgraph=True, backend=graphs)
    same_steps(family, model, eager, 0)
    assert graphs.count <= most
    with torch.compiler.set_stance("fail_on_recompile"):
        same_steps(family, model, eager, 1)


@pytest.mark.parametrize(
    ("family", "scope"),
    [(BY_NAME["qwen-image"], "module"), (BY_NAME["krea2"], "block"), (BY_NAME["auraflow"], "stage")],
    ids=named,
)
def test_a_whole_denoiser_has_one_graph_per_action(family, scope):
    graphs = Graphs()
    model, eager = merged_pair(family, **SCHEDULE, scope=scope)
    model.compile(fullgraph=True, backend=graphs)
    same_steps(family, model, eager, 0)
    assert graphs.count == 2
    with torch.compiler.set_stance("fail_on_recompile"):
        same_steps(family, model, eager, 1)


@pytest.mark.parametrize("family", TODAY, ids=named)
def test_where_torch_cannot_trace_a_whole_call(family):
    """CUDA graphs then give way to blocks, with a warning that says why."""
    model = family.build(**family.shallow)
    obstacle = graphs_obstacle(model)
    assert (obstacle is not None) == (family.name in UNTRACEABLE)
    if obstacle is None:
        return
    with pytest.raises(torch._dynamo.exc.Unsupported):
        family.call(torch.compile(family.build(**family.shallow), fullgraph=True, backend="eager"))
    handle = apply_toma(model, **STRIDED)
    with pytest.warns(UserWarning, match=f"CUDA graphs cannot be used here: {obstacle}. Compiling block by block"):
        assert handle.compile("graphs", backend="eager") == "blocks"
    assert family.call(model).isfinite().all()


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        (BY_NAME["z-image"], {"ratio": 0}),
        (BY_NAME["qwen-image-21"], {"scope": "stage"}),
        (BY_NAME["chroma"], {"scope": "block"}),
    ],
    ids=named,
)
def test_skipped_steps(family, settings):
    """Alone and together with merging, by block."""
    models = [family.build(**family.shallow) for _ in range(2)]
    every_step = {"select_every": 1, "reweigh_every": 1, "skip": Skip(computed=(0, 2))}
    handles = [apply_toma(model, **STRIDED | every_step | settings) for model in models]
    compile_blocks(models[0], fullgraph=True, backend="eager")

    def same_generation(seed: int) -> None:
        for step in range(4):
            for handle in handles:
                handle.step(step)
            same_picture(*(family.call(model, seed=seed + step) for model in models))

    same_generation(0)
    with torch.compiler.set_stance("fail_on_recompile"):
        same_generation(9)
    remove_toma(models[1])
    assert torch.equal(family.call(models[1]), family.call(family.build(**family.shallow)))
