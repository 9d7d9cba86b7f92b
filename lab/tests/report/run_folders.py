"""Finished runs, without any model: images of one colour and figures out of the air."""

from __future__ import annotations

from pathlib import Path

from PIL import Image
from toma_lab.evaluation import BASELINE, NOISE_FLOOR, Plan, RunFolder, Scores, Variant
from toma_lab.evaluation.table import COLUMNS, rows_of
from toma_lab.experiments.facts import Facts
from toma_lab.pipelines.generation import write_png

from toma_diffusion import ToMAConfig, ToMeSDConfig

FACTS = Facts("NVIDIA <GPU>", "2.13.0", "0.42.1", "3.9.0", "0.1.0", "abc1234")
VARIANTS = (
    Variant(BASELINE),
    Variant(NOISE_FLOOR),
    *(Variant("toma", ToMAConfig(ratio=ratio)) for ratio in (0.25, 0.5, 0.75)),
    Variant("tomesd", ToMeSDConfig(ratio=0.5)),
)


def finished_run(path: Path, prompts: tuple[str, ...] = ("a red apple",), size: int = 32, **changes) -> RunFolder:
    settings = {"model": "a model", "seeds": (0, 7), "metrics": ("psnr", "lpips"), "steps": 20} | changes
    folder = RunFolder.start(path, Plan(prompts=prompts, variants=VARIANTS, **settings), FACTS)
    for number, variant in enumerate(VARIANTS):
        for item in folder.plan.items:
            image = Image.new("RGB", (size, size), (30 * number, 10 * item.index % 256, item.seed))
            write_png(image, folder.image_path(variant, item), {})
            figures = {"psnr": 40.0 - 3 * number, "lpips": 0.02 * number} if number else {}
            sources = {"lpips": "weights <b>"} if number else {}
            folder.write_item_scores(variant, item, Scores(figures | {"seconds": 5.0 - 0.4 * number}, sources))
    folder.write_table(COLUMNS, rows_of(folder))
    return folder
