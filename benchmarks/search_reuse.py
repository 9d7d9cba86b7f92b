"""Search which steps to compute, and how far to follow the line between them: the rows of reuse_search_h200.csv.

    python benchmarks/search_reuse.py --lpips-weights FILE --model bundled --steps 20 --computed 13,8,6 --output FILE

For every number of computed steps it measures schedules that are dense at the beginning and grow sparser by a power,
each with several values of `order`; where few are possible, all schedules. Then it climbs: it moves one computed
step at a time as long as the images get closer. The prompts are none of those by which quality is reported. A row is
written as soon as it is measured; killed, the same command goes on.
"""

from __future__ import annotations

import argparse
import csv
from dataclasses import asdict, dataclass, fields
from itertools import combinations
from math import comb
from pathlib import Path
from typing import Any

from quality import PROMPTS, SETUPS, Measurement, Row

from toma_diffusion import PRESETS, Schedule
from toma_diffusion.api import find_denoiser
from toma_diffusion.evaluation.variants import UNMERGED, VariantSpec, variants_of
from toma_diffusion.experiments.facts import Facts, gather_facts
from toma_diffusion.experiments.parsing import numbers
from toma_diffusion.metrics import Weights, open_metrics
from toma_diffusion.metrics.base import PairMetric
from toma_diffusion.pipelines.checkpoints import DEMO_MODELS_OF_IMAGES, load_pipeline
from toma_diffusion.tune.moves import moved_steps

SUBJECTS = Path(__file__).parents[1] / "training" / "prompts.txt"
FIRST_SEED = 1000
POWERS = (1.25, 1.5, 2.0, 2.5)
ORDERS = (0, 0.5, 1)
FEW = 21
"""At most so many schedules are all measured."""
COLUMNS = (
    *("model", "steps", "part", "schedule", "computed", "order", "images", "psnr", "lpips"),
    *(field.name for field in fields(Facts)),
)
Steps = tuple[int, ...]


def by_power(steps: int, computed: int, power: float, *, last: bool) -> Steps:
    """So many steps, dense at the beginning; with `last`, the last step is one of them.

    Example:
        >>> by_power(20, 8, 1.5, last=False)
        (0, 1, 2, 5, 7, 10, 13, 16)
    """
    end, parts = (steps - 1, computed - 1) if last else (steps, computed)
    chosen: list[int] = []
    for number in range(computed):
        wanted = round(end * (number / parts) ** power)
        chosen.append(min(max(wanted, chosen[-1] + 1 if chosen else 0), steps - computed + number))
    return tuple(chosen)


def schedules(steps: int, computed: int) -> dict[Steps, str]:
    """What is tried before the climb, with a name."""
    found: dict[Steps, str] = {}
    for name in ("balanced", "fast", "faster"):
        schedule = Schedule(reuse=PRESETS[name].reuse)
        steps_of_preset = tuple(step for step in range(steps) if not schedule.reuses(step, steps))
        if len(steps_of_preset) == computed:
            found.setdefault(steps_of_preset, name)
    if comb(steps - 1, computed - 1) <= FEW:
        for others in combinations(range(1, steps), computed - 1):
            found.setdefault((0, *others), "all")
        return found
    for power in POWERS:
        for last in (False, True):
            found.setdefault(by_power(steps, computed, power, last=last), f"power {power:g}{', last' * last}")
    return found


@dataclass(eq=False)
class Search:
    """One model at one number of steps."""

    measurement: Measurement
    common: Row
    output: Path

    def __post_init__(self) -> None:
        self.known: dict[tuple[str, ...], Row] = {}
        if self.output.exists():
            with self.output.open(newline="", encoding="utf-8") as file:
                self.known = {self._key(row): row for row in csv.DictReader(file)}

    @staticmethod
    def _key(row: Row) -> tuple[str, ...]:
        return tuple(row[name] for name in ("model", "steps", "part", "computed", "order", "commit"))

    def lpips(self, computed: Steps, order: float, part: str, name: str) -> float:
        """Of one schedule; measured unless there is a row."""
        row = self.common | {"computed": " ".join(map(str, computed)), "order": f"{order:g}", "part": part}
        held = self.known.get(self._key(row))
        if held is None:
            spec = f"reuse:computed=({','.join(map(str, computed))},);order={order:g};part={part}"
            (variant,) = variants_of(find_denoiser(self.measurement.pipe), [VariantSpec.parse(spec)], [0.0])
            figures = self.measurement.figures(variant)
            held = row | {"schedule": name} | {key: figures[key] for key in ("images", "psnr", "lpips")}
            self._write(held)
            self.known[self._key(held)] = held
            print(*(held[key] for key in COLUMNS[:9]), sep="; ", flush=True)
        return float(held["lpips"])

    def _write(self, row: Row) -> None:
        is_new = not self.output.exists()
        with self.output.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if is_new:
                writer.writeheader()
            writer.writerow(row)

    def best(self, computed: int, part: str, rounds: int) -> None:
        """Measure all schedules of so many computed steps, and climb from the best of them."""
        steps = int(self.common["steps"])
        tried = {
            (chosen, order): self.lpips(chosen, order, part, name)
            for chosen, name in schedules(steps, computed).items()
            for order in ORDERS
        }
        (chosen, order), _ = min(tried.items(), key=lambda item: item[1])
        nearby = [each for each in (order - 0.25, order, order + 0.25) if 0 <= each <= 1]
        refined = {each: self.lpips(chosen, each, part, "order") for each in nearby}
        order, lowest = min(refined.items(), key=lambda item: item[1])
        for _ in range(rounds):
            around = {other: self.lpips(other, order, part, "climb") for other in moved_steps(chosen, steps)}
            closest = min(around, key=lambda other: around[other])
            if around[closest] >= lowest:
                break
            chosen, lowest = closest, around[closest]
        print(f"{self.common['model']}, {computed} of {steps}, {part}: {chosen}, order {order:g}: {lowest}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled", choices=DEMO_MODELS_OF_IMAGES)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--computed", default="13,8,6", help="how many of the steps are computed")
    parser.add_argument("--part", default="deep")
    parser.add_argument("--rounds", type=int, default=3, help="moves of the climb")
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--lpips-weights", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=Path("reuse_search.csv"))
    parser.add_argument("--device", default="")
    parser.add_argument("--commit", help="to record; default: that of the checkout")
    options = parser.parse_args()
    setup, pipe = SETUPS[options.model], load_pipeline(options.model, options.device or None)
    metrics = open_metrics(("psnr", "lpips"), Weights(lpips=options.lpips_weights), pipe.device).image
    reported = {line for path in PROMPTS for line in path.read_text(encoding="utf-8").splitlines()}
    prompts = [line for line in SUBJECTS.read_text(encoding="utf-8").splitlines() if line not in reported]
    prompts = prompts[:: max(1, len(prompts) // options.images)][: options.images]
    requests = [
        setup.request(prompt, FIRST_SEED + place, options.steps, clip=False) for place, prompt in enumerate(prompts)
    ]
    pairs: Any = [metric for metric in metrics if isinstance(metric, PairMetric)]
    measurement = Measurement(pipe, requests, setup.batch, pairs)
    measurement.figures(UNMERGED[0])
    facts = {name: str(value) for name, value in asdict(gather_facts(pipe.device, options.commit)).items()}
    search = Search(measurement, facts | {"model": options.model, "steps": str(options.steps)}, options.output)
    wanted = numbers("computed", options.computed, int)
    if not all(1 < computed < options.steps for computed in wanted):
        parser.error(f"--computed {options.computed}: all must lie between 1 and the {options.steps} steps")
    for computed in wanted:
        search.best(computed, options.part, options.rounds)


if __name__ == "__main__":
    main()
