"""Tests of the nodes: some on stand-ins (stand_in.py), some with ComfyUI's own code.

ComfyUI is not part of this project: the environment variable TOMA_COMFYUI says where a checkout of it lies (make
test-comfyui COMFYUI=path). Without one, the tests that need it are left out.
"""

import asyncio
import importlib.util
import logging
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from stand_in import comfy_modules

VARIABLE = "TOMA_COMFYUI"
STAND_INS = {
    "torchvision": ("transforms",),
    "torchvision.transforms": ("functional",),
    "torchvision.transforms.functional": (),
    "torchaudio": ("transforms", "functional"),
    "torchaudio.transforms": ("MelScale",),
    "torchaudio.functional": (),
}
"""What ComfyUI imports of these packages at its start. Its audio models and Stable Cascade use them, ours do not."""
EXTENSION = Path(__file__).parents[2] / "comfyui"


FOLDER = os.environ.get(VARIABLE)
if not FOLDER:  # test_comfyui_nodes.py says once that these are left out
    collect_ignore = [f"test_comfyui_{name}.py" for name in ("graph", "math", "sampling", "together")]


def _stand_in(name: str, children: tuple[str, ...]) -> None:
    module = sys.modules.setdefault(name, ModuleType(name))
    module.__spec__ = importlib.util.spec_from_loader(name, loader=None)
    for child in children:
        setattr(module, child, sys.modules.setdefault(f"{name}.{child}", ModuleType(f"{name}.{child}")))


if FOLDER and (Path(FOLDER) / "comfy").is_dir():
    # Before any test is imported: our nodes look for ComfyUI when they are.
    missing = [name for name in STAND_INS if importlib.util.find_spec(name.partition(".")[0]) is None]
    for each in missing:
        _stand_in(each, STAND_INS[each])
    sys.path.insert(0, FOLDER)
    import comfy.cli_args

    comfy.cli_args.args.cpu = True


@pytest.fixture
def without_comfyui(monkeypatch):
    """What the nodes import of ComfyUI is a stand-in."""
    for name, module in comfy_modules().items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture(scope="session")
def comfyui() -> Path:
    """The folder of ComfyUI, which can be imported, on a CPU."""
    if not FOLDER:
        pytest.skip(f"needs a checkout of ComfyUI: make test-comfyui COMFYUI=path ({VARIABLE} is not set)")
    if not (Path(FOLDER) / "comfy").is_dir():
        pytest.fail(f"{VARIABLE}={FOLDER} is not a checkout of ComfyUI: it has no folder comfy.")
    logging.getLogger().setLevel(logging.WARNING)
    return Path(FOLDER)


@pytest.fixture(scope="session")
def loaded_nodes(comfyui):
    """ComfyUI's nodes with ours, which its own loader has found in the folder `comfyui`."""
    import nodes

    assert asyncio.run(nodes.load_custom_node(str(EXTENSION)))
    return nodes.NODE_CLASS_MAPPINGS


@pytest.fixture(scope="session")
def models(loaded_nodes):
    """One of every family. Tests leave them as they are."""
    from tiny_comfy import FAMILIES

    with torch.inference_mode():
        return {name: family.make() for name, family in FAMILIES.items()}


@pytest.fixture(autouse=True)
def _as_comfyui_runs():
    """ComfyUI runs every node in inference mode."""
    with torch.inference_mode():
        yield
