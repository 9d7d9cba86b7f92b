"""ComfyUI's own loaders and executor: a graph of its nodes and ours, and the example workflows."""

import asyncio
import json
import uuid
from pathlib import Path

import pytest
import torch
from observe import bookkeeping
from safetensors.torch import save_file
from tiny_comfy import conditioning, wan

from toma_diffusion.comfyui.nodes import NODES

EXAMPLES = sorted((Path(__file__).parents[2] / "comfyui" / "example_workflows").glob("*.json"))
PLAIN, HALF, QUARTER = "plain", "half", "quarter"


class Prompt:
    """What a text encoder would return; none is tiny."""

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "run"

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802 - ComfyUI's name
        return {"required": {"seed": ("INT", {})}}

    def run(self, seed):
        return (conditioning("wan", seed),)


class Keep:
    """Keeps what comes out of a graph."""

    RETURN_TYPES = ()
    FUNCTION = "run"
    OUTPUT_NODE = True
    kept: dict = {}  # noqa: RUF012

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802
        return {"required": {"name": ("STRING", {}), "samples": ("LATENT",), "model": ("MODEL",)}}

    def run(self, name, samples, model):
        self.kept[name] = (samples["samples"], bookkeeping(model.model.diffusion_model))
        return {}


class Server:
    """Stands for the web server, which the executor tells what happens."""

    client_id = "test"
    last_node_id = None

    def __init__(self):
        self.messages = []

    def send_sync(self, event, data, client):
        self.messages.append((event, data))

    def texts(self):
        """What nodes show, by their ids."""
        shown = [data for event, data in self.messages if event == "executed" and data["output"]]
        return {data["node"]: data["output"]["text"][0] for data in shown if "text" in data["output"]}


@pytest.fixture(scope="module")
def nodes_with_wan(comfyui, loaded_nodes, tmp_path_factory):
    """ComfyUI's nodes and ours, and a file with a tiny Wan model that its loader finds."""
    import folder_paths
    import nodes

    folder = tmp_path_factory.mktemp("diffusion_models")
    weights = {name: weight.contiguous() for name, weight in wan().model.diffusion_model.state_dict().items()}
    save_file(weights, folder / "tiny-wan.safetensors")
    folder_paths.add_model_folder_path("diffusion_models", str(folder))
    extra = str(comfyui / "comfy_extras" / "nodes_hunyuan.py")
    assert asyncio.run(nodes.load_custom_node(extra, module_parent="comfy_extras"))
    loaded_nodes.update({"TestPrompt": Prompt, "TestKeep": Keep})
    yield loaded_nodes
    for name in ("TestPrompt", "TestKeep"):
        del loaded_nodes[name]


def node(class_type, **inputs):
    return {"class_type": class_type, "inputs": inputs}


def graph(**models):
    """A sampler, a report and a place to keep the result for each of these models.

    Args:
        models: by their names, the inputs of the node that merges tokens, or a link to another model.
    """
    nodes = {
        "loader": node("UNETLoader", unet_name="tiny-wan.safetensors", weight_dtype="default"),
        "positive": node("TestPrompt", seed=1),
        "negative": node("TestPrompt", seed=2),
        "latent": node("EmptyHunyuanLatentVideo", width=64, height=64, length=9, batch_size=1),
    }
    for name, model in models.items():
        source = model
        if isinstance(model, dict):
            settings = {"variant": "toma-stage", "start": -1.0, "end": -1.0} | model
            nodes[f"{name} merge"] = node("ToMAMergeTokens", model=["loader", 0], **settings)
            source = [f"{name} merge", 0]
        nodes[f"{name} sampler"] = node(
            "KSampler",
            model=source,
            seed=1,
            steps=4,
            cfg=3.0,
            sampler_name="euler",
            scheduler="simple",
            positive=["positive", 0],
            negative=["negative", 0],
            latent_image=["latent", 0],
            denoise=1.0,
        )
        nodes[f"{name} report"] = node("ToMAReport", model=source, samples=[f"{name} sampler", 0])
        nodes[f"{name} keep"] = node("TestKeep", name=name, samples=[f"{name} sampler", 0], model=source)
    return nodes


def execute(prompt):
    """Run a graph as ComfyUI does: validate it, then execute it."""
    import execution

    identity, server = str(uuid.uuid4()), Server()
    Keep.kept.clear()
    valid, error, outputs, node_errors = asyncio.run(execution.validate_prompt(identity, prompt, None))
    assert valid, (error, node_errors)
    executor = execution.PromptExecutor(server, cache_args={"lru": 0, "ram": 0})
    executor.execute(prompt, identity, {"client_id": "test"}, outputs)
    return executor, server


def failed(executor):
    """What went wrong."""
    events = ("execution_error", "execution_interrupted")
    return [(event, data) for event, data in executor.status_messages if event in events]


def test_clones_with_other_settings_in_one_graph(nodes_with_wan):
    models = {HALF: {"ratio": 0.5}, PLAIN: ["loader", 0], QUARTER: {"ratio": 0.25}}
    executor, server = execute(graph(**models))
    assert failed(executor) == []
    together = dict(Keep.kept)
    assert set(together) == set(models)
    assert all(not any(hooks) for _, hooks in together.values())
    texts = server.texts()
    assert "half of the tokens are merged" in texts[f"{HALF} merge"]
    assert "48 → 24" in texts[f"{HALF} report"]
    assert "48 → 36" in texts[f"{QUARTER} report"]
    assert "steps: 4 merged" in texts[f"{HALF} report"]
    assert "not accelerated" in texts[f"{PLAIN} report"]
    for name, model in models.items():
        execute(graph(**{name: model}))
        assert torch.equal(Keep.kept[name][0], together[name][0])
    assert len({latents.sum().item() for latents, _ in together.values()}) == 3


def test_wrong_settings_are_shown_as_an_error_of_the_node(nodes_with_wan):
    executor, _ = execute(graph(**{HALF: {"ratio": 0.5, "start": 0.6, "end": 0.4}}))
    ((event, data),) = failed(executor)
    assert (event, data["node_id"]) == ("execution_error", f"{HALF} merge")
    assert "window=" in data["exception_message"]


def test_the_folder_is_loaded(loaded_nodes):
    import nodes

    for each in NODES:
        assert loaded_nodes[each.ID].RELATIVE_PYTHON_MODULE == "custom_nodes.comfyui"
        assert nodes.NODE_DISPLAY_NAME_MAPPINGS[each.ID] == each.NAME


class TestExamples:
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _all_nodes(cls, comfyui, loaded_nodes):
        import nodes

        for name in ("hunyuan", "sd3", "flux", "model_advanced", "video", "preview_any"):
            path = str(comfyui / "comfy_extras" / f"nodes_{name}.py")
            assert asyncio.run(nodes.load_custom_node(path, module_parent="comfy_extras"))

    @pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
    def test_every_node_and_link_is_right(self, path, loaded_nodes):
        """All that ComfyUI validates but the names of the files, which are not here."""
        prompt = json.loads(path.read_text(encoding="utf-8"))
        used = {each["class_type"] for each in prompt.values()}
        assert {"ToMASpeedUp", "ToMAReport"} <= used
        for each in prompt.values():
            inputs = loaded_nodes[each["class_type"]].INPUT_TYPES()
            required, known = inputs["required"], inputs["required"] | inputs.get("optional", {})
            assert set(required) <= set(each["inputs"]) <= set(known), each
            for name, value in each["inputs"].items():
                kind = known[name][0]
                if isinstance(value, list):
                    source, index = value
                    returned = loaded_nodes[prompt[source]["class_type"]].RETURN_TYPES[index]
                    assert kind in (returned, "*"), (each, name)
                else:
                    assert kind in ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO") or isinstance(kind, list)
                    options = kind if isinstance(kind, list) else known[name][1].get("options")
                    is_file = isinstance(value, str) and value.endswith(".safetensors")
                    assert is_file or not options or value in options, (each, name)
