"""Real video pipelines: steps are counted, also over two denoisers, and removal is exact."""

import diffusers
import pytest
import torch
from observe import attention_lengths, our_hooks, state_of
from tiny import SETTINGS
from tiny_video_pipelines import PIPELINES, generate, h3_pipeline, hunyuan15_pipeline, pipeline, wan_pipeline

from toma_diffusion import Action, Skip, ToMAConfig, apply_toma, remove_toma, toma_enabled

TOKENS = 64


class Calls:
    """For every call of the denoisers: which it is, its step, and whether it merged."""

    def __init__(self, *models):
        self.seen = []
        self.hooks = [
            model.register_forward_hook(lambda model, *_, number=number: self.note(model, number))
            for number, model in enumerate(models)
        ]

    def note(self, model, number):
        state = state_of(model)
        self.seen.append((number, state._last_tick.step, state.active))

    def end(self):
        for hook in self.hooks:
            hook.remove()

    def of(self, *which: int) -> list[tuple]:
        """These columns, without second passes over a step."""
        return list(dict.fromkeys(tuple(call[index] for index in which) for call in self.seen))


@pytest.mark.parametrize("name", PIPELINES)
class TestPipelines:
    def test_a_window_of_the_steps_is_merged(self, name):
        pipe = pipeline(name)
        whole = generate(pipe)
        handle = apply_toma(pipe, "toma", **SETTINGS, window=(0.5, 1.0))
        calls = Calls(pipe.transformer)
        lengths = attention_lengths(lambda: generate(pipe))
        calls.end()
        assert calls.of(1, 2) == [(0, False), (1, False), (2, True), (3, True)]
        assert {queries >= TOKENS for queries, _ in lengths} == {True, False}
        summary = handle.summary()
        assert {(kind.grid, kind.tokens_before, kind.tokens_after) for kind in summary.kinds} == {("4×4×4", 64, 32)}
        assert not torch.allclose(generate(pipe), whole, atol=1e-3)
        with toma_enabled(pipe, False):
            assert torch.equal(generate(pipe), whole)
        remove_toma(pipe)
        assert torch.equal(generate(pipe), whole)

    def test_both_halves_of_guidance_share_a_plan(self, name):
        pipe = pipeline(name)
        handle = apply_toma(pipe, "toma", **SETTINGS)
        found = set()
        pipe.transformer.register_forward_hook(lambda *_: found.add(handle.summary().guidance))
        generate(pipe, steps=2)
        in_one_batch = name in ("cogvideox", "mochi", "ltx2")
        shared = "2 parts of guidance choose together" if in_one_batch else "passes over one sample share a plan"
        assert any(shared in guidance for guidance in found)

    def test_the_default_skips(self, name):
        pipe = pipeline(name)
        whole = generate(pipe, steps=8)
        handle = apply_toma(pipe)
        assert generate(pipe, steps=8).isfinite().all()
        computed, predicted = handle.summary().steps
        assert computed + predicted == 8
        assert predicted >= 2
        handle.remove()
        assert torch.equal(generate(pipe, steps=8), whole)


def test_a_modular_pipeline():
    """MiniMax-H3 has no other, and its timesteps are no views of the scheduler's."""
    pipe, run = h3_pipeline()
    whole = run()
    handle = apply_toma(pipe, "toma", **SETTINGS, window=(0.5, 1.0))
    calls = Calls(pipe.transformer)
    merged = run()
    calls.end()
    assert calls.of(1, 2) == [(0, False), (1, False), (2, True), (3, True)]
    assert [(kind.grid, kind.tokens_after) for kind in handle.summary().kinds] == [("4×4×4", 32)]
    assert torch.equal(merged[:16], whole[:16])  # the keyframe
    assert not torch.allclose(merged, whole, atol=1e-3)
    remove_toma(pipe)
    assert torch.equal(run(), whole)


class TestTwoDenoisers:
    """Wan 2.2: the second denoiser takes over in the middle."""

    @pytest.fixture
    def pipe(self):
        return wan_pipeline(experts=2)

    def test_both_are_merged_and_steps_are_counted_over_both(self, pipe):
        whole = generate(pipe, steps=6)
        handle = apply_toma(pipe, "toma", **SETTINGS, window=(0.1, 0.8))
        assert handle.models == (pipe.transformer, pipe.transformer_2)
        calls = Calls(*handle.models)
        generate(pipe, steps=6)
        calls.end()
        denoisers = [number for number, _ in calls.of(0, 1)]
        assert denoisers == sorted(denoisers)
        assert set(denoisers) == {0, 1}
        window = [merges for _, merges in calls.of(1, 2)]
        assert [step for step, _ in calls.of(1, 2)] == list(range(6))
        assert window == [False, True, True, True, True, False]
        summary = handle.summary()
        (other,) = summary.others
        for each in (summary, other):
            assert [(kind.grid, kind.tokens_before, kind.tokens_after) for kind in each.kinds] == [("4×4×4", 64, 32)]
        assert "Denoiser 2 of 2" in str(summary)
        handle.remove()
        assert not our_hooks(pipe.transformer)
        assert not our_hooks(pipe.transformer_2)
        assert torch.equal(generate(pipe, steps=6), whole)

    def test_merging_in_each_counts(self, pipe):
        whole = generate(pipe, steps=4)
        both = apply_toma(pipe, "toma", **SETTINGS)
        merged = generate(pipe, steps=4)
        both.remove()
        outputs = [whole, merged]
        for model in (pipe.transformer, pipe.transformer_2):
            with apply_toma(model, **SETTINGS):
                outputs.append(generate(pipe, steps=4))
        assert all(
            not torch.allclose(one, other, atol=1e-4) for index, one in enumerate(outputs) for other in outputs[:index]
        )

    def test_a_time_for_every_token(self):
        """TI2V: steps are read from the scheduler, and the first frame stays whole."""
        pipe = wan_pipeline(expand_timesteps=True)
        handle = apply_toma(pipe, "toma", **SETTINGS, window=(0.5, 1.0))
        calls = Calls(pipe.transformer)
        generate(pipe)
        assert calls.of(1, 2) == [(0, False), (1, False), (2, True), (3, True)]
        assert handle.summary().kinds[0].grid == "3×4×4"


@pytest.mark.skipif(not hasattr(diffusers, "HunyuanVideo15Pipeline"), reason="this diffusers has no HunyuanVideo 1.5")
class TestHunyuanVideo15:
    """Complete pipelines: prompts and images are encoded, latents are decoded, guidance is that of a guider."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_a_guider_that_stops_early(self, dtype):
        """Two passes over a step share a plan, which the first selects. In bfloat16 times are no views of the
        scheduler's."""
        pipe = hunyuan15_pipeline(stop=0.5)
        pipe.transformer.to(dtype)
        apply_toma(pipe, "toma", **SETTINGS)
        state, seen = state_of(pipe.transformer), []
        pipe.transformer.register_forward_hook(
            lambda *_: seen.append((state._last_tick.step, state._last_tick.is_exact, state.action))
        )
        generate(pipe)
        selects, shares = Action.SELECT, Action.REUSE
        assert seen == [
            *((0, True, selects), (0, True, shares), (1, True, selects), (1, True, shares)),
            *((2, True, selects), (3, True, selects)),
        ]
        assert len(state._plans) == len(state.slots)

    @pytest.mark.parametrize("image", [False, True], ids=["text", "image"])
    def test_both_passes_are_predicted_from_their_own(self, image):
        pipe = hunyuan15_pipeline(image)
        whole = generate(pipe)
        handle = apply_toma(pipe, ToMAConfig(ratio=0, skip=Skip(computed=(0, 2))))
        calls = Calls(pipe.transformer)
        predicted = generate(pipe)
        calls.end()
        assert [step for _, step, _ in calls.seen] == [0, 0, 2, 2]
        assert handle.summary().steps == (2, 2)
        assert not torch.equal(predicted, whole)
        handle.remove()
        assert torch.equal(generate(pipe), whole)

    @pytest.mark.parametrize("image", [False, True], ids=["text", "image"])
    def test_seven_latent_frames_become_a_clip(self, image):
        pipe = hunyuan15_pipeline(image)
        clip = {"num_frames": 25, "output_type": "pt", "steps": 2}
        whole = generate(pipe, **clip)
        assert whole.shape == (1, 25, 3, 64, 64)
        assert not torch.equal(generate(pipe, **clip, prompt="a dog"), whole)
        over_time = {"region_tokens": 8, "selection_tokens": 8, "region_frames": 2, "skip_blocks": ()}
        handle = apply_toma(pipe, "toma-stage", ratio=0.5, **over_time)
        merged = generate(pipe, **clip)
        assert merged.isfinite().all()
        assert not torch.allclose(merged, whole, atol=1e-4)
        summary = handle.summary()
        assert [(kind.grid, kind.regions) for kind in summary.kinds] == [("6×4×4", "12 tiles of 2×2×2")]
        assert any("the first of 7 frames was left whole" in note for note in summary.notes)
        handle.remove()
        assert torch.equal(generate(pipe, **clip), whole)
