"""Finished runs, without any model: pictures of one colour and figures out of the air."""

from __future__ import annotations

from pathlib import Path

from PIL import Image
from tiny_clips import moving
from toma_lab.columns import BASELINE, NOISE_FLOOR, Column
from toma_lab.columns.ours import Ours
from toma_lab.evaluate import EvalFolder, EvalPlan
from toma_lab.facts import Facts
from toma_lab.pipelines.clips import write_lossless
from toma_lab.table import rows_of

from toma_diffusion import Merge
from toma_diffusion.others import ToMeSD

FACTS = Facts("NVIDIA <GPU>", "2.13.0", "0.42.1", "3.9.0", "0.1.0", "abc1234")
COLUMNS = (
    Column(BASELINE),
    Column(NOISE_FLOOR),
    *(Column("toma", Ours(merge=Merge(ratio=ratio))) for ratio in (0.25, 0.5, 0.75)),
    Column("tomesd", Ours(merge=ToMeSD(ratio=0.5))),
)


def finished_run(path: Path, prompts: tuple[str, ...] = ("a red apple",), size: int = 32, **changes) -> EvalFolder:
    settings = {"model": "a model", "seeds": (0, 7), "metrics": ("psnr", "lpips"), "steps": 20} | changes
    plan = EvalPlan(prompts=prompts, columns=COLUMNS, **settings)
    folder = EvalFolder.start(path, plan, FACTS)
    for number, column in enumerate(COLUMNS):
        for item in plan.items:
            color = (30 * number, 10 * item.index % 256, item.seed)
            made = moving(5, color=color) if plan.clips else Image.new("RGB", (size, size), color)
            write_lossless(made, folder.picture(column, item), {})
            figures = {"psnr": 40.0 - 3 * number, "lpips": 0.02 * number} if number else {}
            figures |= {"flicker": 0.5 * number} if number and plan.clips else {}
            sources = '{"lpips": "weights <b>"}' if number else "{}"
            names = {"column_id": column.column_id, "item": item.name}
            size_cells = {"resolution": f"{size}x{size}"} | ({"frames": 5} if plan.clips else {})
            folder.rows.add(names | figures | size_cells | {"seconds": 5.0 - 0.4 * number, "sources": sources})
    folder.write_table(rows_of(folder, COLUMNS))
    return folder
