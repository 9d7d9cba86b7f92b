"""Runs: a generation's schedule really happens in each, and nothing is left behind."""

import importlib
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from toma_lab.bench import caching
from toma_lab.bench.measure import measure
from toma_lab.bench.models import build
from toma_lab.bench.published import SD3, SD35_LARGE, SMALL_SD35
from toma_lab.bench.scenario import Group
from toma_lab.bench.timing import Generation, StepKind, Timing, compile_model, forget_compiled
from toma_lab.bench.turns import Turns
from toma_lab.bench.weights import build_empty
from toma_lab.experiments.cells import Cell
from toma_lab.experiments.parsing import Resolution
from toma_lab.experiments.shortcuts import parse_shortcut

from toma_diffusion import Action, MergePlan, apply_toma
from toma_diffusion.api import compiled_blocks
from toma_diffusion.merge.config import ToMAConfig

CPU = torch.device("cpu")
SIDE = 128


def ready(name: str):
    denoiser = build(name, small=True, device=CPU)
    denoiser.materialize()
    return denoiser


def generation_of(denoiser, steps: int) -> Generation:
    return Generation(denoiser.model, [denoiser.inputs(1, SIDE, SIDE)] * steps)


@contextmanager
def merged(generation: Generation, *settings, **overrides):
    with apply_toma(generation.model, *settings, **overrides) as generation.handle:
        yield
    generation.handle = None


@pytest.fixture
def updates(monkeypatch):
    """What plans are really asked to do: (plan, action) in order."""
    seen = []
    update = MergePlan.update

    def spy(plan, tokens, action):
        seen.append((plan, action))
        update(plan, tokens, action)

    monkeypatch.setattr(MergePlan, "update", spy)
    return seen


class TestGeneration:
    @pytest.mark.parametrize("name", ["sd15", "flux", "sd35"])
    def test_every_run_follows_the_schedule_with_the_same_buffers(self, name, updates):
        generation = generation_of(ready(name), steps=7)
        with merged(generation, "toma-stage", num_regions=4, select_every=4, reweigh_every=2):
            plans = []
            for _ in range(2):
                updates.clear()
                generation.run()
                plans.append({id(plan) for plan, _ in updates})
                for plan in plans[-1]:
                    actions = Counter(action for each, action in updates if id(each) == plan)
                    assert actions == {Action.SELECT: 2, Action.REWEIGH: 2}
            assert plans[0] == plans[1] != set()
            cycle = [Action.SELECT, Action.REUSE, Action.REWEIGH, Action.REUSE]
            assert [kind.action for kind in generation.kinds()] == (cycle * 2)[:7]

    def test_a_window_counts_the_steps_of_the_run(self, updates):
        generation = generation_of(ready("sd35"), steps=4)
        with merged(generation, "toma-stage", num_regions=4, window=(0.5, 1.0), select_every=10, reweigh_every=5):
            generation.run()
            assert [action for _, action in updates] == [Action.SELECT]
            kinds = [StepKind(), StepKind(), StepKind(False, Action.SELECT), StepKind(False, Action.REUSE)]
            assert generation.kinds() == kinds
            assert generation.last_kind() == kinds[-1]

    def test_last_kind_is_what_the_call_did(self):
        generation = generation_of(ready("sd35"), steps=3)
        assert generation.kinds() == [StepKind()] * 3
        with merged(generation, "toma-stage", num_regions=4, select_every=2, reweigh_every=2), torch.no_grad():
            generation.begin()
            done = []
            for step in range(3):
                generation.call(step)
                done.append(generation.last_kind())
            assert done == generation.kinds()
            assert [kind.action for kind in done] == [Action.SELECT, Action.REUSE, Action.SELECT]

    def test_steps_that_show_everything(self):
        generation = generation_of(ready("sd15"), steps=4)
        assert generation.representative_steps() == 1
        with merged(generation, "toma-stage", num_regions=4, select_every=1):
            assert generation.representative_steps() == 2
        with merged(generation, "toma-stage", num_regions=4, select_every=2, reweigh_every=2):
            assert generation.representative_steps() == 4
        with merged(generation, "fast", computed=(0, 2)):
            assert generation.representative_steps() == 4

    @pytest.mark.parametrize(
        "settings", [{"ratio": 0.0}, {"ratio": 0.5, "num_regions": 4, "select_every": 2, "reweigh_every": 2}]
    )
    def test_skipped_steps_are_of_a_kind_of_their_own(self, settings):
        generation = generation_of(ready("sd15"), steps=6)
        skipped = [False, True, False, True, True, False]
        with merged(generation, "toma-stage", skip={"computed": (0, 2, 5)}, **settings), torch.no_grad():
            for _ in range(2):
                generation.begin()
                done = []
                for step in range(6):
                    generation.call(step)
                    done.append(generation.last_kind())
                assert done == generation.kinds()
                assert [kind.is_skipped for kind in done] == skipped
        chosen = [kind.action for kind in done if not kind.is_skipped]
        merges = [Action.SELECT, Action.REUSE, Action.SELECT]  # skipped steps do not count
        assert chosen == (merges if settings["ratio"] else [None] * 3)


def test_percentiles():
    assert Timing.of([3.0]) == Timing(3.0, 3.0, 3.0)
    assert Timing.of([5.0, 1.0, 2.0, 4.0, 3.0, 6.0]) == Timing(3.5, 2.0, 5.0)


class TestCompiled:
    @pytest.mark.parametrize(("name", "how"), [("sd35", "block"), ("sd35", "whole"), ("z-image", "block")])
    def test_equals_eager_and_is_undone(self, name, how):
        """Z-Image takes and returns lists of samples."""
        denoiser = ready(name)
        generation = generation_of(denoiser, steps=2)
        eager = generation.run()
        compile_model(generation_of(denoiser, 1), how, backend="aot_eager")
        generation.run()
        with torch.compiler.set_stance("fail_on_recompile"):
            torch.testing.assert_close(generation.run(), eager, atol=1e-5, rtol=1e-4)
        forget_compiled(denoiser.model, free=True)
        torch.testing.assert_close(generation.run(), eager, atol=1e-5, rtol=1e-4)
        assert all(module._compiled_call_impl is None for module in denoiser.model.modules())

    def test_block_by_block_has_transformers_and_convolutions(self):
        names = Counter(
            type(module).__name__ for module in compiled_blocks(build("sdxl", small=False, device=CPU).model)
        )
        assert names == {"BasicTransformerBlock": 70, "ResnetBlock2D": 17}

    @pytest.mark.slow
    def test_a_cell_with_inductor(self):
        denoiser = build("sd35", small=True, device=CPU)
        denoiser.model = build_empty(SD3, {**SD35_LARGE, **SMALL_SD35, "num_layers": 1})
        denoiser.materialize()
        group = Group("sd35", Resolution(SIDE, SIDE), 1, "compiled", "block", 2, None, "float32")
        stages = []
        cell = Cell("toma-stage", ToMAConfig.from_preset("toma-stage", num_regions=4, skip_blocks=()))
        found = measure(denoiser, group, cell, repeats=1, end_to_end=None, turns=Turns(), stage=stages.append)
        assert stages == ["compiling", "waiting to time", "timing"]
        assert found.timing.median > 0
        assert found.warnings == ()
        assert not any(module._forward_hooks for module in denoiser.model.modules())


class TestMeasure:
    group = Group("sd35", Resolution(SIDE, SIDE), 1, "eager", "none", 2, None, "float32")

    def measured(self, denoiser, **settings):
        cell = Cell("toma-stage", ToMAConfig.from_preset("toma-stage", **settings))
        return measure(denoiser, self.group, cell, repeats=1, end_to_end=None, turns=Turns(), stage=lambda text: None)

    def test_hooks_are_gone_after_a_failure(self):
        denoiser = ready("sd35")
        with pytest.raises(ValueError, match="skip_blocks"):
            self.measured(denoiser, skip_blocks=(99,))
        broken = denoiser.model.transformer_blocks[2].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            self.measured(denoiser)
        broken.remove()
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in denoiser.model.modules())
        assert self.measured(denoiser).warnings == ()

    def test_others_are_not_timed_before_the_warm_up_is_done(self, monkeypatch):
        """A GPU runs behind the CPU: warm-ups that are still queued would slow down what another process times."""
        happened = []

        class Watched(Turns):
            def alone(self):
                happened.append("lets others be timed")
                return super().alone()

        module = importlib.import_module("toma_lab.bench.measure")
        monkeypatch.setattr(module, "synchronize", lambda device: happened.append("waited"))
        denoiser = ready("sd35")
        counting = denoiser.model.register_forward_hook(lambda *_: happened.append("called"))
        measure(denoiser, self.group, Cell("baseline"), repeats=1, end_to_end=None, turns=Watched(), stage=str)
        counting.remove()
        let = happened.index("lets others be timed")
        assert happened[:let] == ["called", "waited"]
        assert "called" in happened[let:]

    def test_warns_of_what_makes_a_time_meaningless(self):
        denoiser = ready("sd35")
        (warning,) = self.measured(denoiser, num_regions=16, ratio=0.1).warnings
        assert "nothing was merged" in warning
        denoiser.model.proj_out.weight.data.fill_(float("inf"))
        (warning,) = self.measured(denoiser, num_regions=4).warnings
        assert "not finite" in warning


class TestCache:
    def test_hits_are_counted_and_every_run_begins_empty(self):
        denoiser = ready("flux")
        calls = caching.moving_calls(denoiser.inputs(1, SIDE, SIDE), denoiser.family.sample, 4)
        assert not torch.equal(calls[0]["hidden_states"], calls[1]["hidden_states"])
        generation = Generation(denoiser.model, calls)
        for threshold, hits in ((0.0, 0.0), (1e9, 0.75)):
            caching.enable(denoiser.model, threshold)
            with merged(generation, "toma-stage", num_regions=4, ratio=0.5):
                assert [caching.share_of_hits(generation) for _ in range(2)] == [hits, hits]
            assert caching.share_of_hits(generation) == hits
            denoiser.model.disable_cache()


class TestShortcuts:
    """Fewer steps and caches as methods, timed as the others are."""

    GROUP = Group("flux-small", Resolution(SIDE, SIDE), 1, "eager", "none", 8, None, "float32")

    def measured(self, cell):
        """What is measured, and how often the denoiser was called for it."""
        denoiser, calls = ready("flux"), []
        counting = denoiser.model.register_forward_pre_hook(lambda *_: calls.append(1))
        found = measure(
            denoiser, self.GROUP, cell, repeats=2, end_to_end=None, turns=Turns(None), stage=lambda text: None
        )
        counting.remove()
        assert not any("forward" in vars(module) for module in denoiser.model.modules())
        return found, len(calls)

    def cell(self, text):
        shortcut = parse_shortcut(text)
        return Cell(shortcut.name, shortcut=shortcut)

    def test_of_eight_steps_two_are_made(self):
        cell = self.cell("steps:2")
        assert cell.key["settings"] == '{"steps":2}'
        fewer, all_steps = (self.measured(each)[1] - 1 for each in (cell, Cell("baseline")))  # one warms up
        assert 4 * fewer == all_steps

    def test_a_cache_is_switched_on_and_off(self):
        cell = self.cell("firstblockcache:10")
        found, _ = self.measured(cell)
        assert (cell.method, cell.settings) == ("first-block-cache", '{"threshold":10.0}')
        assert found.cache_hits > 0.5
