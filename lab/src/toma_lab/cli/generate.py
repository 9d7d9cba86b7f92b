"""`toma generate`: one image or clip from the faster model, or a comparison with the original."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toma_diffusion.errors import UsageError
from toma_lab.cli import run_options as options
from toma_lab.cli.options import find_device, report_user_errors, versions

if TYPE_CHECKING:
    from PIL.Image import Image
    from rich.console import Console

    from toma_diffusion.summary import Summary
    from toma_diffusion.tuned import Tuned
    from toma_lab.columns import Column, ColumnSpec
    from toma_lab.pipelines.clips import Clip
    from toma_lab.pipelines.generation import ImageRequest

DEFAULT, DEFAULT_WITH_RATIO = "balanced", "toma-stage"
PNG, MP4 = ".png", ".mp4"


@report_user_errors
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt.")],
    model: options.Model = "bundled",
    ratio: Annotated[
        float | None, typer.Option(help="Fraction of the tokens to remove. Default: that of the preset.")
    ] = None,
    preset: Annotated[
        str,
        typer.Option(
            help="As in toma eval: a preset, a variant of ToMA or another method, with optional settings "
            "(toma-stage:num_regions=256), or a shortcut (steps:14). Default: balanced; with --ratio toma-stage."
        ),
    ] = "",
    config: Annotated[
        Path | None, typer.Option(help="In place of preset and ratio: a file tuned.json that toma tune wrote.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the initial noise.")] = 0,
    steps: Annotated[
        int | None, typer.Option(help=f"Denoising steps. Default: {options.STEPS}; of bundled-4step 4.")
    ] = None,
    guidance: options.Guidance = None,
    negative_prompt: Annotated[str | None, typer.Option(help="What the image should not show.")] = None,
    width: Annotated[int | None, typer.Option(help="In pixels, with --height. Default: that of the pipeline.")] = None,
    height: Annotated[int | None, typer.Option(help="In pixels, with --width. Default: that of the pipeline.")] = None,
    frames: options.Frames = None,
    fps: options.Fps = None,
    image: options.BeginsWith = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Write the original and the faster one side by side.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            help="The file to write: toma.png, with all settings in its metadata, or of a clip toma.mp4, with them in "
            "toma.mp4.json."
        ),
    ] = None,
    dtype: options.Dtype = "",
    device: options.Device = "",
) -> None:
    """Generate one image or clip faster, print what was skipped and merged and how long it took, and save it as PNG or
    mp4."""
    from rich.console import Console

    from toma_diffusion.files import check_writable
    from toma_diffusion.tuned import Tuned
    from toma_lab.columns import ColumnSpec
    from toma_lab.pipelines.checkpoints import load_pipeline, public_name, steps_and_guidance
    from toma_lab.pipelines.generation import ImageRequest

    console = Console(markup=False, highlight=False, soft_wrap=True)
    if output is not None and output.suffix not in (PNG, MP4):  # said before a large model is loaded
        raise UsageError(f"output {str(output)!r} is neither an image nor a clip: end it in {PNG} or {MP4}.")
    tuned = None if config is None else Tuned.read(config)
    if tuned is not None and (preset or ratio is not None):
        raise UsageError(
            f"--config sets the method and all its settings: leave "
            f"{f'--preset {preset}' if preset else f'--ratio {ratio:g}'} out."
        )
    if tuned is not None:
        tuned.check_steps(tuned.num_steps if steps is None else steps)
        steps = tuned.num_steps
    preset = preset or (DEFAULT if ratio is None else DEFAULT_WITH_RATIO)
    spec = ColumnSpec.parse(preset)
    request = ImageRequest(
        prompt, seed, *steps_and_guidance(model, steps, guidance, options.STEPS), width, height, negative_prompt
    )
    pipe: Any = load_pipeline(model, str(find_device(device)), dtype or None)
    request = _request_of(pipe, request, frames, fps, image)
    column = _column_of(pipe, spec, ratio) if tuned is None else _column_of_file(pipe, tuned)
    path = _output_of(pipe, output)
    check_writable(path)
    about = {
        "model": public_name(model),
        "device": str(pipe.device),
        "dtype": str(pipe.dtype).removeprefix("torch."),
        **versions(),
        "method": preset if tuned is None else "tuned.json",
    }
    files = _generate_both(console, pipe, request, column, path, tuned, compare=compare)
    for each, (made, settings) in files.items():
        console.print(f"Wrote {', '.join(map(str, _write(made, each, about | settings)))}")


Files = dict[Path, "tuple[Image | Clip, dict[str, Any]]"]
"""What to write, with the settings to note in each."""


def _generate_both(
    console: Console,
    pipe: Any,
    request: ImageRequest,
    column: Column,
    path: Path,
    tuned: Tuned | None,
    *,
    compare: bool,
) -> Files:
    """Generate, and print what is done and how long it took. `request` is as it would be of the original."""
    from toma_lab.pipelines.clips import Clip, generate, settings_of
    from toma_lab.runner import warm_up

    own = replace(request, steps=column.requested_steps(request.steps))
    column = column.fitted(pipe, lambda: generate(pipe, [own]), request.steps)
    about = column.in_sentences(request.steps) if tuned is not None or column.own is None else []
    if compare:
        warm_up(pipe, [request])
    with column.applied(pipe, request.steps) as handle:
        if compare:
            warm_up(pipe, [own])
        made, seconds = _timed(console, pipe, own, "generating")
        lines = [] if handle is None else _in_short(handle.summary())
    for line in [*about, *_about_clip(pipe, made, tuned), *lines]:
        console.print(line)
    settings = {**settings_of(own), "column": column.to_dict(), "seconds": round(seconds, 3)}
    if not compare:
        console.print(f"{seconds:.2f} s with {column.title}")
        return {path: (made, settings)}

    original, original_seconds = _timed(console, pipe, request, "generating the original")
    psnr = _psnr(made, original, request.prompt)
    result = f"{seconds:.2f} s, {original_seconds / seconds:.2f}× as fast, PSNR {psnr:.1f} dB"
    console.print(f"{original_seconds:.2f} s as it is\n{result} with {column.title}")
    captions = [f"original: {original_seconds:.2f} s", f"{column.title}: {result}"]
    both = settings | {"original_seconds": round(original_seconds, 3), "psnr": f"{psnr:.3f}"}
    files: Files = {path: (_side_by_side(original, made, captions), both)}
    if isinstance(made, Clip):
        of_original = {**settings_of(request), "column": None, "seconds": round(original_seconds, 3)}
        files[path.with_stem(f"{path.stem}-original")] = original, of_original
        files[path.with_stem(f"{path.stem}-accelerated")] = made, settings
    return files


def _column_of(pipe: Any, spec: ColumnSpec, ratio: float | None) -> Column:
    from toma_lab.columns import columns_of

    if ratio is not None and (spec.own is None or not spec.own.merges):
        name = spec.shortcuts[0].name if spec.own is None else spec.own.name
        raise UsageError(f"{name} has no ratio that can be set: leave --ratio {ratio:g} out.")
    merge = None if spec.own is None else spec.own.ours(ratio).merge
    return columns_of(pipe, [spec], [] if merge is None else [merge.ratio])[0]


def _column_of_file(pipe: Any, tuned: Tuned) -> Column:
    from toma_diffusion.engine.install import find_denoisers
    from toma_lab.pipelines.generation import makes_clips
    from toma_lab.tune.outcome import from_file

    tuned.check_thing(pipe, makes_clips=makes_clips(pipe))
    for model in find_denoisers(pipe):
        tuned.check_model(model)
    column = from_file(tuned)
    for shortcut in column.shortcuts:
        shortcut.check_on(pipe)
    return column


def _request_of(
    pipe: Any, request: ImageRequest, frames: int | None, fps: float | None, image: Path | None
) -> ImageRequest:
    """The request with what is asked of a clip, checked against the pipeline."""
    from toma_lab.pipelines.clips import ClipRequest, check_request
    from toma_lab.pipelines.generation import makes_clips

    if not makes_clips(pipe) and (frames, fps, image) == (None, None, None):
        return request
    of_clip = ClipRequest(**vars(request), frames=frames, fps=fps, image=image)
    check_request(pipe, of_clip)
    return of_clip


def _output_of(pipe: Any, output: Path | None) -> Path:
    """Where the image or clip goes. Raises if it cannot be written there."""
    from toma_lab.pipelines.clips import check_ffmpeg
    from toma_lab.pipelines.generation import makes_clips

    ending, what = (MP4, "a clip") if makes_clips(pipe) else (PNG, "an image")
    if ending == MP4:
        check_ffmpeg()
    if output is not None and output.suffix != ending:
        raise UsageError(
            f"output {str(output)!r} does not fit a {type(pipe).__name__}, which generates {what}: end it in {ending}."
        )
    return output or Path(f"toma{ending}")


def _timed(console: Console, pipe: Any, request: ImageRequest, what: str) -> tuple[Image | Clip, float]:
    """The image or clip, and how many seconds the pipeline took."""
    from rich.progress import Progress

    from toma_lab.pipelines.clips import generate as generate_all

    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task(what, total=request.steps)
        start = perf_counter()
        # The image is on the CPU when it returns, so that no GPU work is pending.
        (made,) = generate_all(pipe, [request], lambda step: progress.advance(bar))
        return made, perf_counter() - start


def _about_clip(pipe: Any, made: Image | Clip, tuned: Tuned | None) -> list[str]:
    """Lines about a clip as it was generated; none about an image."""
    from toma_diffusion.tuned import ClipSize
    from toma_lab.pipelines.clips import Clip

    if not isinstance(made, Clip):
        return []
    width, height = made.size
    lines = [f"{len(made.frames)} frames of {width}×{height} at {made.fps:g} per second"]
    if getattr(pipe, "vocoder", None) is not None:
        lines.append("note: the sound is not written")
    if tuned is not None and tuned.clip not in (None, ClipSize(len(made.frames), width, height)):
        lines.append(f"note: the setting was measured on clips of {tuned.clip}")
    return lines


def _in_short(summary: Summary) -> list[str]:
    lines, merge = [] if summary.skip is None else list(summary.skip.lines[:2]), summary.merge
    if merge is not None and merge.is_used:
        lines += [
            f"{merge.config.label}, ratio {merge.config.ratio:g}, {kind.kind}: {kind.tokens_before} → "
            f"{kind.tokens_after} tokens ({kind.regions}) in {kind.blocks} blocks"
            for kind in merge.kinds
            if kind.tokens_before is not None
        ]
        start, end = merge.config.window
        if (start, end) != (0, 1):
            lines.append(f"merged from {start:.0%} to {end:.0%} of the steps")
        if merge.left_whole:
            lines.append(f"{len(merge.left_whole)} blocks left whole, {merge.left_whole[0][1]}")
    return lines + [f"note: {note}" for note in summary.notes]


def _psnr(made: Image | Clip, original: Image | Clip, prompt: str) -> float:
    from toma_lab.metrics.clips import ClipSample, OverFrames
    from toma_lab.metrics.pixels import Psnr

    one, other = ([each.convert("RGB") for each in _frames(generated)] for generated in (made, original))
    return OverFrames(Psnr()).score(ClipSample(one, prompt, other))


def _side_by_side(original: Image | Clip, made: Image | Clip, captions: list[str]) -> Image | Clip:
    """Both on one sheet; of clips in every frame."""
    from toma_lab.pipelines.clips import Clip
    from toma_lab.report.pictures import make_sheet

    pairs = zip(_frames(original), _frames(made), strict=True)
    sheets = tuple(make_sheet(pair, captions, columns=2) for pair in pairs)
    return Clip(sheets, made.fps) if isinstance(made, Clip) else sheets[0]


def _frames(made: Image | Clip) -> tuple[Image, ...]:
    from toma_lab.pipelines.clips import Clip

    return made.frames if isinstance(made, Clip) else (made,)


def _write(made: Image | Clip, path: Path, settings: dict[str, Any]) -> list[Path]:
    """Write it with its settings, and return the files."""
    from toma_lab.pipelines.clips import Clip, settings_path, write_mp4
    from toma_lab.pipelines.generation import write_png

    if not isinstance(made, Clip):
        write_png(made, path, settings)
        return [path]
    write_mp4(made, path, settings | {"frames": len(made.frames), "fps": made.fps})
    return [path, settings_path(path)]
