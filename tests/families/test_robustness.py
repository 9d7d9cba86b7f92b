"""What goes wrong around merging: each is survived, done another way with a word, or refused in a sentence."""

import pickle

import pytest
import torch
from observe import attention_lengths, same_picture, state_of
from tiny import FAMILIES, SCOPES, SETTINGS, STRIDED, sd15_unet, sdxl_unet
from tiny_today import EVERY_FAMILY

from toma_diffusion import Action, Grid, MergePlan, ToMAConfig, UsageError, apply_toma, remove_toma

BY_NAME = {family.name: family for family in FAMILIES}
families = pytest.mark.parametrize("family", EVERY_FAMILY, ids=lambda family: family.name)


def call(family, model) -> torch.Tensor:
    with torch.no_grad():
        return family.call(model)


class TestMemory:
    def test_a_failed_allocation_leaves_nothing_behind(self):
        family = BY_NAME["sdxl"]
        model = family.build()
        apply_toma(model, **SETTINGS)
        slot = state_of(model).slots[-1]
        make = slot.make

        def fail(*args, **kwargs):
            slot.make = make
            raise torch.OutOfMemoryError("no memory for a plan")

        slot.make = fail
        with pytest.raises(torch.OutOfMemoryError):
            call(family, model)
        merged = [call(family, model) for _ in range(3)]
        assert all(output.isfinite().all() for output in merged)

    def test_summary_counts_the_memory_of_plans(self):
        family = BY_NAME["sdxl"]
        model = family.build()
        handle = apply_toma(model, **SETTINGS)
        assert handle.summary().plan_bytes == 0
        call(family, model)
        plans = state_of(model).current.values()
        assert handle.summary().plan_bytes == sum(buffer.nbytes for plan in plans for buffer in plan.buffers) > 0

    def test_plans_of_captured_graphs_are_never_freed(self):
        family = BY_NAME["sdxl"]
        model = family.build()
        apply_toma(model, **SETTINGS)
        call(family, model)
        state = state_of(model)
        state._captured.update(state._plans)  # as a capture notes it; the real one is in tests/gpu
        before = set(state._plans)
        for _ in range(3):
            model(torch.randn(1, 4, 24, 24), 10, torch.randn(1, 7, 64), added_cond_kwargs=added())
        assert before < set(state._plans)


def added() -> dict[str, torch.Tensor]:
    return {"text_embeds": torch.randn(1, 32), "time_ids": torch.zeros(1, 6)}


class TestSeveralDevices:
    def test_a_device_map_over_several_is_refused(self):
        model = sd15_unet()
        model.hf_device_map = {"down_blocks": 0, "up_blocks": 1}
        with pytest.raises(UsageError, match=r"lie on several devices \(0, 1\)"):
            apply_toma(model)

    @pytest.mark.parametrize("placed", [{"": 0}, {"down_blocks": 0, "up_blocks": "cpu", "mid_block": "disk"}])
    def test_one_device_and_offloading_are_not(self, placed):
        model = sd15_unet()
        model.hf_device_map = placed
        apply_toma(model)

    def test_tokens_on_another_device_than_the_plan(self):
        plan = MergePlan(Grid(8, 8), ToMAConfig(num_regions=4), batch_size=1)
        with pytest.raises(ValueError, match="tokens are on meta, this plan is on cpu"):
            plan.update(torch.randn(1, 64, 8, device="meta"), Action.SELECT)

    def test_kernels_look_at_all_their_arguments(self):
        pytest.importorskip("triton")
        from toma_diffusion.ops import triton_merge
        from toma_diffusion.ops.tiles import Tiling

        tokens = torch.randn(1, 64, 8)
        with pytest.raises(ValueError, match="tensors on cpu and on meta"):
            triton_merge.merge(tokens, torch.rand(4, 8, 16, device="meta"), Tiling(8, 4, 4, 8, 8, 8))


class TestGradients:
    @pytest.mark.parametrize("scope", ["block", "stage"])
    def test_checkpointing_is_refused_around_whole_blocks(self, scope):
        family = BY_NAME["sd15"]
        model = family.build().train().requires_grad_()
        model.enable_gradient_checkpointing()
        apply_toma(model, **SETTINGS, scope=scope)
        with pytest.raises(RuntimeError, match=f"gradient checkpointing.*scope='{scope}'.*scope='module'"):
            model(**family.inputs())
        call(family, model)  # nothing is recomputed without gradients

    def test_checkpointing_around_modules(self):
        family = BY_NAME["sd15"]
        gradients = []
        for checkpointing in (False, True):
            model = family.build().train().requires_grad_()
            if checkpointing:
                model.enable_gradient_checkpointing()
            apply_toma(model, **SETTINGS, selection="strided")
            model(**family.inputs()).sample.square().mean().backward()
            gradients.append(model.conv_in.weight.grad)
        torch.testing.assert_close(*gradients)


class TestSkippedLayers:
    @pytest.mark.parametrize("skipped", [[0], [3], [1, 2]], ids=str)
    def test_sd3_in_stage_scope(self, skipped):
        """Skip-layer guidance leaves out blocks, the first or the last of a run too."""
        family = BY_NAME["sd3"]
        model = family.build()
        handle = apply_toma(model, **SETTINGS, scope="stage")
        inputs = family.inputs()
        with torch.no_grad():
            whole = model(**inputs).sample
            lengths = attention_lengths(lambda: model(**inputs, skip_layers=skipped))
            skipping = model(**inputs, skip_layers=skipped).sample
        assert skipping.shape == whole.shape
        assert lengths == attention_lengths(lambda: model(**inputs, skip_layers=skipped))
        assert any("skip-layer guidance leaves out blocks" in note for note in handle.summary().notes)


class TestPickling:
    @families
    @pytest.mark.parametrize("scope", SCOPES)
    def test_a_merged_model(self, family, scope):
        model = family.build()
        apply_toma(model, **STRIDED, scope=scope)
        before = call(family, model)
        copied = pickle.loads(pickle.dumps(model))
        same_picture(call(family, copied), before)
        remove_toma(copied)
        same_picture(call(family, copied), call(family, family.build()))

    @pytest.mark.parametrize("method", ["tomesd", "tofu", "todo"])
    def test_other_methods(self, method):
        family = BY_NAME["sd15"]
        model = family.build().double()  # where rounding turns no match
        apply_toma(model, method, ratio=0.75, **({} if method == "todo" else {"random": False}))
        before = call(family, model)
        same_picture(call(family, pickle.loads(pickle.dumps(model))), before)


class TestSummary:
    def test_it_names_each_grid_on_which_nothing_is_removed(self):
        """A region of 2 tokens cannot lose a quarter of them."""
        model = sdxl_unet(
            down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        )
        handle = apply_toma(model, ratio=0.25, num_regions=64)
        with torch.no_grad():
            model(torch.randn(1, 4, 16, 16), 10, torch.randn(1, 7, 64), added_cond_kwargs=added())
        small = [kind for kind in handle.summary().kinds if kind.tokens_before == kind.tokens_after]
        assert len(small) == 1
        (note,) = handle.summary().notes
        assert note.startswith(f"nothing was merged on the 8×8 grid of {small[0].kind}: left whole")
        assert "nothing was merged on the 8×8 grid" in str(handle.summary())

    @pytest.mark.parametrize(
        ("settings", "backend", "reason"),
        [
            ({"num_regions": 4}, "triton", None),
            ({"num_regions": 1, "selection_tokens": 64}, "torch+triton", "one product over the whole grid"),
            ({"num_regions": 4, "assign": "global"}, "torch+triton", "one product over the whole grid"),
            ({"num_regions": 4, "backend": "torch"}, "torch", None),
        ],
        ids=str,
    )
    def test_it_names_the_backend_that_ran(self, settings, backend, reason):
        """Kernels run on a CPU here, interpreted."""
        pytest.importorskip("triton")
        model = sd15_unet()
        handle = apply_toma(model, **{"ratio": 0.5, "backend": "triton"} | settings)
        with torch.no_grad():
            model(torch.randn(1, 4, 8, 8), 10, torch.randn(1, 7, 32))
        summary = handle.summary()
        assert summary.backend == backend
        if reason is None:
            assert summary.fallbacks == ()
        else:
            assert any(reason in fallback for fallback in summary.fallbacks)
            assert f"in plain torch: {summary.fallbacks[0]}" in " ".join(str(summary).split())

    def test_gradients_keep_kernels_from_running(self):
        pytest.importorskip("triton")
        plan = MergePlan(Grid(8, 8), ToMAConfig(num_regions=4, backend="triton"), batch_size=1)
        tokens = torch.randn(1, 64, 8, requires_grad=True)
        plan.update(tokens, Action.SELECT)
        assert plan.backends["merging"].name == "triton"
        plan.merge(tokens).sum().backward()
        assert plan.backends["merging"] == ("torch", "gradients were needed, and the kernels have no backward pass")

    def test_under_autocast_the_kernels_take_tokens_of_another_precision(self):
        """With bfloat16 in tests/gpu: Triton's interpreter cannot multiply it."""
        pytest.importorskip("triton")
        dtype = torch.float16
        plans = [
            MergePlan(Grid(8, 8), ToMAConfig(num_regions=4, selection="strided", backend=backend), batch_size=1)
            for backend in ("triton", "torch")
        ]
        tokens = torch.randn(1, 64, 16)
        for plan in plans:
            plan.update(tokens, Action.SELECT)
        kernels, plain = plans
        torch.testing.assert_close(kernels.merge(tokens.to(dtype)), plain.merge(tokens.to(dtype)), atol=2e-2, rtol=2e-2)
        merged = plain.merge(tokens.to(dtype))
        restored = [plan.unmerge(merged, residual=tokens) for plan in plans]
        assert restored[0].dtype == restored[1].dtype == torch.float32
        torch.testing.assert_close(*restored, atol=2e-2, rtol=2e-2)


class TestCompile:
    """On a GPU it is tested in tests/gpu."""

    def test_without_a_gpu_graphs_fall_back_with_a_warning(self):
        model = sd15_unet()
        handle = apply_toma(model, **SETTINGS)
        with pytest.warns(UserWarning, match=r"CUDA graphs cannot be used here: they need a model on a CUDA device"):
            assert handle.compile("graphs", backend="eager") == "blocks"
        assert any(module._compiled_call_impl is not None for module in model.modules())
        remove_toma(model)
        assert all(module._compiled_call_impl is None for module in model.modules())

    @pytest.mark.parametrize("mode", ["blocks", "whole"])
    def test_compiled_is_as_merged(self, mode):
        family = BY_NAME["sd15"]
        model = family.build(**family.shallow)
        plain = call(family, model)
        handle = apply_toma(model, **STRIDED)
        expected = call(family, model)
        handle.reset()
        assert handle.compile(mode, backend="eager") == mode
        same_picture(call(family, model), expected)
        handle.remove()
        assert torch.equal(call(family, model), plain)

    def test_whole_after_whole_takes_no_code_of_another_setting(self):
        """Compiled as a whole it is not checked that modules without hooks have none; the hooks themselves are."""
        family = BY_NAME["sdxl"]
        model, other = family.build(**family.shallow), family.build(**family.shallow)
        lengths = []
        for settings in ({"skip_blocks": (0,)}, {"skip_blocks": (1,)}, {"ratio": 0.75}):
            handle = apply_toma(model, **SETTINGS | {"scope": "block"} | settings)
            expected = attention_lengths(lambda: call(family, model))
            handle.compile("whole", backend="eager")
            assert attention_lengths(lambda: call(family, model)) == expected
            lengths.append(tuple(expected))
            handle.remove()
        assert len(set(lengths)) == 3
        other.compile(backend="eager")
        assert attention_lengths(lambda: call(family, other)) == attention_lengths(lambda: call(family, model))

    def test_unknown_modes(self):
        with pytest.raises(UsageError, match="mode='toma-stage' is not known: use one of 'blocks', 'whole', 'graphs'"):
            apply_toma(sd15_unet()).compile("toma-stage")
