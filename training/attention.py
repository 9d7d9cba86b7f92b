"""Attention that trains safely: which of the GPU's kernels may run, and in which precision they are fed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

KERNELS = ("flash", "efficient", "math")
"""From the fastest to the plainest."""


def use_attention(kernel: str) -> None:
    """Allow `kernel` and the plainer ones, and never cuDNN's.

    From torch 2.11 on cuDNN's is the first choice on an H200, where the backward pass of 2336 tokens in half precision
    crashed. Flash attention takes no mask, which the text encoder has: it needs one of the plainer ones.
    """
    allowed = KERNELS[KERNELS.index(kernel) :]
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_flash_sdp("flash" in allowed)
    torch.backends.cuda.enable_mem_efficient_sdp("efficient" in allowed)
    torch.backends.cuda.enable_math_sdp(True)


class SinglePrecisionNorm(nn.RMSNorm):
    """Calculates in single precision and answers in that of its input.

    With autocast, weights are in single precision and inputs in half: left alone, queries and keys would come out in
    single precision, and values in half.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Of the same shape and precision."""
        return super().forward(x.float()).to(x.dtype)


def norm_in_one_precision(network: nn.Module) -> None:
    """Let queries and keys keep the precision of the values. Names and values of the weights stay as they are."""
    for module in network.modules():
        if type(module) is nn.RMSNorm:
            module.__class__ = SinglePrecisionNorm
