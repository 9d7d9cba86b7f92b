"""The folder of a search.

    tune.json                             the settings, the machine and the versions
    map/<group>-<step>.json               how much an error in these blocks grows that is made in this step
    learned.json                          which steps to compute and how to predict the others, as it was learned
    candidates.json                       all candidates, and why others were left out
    measured/<variant>/<item>.json        seconds, those of the original next to it, and the distances of one image
    images/<variant>/<item>.png           a clip as animated PNG
    answer.json                           the goal, the figures of every candidate, and which is chosen
    table.csv                             the same figures, one row per candidate
    tuned.json                            the chosen setting, for apply_toma and toma generate
    tune.html                             all of it as a page

Every file is complete or absent. What is there is not measured again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any

from toma_diffusion.errors import UsageError
from toma_diffusion.files import replacing
from toma_lab.evaluation.folder import PlannedFolder
from toma_lab.evaluation.plan import Item, Variant
from toma_lab.tune.plan import TunePlan


@dataclass(frozen=True)
class Measurement:
    """One image or clip of one candidate."""

    seconds: float
    original_seconds: float
    """Of the unaccelerated model, for the same image, right before or after."""
    psnr: float
    lpips: float | None = None
    failure: str = ""
    """Why there is no image, if so. The candidate is then left out."""
    flicker: float | None = None
    """Of a clip."""
    computed: tuple[int, ...] | None = None
    """Which steps were computed, if others were skipped: the noise levels of the scheduler decide it."""

    def __post_init__(self) -> None:
        if self.computed is not None:
            object.__setattr__(self, "computed", tuple(self.computed))  # a list in files

    @classmethod
    def failed(cls, reason: str) -> Measurement:
        """Of a candidate that raised an error."""
        return cls(inf, 0.0, 0.0, None, reason)


class TuneFolder(PlannedFolder[TunePlan]):
    """One search on disk."""

    file, what, command, plan_class = "tune.json", "search", "toma tune", TunePlan

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out for the duration of a `with` block. A process that is killed leaves no lock."""
        from filelock import FileLock, Timeout

        lock = FileLock(self.path / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise UsageError(
                f"another process is searching in {str(self.path)!r}: wait for it, or give another --output."
            ) from error
        try:
            yield
        finally:
            lock.release()

    def measurement(self, variant: Variant, item: Item) -> Measurement | None:
        """What was measured of one image; None if nothing was yet."""
        values = read_json(self._measured_path(variant, item))
        return None if values is None else Measurement(**{name: _number(value) for name, value in values.items()})

    def write_measurement(self, variant: Variant, item: Item, measurement: Measurement) -> None:
        """Save it."""
        values = {name: _plain(value) for name, value in asdict(measurement).items()}
        write_json(self._measured_path(variant, item), values)

    def growth(self, group: int, step: int) -> float | None:
        """One cell of the map; None if it was not measured yet."""
        values = read_json(self._map_path(group, step))
        return None if values is None else float(values["growth"])

    def write_growth(self, group: int, step: int, growth: float) -> None:
        """Save it."""
        write_json(self._map_path(group, step), {"growth": growth})

    @property
    def candidates_path(self) -> Path:
        """The list of candidates."""
        return self.path / "candidates.json"

    @property
    def learned_path(self) -> Path:
        """What was learned of skipped steps."""
        return self.path / "learned.json"

    @property
    def learning_path(self) -> Path:
        """What that is learned from, until it is done."""
        return self.path / "learning"

    @property
    def answer_path(self) -> Path:
        """The answer with all figures."""
        return self.path / "answer.json"

    @property
    def tuned_path(self) -> Path:
        """The setting for `apply_toma`."""
        return self.path / "tuned.json"

    def _measured_path(self, variant: Variant, item: Item) -> Path:
        return self.path / "measured" / variant.slug / f"{item.name}.json"

    def _map_path(self, group: int, step: int) -> Path:
        return self.path / "map" / f"{group:02d}-{step:04d}.json"


@contextmanager
def of_this_version(path: Path) -> Iterator[None]:
    """Say what to do about a file whose settings this version does not have."""
    try:
        yield
    except (UsageError, LookupError, TypeError) as error:
        raise UsageError(
            f"{str(path)!r} is of another version ({error}): search again in another folder, or delete that one."
        ) from error


def read_json(path: Path) -> Any:
    """What is in a file; None if there is none."""
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{str(path)!r} is not JSON ({error}): delete it, and run the same again.") from error


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Replace a file as a whole."""
    with replacing(path) as file:
        file.write(json.dumps(values, indent=2, ensure_ascii=False) + "\n")


def _plain(value: Any) -> Any:
    """JSON has no infinity, which is the PSNR of equal images."""
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def _number(value: Any) -> Any:
    return float(value) if value in ("inf", "-inf", "nan") else value
