"""Operators compute similarities, softmax and sums in float32, also where the user's code runs under autocast."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def without_autocast(
    operator: Callable[Concatenate[Tensor, Arguments], Result],
) -> Callable[Concatenate[Tensor, Arguments], Result]:
    """Run an operator in the dtypes of its own arguments, of which the first is a tensor.

    Under autocast a product of float32 tokens is computed in half precision: other destinations are then picked than
    without it.
    """

    @wraps(operator)
    def run(tensor: Tensor, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        device = tensor.device.type
        if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
            return operator(tensor, *args, **kwargs)
        with torch.autocast(device, enabled=False):
            return operator(tensor, *args, **kwargs)

    return run
