"""What every setting costs in quality, on the demo model: the rows of benchmarks/results/quality_bundled.csv.

    python benchmarks/quality.py --output DIR --lpips-weights FILE [--inception-weights FILE --real-images DIR]

Runs of `toma eval` in DIR: the presets at three ratios; some on prompts and a seed that no setting was chosen by; then
on every second prompt one setting after another at ratio 0.5, some that were good together, and the paper's tables.
Killed, it goes on where it was. Then one row for each, with all settings in columns of their own; with `--only` the
rows of other runs stay as they are.
"""

import argparse
import csv
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from toma_diffusion import ToMAConfig
from toma_diffusion.evaluation import NOISE_FLOOR, RunFolder, Variant
from toma_diffusion.files import replacing

PROMPTS = Path(__file__).with_name("quality_prompts.txt")
UNSEEN_PROMPTS = Path(__file__).with_name("quality_unseen_prompts.txt")
PRESETS = (
    *("balanced", "fast", "toma", "toma:scale=1000", "toma-stripe", "toma-tile", "toma-once"),
    *("tomesd", "tofu", "todo"),
)
BASE = {"assign": "local", "scale": "1000"}
"""Changes to the preset `toma`: 64 tiles, local, softmax, each module."""
CHANGES = (
    *(f"num_regions={count}" for count in (4, 16, 64, 256)),
    *("region=stripe;num_regions=64", "region=global"),
    *("scale=100", "scale=inf", "assign=global", "assign=global;scale=inf", "unmerge=pseudo-inverse"),
    *("scope=block", "scope=stage"),
    *("window=(0.2,1.0)", "window=(0.4,1.0)", "window=(0.0,0.8)"),
    *("skip_blocks=(0,)", "skip_blocks=(0,1,12,13)"),
    *(f"select_every={select};reweigh_every={weigh}" for select, weigh in ((1, 1), (10, 10), (20, 20))),
    *("sites=(attn,)", "sites=(ff,)", "sites=(attn,cross_attn)"),
    *(f"num_plans={plans};rotation={rotation}" for plans in (1, 2, 4) for rotation in (0.3, 1.0)),
    *(f"scope=stage;num_plans={plans};rotation=0.3" for plans in (1, 2)),
    *(f"selection={selection};num_plans={plans}" for selection in ("random", "strided") for plans in (1, 2)),
    *(f"num_regions=256;{more}" for more in ("scale=inf", "scope=block", "scope=stage", "window=(0.2,1.0)")),
    *(f"num_regions=256;scope=block;{more}" for more in ("window=(0.2,1.0)", "scale=inf;window=(0.2,1.0)")),
)
EVERY_STEP = "select_every=1;reweigh_every=1"
LARGE_GRIDS = f"{EVERY_STEP};min_tokens=512"
TOGETHER = (
    *(f"{EVERY_STEP};scope={scope}" for scope in ("block", "stage")),
    *(f"{EVERY_STEP};scope=block;window={window}" for window in ("(0.2,1.0)", "(0.4,1.0)", "(0.5,1.0)")),
    f"{LARGE_GRIDS};scope=block",
    *(f"{LARGE_GRIDS};scope=block;window=(0.5,1.0){more}" for more in ("", ";num_regions=16")),
    f"{EVERY_STEP};sites=(attn,);num_plans=20",
    *(f"{LARGE_GRIDS};sites={sites};num_plans=20" for sites in ("(attn,)", "(attn,cross_attn)")),
)
"""What was good alone, together. With 20 plans every block has its own."""
PROMPTS_OF = {
    "presets": (PROMPTS, 1),
    "unseen": (UNSEEN_PROMPTS, 1),
    "table6": (PROMPTS, 8),  # its pseudo-inverse takes two minutes an image on a CPU
}
"""Which prompts a run takes, and every how manieth of them; if not named here, every second."""
RUNS = ("presets", "unseen", "settings", "together", "table2", "table3", "table6", "table7", "table9", "table10")
SETTINGS = tuple(field.name for field in fields(ToMAConfig))
FIGURES = ("images", "psnr", "ssim", "lpips", "fid", "seconds", "speedup")
FACTS = ("steps", "guidance", "resolution", "device", "torch", "diffusers", "commit", "date")


def methods_of(changes: tuple[str, ...]) -> str:
    """Every change as a method for `toma eval`, once."""
    methods = []
    for change in changes:
        fields_of = BASE | dict(part.split("=", 1) for part in change.split(";"))
        methods.append("toma:" + ";".join(f"{name}={value}" for name, value in fields_of.items()))
    return ",".join(dict.fromkeys(methods))


def changed(variant: Variant) -> str:
    """The fields that were changed in its preset."""
    return "; ".join(f"{name}={value}" for name, value in variant.asked_for.items())


def evaluate(folder: Path, arguments: list[str]) -> RunFolder:
    """One run of `toma eval`, named as its folder, or what is missing of it."""
    source, every = PROMPTS_OF.get(folder.name, (PROMPTS, 2))
    prompts = folder.with_suffix(".txt")
    folder.parent.mkdir(parents=True, exist_ok=True)
    prompts.write_text("\n".join(source.read_text().splitlines()[::every]) + "\n")
    command = [sys.executable, "-m", "toma_diffusion.cli", "eval", "--prompts", str(prompts), "--output", str(folder)]
    subprocess.run([*command, *arguments], check=True)
    return RunFolder(folder)


def rows_of(run: RunFolder, name: str) -> list[dict[str, str]]:
    """The run's table with every setting of ToMA, and the noise floor in columns of its own."""
    table = run.table()
    floor = next(row for row in table if row["method"] == NOISE_FLOOR)
    rows = []
    for variant, row in zip(run.plan.variants, table, strict=True):
        config = {} if variant.config is None else variant.config.to_dict()
        rows.append(
            {"run": name, "changed": changed(variant), "model": row["model"], "method": row["method"]}
            | {name: str(config.get(name, "")) for name in SETTINGS}
            | {name: row[name] for name in FIGURES}
            | {f"noise_floor_{name}": floor[name] for name in ("psnr", "lpips")}
            | {name: row[name] for name in FACTS}
        )
    return rows


def write(rows: list[dict[str, str]], path: Path) -> None:
    """Put the rows in the place of those of the same runs; rows of others stay."""
    runs = {row["run"] for row in rows}
    others = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            others = [row for row in csv.DictReader(file) if row["run"] not in runs]
    with replacing(path) as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted([*others, *rows], key=lambda row: RUNS.index(row["run"])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--rows", type=Path, default=Path("benchmarks/results/quality_bundled.csv"))
    parser.add_argument("--only", choices=RUNS, action="append", help="this run; may be given again")
    parser.add_argument("--metrics", default="psnr,ssim,lpips,fid")
    options, passed_on = parser.parse_known_args()
    passed_on += ["--metrics", options.metrics]
    rows = []
    for name in options.only or RUNS:
        asked = {
            "presets": ["--methods", ",".join(PRESETS), "--ratios", "0.25,0.5,0.75"],
            "unseen": ["--methods", "balanced,fast,tomesd,tofu", "--ratios", "0.5", "--seeds", "1"],
            "settings": ["--methods", methods_of(CHANGES), "--ratios", "0.5"],
            "together": ["--methods", methods_of(TOGETHER), "--ratios", "0.5"],
        }.get(name, ["--paper", name])
        rows += rows_of(evaluate(options.output / name, [*asked, *passed_on]), name)
    write(rows, options.rows)
    print(f"Wrote {options.rows}")


if __name__ == "__main__":
    main()
