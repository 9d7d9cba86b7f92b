"""What happens while a clone samples, on stand-ins for ComfyUI's model and sampler."""

import sys

import pytest
import torch
from observe import bookkeeping, our_hooks, same_picture
from stand_in import LEVELS, PROMPTS, WIDTH, Prompt, lengths_of, sample, tiny

from toma_diffusion import Merge, Skip
from toma_diffusion.comfyui.nodes import faster
from toma_diffusion.comfyui.upstream import wrapper_of

MERGE, SKIP = {"merge": Merge(skip_blocks=())}, {"skip": Skip(computed=(0, 2))}
pytestmark = pytest.mark.usefixtures("without_comfyui")
CHOICES = pytest.mark.parametrize(
    "choices",
    [MERGE, {"merge": Merge(scope="module")}, SKIP, MERGE | SKIP],
    ids=["merging", "modules", "skipping", "both"],
)


def clone_of(model, **choices):
    return faster(model, **choices)[0]


def report(clone):
    return str(wrapper_of(clone).last)


class TestOriginal:
    """Clones share their modules. The original must never notice."""

    @CHOICES
    def test_stays_bit_exact(self, choices):
        model = tiny()
        network = model.diffusion_model
        hooks, attributes, before = bookkeeping(network), set(vars(network)), sample(model)
        clone = clone_of(model, **choices)
        assert bookkeeping(network) == hooks
        assert not torch.equal(sample(clone), before)
        assert bookkeeping(network) == hooks
        assert set(vars(network)) == attributes
        assert torch.equal(sample(model), before)

    def test_with_all_steps_computed_it_is_the_original(self):
        model = tiny()
        assert torch.equal(sample(clone_of(model, skip=Skip(computed=(0, 1, 2, 3, 4)))), sample(model))

    @CHOICES
    def test_another_clone_calls_the_model(self, choices):
        """As a node may that looks at the original while the accelerated clone samples."""
        model, seen = tiny(), []
        network = model.diffusion_model
        inputs = torch.randn(1, 4, 1, 16, 16), torch.tensor([0.3]), torch.randn(1, 5, WIDTH)
        expected = network(*inputs, transformer_options={})
        clone = clone_of(model, **choices)
        alone = sample(clone)
        looked = sample(clone, after=lambda _: seen.append(network(*inputs, transformer_options={})))
        assert len(seen) > 1
        assert all(torch.equal(each, expected) for each in seen)
        assert torch.equal(looked, alone)
        assert "calls ran as they are: another clone of the model made them" in report(clone)
        assert "switched off" not in report(clone)

    @CHOICES
    def test_interrupt(self, choices):
        model = tiny()
        hooks, before = bookkeeping(model.diffusion_model), sample(model)
        clone = clone_of(model, **choices)
        whole, evaluations = sample(clone), []

        def interrupt(sampling):
            evaluations.append(len(our_hooks(model.diffusion_model)))
            if len(evaluations) == 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            sample(clone, after=interrupt)
        assert evaluations[0] > 0
        assert bookkeeping(model.diffusion_model) == hooks
        assert "sampling was interrupted, or failed" in report(clone)
        assert torch.equal(sample(model), before)
        assert torch.equal(sample(clone), whole)

    def test_two_clones_sample_in_turn(self):
        model = tiny()
        half, quarter = clone_of(model, merge=Merge(ratio=0.5)), clone_of(model, merge=Merge(ratio=0.25))
        first = [sample(each) for each in (half, quarter, model)]
        again = [sample(each) for each in (model, quarter, half)]
        for one, other in zip(first, reversed(again), strict=True):
            assert torch.equal(one, other)

    def test_one_samples_while_the_other_does(self):
        """The inner sampling runs as the original, and says so."""
        model = tiny()
        outer, inner, found = clone_of(model, **SKIP), clone_of(model, **MERGE), []
        sample(outer, after=lambda _: found.append(sample(inner)))
        assert torch.equal(found[0], sample(model))
        assert "sampling with ToMA already" in report(inner)
        assert "3 skipped" in report(outer)

    def test_a_later_clone_is_accelerated_too(self):
        """Such as that of a LoRA loader after the node."""
        clone = clone_of(tiny(), **MERGE)
        later = clone.clone()
        assert torch.equal(sample(later), sample(clone))
        assert "64 → 32" in report(later)

    @CHOICES
    def test_sizes_may_change_from_sampling_to_sampling(self, choices):
        clone = clone_of(tiny(), **choices)
        first = sample(clone)
        for batch, size in ((2, 16), (1, 24), (3, 8)):
            assert sample(clone, batch=batch, size=size).isfinite().all()
        assert torch.equal(sample(clone), first)


class TestSkippedSteps:
    def test_the_model_runs_in_computed_steps_only(self):
        model = tiny()
        before, clone = sample(model), clone_of(model, **SKIP)
        assert [len(calls) for calls in lengths_of(clone)] == [2, 2, 2]
        assert "steps: 2 whole, 3 skipped" in report(clone)
        assert 0 < (sample(clone) - before).abs().mean() < before.abs().mean()

    def test_it_is_the_solver_on_the_computed_steps(self):
        """After one computed step noise and clean latent are held: Euler's steps over the skipped ones are one step."""
        model = tiny()
        clone = clone_of(model, skip=Skip(computed=(0, 3)))
        same_picture(sample(clone, [1.0, 0.8, 0.6, 0.3, 0.0]), sample(model, [1.0, 0.3, 0.0]))

    def test_merged_in_the_computed_steps(self):
        clone = clone_of(tiny(), **MERGE, **SKIP)
        assert lengths_of(clone) == [[32, 32]] * 3
        assert "steps: 2 merged, 3 skipped" in report(clone)


class TestPasses:
    def test_one_by_one_is_as_together(self):
        """With little memory ComfyUI makes several calls in the place of one."""
        model = tiny()
        clone = clone_of(model, **SKIP)
        same_picture(sample(clone, apart=True), sample(clone))
        assert [len(calls) for calls in lengths_of(clone, apart=True)] == [4, 4, 4]

    def test_memory_becomes_short(self):
        """The evaluation in which passes are others is made again, computed."""
        clone = clone_of(tiny(), skip=Skip(computed=(0,)))

        def separate(sampling):
            sampling.apart = True

        assert sample(clone, after=separate).isfinite().all()
        assert "steps: 2 whole, 3 skipped" in report(clone)

    def test_a_prompt_that_begins_half_way(self):
        """All of its passes are computed then, so that guidance compares none with a predicted one."""
        model = tiny()
        prompts = (*PROMPTS, Prompt(3, begins=0.6))
        clone, whole = clone_of(model, skip=Skip(computed=(0,))), sample(model, prompts=prompts)
        assert 0 < (sample(clone, prompts=prompts) - whole).abs().mean() < whole.abs().mean()
        assert "steps: 2 whole, 3 skipped" in report(clone)

    def test_a_prompt_that_ends_half_way(self):
        clone = clone_of(tiny(), skip=Skip(computed=(0,)))
        assert sample(clone, prompts=(*PROMPTS, Prompt(3, ends=0.6)), apart=True).isfinite().all()
        assert "steps: 2 whole, 3 skipped" in report(clone)

    @pytest.mark.parametrize("apart", [False, True])
    def test_merging_with_guidance(self, apart):
        assert set(lengths_of(clone_of(tiny(), **MERGE), apart=apart)[0]) == {32}


class TestSamplers:
    def test_one_that_is_known_to_evaluate_twice(self):
        """Nothing is skipped, and it is the original."""
        model = tiny()
        clone = clone_of(model, **SKIP)
        assert torch.equal(sample(clone, sampler="heun"), sample(model, sampler="heun"))
        assert "steps: 5 whole" in report(clone)
        assert "the sampler heun evaluates the model several times a step: nothing is skipped" in report(clone)

    def test_one_that_is_found_to_do_so(self):
        clone = clone_of(tiny(), skip=Skip(computed=(0, 2)))
        assert sample(clone, sampler="heun", name="of_another_node").isfinite().all()
        assert "of_another_node evaluates the model several times a step: nothing more is skipped" in report(clone)

    def test_it_merges(self):
        clone = clone_of(tiny(), **MERGE)
        assert set(lengths_of(clone, sampler="heun")[0]) == {32}
        assert "several times" not in report(clone)

    def test_a_schedule_that_adds_noise(self):
        clone = clone_of(tiny(), skip=Skip(computed=(0, 2)))
        assert sample(clone, LEVELS[::-1]).isfinite().all()
        assert "steps: 2 whole, 3 skipped" in report(clone)


class TestCallsThatRunAsTheyAre:
    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"context_window": object()}, "context windows are not supported"),
            ({"uuids": None}, "does not say in transformer_options which step it is (uuids)"),
        ],
    )
    @CHOICES
    def test_and_the_report_says_why(self, choices, options, reason):
        model = tiny()
        clone = clone_of(model, **choices)
        assert torch.equal(sample(clone, **options), sample(model))
        assert f"note: calls ran as they are: {reason}" in report(clone).replace("the sampler ", "")
        assert "no step was made" in report(clone)


def test_diffusers_is_not_used(monkeypatch):
    """Who has ComfyUI need not have it."""
    monkeypatch.setitem(sys.modules, "diffusers", None)
    sample(clone_of(tiny(), **MERGE, **SKIP))
