"""Whole pipelines around a denoiser, with text encoders and decoder, to time an image end to end."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from toma_diffusion.errors import UsageError
from toma_lab.bench.group import Group
from toma_lab.bench.zoo import MODELS, Denoiser, build_empty, empty, fill


def check_surroundings(name: str) -> None:
    """Raise `UsageError` if no more than the denoiser of this model is known."""
    if "pipeline" not in MODELS[name]:
        known = ", ".join(each for each, model in MODELS.items() if "pipeline" in model)
        raise UsageError(
            f"--pipeline does not know the text encoders and the decoder of model {name!r}: leave it out, use one of "
            f"{known}, or give a folder with a whole pipeline."
        )


class EndToEnd(Protocol):
    """Generates a whole image, from the prompt to the pixels."""

    def image(self, group: Group) -> None:
        """Generate one."""


class RandomPipeline:
    """The diffusers pipeline of a model known by name, at its published size or smaller, with random weights.

    Prompts are random token ids. They go through the text encoders, whose time counts; the pipeline itself gets random
    embeddings, because random encoders make numbers that overflow.
    """

    def __init__(self, name: str, denoiser: Denoiser, *, small: bool) -> None:
        import diffusers

        around = MODELS[name]["pipeline"]
        self.denoiser = denoiser
        self.guidance = around["guidance"]
        self.encoders = [(self._encoder(encoder, small), encoder["tokens"]) for encoder in around["encoders"]]
        vae = build_empty(around["vae"]["class"], _sized(around["vae"], small))
        fill(vae, denoiser.device, denoiser.dtype)
        scheduler = getattr(diffusers, around["scheduler"]["class"])(**around["scheduler"]["config"])
        pipeline_class: Any = getattr(diffusers, around["class"])
        parts: dict[str, Any] = {around["denoiser"]: denoiser.model, "vae": vae, "scheduler": scheduler}
        expected = list(inspect.signature(pipeline_class.__init__).parameters.values())[1:]
        parts |= {each.name: None for each in expected if each.default is each.empty and each.name not in parts}
        if any(each.name == "requires_safety_checker" for each in expected):
            parts["requires_safety_checker"] = False
        self.pipeline = pipeline_class(**parts)
        self.pipeline.set_progress_bar_config(disable=True)

    def image(self, group: Group) -> None:
        """Encode random prompts, and call the pipeline, which makes the steps and decodes."""
        with torch.no_grad():
            for encoder, tokens in self.encoders:
                encoder(torch.randint(1000, (group.batch, tokens), device=self.denoiser.device))
        self.pipeline(
            **self._embeddings(group),
            guidance_scale=self.guidance,
            num_inference_steps=group.steps,
            height=group.resolution.height,
            width=group.resolution.width,
            output_type="pt",
        )

    def _embeddings(self, group: Group) -> dict[str, Tensor]:
        images = images_of(self.denoiser, group.batch)
        inputs = self.denoiser.inputs(images, group.resolution.width, group.resolution.height)
        found = {"prompt_embeds": inputs["encoder_hidden_states"]}
        pooled = inputs.get("pooled_projections", inputs.get("added_cond_kwargs", {}).get("text_embeds"))
        if pooled is not None:
            found["pooled_prompt_embeds"] = pooled
        if self.denoiser.family.is_guided:
            found |= {f"negative_{name}": tensor.neg() for name, tensor in found.items()}
        return found

    def _encoder(self, encoder: Mapping[str, Any], small: bool) -> nn.Module:
        import transformers

        config = getattr(transformers, encoder["config_class"])(**_sized(encoder, small))
        model = empty(lambda: getattr(transformers, encoder["class"])(config))
        fill(model, self.denoiser.device, self.denoiser.dtype)
        return model


class LoadedPipeline:
    """The pipeline that the denoiser was loaded with."""

    def __init__(self, denoiser: Denoiser) -> None:
        self.denoiser = denoiser
        self.pipeline = denoiser.pipeline.to(denoiser.device)
        self.pipeline.set_progress_bar_config(disable=True)

    def image(self, group: Group) -> None:
        """Call the pipeline with a prompt, for images or clips."""
        count = images_of(self.denoiser, group.batch)
        clip = {"num_videos_per_prompt": count, "num_frames": group.frames}
        self.pipeline(
            prompt="a photograph of an astronaut riding a horse",
            num_inference_steps=group.steps,
            height=group.resolution.height,
            width=group.resolution.width,
            **({"num_images_per_prompt": count} if group.frames is None else clip),
        )


def images_of(denoiser: Denoiser, batch: int) -> int:
    return max(1, batch // 2) if denoiser.family.is_guided else batch


def _sized(part: Mapping[str, Any], small: bool) -> dict[str, Any]:
    return {**part["config"], **(part["small"] if small else {})}
