"""The nodes, described once, and made for ComfyUI's V3 interface or for its older one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from toma_diffusion.comfyui import _comfy
from toma_diffusion.comfyui.session import Session
from toma_diffusion.errors import UsageError
from toma_diffusion.merge.config import PRESETS

logger = logging.getLogger(__name__)

CATEGORY = "model_patches/ToMA"
AS_IN_PRESET = -1.0
"""A number that stands for what the preset says."""
AS_IN_THE_PRESET, ALL_STEPS = "as in the preset", "all steps"
COMPUTED: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        AS_IN_THE_PRESET: {},
        ALL_STEPS: {"skip": None},
        "60 % of the steps": {"skip": PRESETS["balanced"].skip},
        "40 % of the steps": {"skip": PRESETS["fast"].skip},
        "30 % of the steps": {"skip": PRESETS["faster"].skip},
    }
)
"""The choices for skipped steps, and what they set: as much as a preset does, also where there are few steps."""


@dataclass(frozen=True)
class Field:
    """An input of a node."""

    name: str
    kind: str
    """As ComfyUI calls it: MODEL, LATENT, FLOAT, or COMBO."""
    tooltip: str
    options: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Default, smallest and largest value, step."""


@dataclass(frozen=True)
class Node:
    """A node: its inputs, its output, and what it does."""

    node_id: str
    display_name: str
    description: str
    inputs: tuple[Field, ...]
    output: str
    """The type of its output."""
    output_name: str
    run: Callable[..., tuple[Any, str]]
    """Returns the output, and a text that is shown on the node."""
    is_output_node: bool = False


def accelerate(model: Any, preset: str, ratio: float, start: float, end: float, computed: str) -> tuple[Any, str]:
    """A clone of the model that samples faster. A model with which nothing can be done is returned as it is."""
    session = Session(preset, overrides_of(preset, ratio, start, end, computed))
    fitted = session.check(model)
    if fitted.obstacle is not None:
        logger.warning("ToMA: the model is passed on unchanged: %s", fitted.obstacle)
        return model, f"unchanged: {fitted.obstacle}"
    clone = model.clone()
    session.put(clone)
    return clone, "\n".join([f"ToMA, preset {preset}", *fitted.notes])


def overrides_of(preset: str, ratio: float, start: float, end: float, computed: str) -> dict[str, Any]:
    """The settings that differ from those of the preset."""
    if preset not in PRESETS:
        raise UsageError(f"preset={preset!r} is not known: use one of {', '.join(PRESETS)}.")
    if computed not in COMPUTED:
        raise UsageError(f"computed={computed!r} is not known: use one of {', '.join(COMPUTED)}.")
    of_preset, changes = PRESETS[preset], dict(COMPUTED[computed])
    if ratio >= 0:
        changes["ratio"] = ratio
    if start >= 0 or end >= 0:
        if not changes.get("ratio", of_preset.ratio):
            raise UsageError(
                f"start={start:g} and end={end:g} say when tokens are merged, but no tokens are: set a ratio above 0, "
                f"or leave both at {AS_IN_PRESET:g}."
            )
        changes["window"] = (
            start if start >= 0 else of_preset.window[0],
            end if end >= 0 else of_preset.window[1],
        )
    if changes.keys() & {"ratio", "window"} or computed == ALL_STEPS:
        changes["max_steps"] = None  # who asks for merging gets it, whatever the number of steps
    config = of_preset.changed(changes)
    if not config.ratio and config.skip is None:
        raise UsageError(
            f"preset={preset!r} with ratio={config.ratio:g} and computed={computed!r} would do nothing: set a ratio "
            "above 0, or choose how many steps are computed, or bypass the node."
        )
    return changes


def report(model: Any, samples: Any) -> tuple[str, str]:
    """What the last sampling with this clone did."""
    session = _comfy.wrapper_of(model)
    if session is None:
        text = (
            "This model is not accelerated: connect the MODEL that 'ToMA: accelerate model' returns. If it is "
            "connected, that node says why it passed the model on."
        )
    elif session.last is None:
        text = "This model has not sampled yet: connect the LATENT that its sampler returns."
    elif isinstance(session.last, str):
        text = f"Not accelerated: {session.last}"
    else:
        text = str(session.last)
    return text, text


def _fraction(name: str, tooltip: str, most: float = 1.0) -> Field:
    settings = {"default": AS_IN_PRESET, "min": AS_IN_PRESET, "max": most, "step": 0.05}
    return Field(name, "FLOAT", f"{tooltip} {AS_IN_PRESET:g}: as in the preset.", settings=settings)


ACCELERATE = Node(
    node_id="ToMAAccelerateModel",
    display_name="ToMA: accelerate model",
    description="Makes a model sample faster, by skipping steps, by merging tokens, or by both. No training needed.",
    inputs=(
        Field("model", "MODEL", "The model. Put LoRAs and other patches before or after this node."),
        Field(
            "preset",
            "COMBO",
            "balanced is closest to the original, fast and faster save more time; the others are for comparisons.",
            options=("balanced", *(name for name in PRESETS if name != "balanced")),
            settings={"default": "balanced"},
        ),
        _fraction("ratio", "Fraction of the tokens that is removed. Higher is faster and loses more detail.", 0.95),
        _fraction("start", "From which fraction of the steps on tokens are merged. Later keeps more detail."),
        _fraction("end", "Up to which fraction of the steps tokens are merged."),
        Field(
            "computed",
            "COMBO",
            "In how many steps the model runs. In the others its output is predicted. Fewer is faster and loses more "
            "detail.",
            options=tuple(COMPUTED),
            settings={"default": AS_IN_THE_PRESET},
        ),
    ),
    output="MODEL",
    output_name="model",
    run=accelerate,
)
REPORT = Node(
    node_id="ToMAReport",
    display_name="ToMA: report",
    description="Says what was skipped and merged in the last sampling, and how much time that saved.",
    inputs=(
        Field("model", "MODEL", "The MODEL that 'ToMA: accelerate model' returns."),
        Field("samples", "LATENT", "The LATENT that the sampler returns: the report is made after it has run."),
    ),
    output="STRING",
    output_name="report",
    run=report,
    is_output_node=True,
)
NODES = (ACCELERATE, REPORT)


def v1_class(node: Node) -> type:
    """The node for ComfyUI's older interface."""

    def input_types(cls: type) -> dict[str, Any]:
        required = {each.name: _v1_input(each) for each in node.inputs}
        return {"required": required, "hidden": {"unique_id": "UNIQUE_ID"}}

    def run(self: Any, unique_id: str | None = None, **inputs: Any) -> dict[str, Any]:
        result, text = node.run(**inputs)
        _comfy.show(text, unique_id)
        return {"ui": {"text": (text,)}, "result": (result,)}

    return type(
        node.node_id,
        (),
        {
            "INPUT_TYPES": classmethod(input_types),
            "RETURN_TYPES": (node.output,),
            "RETURN_NAMES": (node.output_name,),
            "FUNCTION": "run",
            "CATEGORY": CATEGORY,
            "DESCRIPTION": node.description,
            "OUTPUT_NODE": node.is_output_node,
            "run": run,
        },
    )


def _v1_input(each: Field) -> tuple[Any, dict[str, Any]]:
    kind = list(each.options) if each.kind == "COMBO" else each.kind
    return kind, {"tooltip": each.tooltip, **each.settings}


def v3_class(node: Node) -> type:
    """The node for ComfyUI's V3 interface."""
    from comfy_api.latest import io, ui

    types = {"MODEL": io.Model, "LATENT": io.Latent, "FLOAT": io.Float, "COMBO": io.Combo, "STRING": io.String}

    def define_schema(cls: type) -> Any:
        return io.Schema(
            node_id=node.node_id,
            display_name=node.display_name,
            category=CATEGORY,
            description=node.description,
            inputs=[
                types[each.kind].Input(
                    each.name,
                    tooltip=each.tooltip,
                    **({"options": list(each.options)} if each.options else {}),
                    **each.settings,
                )
                for each in node.inputs
            ],
            outputs=[types[node.output].Output(display_name=node.output_name)],
            hidden=[io.Hidden.unique_id],
            is_output_node=node.is_output_node,
        )

    def execute(cls: Any, /, **inputs: Any) -> Any:
        result, text = node.run(**inputs)
        _comfy.show(text, cls.hidden.unique_id)
        return io.NodeOutput(result, ui=ui.PreviewText(text))

    members = {"define_schema": classmethod(define_schema), "execute": classmethod(execute)}
    return type(node.node_id, (io.ComfyNode,), members)
