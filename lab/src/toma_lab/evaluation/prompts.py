"""The prompts of a run: from a text file, a CSV file, or the class names of ImageNet."""

from __future__ import annotations

import csv
from pathlib import Path

from toma_diffusion.errors import UsageError

IMAGENET = "imagenet"
IMAGENET_TEMPLATE = "a photo of a {}"
PAPER_SEEDS = (0, 1, 2)
PAPER_PROMPTS = 50
"""From a list such as GEMRec's. Of ImageNet's class names the paper uses all."""


def load_prompts(source: str, template: str = "") -> tuple[str, ...]:
    """The prompts of a run.

    Args:
        source: a text file with one prompt per line; a CSV file with a column `prompt`, such as GEMRec's; or
            `imagenet`, the 1000 class names of ImageNet-1K.
        template: a text in which `{}` is replaced by the prompt, for files of class names.
    """
    if source == IMAGENET:
        prompts, template = _imagenet(), template or IMAGENET_TEMPLATE
    else:
        path = Path(source)
        if not path.is_file():
            raise UsageError(f"prompts {source!r}: there is no such file. Give a .txt or .csv file, or {IMAGENET!r}.")
        try:
            prompts = _from_csv(path) if path.suffix.lower() == ".csv" else _from_lines(path)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise UsageError(f"prompts {source!r}: the file cannot be read as UTF-8 text or CSV ({error}).") from error
    if template and "{}" not in template:
        raise UsageError(f"template {template!r} has no {{}}, which is replaced by the prompt.")
    prompts = tuple(dict.fromkeys(prompts))  # a second time would give the same image
    return tuple(template.replace("{}", prompt) for prompt in prompts) if template else prompts


def paper_protocol(source: str, prompts: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Prompts and seeds as in the paper: three images of each class of ImageNet, or of 50 prompts."""
    if source == IMAGENET:
        return prompts, PAPER_SEEDS
    if len(prompts) < PAPER_PROMPTS:
        raise UsageError(f"the paper's protocol needs {PAPER_PROMPTS} prompts, {source!r} has {len(prompts)}.")
    return prompts[:PAPER_PROMPTS], PAPER_SEEDS


def _from_lines(path: Path) -> tuple[str, ...]:
    prompts = tuple(line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip())
    if not prompts:
        raise UsageError(f"prompts {str(path)!r}: the file is empty. Write one prompt per line.")
    return prompts


def _from_csv(path: Path) -> tuple[str, ...]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        column = next((name for name in reader.fieldnames or () if name.strip().lower() == "prompt"), None)
        if column is None:
            columns = ", ".join(reader.fieldnames or ()) or "none"
            raise UsageError(f"prompts {str(path)!r} has no column 'prompt'. Its columns: {columns}.")
        prompts = tuple((row[column] or "").strip() for row in reader)
    if not any(prompts):
        raise UsageError(f"prompts {str(path)!r}: the column {column!r} is empty.")
    return tuple(prompt for prompt in prompts if prompt)


def _imagenet() -> tuple[str, ...]:
    """From torchvision, which has them without a download."""
    try:
        from torchvision.models import AlexNet_Weights
    except Exception as error:  # not installed, or one that does not fit torch
        raise UsageError(
            f"prompts {IMAGENET!r}: the class names come with torchvision, which cannot be imported here ({error}). "
            "Install it, or give a file with one class name per line: "
            f"--prompts FILE --template {IMAGENET_TEMPLATE!r}."
        ) from error
    return tuple(AlexNet_Weights.DEFAULT.meta["categories"])
