"""The folder of a run, for every command that keeps rows and pictures.

    run.json                    the plan, the machine and the versions
    rows.jsonl                  one row a picture: seconds and metrics; failures, with the reason (rows.py)
    images/<column>/<item>.png  the pictures; a clip is an animated PNG
    table.csv                   one row a column: what the command prints

`toma tune` adds files of its own (tune/folder.py). A folder is one run of one plan. To resume is to run the same
command again: what has a row is not computed again, what failed is tried again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from filelock import FileLock, Timeout

from toma_diffusion.errors import UsageError
from toma_diffusion.files import check_writable, replacing
from toma_lab.columns import Column
from toma_lab.facts import Facts
from toma_lab.plan import Item, Plan
from toma_lab.rows import Row, Rows, read_csv, write_csv

PlanT = TypeVar("PlanT", bound=Plan)
Self = TypeVar("Self", bound="RunFolder[Any]")
FILE = "run.json"
KEY = ("column_id", "item")
"""What identifies a row of a folder."""


class RunFolder(Generic[PlanT]):
    """Work on disk that follows a plan, and goes on where it was."""

    what: ClassVar[str] = "run"
    """What it is, for errors."""
    command: ClassVar[str]
    plan_class: ClassVar[type[Any]]

    def __init__(self, path: Path) -> None:
        """Open an existing one."""
        self.path = path
        try:
            written = json.loads((path / FILE).read_text(encoding="utf-8"))
            if written["command"] != self.command:
                raise UsageError(f"{str(path)!r} is a folder of `{written['command']}`, not of `{self.command}`.")
            self.plan: PlanT = self.plan_class.from_dict(written["plan"])
            self.facts: Facts = Facts(**written["facts"])
            self.date: str = written["date"]
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UsageError(f"{str(path)!r} is not a {self.what} of `{self.command}`: it has no {FILE}.") from error
        except UsageError:
            raise
        except (OSError, ValueError, LookupError, TypeError) as error:  # no permission; not JSON; wrong fields
            raise UsageError(
                f"{str(path / FILE)!r} cannot be read, it may be of another version ({error!r}): "
                "give another folder, or delete that one."
            ) from error
        self.rows = Rows(path / "rows.jsonl", KEY)

    @classmethod
    def start(cls: type[Self], path: Path, plan: Plan, facts: Facts) -> Self:
        """Start it, or resume it. A folder with another plan is refused."""
        check_writable(path / FILE)
        settings: dict[str, Any] = plan.to_dict()
        if not (path / FILE).exists():
            date = datetime.now(timezone.utc).isoformat(timespec="seconds")
            written = {"command": cls.command, "plan": settings, "facts": asdict(facts), "date": date}
            write_json(path / FILE, written)
        folder = cls(path)
        held = folder.plan.to_dict() | asdict(folder.facts)
        for name, wanted in (settings | asdict(facts)).items():
            if held[name] != wanted:
                raise UsageError(
                    f"{str(path)!r} holds a {cls.what} with other settings. {_difference(name, held[name], wanted)} "
                    "Give another --output, or delete that folder."
                )
        return folder

    @contextmanager
    def locked(self, is_first: bool = True) -> Iterator[None]:
        """Keep other runs out for the duration of a `with` block.

        Args:
            is_first: of the processes of this run. The others share the folder with it, and lock nothing.
        """
        if not is_first:
            yield
            return
        with locked(self.path / ".lock", f"another process is at work in {str(self.path)!r}"):
            yield

    def picture(self, column: Column, item: Item) -> Path:
        """The path of a picture, whether it exists or not."""
        return self.path / "images" / column.column_id / f"{item.name}.png"

    def item_row(self, column: Column, item: Item) -> Row:
        """What was measured of a picture, or its `failure`; empty if nothing was yet."""
        return self.rows.get(column_id=column.column_id, item=item.name) or {}

    def add(self, column: Column, item: Item, cells: Row) -> None:
        """Save what was measured of a picture."""
        names = {"title": column.title, "prompt": item.prompt, "seed": item.seed}
        self.rows.add({"column_id": column.column_id, "item": item.name, **names, **cells})

    def write_table(self, rows: Iterable[Row], columns: Iterable[str] = ()) -> None:
        """Replace the table. It has these columns, and others that are not empty."""
        write_csv(self.path / "table.csv", rows, columns)

    def table(self) -> list[Row]:
        """One row a column, in the order of the plan; without a table, none."""
        path = self.path / "table.csv"
        return read_csv(path) if path.exists() else []

    def common_cells(self) -> Row:
        """The cells that all rows of its table share."""
        cells = asdict(self.facts) | {"date": self.date, "run": self.command.removeprefix("toma ")}
        return self.plan.cells() | cells


@contextmanager
def locked(path: Path, message: str) -> Iterator[None]:
    """Hold a lock file for the duration of a `with` block, or raise `UsageError` at once. A process that is killed
    leaves no lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UsageError(f"{message}: wait for it, or give another --output.") from None
    try:
        yield
    finally:
        lock.release()


def read_json(path: Path) -> Any:
    """What is in a file; None if there is none."""
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{str(path)!r} is not JSON ({error}): delete it, and run the same again.") from error


def write_json(path: Path, values: Any) -> None:
    """Replace a file as a whole."""
    with replacing(path) as file:
        file.write(json.dumps(values, indent=2, ensure_ascii=False) + "\n")


def _difference(name: str, held: Any, wanted: Any) -> str:
    if isinstance(held, list) and isinstance(wanted, list):
        held, wanted = ([each.get("title", each) if isinstance(each, dict) else each for each in every]
                        for every in (held, wanted))  # fmt: skip
        if held == wanted:
            return f"The {name} have the same names, but other settings."
        gone, new = [each for each in held if each not in wanted], [each for each in wanted if each not in held]
        changes = [f"{len(gone)} of its {name} are not in this command, for example {gone[0]!r}"] if gone else []
        changes += [f"{len(new)} {name} of this command are not in it, for example {new[0]!r}"] if new else []
        return ("; ".join(changes) or f"The {name} have another order") + "."
    return f"Its {name} is {held!r}, this command has {wanted!r}."
