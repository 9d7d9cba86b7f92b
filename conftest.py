"""Set before torch is imported, and shared by all tests."""

import gc
import os

# Some virtual machines advertise AMX but do not enable it, and oneDNN then dies of an illegal instruction in any
# bfloat16 matrix product. The next lower instruction set computes the same.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# apricot has numba compile its loops anew for every selector, 2.7 s each; interpreted they take 0.1 s at our sizes.
os.environ.setdefault("NUMBA_DISABLE_JIT", "1")
# Inductor keeps what it compiled on disk, and its key does not hold the signatures of our operators: code that another
# version of the package compiled would call them with arguments they no longer have.
os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")

import pytest
import torch
from hypothesis import settings

# Without a GPU Triton interprets its kernels on the CPU. It must know before it is imported, which torch does late.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# One thread, for two reasons: the tests run in parallel already (two processes of two threads each took 18 s for what
# takes 1.3 s with one), and BLAS splits a product over threads by its size, so a larger batch may round differently.
torch.set_num_threads(1)

settings.register_profile("local", deadline=None, max_examples=60)
settings.register_profile("ci", parent=settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def _quick_collections():
    """Leave all that lives now out of later garbage collections. A full one walks over every object of torch, diffusers
    and whatever was compiled before: over a second each towards the end of a run, and benchmarks ask for many."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()  # or bindings complain at the end of what was never freed


def pytest_collection_modifyitems(items):
    for item in items:
        for value in item.callspec.params.values() if hasattr(item, "callspec") else ():
            if getattr(value, "missing", ""):  # a model family that this diffusers lacks
                item.add_marker(pytest.mark.skip(reason=value.missing))
        if item.path.name.startswith("test_triton") and torch.cuda.is_available():
            item.add_marker(pytest.mark.gpu)
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
