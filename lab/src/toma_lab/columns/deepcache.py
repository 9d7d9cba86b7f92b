"""DeepCache (Ma et al. 2023, arXiv 2312.00858), by its authors' package: reuses the deep part of a UNet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from toma_diffusion.engine.install import find_denoisers
from toma_diffusion.errors import UsageError
from toma_lab.columns.base import Shortcut, at_least, forwards_restored


class DeepCache(Shortcut):
    """Runs the whole UNet in every `interval`-th step, and in between only its outermost layers.

    A higher `interval` is faster and loses more detail. `branch` more layers at the top of the UNet run in every step:
    slower, with more detail.
    """

    name = "deepcache"
    knob = "interval"
    checks = {"interval": at_least(1), "branch": at_least(0)}  # noqa: RUF012
    usual = {"interval": 3, "branch": 0}  # noqa: RUF012
    needs_pipeline = True

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> DeepCache:
        found = super().from_settings({"interval": cls.usual["interval"]} | {**settings})
        return cls(tuple(each for each in found.chosen if each != ("branch", 0)))

    @property
    def skipped_step(self) -> str:
        return f"{self.name}, branch {self.value('branch')}"

    def check(self, model: nn.Module) -> None:
        if not hasattr(model, "mid_block"):
            raise UsageError(
                f"{self.text!r} cannot be used with a {type(model).__name__}: it needs a UNet. Leave it out; for a "
                "transformer use first-block-cache, taylorseer or magcache."
            )
        self._helper_class()

    @contextmanager
    def applied(self, pipe: Any, steps: int) -> Iterator[None]:
        model = find_denoisers(pipe)[0]
        with forwards_restored(model):
            helper = self._helper_class()(pipe=pipe)
            helper.set_params(cache_interval=self.value("interval"), cache_branch_id=self.value("branch"))
            helper.enable()
            try:
                yield
            finally:
                helper.disable()

    def _helper_class(self) -> Any:
        try:
            from DeepCache import DeepCacheSDHelper
        except ModuleNotFoundError as error:
            raise UsageError(
                f"{self.text!r} needs the package DeepCache. Install it: pip install 'toma-diffusion-lab[compare]'."
            ) from error
        return DeepCacheSDHelper
