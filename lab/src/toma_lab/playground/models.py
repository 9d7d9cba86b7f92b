"""The models of the page, opened when they are first needed."""

from __future__ import annotations

from typing import Any

import torch

from toma_lab.metrics import MetricSet, Weights, open_metrics
from toma_lab.pipelines.checkpoints import BUNDLED, DEMO_MODELS_OF_IMAGES, load_pipeline, steps_and_guidance

STEPS = 20
GUIDANCE = {BUNDLED: 4.0}
"""As the model card recommends. Others have that of `steps_and_guidance`."""


class Models:
    """One model that the user names, or all demo models of images."""

    def __init__(self, model: str, device: torch.device, dtype: str | None, weights: Weights) -> None:
        self.names = DEMO_MODELS_OF_IMAGES if model in DEMO_MODELS_OF_IMAGES else (model,)
        self.first, self.device, self.dtype = model, device, dtype
        self.metrics: MetricSet = open_metrics(("psnr", "ssim", "lpips"), weights, device)
        self._opened: dict[str, Any] = {}

    def pipe(self, name: str) -> Any:
        if name not in self._opened:
            self._opened[name] = load_pipeline(name, str(self.device), self.dtype)
        return self._opened[name]

    def usual(self, name: str) -> tuple[int, float | None]:
        """Steps and guidance to begin with."""
        steps, guidance = steps_and_guidance(name, None, GUIDANCE.get(name), STEPS)
        return steps, guidance
