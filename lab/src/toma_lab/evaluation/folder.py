"""The folder of a run, with its settings, images, scores and table.

    run.json                        the settings, the machine and the versions
    images/<variant>/<item>.png
    scores/<variant>/<item>.json    seconds, and every metric of one image
    scores/<variant>.json           metrics of all images of a variant together
    table.csv                       one row per variant

Every file is complete or absent. What is there is not computed again.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from toma_diffusion.errors import UsageError
from toma_diffusion.files import check_writable, replacing
from toma_lab.evaluation.plan import Item, Plan, Variant
from toma_lab.experiments.facts import Facts


class HasSettings(Protocol):
    """A plan."""

    def to_dict(self) -> dict[str, Any]:
        """All its settings, for JSON."""


PlanT = TypeVar("PlanT", bound=HasSettings)
Self = TypeVar("Self", bound="PlannedFolder[Any]")


@dataclass(frozen=True)
class Scores:
    """Values by name, and the source of the weights that a metric used."""

    values: dict[str, float]
    sources: dict[str, str]

    def has(self, name: str, source: str) -> bool:
        """Whether a metric was computed with these weights."""
        return name in self.values and self.sources.get(name, "") == source


class PlannedFolder(Generic[PlanT]):
    """Work on disk that follows a plan, and goes on where it was."""

    file: ClassVar[str]
    """Where its settings are."""
    what: ClassVar[str]
    """What it is, for errors: `run`."""
    command: ClassVar[str]
    plan_class: ClassVar[type[Any]]

    def __init__(self, path: Path) -> None:
        """Open an existing one."""
        self.path = path
        try:
            written = json.loads((path / self.file).read_text(encoding="utf-8"))
            self.plan: PlanT = self.plan_class.from_dict(written["plan"])
            self.facts: Facts = Facts(**written["facts"])
            self.date: str = written["date"]
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UsageError(
                f"{str(path)!r} is not a {self.what} of `{self.command}`: it has no {self.file}."
            ) from error
        except (OSError, ValueError, LookupError, TypeError) as error:  # no permission; not JSON; wrong fields
            raise UsageError(
                f"{str(path / self.file)!r} cannot be read, it may be of another version ({error!r}): "
                "give another folder, or delete that one."
            ) from error

    @classmethod
    def start(cls: type[Self], path: Path, plan: PlanT, facts: Facts) -> Self:
        """Start it, or resume it. A folder with another plan is refused."""
        check_writable(path / cls.file)
        settings: dict[str, Any] = plan.to_dict()
        if not (path / cls.file).exists():
            date = datetime.now(timezone.utc).isoformat(timespec="seconds")
            with replacing(path / cls.file) as file:
                written = {"plan": settings, "facts": asdict(facts), "date": date}
                file.write(json.dumps(written, indent=2, ensure_ascii=False) + "\n")
        folder = cls(path)
        held = folder.plan.to_dict() | asdict(folder.facts)
        for name, wanted in (settings | asdict(facts)).items():
            if held[name] != wanted:
                raise UsageError(
                    f"{str(path)!r} holds a {cls.what} with other settings. {_difference(name, held[name], wanted)} "
                    "Give another --output, or delete that folder."
                )
        return folder

    def image_path(self, variant: Variant, item: Item) -> Path:
        """The path of an image, whether it exists or not."""
        return self.path / "images" / variant.slug / f"{item.name}.png"


class RunFolder(PlannedFolder[Plan]):
    """One run on disk."""

    file, what, command, plan_class = "run.json", "run", "toma eval", Plan

    def image_paths(self, variant: Variant) -> list[Path]:
        """The paths of all items, in order."""
        return [self.image_path(variant, item) for item in self.plan.items]

    def missing(self) -> list[tuple[Variant, tuple[Item, ...]]]:
        """The batches of which an image does not exist yet, batch by batch, each with all variants in turn.

        The order of the variants rotates from batch to batch, so that none always comes first. A batch of which some
        images exist is generated again as a whole: in a smaller one they would be rounded otherwise.
        """
        variants, found = self.plan.variants, []
        for number, batch in enumerate(self.plan.batches):
            first = number % len(variants)
            for variant in (*variants[first:], *variants[:first]):
                if not all(self.image_path(variant, item).exists() for item in batch):
                    found.append((variant, batch))
        return found

    def item_scores(self, variant: Variant, item: Item) -> Scores:
        """The scores of one image. Empty if it has not been scored."""
        return _read_scores(self._scores_path(variant, item))

    def write_item_scores(self, variant: Variant, item: Item, scores: Scores) -> None:
        """Save the scores of one image."""
        _write_scores(self._scores_path(variant, item), scores)

    def joint_scores(self, variant: Variant) -> Scores:
        """Metrics with one value for all images of a variant, such as FID."""
        return _read_scores(self.path / "scores" / f"{variant.slug}.json")

    def write_joint_scores(self, variant: Variant, scores: Scores) -> None:
        """Save them."""
        _write_scores(self.path / "scores" / f"{variant.slug}.json", scores)

    def scores(self, variant: Variant) -> dict[str, dict[str, float]]:
        """The values of every image that has been scored, by the item's name."""
        found = {item.name: self.item_scores(variant, item).values for item in self.plan.items}
        return {name: values for name, values in found.items() if values}

    def write_table(self, columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> None:
        """Replace the table."""
        with replacing(self.path / "table.csv") as file:
            writer = csv.DictWriter(file, fieldnames=columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)

    def table(self) -> list[dict[str, str]]:
        """The rows, one per variant, in the plan's order. Unknown values are empty. Without a table, no rows."""
        path = self.path / "table.csv"
        if not path.exists():
            return []
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def _scores_path(self, variant: Variant, item: Item) -> Path:
        return self.path / "scores" / variant.slug / f"{item.name}.json"


def _read_scores(path: Path) -> Scores:
    if not path.exists():
        return Scores({}, {})
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        return Scores({name: float(value) for name, value in written["values"].items()}, written["sources"])
    except (ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{str(path)!r} holds no scores ({error!r}): delete it, and run the same again.") from error


def _write_scores(path: Path, scores: Scores) -> None:
    # JSON has no infinity, which is the PSNR of equal images.
    values: dict[str, Any] = {n: value if math.isfinite(value) else str(value) for n, value in scores.values.items()}
    with replacing(path) as file:
        file.write(json.dumps({"values": values, "sources": scores.sources}, indent=2) + "\n")


def _difference(name: str, held: Any, wanted: Any) -> str:
    if name == "variants":
        held, wanted = ([Variant.from_dict(each).title for each in variants] for variants in (held, wanted))
        if held == wanted:
            return "The variants have the same names, but other settings."
    if isinstance(held, list) and isinstance(wanted, list):
        gone, new = [each for each in held if each not in wanted], [each for each in wanted if each not in held]
        changes = [f"{len(gone)} of its {name} are not in this command, for example {gone[0]!r}"] if gone else []
        changes += [f"{len(new)} {name} of this command are not in it, for example {new[0]!r}"] if new else []
        return ("; ".join(changes) or f"The {name} have another order") + "."
    return f"Its {name} is {held!r}, this command has {wanted!r}."
