"""Metrics on the features of large networks that transformers loads: DINO distance and CLIP-T."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from toma_lab.metrics.base import ImageMetric, Sample, UnavailableError, describe_model

DINO = "facebook/dino-vits16"
CLIP = "openai/clip-vit-base-patch32"
"""The paper names the methods, not the networks: these are the ones with which CLIP-T and DINO became usual."""


class Dino(ImageMetric):
    """One minus the cosine between the DINO features (Caron et al. 2021) of the image and of its reference: how much
    of what is in the picture has changed. Lower is nearer; the paper's claim is below 0.07."""

    name = "dino"

    def __init__(self, model: str, device: torch.device) -> None:
        from transformers import AutoImageProcessor, AutoModel

        self.processor = _load(AutoImageProcessor, model, self.name)
        self.network, self.source = _network(AutoModel, model, self.name, device)

    def score(self, sample: Sample) -> float:
        return 1 - float(functional.cosine_similarity(self._features(sample.image), self._features(sample.reference)))

    @torch.no_grad()
    def _features(self, image: Any) -> Tensor:
        inputs = self.processor(images=image, return_tensors="pt").to(self.network.device)
        output: Tensor = self.network(**inputs).last_hidden_state
        return output[:, 0]  # the class token


class ClipT(ImageMetric):
    """100 times the cosine between the CLIP embeddings (Radford et al. 2021) of prompt and image: how well the picture
    shows what was asked for. Higher is better. It needs no reference, so that the baseline has one too."""

    name = "clip_t"
    needs_reference = False

    def __init__(self, model: str, device: torch.device) -> None:
        from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

        self.processor = _load(AutoImageProcessor, model, self.name)
        self.tokenizer = _load(AutoTokenizer, model, self.name)
        self.network, self.source = _network(CLIPModel, model, self.name, device)

    @torch.no_grad()
    def score(self, sample: Sample) -> float:
        longest = self.network.config.text_config.max_position_embeddings
        text = self.tokenizer(sample.prompt, truncation=True, max_length=longest, return_tensors="pt")
        image = self.processor(images=sample.image, return_tensors="pt")
        output = self.network(**text.to(self.network.device), **image.to(self.network.device))
        return 100 * float(functional.cosine_similarity(output.text_embeds, output.image_embeds))


def _network(kind: Any, model: str, metric: str, device: torch.device) -> tuple[Any, str]:
    network = _load(kind, model, metric).float().eval().requires_grad_(False).to(device)
    return network, describe_model(model, network)


def _load(kind: Any, model: str, metric: str) -> Any:
    refusal = "" if Path(model).exists() else _hub_refusal(model)
    try:
        return kind.from_pretrained(model, local_files_only=bool(refusal))
    except Exception as error:  # transformers raises many kinds: not found, another network, a broken file
        reason = f"it is not on this machine, and the hub failed: {refusal}" if refusal else _first_line(error)
        raise UnavailableError(
            f"{metric}: the network could not be loaded from {model!r} ({reason}). "
            f"Give a local folder or a hub id with --{metric.removesuffix('_t')}."
        ) from error


@cache
def _hub_refusal(model: str) -> str:
    """Why the hub cannot serve a model; empty if it can. Without a network transformers retries for minutes."""
    from huggingface_hub import model_info

    try:
        model_info(model, timeout=10)
    except Exception as error:  # no network, no such model, no permission
        return _first_line(error)
    return ""


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
