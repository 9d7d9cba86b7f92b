"""Runs: a generation's schedule really happens in each, and nothing is left behind."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from toma_lab.bench.group import BASELINE, Group
from toma_lab.bench.measure import Measured, applied, compiled, measure, share_of_hits
from toma_lab.bench.timing import Timing, time_runs
from toma_lab.bench.turns import Turns
from toma_lab.bench.zoo import MODELS, build, build_empty
from toma_lab.columns import ColumnSpec, columns_of
from toma_lab.parsing import Resolution

from toma_diffusion.merge import Action, MergePlan

CPU = torch.device("cpu")
GROUP = Group("small", Resolution(128, 128), 1, "eager", "none", 2, "float32")


def ready(name: str):
    denoiser = build(name, small=True, device=CPU)
    denoiser.materialize()
    return denoiser


def column_of(denoiser, text: str, ratio: float = 0.5):
    return columns_of(denoiser.model, [ColumnSpec.parse(text)], [ratio])[0]


def generation_of(denoiser, text: str = "", steps: int = 2, *, moves: bool = False):
    column = column_of(denoiser, text) if text else BASELINE
    return applied(column, denoiser, replace(GROUP, steps=steps), moves=moves)


def measured(denoiser, column=BASELINE, group=GROUP, stage=str, turns=None) -> Measured:
    return measure(denoiser, group, column, repeats=1, end_to_end=None, turns=turns or Turns(), stage=stage)


@pytest.mark.parametrize("name", ["sd15", "flux", "sd35"])
def test_every_run_follows_the_schedule_with_the_same_buffers(name, monkeypatch):
    updates, plans, update = [], [], MergePlan.update

    def spy(plan, tokens, action):
        updates.append((id(plan), action))
        update(plan, tokens, action)

    monkeypatch.setattr(MergePlan, "update", spy)
    with generation_of(ready(name), "toma-stage:num_regions=4;select_every=4;reweigh_every=2", steps=7) as generation:
        for _ in range(2):
            updates.clear()
            generation.run()
            plans.append({plan for plan, _ in updates})
            for plan in plans[-1]:
                actions = Counter(action for each, action in updates if each == plan)
                assert actions == {Action.SELECT: 2, Action.REWEIGH: 2}
    assert plans[0] == plans[1] != set()


def test_skipped_steps_are_the_same_in_every_run():
    denoiser = ready("sd15")
    calls = []
    with generation_of(denoiser, "fast:computed=(0,2,5)", steps=6) as generation:
        counting = denoiser.model.conv_in.register_forward_hook(lambda *_: calls.append(1))
        for _ in range(2):
            calls.clear()
            generation.run()
            assert len(calls) == 3
        counting.remove()


def test_percentiles():
    assert Timing.of([3.0]) == Timing(3.0, 3.0, 3.0)
    assert Timing.of([5.0, 1.0, 2.0, 4.0, 3.0, 6.0]) == Timing(3.5, 2.0, 5.0)
    runs = []
    assert time_runs(lambda: runs.append(1), 3, 10, CPU).median > 0
    assert len(runs) == 3


class TestCompiled:
    @pytest.mark.parametrize(("name", "how"), [("sd35", "block"), ("sd35", "whole"), ("z-image", "block")])
    def test_equals_eager_and_is_undone(self, name, how):
        """Z-Image takes and returns lists of samples."""
        denoiser = ready(name)
        with generation_of(denoiser) as generation:
            eager = generation.run()
            with compiled(generation, how, backend="aot_eager"):
                generation.run()
                with torch.compiler.set_stance("fail_on_recompile"):
                    torch.testing.assert_close(generation.run(), eager, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(generation.run(), eager, atol=1e-5, rtol=1e-4)
        assert all(module._compiled_call_impl is None for module in denoiser.model.modules())

    @pytest.mark.slow
    def test_a_column_with_inductor(self):
        denoiser = build("sd35", small=True, device=CPU)
        config = MODELS["sd35"]["config"] | MODELS["sd35"]["small"]["config"]
        denoiser.model = build_empty(MODELS["sd35"]["class"], config | {"num_layers": 1})
        denoiser.materialize()
        stages = []
        column = column_of(denoiser, "toma-stage:num_regions=4;skip_blocks=()")
        found = measured(denoiser, column, replace(GROUP, mode="compiled", compile="block"), stages.append)
        assert stages == ["compiling", "waiting to time", "timing"]
        assert found.timing.median > 0
        assert found.warnings == ()
        assert not any(module._forward_hooks for module in denoiser.model.modules())


class TestMeasure:
    def test_hooks_are_gone_after_a_failure(self):
        denoiser = ready("sd35")
        column = column_of(denoiser, "toma-stage")
        broken = denoiser.model.transformer_blocks[2].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            measured(denoiser, column)
        broken.remove()
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in denoiser.model.modules())
        assert measured(denoiser, column).warnings == ()

    def test_others_are_not_timed_before_the_warm_up_is_done(self, monkeypatch):
        """A GPU runs behind the CPU: warm-ups that are still queued would slow down what another process times."""
        happened = []

        class Watched(Turns):
            def alone(self):
                happened.append("lets others be timed")
                return super().alone()

        monkeypatch.setattr("toma_lab.bench.measure.synchronize", lambda device: happened.append("waited"))
        denoiser = ready("sd35")
        counting = denoiser.model.register_forward_hook(lambda *_: happened.append("called"))
        measured(denoiser, turns=Watched())
        counting.remove()
        let = happened.index("lets others be timed")
        assert happened[:let] == ["called", "waited"]
        assert "called" in happened[let:]

    def test_warns_of_what_makes_a_time_meaningless(self):
        denoiser = ready("sd35")
        (warning,) = measured(denoiser, column_of(denoiser, "toma-stage:num_regions=16", ratio=0.1)).warnings
        assert "nothing was merged" in warning
        denoiser.model.proj_out.weight.data.fill_(float("inf"))
        (warning,) = measured(denoiser, column_of(denoiser, "toma-stage:num_regions=4")).warnings
        assert "not finite" in warning


class TestShortcuts:
    """Fewer steps and caches as methods, timed as the others are."""

    def test_of_eight_steps_two_are_made(self):
        denoiser, calls = ready("flux"), []
        counting = denoiser.model.register_forward_pre_hook(lambda *_: calls.append(1))
        counts = []
        for column in (column_of(denoiser, "steps:2"), BASELINE):
            calls.clear()
            measured(denoiser, column, replace(GROUP, steps=8))
            counts.append(len(calls) - 1)  # one warms up
        counting.remove()
        assert counts == [2, 8]

    def test_a_cache_is_switched_on_and_off(self):
        denoiser = ready("flux")
        column = column_of(denoiser, "firstblockcache:10")
        assert (column.key["method"], column.key["settings"]) == ("first-block-cache", '{"threshold":10.0}')
        assert measured(denoiser, column, replace(GROUP, steps=8)).cache_hits > 0.5
        assert not any("forward" in vars(module) for module in denoiser.model.modules())

    @pytest.mark.parametrize(("threshold", "hits"), [(0.0, 0.0), (1e9, 0.75)])
    def test_hits_are_counted_and_every_run_begins_empty(self, threshold, hits):
        with generation_of(ready("flux"), f"firstblockcache:{threshold}", steps=4, moves=True) as generation:
            first, second = (call["hidden_states"] for call in generation.calls[:2])
            assert not torch.equal(first, second)
            assert [share_of_hits(generation) for _ in range(2)] == [hits, hits]
