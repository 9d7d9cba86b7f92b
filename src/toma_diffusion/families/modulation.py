"""What the first layer of a block gets: its tokens, normalised, and modulated by the time.

One function for every formula that several families have. Each returns a function of a block and its arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from toma_diffusion.engine import upstream
from toma_diffusion.engine.arguments import Given

Normalize = Callable[[Any, Given], Tensor]


@dataclass(frozen=True)
class Before:
    """What `normalize` computes from a block and its arguments before it runs, with offloaded weights loaded."""

    normalize: Normalize

    def __call__(self, module: Any, given: Given) -> Tensor:
        with upstream.weights_loaded(module):
            return self.normalize(module, given)


def plain_norm(norm: str) -> Normalize:
    """norm(x)."""
    return partial(_plain_norm, norm=norm)


def modulating_norm(norm: str) -> Normalize:
    """norm(x, temb): the norm itself modulates."""
    return partial(_modulating_norm, norm=norm)


def shift_and_scale(norm: str, modulation: str) -> Normalize:
    """norm(x) · (1 + scale) + shift: the first two parts of the argument `modulation`, for a sample or every token."""
    return partial(_shift_and_scale, norm=norm, modulation=modulation)


def from_table(time: str = "temb", scale_first: bool = False, in_float32: bool = False) -> Normalize:
    """norm1(x) · (1 + scale) + shift, the first two rows of the block's own table + the argument `time`.

    Args:
        time: has a row for every row of the table: for a sample, or for every token.
        scale_first: the table begins with the scale, not with the shift.
        in_float32: the block computes this in float32.
    """
    return partial(_from_table, time=time, scale_first=scale_first, in_float32=in_float32)


def _plain_norm(module: Any, given: Given, norm: str) -> Tensor:
    tokens: Tensor = getattr(module, norm)(given.tokens)
    return tokens


def _modulating_norm(module: Any, given: Given, norm: str) -> Tensor:
    tokens: Tensor = getattr(module, norm)(given.tokens, emb=given["temb"])[0]
    return tokens


def _shift_and_scale(module: Any, given: Given, norm: str, modulation: str) -> Tensor:
    tokens = given.tokens
    parts = given[modulation].unsqueeze(1) if given[modulation].ndim == 2 else given[modulation]
    shift, scale, *_ = parts.split(tokens.shape[-1], dim=-1)
    normalized: Tensor = (1 + scale) * _plain_norm(module, given, norm) + shift
    return normalized


def _from_table(module: Any, given: Given, time: str, scale_first: bool, in_float32: bool) -> Tensor:
    tokens, table, times = given.tokens, module.scale_shift_table, given[time]
    times = times.reshape(len(times), -1, *table.shape[-2:])  # [B, 1 or tokens, rows, C]
    first, second, *_ = (table + (times.float() if in_float32 else times)).unbind(-2)
    scale, shift = (first, second) if scale_first else (second, first)
    normalized: Tensor = module.norm1(tokens.float() if in_float32 else tokens) * (1 + scale) + shift
    return normalized.type_as(tokens) if in_float32 else normalized
