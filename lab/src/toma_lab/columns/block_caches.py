"""The caches of diffusers, which skip blocks of a transformer where little would change: FirstBlockCache, TaylorSeer,
MagCache and SeaCache."""

from __future__ import annotations

import ast
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, ClassVar

from torch import nn

from toma_diffusion.engine.install import find_denoisers
from toma_diffusion.errors import UsageError
from toma_lab.columns.base import Check, Shortcut, at_least, forwards_restored, not_negative, yes_or_no
from toma_lab.columns.schedulers import is_flow

PIPELINES_OF_SEACACHE = ("WanPipeline", "Cosmos3OmniPipeline")
"""Those that tell it the noise level of a step. Elsewhere diffusers computes everything, with a warning."""
ATTENTION_OF_TAYLORSEER = re.compile(r"((single_|temporal_)?transformer_)?blocks.*attn")
"""What diffusers looks for: not attn1 and attn2, which Wan has."""
PRINTED_RATIOS = re.compile(r"^\[[-+.,\de ]+\]$", re.MULTILINE)
"""The list that diffusers prints at the end of a calibration."""
CALIBRATING = threading.Lock()


@contextmanager
def printed_by(module: Any) -> Iterator[list[str]]:
    """What a module prints, in place of the terminal. Other threads and modules print as ever."""
    lines: list[str] = []
    with CALIBRATING:
        module.print = lambda *values: lines.append(" ".join(map(str, values)))
        try:
            yield lines
        finally:
            del module.print


@dataclass(frozen=True)
class BlockCache(Shortcut):
    """A cache that diffusers has for transformers. Its state is fresh in every `with` block."""

    config_class: ClassVar[str]
    """The name of its settings in diffusers, whose fields are the settings here."""

    def check(self, model: nn.Module) -> None:
        if not hasattr(model, "enable_cache"):
            raise UsageError(
                f"{self.text!r} cannot be used with a {type(model).__name__}: diffusers has its caches for some "
                "transformers only, such as Flux. Leave it out; for a UNet use deepcache."
            )
        self._config_class()

    @contextmanager
    def applied(self, pipe: Any, steps: int) -> Iterator[None]:
        """Switch the cache on, and off again. Several denoisers have one each."""
        models: list[Any] = find_denoisers(pipe)
        with ExitStack() as stack:
            for model in models:
                stack.enter_context(self._enabled(model, self._arguments(model, steps)))
            yield

    def _arguments(self, model: Any, steps: int) -> dict[str, Any]:
        """All arguments of the class in diffusers."""
        return self.settings

    @contextmanager
    def _enabled(self, model: Any, arguments: dict[str, Any]) -> Iterator[None]:
        with forwards_restored(model):
            model.enable_cache(self._config_class()(**arguments))
            try:
                yield
            finally:
                model.disable_cache()

    def _config_class(self) -> Any:
        import diffusers

        found = getattr(diffusers, self.config_class, None)
        if found is None:
            raise UsageError(
                f"{self.text!r} needs a newer diffusers: {metadata.version('diffusers')} has no {self.config_class}."
            )
        return found


class FirstBlockCache(BlockCache):
    """Skips all blocks but the first in a step in which the output of the first changes little."""

    name = "first-block-cache"
    knob = "threshold"
    mixes_images = True
    config_class = "FirstBlockCacheConfig"
    checks: ClassVar[Mapping[str, Check]] = {"threshold": not_negative}


class TaylorSeer(BlockCache):
    """Extrapolates attention, or with `use_lite_mode=True` the whole output, from earlier steps."""

    name = "taylorseer"
    knob = "cache_interval"
    config_class = "TaylorSeerCacheConfig"
    checks: ClassVar[Mapping[str, Check]] = {"cache_interval": at_least(1), "use_lite_mode": yes_or_no}

    @property
    def skipped_step(self) -> str:
        return FirstBlockCache.name if self.settings.get("use_lite_mode") else self.name

    def check(self, model: nn.Module) -> None:
        super().check(model)
        is_found = any(ATTENTION_OF_TAYLORSEER.fullmatch(name) for name, _ in model.named_modules())
        if not self.settings.get("use_lite_mode") and not is_found:
            raise UsageError(
                f"{self.text!r} would do nothing in a {type(model).__name__}: diffusers finds no attention in it by "
                "name. Add use_lite_mode=True, which extrapolates the whole output."
            )

    def _arguments(self, model: Any, steps: int) -> dict[str, Any]:
        return {"taylor_factors_dtype": model.dtype} | self.settings


@dataclass(frozen=True)
class MagCache(BlockCache):
    """Skips all blocks while the magnitude of their change is predictable. It is fitted to the model by one image."""

    name = "magcache"
    knob = "threshold"
    counts_all_steps = True
    config_class = "MagCacheConfig"
    checks: ClassVar[Mapping[str, Check]] = {"threshold": not_negative}

    ratios: tuple[float, ...] = ()
    """How the magnitude of the change goes on from step to step, measured by `fitted`."""

    @property
    def skipped_step(self) -> str:
        return FirstBlockCache.name

    def fitted(self, pipe: Any, generate: Callable[[], object], steps: int) -> MagCache:
        """Let diffusers calibrate it. The only way to its result is what it prints."""
        from diffusers.hooks import mag_cache

        model: Any = find_denoisers(pipe)[0]
        with self._enabled(model, {"calibrate": True, "num_inference_steps": steps}), printed_by(mag_cache) as printed:
            generate()
        found = PRINTED_RATIOS.search("\n".join(printed))
        if found is None:
            raise RuntimeError(f"diffusers printed no ratios in the calibration of MagCache: {printed!r}.")
        return replace(self, ratios=tuple(ast.literal_eval(found[0])))

    def _arguments(self, model: Any, steps: int) -> dict[str, Any]:
        if not self.ratios:
            raise RuntimeError("MagCache has to be fitted to the model first: call `fitted`.")
        return self.settings | {"mag_ratios": list(self.ratios), "num_inference_steps": steps}


class SeaCache(BlockCache):
    """Skips all blocks while the sample changes little, in the frequencies that matter at its noise level."""

    name = "seacache"
    knob = "threshold"
    mixes_images = True
    needs_pipeline = True
    config_class = "SeaCacheConfig"
    checks: ClassVar[Mapping[str, Check]] = {"threshold": not_negative}

    @property
    def skipped_step(self) -> str:
        return FirstBlockCache.name

    def check_pipeline(self, pipe: Any) -> None:
        model: Any = find_denoisers(pipe)[0]
        name, config = type(pipe).__name__, model.config
        tells = any(kind.__name__ in PIPELINES_OF_SEACACHE for kind in type(pipe).__mro__)
        if not tells or config.get("in_channels") != config.get("out_channels"):
            raise UsageError(
                f"{self.text!r} would do nothing in a {name}: diffusers has SeaCache for Wan from text to video and "
                "Cosmos 3 only. Leave it out; use first-block-cache, taylorseer or magcache."
            )
        if not is_flow(pipe.scheduler):
            raise UsageError(
                f"{self.text!r} would do nothing in a {name} with a {type(pipe.scheduler).__name__}: it needs noise "
                "levels from 1 to 0, as flow models have. Leave it out."
            )
