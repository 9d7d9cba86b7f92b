"""The folder of a search: that of any run (toma_lab/folder.py), and

learned.json                          which steps to compute and how to predict the others, as it was learned
candidates.json                       all candidates, and why others were left out
answer.json                           the goal, the figures of every candidate, and which is chosen
tuned.json                            the chosen setting, for speed_up and toma generate
tune.html                             all of it as a page
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

from toma_diffusion.errors import UsageError
from toma_diffusion.tuned import ClipSize
from toma_lab.columns import BASELINE, Column
from toma_lab.folder import RunFolder
from toma_lab.pipelines.generation import read_settings
from toma_lab.tune.plan import TunePlan

ORIGINAL = Column(BASELINE)
"""The model as it is."""


class TuneFolder(RunFolder[TunePlan]):
    """One search on disk."""

    what, command, plan_class = "search", "toma tune", TunePlan

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
        """The setting that was chosen."""
        return self.path / "tuned.json"

    def clip_size(self) -> ClipSize | None:
        """The clips of the search as they were made; None if it is one of images."""
        plan = self.plan
        if not plan.clips:
            return None
        paths = (self.picture(ORIGINAL, item) for item in plan.items)
        path = next((path for path in paths if path.exists()), None)
        if path is None:
            return ClipSize(plan.frames, plan.width, plan.height)
        with Image.open(path) as file:
            return ClipSize(read_settings(path)["frames"], *file.size)


@contextmanager
def of_this_version(path: Path) -> Iterator[None]:
    """Say what to do about a file whose settings this version does not have."""
    try:
        yield
    except (UsageError, LookupError, TypeError) as error:
        raise UsageError(
            f"{str(path)!r} is of another version ({error}): search again in another folder, or delete that one."
        ) from error
