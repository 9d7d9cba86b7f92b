"""The settings of the page as code that generates the same picture."""

from __future__ import annotations

import json
from typing import Any

from toma_lab.pipelines.generation import ImageRequest
from toma_lab.playground.choice import Choice

TEMPLATE = """\
from toma_diffusion import apply_toma
from toma_lab.pipelines.checkpoints import load_pipeline
from toma_lab.pipelines.generation import ImageRequest, generate_image

pipe = load_pipeline({load})
handle = apply_toma(pipe, {apply})
request = ImageRequest({request})
image = generate_image(pipe, request)
image.save("toma.png")
"""


def as_code(model: str, device: str, dtype: str | None, request: ImageRequest, choice: Choice) -> str:
    """A program that writes the accelerated picture to `toma.png`."""
    load = _arguments(model, device=device, **{} if dtype is None else {"dtype": dtype})
    guidance = {} if request.guidance is None else {"guidance": request.guidance}
    return TEMPLATE.format(
        load=load,
        apply=_arguments(choice.method, **choice.overrides),
        request=_arguments(request.prompt, seed=request.seed, steps=request.steps, **guidance),
    )


def _arguments(first: str, **named: Any) -> str:
    return ", ".join([_literal(first), *(f"{name}={_literal(value)}" for name, value in named.items())])


def _literal(value: Any) -> str:
    """Texts in double quotes: what JSON escapes, Python escapes alike."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
