"""A method turns settings and the blocks of a model into hooks, plans and a description."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeVar

from toma_diffusion.engine.hooks import Placement
from toma_diffusion.merge.base import Merging
from toma_diffusion.merge.block import Block
from toma_diffusion.merge.state import BlockRecord, MergeState

ConfigT = TypeVar("ConfigT", bound=Merging)
Placed = tuple[list[Placement], list[BlockRecord]]
"""All hooks of a method, and what is done in every block."""


class Method(ABC, Generic[ConfigT]):
    """One method. It has no state: what is kept from step to step is in the slots of `MergeState`."""

    name: ClassVar[str]
    """As the user writes it."""
    config_class: ClassVar[type[Any]]
    """The class of its settings. Every method has its own."""

    @abstractmethod
    def place(self, config: ConfigT, blocks: list[Block], reasons: dict[int, str], state: MergeState) -> Placed:
        """Make the hooks of the method for a model.

        Args:
            blocks: of the model, in the order in which they run.
            reasons: by index, the blocks that must be left whole, and why.
            state: gets a slot for every plan, and notes for the summary.
        """

    @abstractmethod
    def describe(self, config: ConfigT) -> list[str]:
        """What the method does, line by line, for `summary()`."""
