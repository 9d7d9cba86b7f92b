"""What goes wrong or changes around merging: offloading, copies, threads, hooks of others, precision, memory."""

import copy
from concurrent.futures import ThreadPoolExecutor

import accelerate
import diffusers
import pytest
import torch
from merging import call, merged, remove, steady, steady_call
from observe import attention_lengths, bookkeeping, our_hooks, same_picture, state_of
from packaging.version import Version
from pairs import in_turn, named, pairwise
from tiny import BUILDERS, FAMILIES, SCOPES, in_dtype, one, output_of, sd15_unet

from toma_diffusion import UsageError


def lengths_of(family, model, **inputs) -> list[tuple[int, int]]:
    return attention_lengths(lambda: call(family, model, **inputs))


families_and_scopes = pytest.mark.parametrize(("family", "scope"), in_turn(FAMILIES, SCOPES), ids=named)
builders_and_scopes = pytest.mark.parametrize(("family", "scope"), pairwise(BUILDERS, SCOPES), ids=named)


class Offloads:
    """Each takes the weights away between calls: to the meta device or to disk, for want of a GPU."""

    @staticmethod
    def sequential(model, path):
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)

    @staticmethod
    def whole_model(model, path):
        accelerate.cpu_offload_with_hook(model, execution_device=torch.device("cpu"))

    @staticmethod
    def dispatched(model, path):
        names = {name: "cpu" if index % 2 else "disk" for index, (name, _) in enumerate(model.named_children())}
        names |= {name: "cpu" for name, _ in model.named_parameters(recurse=False)}
        accelerate.dispatch_model(
            model, names, main_device="cpu", offload_dir=path, offload_buffers=True, force_hooks=True
        )

    @staticmethod
    def leaf_groups_on_disk(model, path):
        _require_group_offload()
        model.enable_group_offload(
            onload_device=torch.device("cpu"), offload_type="leaf_level", offload_to_disk_path=str(path)
        )

    @staticmethod
    def block_groups_on_disk(model, path):
        _require_group_offload()
        model.enable_group_offload(
            onload_device=torch.device("cpu"),
            offload_type="block_level",
            num_blocks_per_group=1,
            offload_to_disk_path=str(path),
        )


def _require_group_offload() -> None:
    if Version(diffusers.__version__) < Version("0.41") and torch.accelerator.current_accelerator() is None:
        pytest.skip("diffusers before 0.41 offloads groups only on a machine with an accelerator")


OFFLOADS = [value.__func__ for value in vars(Offloads).values() if isinstance(value, staticmethod)]
every_offload = pytest.mark.parametrize(("family", "scope", "offload"), pairwise(BUILDERS, SCOPES, OFFLOADS), ids=named)


class TestOffloading:
    @every_offload
    def test_offloaded_after(self, family, scope, offload, tmp_path):
        expected = steady_call(family, scope)
        model = family.build()
        steady(model, scope=scope)
        offload(model, tmp_path)
        for _ in range(2):
            same_picture(call(family, model), expected)

    @every_offload
    def test_offloaded_before(self, family, scope, offload, tmp_path):
        plain = call(family, family.build())
        expected = steady_call(family, scope)
        model = family.build()
        offload(model, tmp_path)
        steady(model, scope=scope)
        for _ in range(2):
            same_picture(call(family, model), expected)
        remove(model)
        same_picture(call(family, model), plain)

    @pytest.mark.parametrize(
        ("family", "scope", "storage"), in_turn(BUILDERS, SCOPES, (torch.float8_e4m3fn, torch.bfloat16)), ids=named
    )
    def test_layerwise_casting(self, family, scope, storage):
        model = family.build()
        merged(model, scope=scope)
        lengths, ours = lengths_of(family, model), call(family, model)
        model.enable_layerwise_casting(storage_dtype=storage, compute_dtype=torch.float32)
        assert lengths_of(family, model) == lengths
        cast = call(family, model)
        assert cast.isfinite().all()
        assert not torch.equal(cast, ours)


class TestSaving:
    @families_and_scopes
    def test_a_saved_model_is_plain(self, family, scope, tmp_path):
        model = family.build()
        plain, weights = call(family, model), {key: value.clone() for key, value in model.state_dict().items()}
        steady(model, scope=scope)
        ours = call(family, model)
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path)
        assert not our_hooks(loaded)
        assert loaded.state_dict().keys() == weights.keys()
        assert all(torch.equal(value, weights[key]) for key, value in loaded.state_dict().items())
        assert dict(loaded.config)["_class_name"] == type(model).__name__
        same_picture(call(family, loaded), plain)
        same_picture(call(family, model), ours)


@builders_and_scopes
def test_a_copy_merges_for_itself(family, scope):
    model = family.build()
    plain = call(family, model)
    steady(model, scope=scope)
    ours = call(family, model)
    twin = copy.deepcopy(model)
    hooks = [set(map(id, our_hooks(each))) for each in (model, twin)]
    assert len(hooks[0]) == len(hooks[1])
    assert not hooks[0] & hooks[1]
    same_picture(call(family, twin), ours)
    remove(twin)
    same_picture(call(family, twin), plain)
    same_picture(call(family, model), ours)
    third = copy.deepcopy(model)
    remove(model)
    assert torch.equal(call(family, model), plain)
    same_picture(call(family, third), ours)
    remove(third)
    same_picture(call(family, third), plain)
    assert not our_hooks(copy.deepcopy(model))
    same_picture(call(family, copy.deepcopy(model)), plain)


@families_and_scopes
class TestCopies:
    def test_two_threads(self, family, scope):
        def generate(seed):
            torch.set_num_threads(1)
            return [family.call(models[seed], seed=seed + index) for index in range(3)]

        models = {seed: family.build() for seed in (10, 20)}
        for model in models.values():
            steady(model, scope=scope)
        alone = [generate(seed) for seed in models]
        with ThreadPoolExecutor(2) as pool:
            together = list(pool.map(generate, models))
        for ours, theirs in zip(alone, together, strict=True):
            same_picture(torch.stack(ours), torch.stack(theirs))


@families_and_scopes
def test_hooks_of_others_survive(family, scope):
    """On the model and on every module that we hook too, added before and after ours."""
    fired = []

    def add(model, label):
        handles = []
        for name, module in [("", model), *model.named_modules()]:
            if name.split(".")[-1] in ("", "attn", "attn1", "attn2", "ff", "norm", "proj_out", "0"):
                handles.append(module.register_forward_pre_hook(lambda *_: fired.append((label, "pre"))))
                handles.append(module.register_forward_hook(lambda *_, **__: fired.append((label, "post"))))
        return handles

    model = family.build()
    plain, bare = call(family, model), bookkeeping(model)
    early = add(model, "early")
    only_early = bookkeeping(model)
    handle = steady(model, scope=scope)
    late = add(model, "late")
    same_picture(call(family, model), steady_call(family, scope))
    assert len(fired) == 4 * fired.count(("early", "pre"))
    handle.remove()
    assert not our_hooks(model)
    fired.clear()
    assert torch.equal(call(family, model), plain)
    assert set(fired) == {(label, when) for label in ("early", "late") for when in ("pre", "post")}
    for each in late:
        each.remove()
    assert bookkeeping(model) == only_early
    for each in early:
        each.remove()
    assert bookkeeping(model) == bare


@pytest.mark.parametrize(
    ("family", "scope", "dtype"), in_turn(FAMILIES, SCOPES, (torch.float16, torch.bfloat16)), ids=named
)
def test_another_dtype_after(family, scope, dtype):
    model = family.build()
    merged(model, scope=scope)
    lengths, single = lengths_of(family, model), call(family, model)
    model.to(dtype)
    inputs = in_dtype(family.inputs(), dtype)
    half = output_of(model, inputs)
    assert half.dtype == dtype
    assert half.isfinite().all()
    assert attention_lengths(lambda: output_of(model, inputs)) == lengths
    model.to(torch.float32)
    assert call(family, model).dtype == torch.float32
    torch.testing.assert_close(half.float().std(), single.std(), rtol=0.2, atol=0)


@families_and_scopes
class TestNumbers:
    def test_gradients_are_those_of_the_merged_model(self, family, scope):
        """Against the difference quotient, with one choice of destinations for both."""
        model = family.build().double()
        merged(model, scope=scope, select_every=100, reweigh_every=100)
        inputs = in_dtype(family.inputs(), torch.float64)
        name = "sample" if "sample" in inputs else "hidden_states"

        def loss(sample):
            return model(**inputs | {name: sample}, return_dict=False)[0].square().sum()

        sample = inputs[name].clone()
        with torch.no_grad():
            loss(sample)  # chooses; all that follow reuse
        sample = sample.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(sample), sample)
        direction = torch.randn_like(sample)
        with torch.no_grad():
            quotient = (loss(sample + 1e-4 * direction) - loss(sample - 1e-4 * direction)) / 2e-4
        torch.testing.assert_close((gradient * direction).sum(), quotient, rtol=1e-2, atol=1e-3)  # norms are in float32

    def test_inference_mode_and_no_grad_alternate(self, family, scope):
        model = family.build()
        steady(model, scope=scope)
        results = []
        for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                results.append(model(**family.inputs(), return_dict=False)[0].clone())
        for result in results:
            same_picture(result, results[0])


class TestMemory:
    def test_a_failed_allocation_leaves_nothing_behind(self):
        family = one("sdxl")
        model = family.build()
        merged(model)
        slot = state_of(model).slots[-1]
        make = slot.make

        def fail(*args, **kwargs):
            slot.make = make
            raise torch.OutOfMemoryError("no memory for a plan")

        slot.make = fail
        with pytest.raises(torch.OutOfMemoryError):
            call(family, model)
        assert all(call(family, model).isfinite().all() for _ in range(3))

    def test_summary_counts_the_memory_of_plans(self):
        family = one("sdxl")
        model = family.build()
        handle = merged(model)
        assert handle.summary().merge.num_bytes == 0
        call(family, model)
        plans = state_of(model).current.values()
        assert handle.summary().merge.num_bytes == sum(buffer.nbytes for plan in plans for buffer in plan.buffers) > 0


class TestSeveralDevices:
    def test_a_device_map_over_several_is_refused(self):
        model = sd15_unet()
        model.hf_device_map = {"down_blocks": 0, "up_blocks": 1}
        with pytest.raises(UsageError, match=r"lie on several devices \(0, 1\)"):
            merged(model)

    @pytest.mark.parametrize("placed", [{"": 0}, {"down_blocks": 0, "up_blocks": "cpu", "mid_block": "disk"}])
    def test_one_device_and_offloading_are_not(self, placed):
        model = sd15_unet()
        model.hf_device_map = placed
        merged(model)


class TestGradients:
    @pytest.mark.parametrize("scope", ["block", "stage"])
    def test_checkpointing_is_refused_around_whole_blocks(self, scope):
        family = one("sd15")
        model = family.build().train().requires_grad_()
        model.enable_gradient_checkpointing()
        merged(model, scope=scope)
        with pytest.raises(RuntimeError, match=f"gradient checkpointing.*scope='{scope}'.*scope='module'"):
            model(**family.inputs())
        call(family, model)  # nothing is recomputed without gradients

    def test_checkpointing_around_modules(self):
        family = one("sd15")
        gradients = []
        for checkpointing in (False, True):
            model = family.build().train().requires_grad_()
            if checkpointing:
                model.enable_gradient_checkpointing()
            steady(model)
            model(**family.inputs()).sample.square().mean().backward()
            gradients.append(model.conv_in.weight.grad)
        torch.testing.assert_close(*gradients)


class TestSkippedLayers:
    @pytest.mark.parametrize("skipped", [[0], [3], [1, 2]], ids=str)
    def test_sd3_in_stage_scope(self, skipped):
        """Skip-layer guidance leaves out blocks, the first or the last of a run too."""
        family = one("sd3")
        model = family.build()
        handle = merged(model, scope="stage")
        inputs = family.inputs()
        with torch.no_grad():
            whole = model(**inputs).sample
            lengths = attention_lengths(lambda: model(**inputs, skip_layers=skipped))
            skipping = model(**inputs, skip_layers=skipped).sample
        assert skipping.shape == whole.shape
        assert lengths == attention_lengths(lambda: model(**inputs, skip_layers=skipped))
        assert any("skip-layer guidance leaves out blocks" in note for note in handle.summary().notes)
