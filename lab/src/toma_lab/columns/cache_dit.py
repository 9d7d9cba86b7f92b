"""Cache-DiT, by its authors' package: DBCache with its calibrators and step masks, for transformers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

from torch import nn

from toma_diffusion.engine.install import find_denoisers
from toma_diffusion.errors import UsageError
from toma_lab.columns.base import Check, Shortcut, at_least, forwards_restored, not_negative, one_of
from toma_lab.columns.skipped import counted_calls

MASKS = ("slow", "medium", "fast", "ultra")
POLICIES = ("dynamic", "static")
CALIBRATORS: Mapping[str, str] = MappingProxyType(
    {"taylorseer": "TaylorSeerCalibratorConfig", "foca": "FoCaCalibratorConfig", "dmd": "DMDCalibratorConfig"}
)
OF_THE_CACHE: Mapping[str, str] = MappingProxyType(
    {
        "F": "Fn_compute_blocks",
        "B": "Bn_compute_blocks",
        "R": "residual_diff_threshold",
        "max_warmup_steps": "max_warmup_steps",
        "max_continuous_cached_steps": "max_continuous_cached_steps",
        "steps_computation_policy": "steps_computation_policy",
    }
)
"""What users write, and the names in the package."""
FEWEST_MASKED_STEPS, OTHER_MASKED_STEPS = 8, (4, 6)
"""Numbers of steps for which the package has masks."""


@dataclass(frozen=True)
class CacheDiT(Shortcut):
    """Computes the first F and the last B blocks, and skips the others where the first ones change by less than R."""

    name = "cache-dit"
    knob = "R"
    mixes_images = True
    needs_pipeline = True

    checks: ClassVar[Mapping[str, Check]] = {
        "F": at_least(1),
        "B": at_least(0),
        "R": not_negative,
        "max_warmup_steps": at_least(0),
        "max_continuous_cached_steps": at_least(-1),
        "steps_computation_policy": one_of(*POLICIES),
        "steps_mask": one_of(*MASKS),
        "calibrator": one_of(*CALIBRATORS),
        "taylorseer_order": at_least(1),
    }
    usual: ClassVar[Mapping[str, Any]] = {"F": 8, "B": 0, "max_warmup_steps": 8}
    """The defaults of the package that are checked here."""

    passes: int = 0
    """How often a step calls the denoiser: twice if the halves of guidance are apart. Counted by `fitted`."""

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> CacheDiT:
        found = super().from_settings(settings)
        for setting, needed, example in (
            ("taylorseer_order", settings.get("calibrator") == "taylorseer", "calibrator=taylorseer"),
            ("steps_computation_policy", "steps_mask" in settings, "steps_mask=medium"),
        ):
            if setting in settings and not needed:
                raise UsageError(f"{setting}={settings[setting]!r} needs {example}: add it.")
        return found

    @property
    def skipped_step(self) -> str:
        return "first-block-cache"

    @property
    def more_blocks(self) -> int:
        return int(self.value("F") + self.value("B") - 1)

    def steps_of(self, steps: int) -> int:
        if "steps_mask" in self.settings:
            if steps < FEWEST_MASKED_STEPS and steps not in OTHER_MASKED_STEPS:
                raise UsageError(
                    f"{self.text!r} is not possible with {steps} steps: the package has masks for 4, 6, and 8 or more. "
                    "Take so many steps, or leave steps_mask out."
                )
        elif self.value("max_warmup_steps") >= steps:
            raise UsageError(
                f"{self.text!r} skips none of {steps} steps: the first {self.value('max_warmup_steps')} are always "
                "computed. Add a smaller max_warmup_steps, such as max_warmup_steps=2."
            )
        return steps

    def check(self, model: nn.Module) -> None:
        _package(self.text)
        if hasattr(model, "mid_block"):
            raise UsageError(
                f"{self.text!r} cannot be used with a {type(model).__name__}: Cache-DiT knows no UNet. Leave it out; "
                "for a UNet use deepcache."
            )

    def check_pipeline(self, pipe: Any) -> None:
        for blocks in self._lists_of_blocks(pipe):
            computed = self.value("F") + self.value("B")
            if computed >= len(blocks):
                raise UsageError(
                    f"{self.text!r} would do nothing: it computes {computed} blocks in every step, and this "
                    f"{type(pipe).__name__} has lists of {len(blocks)}. Write a smaller F and B, such as F=1;B=0."
                )

    def watched(self, pipe: Any) -> nn.Module:
        blocks = max(self._lists_of_blocks(pipe), key=len)
        skippable = list(blocks)[self.value("F") : len(blocks) - self.value("B")]
        return skippable[len(skippable) // 2]

    def fitted(self, pipe: Any, generate: Callable[[], object], steps: int) -> CacheDiT:
        """Count the calls of one generation: halves of guidance that are apart must not be taken for steps."""
        with counted_calls(pipe) as calls:
            generate()
        if len(calls) not in (steps, 2 * steps):
            raise UsageError(
                f"{self.text!r} cannot be used with this {type(pipe).__name__}: it calls its denoiser {len(calls)} "
                f"times in {steps} steps, and Cache-DiT expects one or two calls a step. Leave it out."
            )
        return replace(self, passes=len(calls) // steps)

    @contextmanager
    def applied(self, pipe: Any, steps: int) -> Iterator[None]:
        """Switch the cache on, and off again. The package changes the class of the pipeline, too."""
        if not self.passes:
            raise RuntimeError("Cache-DiT has to be fitted to the pipeline first: call `fitted`.")
        package = _package(self.text)
        with ExitStack() as stack:
            stack.enter_context(_quiet())
            stack.enter_context(_attributes_restored(type(pipe), pipe))
            for model in find_denoisers(pipe):
                stack.enter_context(_attributes_restored(*model.modules()))
                stack.enter_context(forwards_restored(model))
            adapter = _adapter_of(self.text, pipe)(pipe)
            package.enable_cache(adapter, self._cache_config(package, steps), self._calibrator_config(package))
            try:
                yield
            finally:
                package.disable_cache(pipe)

    def _cache_config(self, package: Any, steps: int) -> Any:
        given = {OF_THE_CACHE[name]: value for name, value in self.chosen if name in OF_THE_CACHE}
        if mask := self.settings.get("steps_mask"):
            given["steps_computation_mask"] = package.steps_mask(total_steps=steps, mask_policy=mask)
        return package.DBCacheConfig(num_inference_steps=steps, enable_separate_cfg=self.passes == 2, **given)

    def _calibrator_config(self, package: Any) -> Any:
        calibrator = self.settings.get("calibrator")
        if calibrator is None:
            return None
        order = {name: value for name, value in self.chosen if name == "taylorseer_order"}
        return getattr(package, CALIBRATORS[calibrator])(**order)

    def _lists_of_blocks(self, pipe: Any) -> list[nn.ModuleList]:
        """Those of the first denoiser; F and B count in each."""
        blocks = _adapter_of(self.text, pipe)(pipe, skip_post_init=True).blocks
        if len(find_denoisers(pipe)) > 1:
            blocks = blocks[0]
        return [blocks] if isinstance(blocks, nn.ModuleList) else list(blocks)


def _package(text: str) -> Any:
    try:
        import cache_dit
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{text!r} needs the package cache-dit. Install it: pip install 'toma-diffusion-lab[compare]'."
        ) from error
    return cache_dit


def _adapter_of(text: str, pipe: Any) -> Callable[..., Any]:
    """What the package has for pipelines whose name begins so. Subclasses of them may have any name."""
    known: Mapping[str, Callable[..., Any]] = _package(text).BlockAdapterRegister._adapters
    for kind in type(pipe).__mro__:
        for start in sorted(known, key=len, reverse=True):
            if kind.__name__.startswith(start):
                return known[start]
    raise UsageError(f"{text!r} cannot be used with a {type(pipe).__name__}: Cache-DiT does not know it. Leave it out.")


@contextmanager
def _attributes_restored(*owners: Any) -> Iterator[None]:
    """Give objects and classes the attributes that they had: the package leaves some behind."""
    before = [dict(vars(owner)) for owner in owners]
    try:
        yield
    finally:
        for owner, held in zip(owners, before, strict=True):
            _restore(owner, held)


def _restore(owner: Any, held: Mapping[str, Any]) -> None:
    added = [name for name in vars(owner) if name not in held]
    changed = {name: value for name, value in held.items() if vars(owner).get(name) is not value}
    if isinstance(owner, type):
        for name in added:
            delattr(owner, name)
        for name, value in changed.items():
            setattr(owner, name, value)
        return
    for name in added:
        del vars(owner)[name]
    vars(owner).update(changed)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the messages of the package, which tell what was asked for. Its loggers share their handlers."""
    handlers = logging.getLogger("CACHE_DIT").handlers
    levels = [handler.level for handler in handlers]
    for handler in handlers:
        handler.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for handler, level in zip(handlers, levels, strict=True):
            handler.setLevel(level)
