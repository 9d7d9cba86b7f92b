"""Model families that are not supported, and why."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

VIDEO, VIDEO_SUFFIX = "this video model is not supported yet", "3DModel"
REFUSED: Mapping[str, str] = {
    "CogView4Transformer2DModel": "its feed-forward layer runs on text and image in turn",
    "DreamLiteUNetModel": "most of its blocks have no self-attention",
    "HiDreamImageTransformer2DModel": "its experts and its padding need every token in its place",
    "HunyuanDiT2DModel": "its blocks are joined by long skips, which need all tokens",
    "Ideogram4Transformer2DModel": "it builds a mask of all tokens by all tokens",
    "Kandinsky5Transformer3DModel": "it orders tokens for sparse attention",
    "LatteTransformer3DModel": "it attends to space and time in turn",
    "Lumina2Transformer2DModel": "every sample of a batch has its image at another place of the sequence",
    "OmniGenTransformer2DModel": "it builds a mask of all tokens by all tokens",
    "SanaTransformer2DModel": "its attention is linear, and its convolutions need the whole grid",
    "SanaVideoTransformer3DModel": "its attention is linear, and its convolutions need the whole grid",
    "WanAnimateTransformer3DModel": "between its blocks it adds the motion of a face to the tokens of every frame",
    "WanVACETransformer3DModel": "other blocks compute what is added to all tokens after every few blocks",
}
"""By the name of the model class."""


def reason_to_refuse(model: nn.Module) -> str | None:
    """Why a model is not supported, if that is known of its class."""
    names = [each.__name__ for each in type(model).__mro__]
    known = next((REFUSED[name] for name in names if name in REFUSED), None)
    return known or (VIDEO if any(name.endswith(VIDEO_SUFFIX) for name in names) else None)
