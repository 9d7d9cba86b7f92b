"""Draw how the operators' time grows with the number of tokens, from the rows of the benchmarks."""

import argparse
import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

LABELS = {
    "facility_location": "facility location",
    "weights": "weights",
    "merge": "merge",
    "unmerge": "unmerge",
}
GROWING = "1x{side}x{side}x640, tiles 8x8"
SIDES = (64, 96, 128, 192, 256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path, nargs="?", default=Path("benchmarks/results/ops_h200.csv"))
    parser.add_argument("--output", type=Path, default=Path("docs/growth.png"))
    arguments = parser.parse_args()
    with arguments.rows.open(newline="") as file:
        rows = {(row["op"], row["shape"]): row for row in csv.DictReader(file)}
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    tokens = [side**2 for side in SIDES]
    for op, label in LABELS.items():
        times = [float(rows[op, GROWING.format(side=side)]["us"]) for side in SIDES]
        axes.plot(tokens, times, marker="o", label=label)
    first = next(iter(rows.values()))
    axes.plot(tokens, [4 * count / tokens[0] for count in tokens], color="grey", linestyle=":", label="linear")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="tokens (64×64 to 256×256: 1024² to 4096² pixels in SDXL)",
        ylabel="µs",
        title=f"Regions of 8×8 tokens, width 640, float16, {first['gpu']}",
    )
    axes.set_xticks(tokens, [f"{count:,}" for count in tokens])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(arguments.output, dpi=120)
    print(f"Wrote {arguments.output}")


if __name__ == "__main__":
    main()
