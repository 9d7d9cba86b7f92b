"""What a run is asked for: a model, pictures, and how they are made. It is saved in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from toma_lab.pipelines.clips import ClipRequest
from toma_lab.pipelines.generation import ImageRequest
from toma_lab.rows import Row

Self = TypeVar("Self", bound="Plan")


@dataclass(frozen=True)
class Item:
    """One picture, or clip, to generate."""

    index: int
    """Position of the prompt in the run's list."""
    prompt: str
    seed: int

    @property
    def name(self) -> str:
        """A short name for files and rows: `p0003-s1`."""
        return f"p{self.index:04d}-s{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What every run has."""

    model: str
    """Its public name, never a path."""
    prompts: tuple[str, ...]
    steps: int
    """With nothing saved."""
    guidance: float | None = None
    """None, here and below: the default of the pipeline."""
    width: int | None = None
    height: int | None = None
    clips: bool = False
    """Whether its pictures are clips, which have the three fields below."""
    frames: int | None = None
    fps: float | None = None
    image: str = ""
    """Name and hash of the image that all clips begin with, if they do."""
    dtype: str = ""
    weights: str = ""
    """Fingerprint of the model's weights: a model may be trained again in the same folder."""

    def request(self, item: Item, steps: int, image: Path | None = None) -> ImageRequest:
        """What a picture asks of the pipeline. Where the image is, the plan does not say: a path is private."""
        common = (item.prompt, item.seed, steps, self.guidance, self.width, self.height)
        if not self.clips:
            return ImageRequest(*common)
        return ClipRequest(*common, frames=self.frames, fps=self.fps, image=image)

    def cells(self) -> Row:
        """Its cells in a row."""
        guidance = "" if self.guidance is None else f"{self.guidance:g}"
        return {"model": self.model, "steps": self.steps, "guidance": guidance, "dtype": self.dtype}

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {each.name: _plain(getattr(self, each.name)) for each in fields(self)}

    @classmethod
    def from_dict(cls: type[Self], values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`."""
        read: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in values.items()}
        return cls(**read)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [each.to_dict() if hasattr(each, "to_dict") else each for each in value]
    return value
