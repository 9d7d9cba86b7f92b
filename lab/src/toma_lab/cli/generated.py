"""What `toma generate` does with an image or a clip that it generated: compare, put side by side, write."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from toma_diffusion.errors import UsageError
from toma_lab.pipelines.clips import Clip, ClipRequest, check_ffmpeg, check_request, settings_path, write_mp4
from toma_lab.pipelines.generation import ImageRequest, makes_clips, write_png

if TYPE_CHECKING:
    from PIL.Image import Image

    Generated = Image | Clip
    Settings = dict[str, Any]

PNG, MP4 = ".png", ".mp4"
NAME = "toma"


def check_ending(output: Path | None) -> None:
    """Raise, before a model is loaded, for files that neither an image nor a clip is written to."""
    if output is not None and output.suffix not in (PNG, MP4):
        raise UsageError(
            f"output {str(output)!r} has an ending that is not supported: use {PNG} for an image, {MP4} for a clip."
        )


def output_of(pipe: Any, output: Path | None) -> Path:
    """Where the image or clip goes. Raises if it cannot be written there."""
    ending, other = (MP4, "a clip") if makes_clips(pipe) else (PNG, "an image")
    if ending == MP4:
        check_ffmpeg()
    if output is not None and output.suffix != ending:
        raise UsageError(
            f"output {str(output)!r} does not fit a {type(pipe).__name__}, which generates {other}: end it in {ending}."
        )
    return output or Path(f"{NAME}{ending}")


def request_of(
    pipe: Any, request: ImageRequest, frames: int | None, fps: float | None, image: Path | None
) -> ImageRequest:
    """The request with what is asked of a clip, checked against the pipeline."""
    if not makes_clips(pipe) and (frames, fps, image) == (None, None, None):
        return request
    of_clip = ClipRequest(**vars(request), frames=frames, fps=fps, image=image)
    check_request(pipe, of_clip)
    return of_clip


def describe(pipe: Any, generated: Generated) -> list[str]:
    """Lines about a clip as it was generated; none about an image."""
    if not isinstance(generated, Clip):
        return []
    width, height = generated.size
    sound = ["note: the sound is not written"] if getattr(pipe, "vocoder", None) is not None else []
    return [f"{len(generated.frames)} frames of {width}×{height} at {generated.fps:g} per second", *sound]


def psnr_of(generated: Generated, original: Generated, prompt: str) -> float:
    """PSNR to the original."""
    from toma_lab.metrics.base import Sample
    from toma_lab.metrics.clips import ClipSample, OverFrames
    from toma_lab.metrics.pixels import Psnr

    if isinstance(generated, Clip) and isinstance(original, Clip):
        return OverFrames(Psnr()).score(ClipSample(generated.frames, prompt, original.frames))
    assert not isinstance(generated, Clip)
    assert not isinstance(original, Clip)
    return Psnr().score(Sample(generated.convert("RGB"), prompt, original.convert("RGB")))


def side_by_side(original: Generated, generated: Generated, captions: list[str]) -> Generated:
    """Both on one sheet; of clips in every frame."""
    from toma_lab.report.sheet import make_sheet

    if isinstance(generated, Clip) and isinstance(original, Clip):
        pairs = zip(original.frames, generated.frames, strict=True)
        return Clip(tuple(make_sheet(pair, captions, columns=2) for pair in pairs), generated.fps)
    assert not isinstance(generated, Clip)
    assert not isinstance(original, Clip)
    return make_sheet([original, generated], captions, columns=2)


def compared(
    path: Path,
    original: tuple[Generated, Settings],
    made: tuple[Generated, Settings],
    captions: list[str],
    both: Settings,
) -> dict[Path, tuple[Generated, Settings]]:
    """The files of a comparison: both side by side, and of clips each alone too."""
    files = {path: (side_by_side(original[0], made[0], captions), both)}
    if isinstance(made[0], Clip):
        files[path.with_stem(f"{path.stem}-original")] = original
        files[path.with_stem(f"{path.stem}-accelerated")] = made
    return files


def write(generated: Generated, output: Path, settings: dict[str, Any]) -> list[Path]:
    """Write it with its settings, and return the files."""
    if not isinstance(generated, Clip):
        write_png(generated, output, settings)
        return [output]
    of_clip = {"frames": len(generated.frames), "fps": generated.fps}
    write_mp4(generated, output, settings | of_clip)
    return [output, settings_path(output)]
