"""Generates clips with a video pipeline, and writes them: as mp4 to look at, as animated PNG to measure."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from toma_diffusion.errors import UsageError
from toma_diffusion.files import replacing
from toma_lab.pipelines.generation import (
    SETTINGS_KEY,
    ImageRequest,
    call,
    makes_clips,
    read_settings,
    write_png,
)

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

FRAME_RATES: Mapping[str, float] = {"Wan": 16, "DemoWan": 8, "CogVideoX": 8, "Mochi": 30}
"""Frames per second that models were trained on, by the beginning of the pipeline's name."""
USUAL_FRAME_RATE = 24.0
FASTEST = 120
"""Frames per second."""
FEWEST_FRAMES = 2
QUALITY = 8
"""Of imageio, up to 10: differences from the frames are hardly visible."""
INSTALL_VIDEO = "pip install 'toma-diffusion-lab[video]'"


@dataclass(frozen=True, eq=False)
class Clip:
    """Frames, and how fast they follow each other."""

    frames: tuple[Image, ...]
    """In RGB, all of one size."""
    fps: float

    @property
    def size(self) -> tuple[int, int]:
        return self.frames[0].size


@dataclass(frozen=True)
class ClipRequest(ImageRequest):
    """One clip to generate. Fields that are None keep the pipeline's own default."""

    frames: int | None = None
    """Some pipelines make one more or a few less: what their decoder can make."""
    fps: float | None = None
    """Of the written clip. Pipelines that take a frame rate also generate the motion for it."""
    image: Path | None = None
    """What an image-to-video pipeline begins with."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.frames is not None and self.frames < FEWEST_FRAMES:
            raise UsageError(f"frames={self.frames} is not allowed: a clip has {FEWEST_FRAMES} or more.")
        if self.fps is not None and not 0 < self.fps <= FASTEST:
            raise UsageError(f"fps={self.fps:g} is not allowed: it must be above 0, at most {FASTEST}.")

    @cached_property
    def opened_image(self) -> Image | None:
        from PIL import Image, UnidentifiedImageError

        if self.image is None:
            return None
        try:
            with Image.open(self.image) as file:
                image: Image.Image = file.convert("RGB")
                return image
        except (OSError, UnidentifiedImageError) as error:
            raise UsageError(f"image {str(self.image)!r} cannot be read: {error}") from error


def settings_of(request: ImageRequest) -> dict[str, Any]:
    """A request as it is noted in files: of its image only the name, since a path is private."""
    settings = asdict(request)
    return settings | {"image": Path(settings["image"]).name} if settings.get("image") else settings


def generate(
    pipe: Any, requests: Sequence[ImageRequest], on_step: Callable[[int], None] | None = None
) -> list[Image | Clip]:
    """Generate images or clips in one call of the pipeline. The requests differ in prompt and seed only.

    Each has the noise that it has alone, so that it is the same picture up to rounding. Some methods decide for a batch
    as a whole: ToMeSD and ToFu draw random numbers once, with the seed of the first image; on Flux all images share
    the destinations of merging; the first-block cache compares steps over all images.
    """
    first, made = requests[0], _call(pipe, requests, on_step)
    if not isinstance(first, ClipRequest):
        return list(made)
    clips = [Clip(tuple(frame.convert("RGB") for frame in frames), frame_rate(pipe, first)) for frames in made]
    if len(clips[0].frames) < FEWEST_FRAMES:
        raise UsageError(
            f"frames={first.frames} gives a single frame with a {type(pipe).__name__}, which makes them in groups: "
            "ask for more."
        )
    return list(clips)


def latents_of(pipe: Any, request: ImageRequest, on_step: Callable[[int], None] | None = None) -> Tensor:
    """The latents of one image or clip after the last step, not decoded. Their layout is that of the pipeline."""
    latents: Tensor = _call(pipe, [request], on_step, output_type="latent")
    return latents


def _call(
    pipe: Any, requests: Sequence[ImageRequest], on_step: Callable[[int], None] | None, output_type: str = "pil"
) -> Any:
    """The images of the pipeline's output, or the frames of each clip."""
    first = requests[0]
    if not isinstance(first, ClipRequest):
        return call(pipe, requests, on_step, output_type=output_type).images
    check_request(pipe, first)
    more: dict[str, Any] = {"num_frames": first.frames, "image": first.opened_image}
    if "frame_rate" in inspect.signature(pipe.__call__).parameters:
        more["frame_rate"] = first.fps
    given = {name: value for name, value in more.items() if value is not None}
    try:
        return call(pipe, requests, on_step, output_type=output_type, **given).frames
    except NameError as error:
        if error.name != "ftfy":
            raise
        raise UsageError(f"a {type(pipe).__name__} needs the package ftfy: {INSTALL_VIDEO}.") from error


def check_request(pipe: Any, request: ClipRequest) -> None:
    """Raise `UsageError` if this pipeline makes no clips, or lacks the image, or does not take one."""
    name, taken = type(pipe).__name__, inspect.signature(pipe.__call__).parameters
    if not makes_clips(pipe):
        for option in ("frames", "fps", "image"):
            if getattr(request, option) is not None:
                raise UsageError(
                    f"{option}={str(getattr(request, option))!r} is for clips, and a {name} generates images: leave "
                    "it out, or use a video pipeline."
                )
        raise UsageError(f"a {name} generates images, not clips: use a video pipeline.")
    needs_image = "image" in taken and (taken["image"].default is inspect.Parameter.empty or "ImageToVideo" in name)
    if request.image is None and needs_image:
        raise UsageError(f"a {name} begins with an image: give one with --image.")
    if request.image is not None and "image" not in taken:
        raise UsageError(
            f"image {str(request.image)!r} cannot be given to a {name}: leave it out, or use an image-to-video "
            "pipeline."
        )
    request.opened_image  # noqa: B018 (raises if it cannot be read)


def frame_rate(pipe: Any, request: ClipRequest) -> float:
    """Frames per second: what the user says, else what the pipeline takes, else what the model was trained on."""
    if request.fps is not None:
        return float(request.fps)
    taken = inspect.signature(pipe.__call__).parameters
    if "frame_rate" in taken:
        return float(taken["frame_rate"].default)
    if getattr(pipe, "config", {}).get("expand_timesteps"):  # Wan 2.2 TI2V-5B
        return USUAL_FRAME_RATE
    name = type(pipe).__name__
    return float(next((rate for start, rate in FRAME_RATES.items() if name.startswith(start)), USUAL_FRAME_RATE))


def check_ffmpeg() -> None:
    """Raise `UsageError`, before long work, if no mp4 can be written here."""
    try:
        import imageio  # noqa: F401
        from imageio_ffmpeg import get_ffmpeg_exe

        get_ffmpeg_exe()
    except (ImportError, RuntimeError) as error:
        raise UsageError(f"writing an mp4 needs imageio-ffmpeg ({error}): {INSTALL_VIDEO}.") from error


def settings_path(path: Path) -> Path:
    """The JSON file with the settings of a clip: `clip.mp4.json`."""
    return path.with_name(f"{path.name}.json")


def write_mp4(clip: Clip, path: Path, settings: Mapping[str, Any]) -> None:
    """Write a clip as mp4 (H.264), with its settings as JSON in a file of the same name.

    The files are replaced as a whole: they are never seen half written.
    """
    from diffusers.utils import export_to_video

    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        unfinished = Path(folder) / "clip.mp4"
        width, height = clip.size
        even = (0, 0, width + width % 2, height + height % 2)  # H.264 has no odd sizes
        frames = [frame.crop(even) for frame in clip.frames]
        export_to_video(frames, str(unfinished), fps=clip.fps, quality=QUALITY, macro_block_size=2)
        os.replace(unfinished, path)
    with replacing(settings_path(path)) as file:
        file.write(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def write_lossless(made: Image | Clip, path: Path, settings: Mapping[str, Any]) -> None:
    """Write an image as PNG, a clip as animated PNG, with its settings inside. Browsers play it, and every pixel is
    kept."""
    if not isinstance(made, Clip):
        write_png(made, path, settings)
        return
    from PIL.PngImagePlugin import PngInfo

    texts = PngInfo()
    noted = {**settings, "frames": len(made.frames), "fps": made.fps}
    texts.add_itxt(SETTINGS_KEY, json.dumps(noted, ensure_ascii=False))
    first, *others = made.frames
    with replacing(path, "wb") as file:
        first.save(
            file,
            format="PNG",
            save_all=True,
            append_images=others,
            duration=1000 / made.fps,
            loop=0,
            pnginfo=texts,
        )


def read_clip(path: Path) -> Clip:
    """A clip that `write_lossless` wrote.

    Pillow stores a frame that equals the one before it as a longer duration, and a clip that stands still as an image.
    """
    from PIL import Image

    settings, frames = read_settings(path), []
    fps, count = float(settings["fps"]), int(settings["frames"])
    with Image.open(path) as file:
        stored = getattr(file, "n_frames", 1)
        for number in range(stored):
            file.seek(number)
            shown = count if stored == 1 else round(file.info["duration"] * fps / 1000)
            frames += [file.convert("RGB")] * shown
    if len(frames) != count:
        raise UsageError(f"{str(path)!r} has {len(frames)} frames, not {count} as it was written: delete it.")
    return Clip(tuple(frames), fps)
