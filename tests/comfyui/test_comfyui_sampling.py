"""ComfyUI's own KSampler and guiders on tiny models of its own, with ToMA on one of two clones."""

import pytest
import torch
from observe import bookkeeping
from tiny_comfy import (
    FAMILIES,
    SCOPES,
    SKIP,
    TEXT,
    accelerated,
    conditioning,
    denoiser,
    joint_text,
    lengths_of,
    report,
    sample,
    vace,
)

from toma_diffusion import Skip, UsageError
from toma_diffusion.comfyui.nodes import SpeedUp
from toma_diffusion.comfyui.place import Place, PlaceReader
from toma_diffusion.comfyui.upstream import wrapper_of

pytestmark = pytest.mark.usefixtures("loaded_nodes")
SETTINGS = pytest.mark.parametrize(
    "settings", [{"ratio": 0.5}, {"ratio": 0.5, "scope": "module"}, SKIP], ids=["stage", "module", "skipping"]
)


@pytest.mark.parametrize("family", FAMILIES)
class TestEveryFamily:
    @pytest.mark.parametrize("scope", SCOPES)
    def test_attention_sees_half_the_tokens(self, models, family, scope):
        text = joint_text(family)
        whole = lengths_of(models[family], family, steps=1)
        merged = lengths_of(accelerated(models[family], ratio=0.5, scope=scope), family, steps=1)
        assert whole[0] == FAMILIES[family].tokens + text
        assert merged == [text + (length - text) // 2 for length in whole]

    def test_the_model_runs_in_every_second_step(self, models, family):
        model, ran = models[family], []
        whole = sample(model, family)
        clone = accelerated(model, **SKIP)
        handle = denoiser(model).register_forward_hook(lambda *_: ran.append(1))
        predicted = sample(clone, family)
        handle.remove()
        assert len(ran) == 2  # guidance is one batch
        assert "steps: 2 whole, 2 skipped" in report(clone)
        assert 0 < (predicted - whole).abs().mean() < whole.abs().mean()

    def test_the_original_stays_bit_exact(self, models, family):
        model = models[family]
        hooks, before, attributes = bookkeeping(denoiser(model)), sample(model, family), set(vars(denoiser(model)))
        for settings in (*({"ratio": 0.5, "scope": scope} for scope in SCOPES), SKIP):
            assert not torch.equal(sample(accelerated(model, **settings), family), before)
            assert bookkeeping(denoiser(model)) == hooks
            assert set(vars(denoiser(model))) == attributes
            assert torch.equal(sample(model, family), before)

    @pytest.mark.parametrize("scope", SCOPES)
    def test_odd_sizes(self, models, family, scope):
        *rest, height, width = FAMILIES[family].latent
        odd = torch.zeros(1, *rest, height + 1, width - 1)
        grids = {"sd15": {"17×15", "9×8"}, "flux2": {"9×7"}, "wan": {"3×5×4"}}
        clone = accelerated(models[family], ratio=0.5, scope=scope)
        result = sample(clone, family, latent_image={"samples": odd}, steps=1)
        assert result.shape == odd.shape
        assert result.isfinite().all()
        assert {kind.grid for kind in wrapper_of(clone).last.summary.merge.kinds} == grids.get(family, {"9×8"})


@pytest.fixture
def places(monkeypatch) -> list[Place]:
    """The places of all calls."""
    found = []
    read = PlaceReader.read

    def note(self, options):
        found.append(read(self, options))
        return found[-1]

    monkeypatch.setattr(PlaceReader, "read", note)
    return found


class TestSteps:
    STEPS = 5

    @pytest.mark.parametrize("family", ["sd15", "flux"])
    @pytest.mark.parametrize(
        "sampler",
        ["euler", "heun", "dpm_2", "dpm_2_ancestral", "dpmpp_2s_ancestral", "dpmpp_sde", "dpmpp_2m", "uni_pc", "lcm"],
    )
    def test_every_sampler_goes_through_all_steps_once(self, models, places, family, sampler):
        clone = accelerated(models[family], ratio=0.5, **SKIP)
        assert sample(clone, family, steps=self.STEPS, sampler_name=sampler).isfinite().all()
        steps = [place.step for place in places]
        assert [place.begins for place in places] == [True] + [False] * (len(places) - 1)
        assert steps == sorted(steps)
        assert {place.num_steps for place in places} == {self.STEPS}
        assert set(steps) == set(range(self.STEPS))
        several = sampler in ("heun", "dpm_2", "dpm_2_ancestral", "dpmpp_2s_ancestral", "dpmpp_sde")
        assert several == ("evaluates the model several times a step" in report(clone))
        assert several == ("skipped" not in report(clone).partition("steps: ")[2].partition("\n")[0])

    @pytest.mark.parametrize(
        ("negative", "parts", "ordinals"),
        [(TEXT, 2, [0] * 4), (TEXT + 3, 1, [0, 1] * 4)],
        ids=["in one batch", "in separate calls"],
    )
    def test_guidance(self, models, places, negative, parts, ordinals):
        prompts = {"negative": conditioning("flux", 2, length=negative)}
        predicted = sample(accelerated(models["flux"], **SKIP), "flux", **prompts)
        assert [place.pass_index for place in places] == ordinals
        assert {place.parts for place in places} == {parts}
        whole = sample(models["flux"], "flux", **prompts)
        assert 0 < (predicted - whole).abs().mean() < whole.abs().mean()

    def test_a_guider_with_three_conditionings(self, models, places):
        """ComfyUI's own guider for two prompts and a negative one."""
        from comfy.samplers import sampler_object
        from comfy_extras.nodes_custom_sampler import Guider_DualCFG

        guider = Guider_DualCFG(accelerated(models["flux"], ratio=0.5))
        guider.set_conds(*(conditioning("flux", seed) for seed in (1, 2, 3)))
        guider.set_cfg(3.0, 2.0)
        noise = torch.randn(1, *FAMILIES["flux"].latent)
        levels = torch.tensor([1.0, 0.5, 0.0])
        assert guider.sample(noise, torch.zeros_like(noise), sampler_object("euler"), levels, seed=1).isfinite().all()
        assert [(place.step, place.pass_index, place.parts) for place in places] == [(0, 0, 3), (1, 0, 3)]

    def test_several_conditionings(self, models, places):
        """Two prompts for two halves of the picture, and a negative one: three passes, or fewer, in every step."""
        left, right = (conditioning("sd15", seed) for seed in (1, 3))
        left[0][1]["area"], right[0][1]["area"] = (16, 8, 0, 0), (16, 8, 0, 8)
        sample(accelerated(models["sd15"], ratio=0.5), "sd15", steps=2, positive=left + right)
        first, second = ([place for place in places if place.step == step] for step in (0, 1))
        assert len(first) > 1
        assert (
            [place.pass_index for place in first] == [place.pass_index for place in second] == list(range(len(first)))
        )

    def test_a_prompt_that_begins_half_way(self, models):
        """The evaluation in which it is new is made again, with all of its passes computed."""
        late = conditioning("sd15", 3)
        late[0][1]["start_percent"] = 0.4
        clone = accelerated(models["sd15"], skip=Skip(computed=(0,)))
        assert sample(clone, "sd15", steps=6, positive=conditioning("sd15", 1) + late).isfinite().all()
        assert "steps: 2 whole, 4 skipped" in report(clone)


def test_a_compiled_model(models):
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    model = models["sd15"].clone()
    set_torch_compile_wrapper(model, backend="eager")
    with pytest.raises(UsageError, match=r"torch\.compile is not supported"):
        SpeedUp().make(model, "balanced")


def test_a_model_that_looks_like_another():
    """Wan Vace is a subclass of Wan: its tokens cannot be merged, its steps can be skipped."""
    model = vace()
    clone, shown = SpeedUp().make(model, "balanced")
    assert "tokens of VaceWanModel cannot be merged" in shown
    assert sample(clone, "wan", steps=10).isfinite().all()
    assert "steps: 6 whole, 4 skipped" in report(clone)
