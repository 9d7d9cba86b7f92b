"""The nodes. Three make a model faster, each in its way; connected one after the other they work together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from toma_diffusion import presets
from toma_diffusion.comfyui import upstream
from toma_diffusion.comfyui.families import find_comfy_family
from toma_diffusion.comfyui.sampling import Acceleration
from toma_diffusion.merge import variants
from toma_diffusion.presets import Chosen
from toma_diffusion.skip.config import Skip

AS_IN_VARIANT = -1.0
"""A number that stands for what the variant says."""
FASTEST = "toma-stage"


def fraction(default: float, least: float, most: float, tooltip: str) -> tuple[str, dict[str, Any]]:
    return "FLOAT", {"default": default, "min": least, "max": most, "step": 0.05, "tooltip": tooltip}


def choice(names: Mapping[str, Any], default: str, tooltip: str) -> tuple[list[str], dict[str, Any]]:
    """An input for one of several names, the default first."""
    ordered = [default, *(name for name in names if name != default)]
    return ordered, {"default": default, "tooltip": tooltip}


MODEL = ("MODEL", {"tooltip": "The model. Connect LoRAs and other patches before or after this node."})


class Node(ABC):
    """A node of ComfyUI. ComfyUI shows its docstring as the description."""

    ID: ClassVar[str]
    NAME: ClassVar[str]
    INPUTS: ClassVar[dict[str, Any]]
    DESCRIPTION: ClassVar[str | None]
    CATEGORY = "model_patches/ToMA"
    RETURN_TYPES: tuple[str, ...] = ("MODEL",)
    RETURN_NAMES: tuple[str, ...] = ("model",)
    FUNCTION = "run"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802 - ComfyUI's name
        return {"required": cls.INPUTS, "hidden": {"unique_id": "UNIQUE_ID"}}

    def run(self, unique_id: str | None = None, **inputs: Any) -> dict[str, Any]:
        output, text = self.make(**inputs)
        upstream.show(text, unique_id)
        return {"ui": {"text": (text,)}, "result": (output,)}

    @abstractmethod
    def make(self, model: Any, *inputs: Any) -> tuple[Any, str]:
        """The output, and a text that is shown on the node."""


class SpeedUp(Node):
    """Makes a model sample faster, by skipping steps or by merging tokens. Needs no training."""

    ID, NAME, DESCRIPTION = "ToMASpeedUp", "ToMA: speed up model", __doc__
    INPUTS: ClassVar = {
        "model": MODEL,
        "preset": choice(
            presets.PRESETS,
            presets.DEFAULT,
            "balanced is closest to the original, and merges tokens if there are 4 steps or fewer. fast and faster "
            "save more time and lose more detail.",
        ),
    }

    def make(self, model: Any, preset: str) -> tuple[Any, str]:
        return faster(model, preset=presets.named(preset))


class SkipSteps(Node):
    """Runs the model in some of the steps only. In the others its output is predicted from earlier steps."""

    ID, NAME, DESCRIPTION = "ToMASkipSteps", "ToMA: skip steps", __doc__
    INPUTS: ClassVar = {
        "model": MODEL,
        "computed": fraction(
            0.5, 0.05, 0.95, "The share of the steps in which the model runs. Lower is faster and loses more detail."
        ),
    }

    def make(self, model: Any, computed: float) -> tuple[Any, str]:
        return faster(model, skip=Skip(computed=computed))


class MergeTokens(Node):
    """Merges similar tokens of the picture inside the model, in all steps or in some of them."""

    ID, NAME, DESCRIPTION = "ToMAMergeTokens", "ToMA: merge tokens", __doc__
    INPUTS: ClassVar = {
        "model": MODEL,
        "variant": choice(
            variants.VARIANTS,
            FASTEST,
            f"{FASTEST} is the fastest, toma-late the closest to the original; others are the paper's.",
        ),
        "ratio": fraction(
            0.5, 0.05, 0.95, "The share of the tokens that is removed. Higher is faster and loses more detail."
        ),
        "start": fraction(
            AS_IN_VARIANT,
            AS_IN_VARIANT,
            1.0,
            "From which share of the steps on tokens are merged. Later keeps more detail. -1: as in the variant.",
        ),
        "end": fraction(
            AS_IN_VARIANT,
            AS_IN_VARIANT,
            1.0,
            "Up to which share of the steps tokens are merged. -1: as in the variant.",
        ),
    }

    def make(self, model: Any, variant: str, ratio: float, start: float, end: float) -> tuple[Any, str]:
        denoiser = upstream.denoiser_of(model)
        is_transformer = find_comfy_family(denoiser).skip_blocks(denoiser) is not None
        settings = variants.variant(variant, ratio, selects_every_step=is_transformer)
        first, last = settings.window
        window = (first if start < 0 else start, last if end < 0 else end)
        return faster(model, merge=settings.changed({"window": window}))


class Report(Node):
    """Says what was skipped and merged in the last sampling, and how much time that saved."""

    ID, NAME, DESCRIPTION = "ToMAReport", "ToMA: report", __doc__
    INPUTS: ClassVar = {
        "model": ("MODEL", {"tooltip": "The MODEL that the sampler gets."}),
        "samples": ("LATENT", {"tooltip": "The LATENT that the sampler returns: the report is made after it has run."}),
    }
    RETURN_TYPES = ("STRING",)
    RETURN_NAMES = ("report",)
    OUTPUT_NODE = True

    def make(self, model: Any, samples: Any) -> tuple[str, str]:
        acceleration = upstream.wrapper_of(model)
        if acceleration is None:
            text = f"This model is not accelerated: connect the MODEL that '{SpeedUp.NAME}' returns."
        elif acceleration.last is None:
            text = "This model has not sampled yet: connect the LATENT that its sampler returns."
        else:
            text = str(acceleration.last)
        return text, text


NODES: tuple[type[Node], ...] = (SpeedUp, SkipSteps, MergeTokens, Report)


def faster(model: Any, **choices: Any) -> tuple[Any, str]:
    """A clone of the model that samples faster, by these fields of `Chosen` and by what nodes before have chosen.

    Raises `UsageError`, which ComfyUI shows on the node, if they do not fit the model.
    """
    before = upstream.wrapper_of(model)
    acceleration = Acceleration(replace(Chosen() if before is None else before.chosen, **choices))
    text = acceleration.check(model)
    clone = model.clone()
    acceleration.put(clone)
    return clone, text
