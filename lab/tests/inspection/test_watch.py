"""What blocks see, in every family."""

import pytest
import torch
from tiny_pipelines import PIPELINES, denoiser, run
from tiny_text import text_pipeline
from toma_lab.inspection.watch import watch
from toma_lab.pipelines.generation import ImageRequest, generate_image

from toma_diffusion import Merge, speed_up
from toma_diffusion.engine.install import find_root
from toma_diffusion.families import find_family
from toma_diffusion.merge import Action, MergePlan


@pytest.mark.parametrize("family", PIPELINES)
def test_every_block_is_seen_in_every_step_and_nothing_changes(family):
    pipe = PIPELINES[family]()
    expected = run(pipe, num_inference_steps=3)
    seen = []
    with watch(pipe, seen.append) as blocks:
        assert torch.equal(run(pipe, num_inference_steps=3), expected)
    names = [block.name for block in find_family(denoiser(pipe)).blocks(denoiser(pipe))]
    assert [block.name for block in blocks] == names
    assert [(block_input.step, block_input.block) for block_input in seen] == [
        (step, name) for step in range(3) for name in names
    ]
    widths = {block.name: block.width for block in blocks}
    for block_input in seen:
        assert block_input.tokens.shape == (block_input.grid.num_tokens, widths[block_input.block])
        assert block_input.tokens.dtype == torch.float32
    assert torch.equal(run(pipe, num_inference_steps=3), expected)
    assert len(seen) == 3 * len(names)  # hooks are gone


def test_tokens_are_those_that_destinations_are_chosen_among():
    """At the leading site of a merged model the same tokens come in: the choice is the same."""
    pipe, request = text_pipeline(), ImageRequest("a shoe", steps=1)
    config = Merge(num_regions=4)
    seen = []
    with watch(pipe, seen.append):
        generate_image(pipe, request)
    with speed_up(pipe, merge=config) as handle:
        generate_image(pipe, request)
        plan = find_root(handle.model).inside.plan_of("level 0")
    alone = MergePlan(seen[0].grid, config, batch_size=1)
    alone.update(seen[0].tokens[None], Action.SELECT)
    assert torch.equal(alone.positions[0], plan.positions[-1])


def test_merged_models_and_strangers_are_refused():
    pipe = text_pipeline()
    with speed_up(pipe), pytest.raises(RuntimeError, match=r"call handle.remove\(\) first"), watch(pipe, print):
        pass
    with pytest.raises(ValueError, match="Linear is not supported"), watch(torch.nn.Linear(1, 1), print):
        pass
