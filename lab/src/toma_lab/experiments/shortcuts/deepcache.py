"""DeepCache (Ma et al. 2023, arXiv 2312.00858), by its authors' package: reuses the deep part of a UNet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from toma_diffusion.api import find_denoiser
from toma_diffusion.checks import check_integer
from toma_diffusion.errors import UsageError
from toma_lab.experiments.shortcuts.base import Shortcut, check_known, forwards_restored


@dataclass(frozen=True)
class DeepCache(Shortcut):
    """Runs the whole UNet in every `interval`-th step, and in between only its outermost layers."""

    name = "deepcache"
    knob = "interval"
    needs_pipeline = True

    interval: int = 3
    """Higher is faster and loses more detail."""
    branch: int = 0
    """How many more layers at the top of the UNet run in every step. Higher is slower and keeps more detail."""

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> DeepCache:
        """From `interval` and `branch`."""
        check_known(cls.name, settings, ("interval", "branch"))
        return cls(
            check_integer("interval", settings.get("interval", cls.interval), minimum=1),
            check_integer("branch", settings.get("branch", cls.branch), minimum=0),
        )

    @property
    def settings(self) -> dict[str, Any]:
        """The branch only if it is another than usual."""
        return {"interval": self.interval} | ({"branch": self.branch} if self.branch else {})

    @property
    def skipped_step(self) -> str:
        """It depends on how much is computed in every step."""
        return f"{self.name}, branch {self.branch}"

    def check(self, model: nn.Module) -> None:
        """It needs a UNet, and its package."""
        if not hasattr(model, "mid_block"):
            raise UsageError(
                f"{self.text!r} cannot be used with a {type(model).__name__}: it needs a UNet. Leave it out; for a "
                "transformer use first-block-cache, taylorseer or magcache."
            )
        _helper_class(self.text)

    @contextmanager
    def applied(self, pipe: Any, steps: int) -> Iterator[None]:
        """Switch the cache on, and off again."""
        model = find_denoiser(pipe)
        self.check(model)
        with forwards_restored(model):
            helper = _helper_class(self.text)(pipe=pipe)
            helper.set_params(cache_interval=self.interval, cache_branch_id=self.branch)
            helper.enable()
            try:
                yield
            finally:
                helper.disable()


def _helper_class(text: str) -> Any:
    try:
        from DeepCache import DeepCacheSDHelper
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{text!r} needs the package DeepCache. Install it: pip install 'toma-diffusion[compare]'."
        ) from error
    return DeepCacheSDHelper
