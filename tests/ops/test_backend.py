"""Where the kernels run, and what is said where they do not. tests/merge/test_plan.py compares it with what ran."""

import warnings

import pytest
import torch

from toma_diffusion.ops import backend as backends

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _uninterpreted(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    backends.choose_backend.cache_clear()
    yield
    backends.choose_backend.cache_clear()


def test_torch_where_it_was_asked_for_or_nothing_else_is_expected():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.choose_backend("torch", GPU, torch.float16) == "torch"
        for device in ("cpu", "mps", "meta"):
            assert backends.choose_backend("auto", torch.device(device), torch.float32) == "torch"


@pytest.mark.parametrize(
    ("device", "dtype", "reason"),
    [
        (CPU, torch.float32, "need an NVIDIA GPU, and the tokens are on 'cpu'"),
        (torch.device("mps"), torch.float16, "the tokens are on 'mps'"),
        (CPU, torch.float64, "not float64"),
    ],
)
def test_says_once_why_not_triton(device, dtype, reason):
    with pytest.warns(UserWarning, match=reason):
        assert backends.choose_backend("triton", device, dtype) == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.choose_backend("triton", device, dtype) == "torch"


def test_without_triton(monkeypatch):
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="triton is not installed"):
        assert backends.choose_backend("auto", GPU, torch.float16) == "torch"


def test_on_amd(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.0")
    with pytest.warns(UserWarning, match="AMD"):
        assert backends.choose_backend("auto", GPU, torch.float16) == "torch"


@pytest.mark.parametrize(("capability", "expected"), [((6, 1), "torch"), ((8, 0), "triton")])
def test_on_old_and_new_gpus(monkeypatch, capability, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert backends.choose_backend("auto", GPU, torch.float16) == expected
