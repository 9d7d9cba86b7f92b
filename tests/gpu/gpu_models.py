"""What the tests of models on a GPU share."""

from contextlib import contextmanager

import torch
from observe import compile_blocks
from torch import nn


def on_gpu(value, dtype: torch.dtype):
    if isinstance(value, dict):
        return {name: on_gpu(item, dtype) for name, item in value.items()}
    if isinstance(value, torch.Tensor):
        return value.to("cuda", dtype if value.is_floating_point() and value.ndim > 1 else None)
    return value


def steps(model, inputs: dict, number: int) -> list[torch.Tensor]:
    name = "sample" if "sample" in inputs else "hidden_states"
    with torch.no_grad():
        return [
            model(**inputs | {name: inputs[name] * (1 + 0.01 * step)}, return_dict=False)[0].clone()
            for step in range(number)
        ]


@contextmanager
def no_waiting():
    """CUDA itself raises at any synchronisation."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def compile_model(model: nn.Module, how: str) -> None:
    if how == "by block":
        compile_blocks(model, fullgraph=True)
    else:
        model.compile(fullgraph=True, mode="reduce-overhead")
