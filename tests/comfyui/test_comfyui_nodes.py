"""The nodes, on stand-ins for ComfyUI's models."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from observe import bookkeeping
from stand_in import OtherModel, sample, tiny

from toma_diffusion import UsageError
from toma_diffusion.comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
from toma_diffusion.comfyui.nodes import NODES, MergeTokens, Report, SkipSteps, SpeedUp

pytestmark = pytest.mark.usefixtures("without_comfyui")
FOLDER = Path(__file__).parents[2] / "comfyui"
NAMES = {
    "ToMASpeedUp": "ToMA: speed up model",
    "ToMASkipSteps": "ToMA: skip steps",
    "ToMAMergeTokens": "ToMA: merge tokens",
    "ToMAReport": "ToMA: report",
}


def run(node, model, **inputs):
    """What the node returns, with the defaults of inputs that are not given."""
    _, *others = node.INPUT_TYPES()["required"].items()
    defaults = {name: settings["default"] for name, (_, settings) in others}
    return node().run(model=model, **defaults | inputs)["result"][0]


def shown(node, model, **inputs):
    return node().run(model=model, **inputs)["ui"]["text"][0]


def report(model):
    return shown(Report, model, samples=None)


def test_with_comfyui(comfyui):
    """Tests that need it are left out where there is none, and this one says so."""
    assert (comfyui / "nodes.py").is_file()


class TestInterface:
    def test_names(self):
        assert list(NODE_CLASS_MAPPINGS) == list(NAMES)
        assert NODE_DISPLAY_NAME_MAPPINGS == NAMES

    @pytest.mark.parametrize("node", NODES)
    def test_what_comfyui_reads(self, node):
        inputs = node.INPUT_TYPES()["required"]
        assert list(inspect.signature(node.make).parameters) == ["self", *inputs]
        assert all(settings["tooltip"].endswith(".") for _, settings in inputs.values())
        assert node.__doc__ == node.DESCRIPTION
        assert hasattr(node, node.FUNCTION)
        assert len(node.RETURN_TYPES) == len(node.RETURN_NAMES) == 1
        assert getattr(node, "OUTPUT_NODE", False) == (node is Report)  # the report runs by itself

    def test_a_text_is_shown_on_the_node(self, monkeypatch):
        texts = {}
        server = type("PromptServer", (), {"send_progress_text": lambda self, text, name: texts.update({name: text})})
        server.instance = server()
        monkeypatch.setitem(sys.modules, "server", type("server", (), {"PromptServer": server}))
        SpeedUp().run(model=tiny(), preset="fast", unique_id="7")
        assert texts == {"7": "8 of 20 steps are computed, 12 skipped and predicted"}


class TestOneAfterTheOther:
    def test_a_preset(self):
        clone = run(SpeedUp, tiny(), preset="faster")
        sample(clone, [step / 10 for step in range(10, -1, -1)])
        assert "steps: 4 whole, 6 skipped" in report(clone)

    def test_the_default_merges_where_there_are_few_steps(self):
        clone = run(SpeedUp, tiny())
        sample(clone, [1.0, 0.75, 0.5, 0.25, 0.0], size=64)
        assert "steps: 2 whole, 2 merged" in report(clone)

    def test_they_work_together_in_any_order(self):
        model = tiny()
        one = run(MergeTokens, run(SkipSteps, model, computed=0.4))
        other = run(SkipSteps, run(MergeTokens, model), computed=0.4)
        assert torch.equal(sample(one), sample(other))
        for clone in (one, other):
            assert "steps: 2 merged, 3 skipped" in report(clone)
            assert "block: 64 → 32 tokens of a grid of 8×8" in report(clone)

    def test_settings_take_the_place_of_those_of_a_preset(self):
        clone = run(SkipSteps, run(SpeedUp, tiny(), preset="balanced"), computed=0.2)
        sample(clone)
        assert "steps: 1 whole, 4 skipped" in report(clone)

    def test_a_node_twice_is_the_second_one(self):
        first = run(MergeTokens, tiny(), ratio=0.5)
        second = run(MergeTokens, first, ratio=0.25)
        for clone, merged in ((second, "64 → 48"), (first, "64 → 32")):
            sample(clone)
            assert merged in report(clone)

    @pytest.mark.parametrize(
        ("inputs", "merged"),
        [({"variant": "toma-late"}, 2), ({"start": 0.8}, 1), ({"end": 0.4}, 2), ({"start": 0.2, "end": 0.6}, 2)],
    )
    def test_start_and_end(self, inputs, merged):
        clone = run(MergeTokens, tiny(), **inputs)
        sample(clone, size=64)
        assert f"steps: {5 - merged} whole, {merged} merged" in report(clone)

    @pytest.mark.parametrize("variant", MergeTokens.INPUTS["variant"][0])
    def test_variants(self, variant):
        clone = run(MergeTokens, tiny(), variant=variant)
        sample(clone, size=64)
        assert " merged" in report(clone)


class TestSettingsThatCannotAct:
    """They are an error of the node, and nothing is left in the model."""

    @pytest.mark.parametrize(
        ("node", "inputs", "message"),
        [
            (SpeedUp, {"preset": "quick"}, "preset='quick' is not known"),
            (SkipSteps, {"computed": 1.0}, "computed=1.0 is not allowed"),
            (MergeTokens, {"variant": "tomato"}, "variant='tomato' is not known"),
            (MergeTokens, {"ratio": 1.0}, "ratio=1.0 is not allowed"),
            (MergeTokens, {"variant": "toma-late", "end": 0.4}, r"window=[\[(]0.5, 0.4"),
        ],
    )
    def test_values(self, node, inputs, message):
        model = tiny()
        before = bookkeeping(model.diffusion_model)
        with pytest.raises(UsageError, match=message):
            run(node, model, **inputs)
        assert bookkeeping(model.diffusion_model) == before
        assert model.wrappers == {}

    def test_another_model_cannot_be_merged_but_its_steps_can_be_skipped(self):
        model = tiny(OtherModel)
        with pytest.raises(UsageError, match=r"tokens of OtherModel cannot be merged.*UNetModel.*Flux.*WanModel"):
            run(MergeTokens, model)
        assert "tokens of OtherModel cannot be merged" in shown(SpeedUp, model, preset="balanced")
        clone = run(SpeedUp, model, preset="balanced")
        sample(clone, [step / 10 for step in range(10, -1, -1)])
        assert "steps: 6 whole, 4 skipped" in report(clone)

    def test_a_compiled_model(self):
        model = tiny().clone()
        model.object_patches["diffusion_model.blocks.0"] = torch.compile(model.diffusion_model.blocks[0])
        with pytest.raises(UsageError, match=r"torch\.compile is not supported"):
            run(SpeedUp, model)

    def test_a_node_that_skips_steps_already(self):
        model = tiny()
        model.add_wrapper_with_key("outer_sample", "easycache", print)
        with pytest.raises(UsageError, match="EasyCache skips steps already"):
            run(SpeedUp, model)
        run(MergeTokens, model)

    @pytest.mark.parametrize(("key", "message"), [("torch.compile", "torch.compile"), ("lazycache", "LazyCache")])
    def test_nodes_after_ours(self, key, message):
        """It is found when the clone samples: in the report, and the clone samples as it is."""
        model = tiny()
        clone = run(SpeedUp, model, preset="faster")
        clone.add_wrapper_with_key("outer_sample", key, lambda executor, *args: executor(*args))
        assert torch.equal(sample(clone), sample(model))
        assert "Not accelerated: " + message in report(clone)

    def test_a_version_of_comfyui_without_wrappers(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "comfy.patcher_extension", object())
        with pytest.raises(UsageError, match="update ComfyUI"):
            run(SpeedUp, tiny())


class TestReport:
    def test_without_another_node(self):
        assert "connect the MODEL that 'ToMA: speed up model' returns" in report(tiny())

    def test_before_sampling(self):
        assert "has not sampled yet" in report(run(SpeedUp, tiny()))


class TestFolder:
    def python(self, code):
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    def test_without_the_package_it_says_what_to_install(self):
        result = self.python(
            "import importlib.util, sys\n"
            "sys.modules['toma_diffusion'] = None\n"
            f"spec = importlib.util.spec_from_file_location('x', {str(FOLDER / '__init__.py')!r})\n"
            "spec.loader.exec_module(importlib.util.module_from_spec(spec))\n"
        )
        assert result.returncode == 1
        assert "in a clone of its repository: python -m pip install ." in result.stderr

    def test_nodes_are_loaded_without_comfyui_and_not_by_the_package_itself(self):
        result = self.python(
            "import json, sys, toma_diffusion\n"
            "before = 'toma_diffusion.comfyui' in sys.modules\n"
            "from toma_diffusion.comfyui import NODE_CLASS_MAPPINGS\n"
            "print(json.dumps([before, list(NODE_CLASS_MAPPINGS), 'comfy' in sys.modules]))"
        )
        assert json.loads(result.stdout) == [False, list(NAMES), False]

    @pytest.mark.parametrize("path", sorted(FOLDER.glob("example_workflows/*.json")), ids=lambda path: path.stem)
    def test_examples_use_our_nodes_as_they_are(self, path):
        ours = [each for each in json.loads(path.read_text()).values() if each["class_type"] in NAMES]
        assert {"ToMASpeedUp", "ToMAReport"} <= {each["class_type"] for each in ours}
        for each in ours:
            inputs = NODE_CLASS_MAPPINGS[each["class_type"]].INPUT_TYPES()["required"]
            assert set(each["inputs"]) == set(inputs)
            for name, value in each["inputs"].items():
                assert not isinstance(inputs[name][0], list) or value in inputs[name][0]
