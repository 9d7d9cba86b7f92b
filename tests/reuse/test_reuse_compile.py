"""torch.compile: reuse adds one graph to a whole denoiser, and nothing is compiled again later."""

import pytest
import torch
from observe import Graphs, compile_blocks, same_picture
from parts import BY_NAME, generate, only_reuse
from tiny import STRIDED

from toma_diffusion import PRESETS, Reuse, apply_toma, remove_toma

EVERY = {"select_every": 1, "reweigh_every": 1}
SMALL_UNET = {
    "block_out_channels": (32, 32),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("UpBlock2D", "UpBlock2D"),
    "mid_block_type": None,
}
"""A second level with one transformer block: compiling takes seconds a layer."""


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def pair(family, changes, config):
    """Two equal models and their handles: one to be compiled, one to stay as it is."""
    models = [family.build(**changes) for _ in range(2)]
    return [(model, apply_toma(model, config)) for model in models]


def same_steps(family, pairs, steps: int, seed: int = 0) -> None:
    ours, theirs = (torch.stack(generate(family, *each, steps, seed)) for each in pairs)
    same_picture(ours, theirs)


# The autograd compiler turns what is stored in place into results.
@pytest.mark.parametrize(
    ("family", "changes", "fields", "backend"),
    [
        (BY_NAME["pixart"], {"num_layers": 1}, {"order": 1}, "aot_eager"),
        (BY_NAME["sd3"], {"num_layers": 2, "dual_attention_layers": ()}, {"order": 0}, "eager"),
        (BY_NAME["sd15"], SMALL_UNET, {"order": 0, "part": "deep"}, "eager"),
    ],
    ids=lambda value: getattr(value, "name", "-"),
)
def test_whole_denoiser(family, changes, fields, backend):
    graphs = Graphs(backend)
    pairs = pair(family, changes, only_reuse(start=0, **fields))
    pairs[0][0].compile(fullgraph=True, backend=graphs)
    same_steps(family, pairs, 4)
    assert graphs.count == 2
    with torch.compiler.set_stance("fail_on_recompile"):
        same_steps(family, pairs, 4, seed=9)
        same_steps(family, pairs, 7)


def test_lines_that_are_followed_further_are_no_other_graph():
    """`order="auto"` follows none with few computed steps, and some with many."""
    graphs, family = Graphs(), BY_NAME["pixart"]
    pairs = pair(family, {"num_layers": 1}, PRESETS["fast"])
    pairs[0][0].compile(fullgraph=True, backend=graphs)
    same_steps(family, pairs, 8)
    assert graphs.count == 2
    with torch.compiler.set_stance("fail_on_recompile"):
        same_steps(family, pairs, 20)
        same_steps(family, pairs, 8, seed=9)


def test_without_reuse_it_is_one_graph_less():
    graphs, family = Graphs(), BY_NAME["pixart"]
    model = family.build(num_layers=1)
    handle = apply_toma(model, only_reuse(period=1))
    model.compile(fullgraph=True, backend=graphs)
    generate(family, model, handle, 4)
    assert graphs.count == 1


@pytest.mark.parametrize("update", ["nothing", "clusters"])
def test_together_with_merging(update):
    """Merged and reused steps; or whole and corrected ones."""
    family = BY_NAME["pixart"]
    graphs, models = Graphs(), [family.build(num_layers=1) for _ in range(2)]
    settings = STRIDED | EVERY | {"scope": "stage", "reuse": Reuse(start=0, update=update)}
    pairs = [(model, apply_toma(model, **settings)) for model in models]
    models[0].compile(fullgraph=True, backend=graphs)
    same_steps(family, pairs, 4)
    assert graphs.count == 2
    with torch.compiler.set_stance("fail_on_recompile"):
        same_steps(family, pairs, 6, seed=9)


def test_two_passes_share_the_graphs():
    """Their memories are other tensors of the same shape."""
    graphs, family = Graphs(), BY_NAME["flux"]
    model = family.build(num_layers=1, num_single_layers=1)
    handle = apply_toma(model, only_reuse(start=0))
    model.compile(fullgraph=True, backend=graphs)
    prompts = [family.inputs(seed=seed) for seed in range(2)]
    handle.begin(4)
    for step in range(4):
        handle.step(step)
        latent = torch.randn_like(prompts[0]["hidden_states"])
        for prompt in prompts:
            with torch.no_grad():
                model(**prompt | {"hidden_states": latent})
    assert graphs.count == 2


@pytest.mark.parametrize(
    ("family", "part"),
    [
        (BY_NAME["sdxl"], "blocks"),
        (BY_NAME["sdxl"], "deep"),
        (BY_NAME["flux"], "blocks"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_blocks(family, part):
    changes = {"num_layers": 1, "num_single_layers": 2} if family.name == "flux" else {}
    pairs = pair(family, changes, only_reuse(start=0, part=part))
    compile_blocks(pairs[0][0], fullgraph=True, backend="eager")
    same_steps(family, pairs, 4)
    with torch.compiler.set_stance("fail_on_recompile"):
        same_steps(family, pairs, 6, seed=9)


def test_removed_and_switched_off():
    family = BY_NAME["pixart"]
    pairs = pair(family, {"num_layers": 1}, only_reuse(start=0))
    (model, handle), _ = pairs
    assert handle.compile("whole", backend="eager") == "whole"
    generate(family, *pairs[0], 2)
    handle.enabled = False
    original = family.call(family.build(num_layers=1))
    same_picture(family.call(model), original)
    handle.enabled = True
    same_steps(family, pairs, 2)
    remove_toma(model)
    assert torch.equal(family.call(model), original)
