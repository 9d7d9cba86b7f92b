"""Makes the data small enough to travel: smaller images, and of the garments only a share.

`python -m training.pack --data DIR --out DIR --size 192 --quality 80 --clothing-share 0.5`, or with `--clips` only what
the video model is trained on.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from training.clips import chosen, subject_names
from training.data import SETS, read_image
from training.settings import WAN


def shrink(file: bytes, size: int, quality: int) -> bytes:
    """One WebP file, smaller."""
    buffer = io.BytesIO()
    Image.fromarray(read_image(file, size)).save(buffer, "WEBP", quality=quality, method=6)
    return buffer.getvalue()


def every(captions: list[str], share: float) -> list[int]:
    """Every 1/`share`-th of them."""
    return [int(index) for index in np.unique((np.arange(0, len(captions), 1 / share)).astype(int))]


def pack(source: Path, target: Path, size: int, quality: int, choose: Callable[[list[str]], list[int]]) -> int:
    """Write one set with the images that `choose` finds by their captions. Returns the size of the file."""
    with np.load(source) as arrays:
        blob, offsets, labels = arrays["blob"], arrays["off"], arrays["label"]
        classes, captions = str(arrays["classes"]), json.loads(str(arrays["caption"]))
    kept = choose(captions)
    spans = list(pairwise(offsets))
    with ThreadPoolExecutor() as pool:
        files = list(pool.map(lambda index: shrink(blob[slice(*spans[index])].tobytes(), size, quality), kept))
    arrays_out: dict[str, Any] = {
        "blob": np.frombuffer(b"".join(files), dtype=np.uint8),
        "off": np.cumsum([0, *map(len, files)]),
        "label": labels[kept],
        "classes": classes,
        "caption": json.dumps([captions[index] for index in kept]),
    }
    np.savez(target, **arrays_out)
    return target.stat().st_size


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and write both sets."""
    parser = argparse.ArgumentParser(prog="python -m training.pack", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of fluent_emoji.npz and clothing.npz")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the smaller files to")
    parser.add_argument("--size", type=int, default=192, help="width and height of the images")
    parser.add_argument("--quality", type=int, default=80, help="of WebP, up to 100")
    parser.add_argument("--clothing-share", type=float, default=0.5, help="how many of the garments to keep")
    parser.add_argument("--clips", action="store_true", help="keep only the subjects of the video model's clips")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in SETS:
        choose = partial(every, share=options.clothing_share if name == "clothing" else 1.0)
        if options.clips:
            choose = partial(chosen, names=subject_names(), most=WAN.garments)
        path = options.out / f"{name}.npz"
        size = pack(options.data / f"{name}.npz", path, options.size, options.quality, choose)
        print(f"{path}: {size / 1e6:.1f} MB", flush=True)


if __name__ == "__main__":
    main()
