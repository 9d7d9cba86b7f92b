"""The handle that `apply_toma` returns."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from toma_diffusion.engine.clock import StepCounter
from toma_diffusion.engine.compile import compile_denoiser, undo_compile
from toma_diffusion.engine.install import RootHook, find_root
from toma_diffusion.engine.summary import Summary, summarize
from toma_diffusion.errors import UsageError
from toma_diffusion.files import replacing
from toma_diffusion.merge.config import PRESETS
from toma_diffusion.merge.sites import Hook, remove_hooks
from toma_diffusion.skip.config import Skip
from toma_diffusion.skip.denoiser import Skipper
from toma_diffusion.skip.learned import Learned

if TYPE_CHECKING:
    from toma_diffusion.skip.learning import Distance, Progress
    from toma_diffusion.skip.store import Store


class ToMAHandle:
    """What makes a denoiser faster, or all of a pipeline: inspect it, switch it off and on, compile it, remove it.

    As a context manager it removes all of it at the end of the `with` block. All state is in the hooks of the models; a
    handle holds nothing but them.
    """

    def __init__(self, *models: nn.Module) -> None:
        self.models = models
        self._learned: Learned | None = None

    @property
    def model(self) -> nn.Module:
        """The denoiser; the first if there are several."""
        return self.models[0]

    @property
    def enabled(self) -> bool:
        """Whether it does anything. If False, the output is that of the original model, bit for bit."""
        return all(root.state.enabled for root in self._roots().values())

    @enabled.setter
    def enabled(self, value: bool) -> None:
        for root in self._roots().values():
            if value and not root.state.enabled:
                root.forget()
            root.state.enabled = bool(value)

    def begin(self, num_steps: int, scheduler: Any = None) -> None:
        """Set the number of steps of the generation that begins with the next call of the denoiser.

        Needed in a loop without a pipeline. Inside a diffusers pipeline, steps are read from its scheduler. Valid until
        `reset`.

        Args:
            num_steps: of the generation.
            scheduler: of diffusers, with its timesteps set. Skipped steps are placed and predicted by its noise levels;
                without it the last output is used as it was.
        """
        for root in self._roots().values():
            root.state.steps.begin(num_steps, scheduler)
            root.forget()

    def step(self, index: int, ordinal: int | None = None, parts: int | None = None) -> None:
        """Set the step, counted from 0, that the following calls of the denoiser belong to.

        Several calls in one step are passes over it, such as the two halves of classifier-free guidance, or the tiles
        of a large image.

        Args:
            index: of the step.
            ordinal: which pass over the step the next call is, if passes do not always come in the same order. Call
                this before every pass then. What is kept from step to step is kept for every ordinal.
            parts: of how many parts the batch consists that are the same pictures with other prompts, if that is known.
        """
        for steps in {id(root.state.steps): root.state.steps for root in self._roots().values()}.values():
            steps.set_step(index, ordinal, parts)

    def compile(self, mode: str = "graphs", **options: Any) -> str:
        """Compile the denoiser with its merging. The next generation compiles, which takes seconds to minutes.

        Args:
            mode: `graphs` compiles the whole denoiser and captures it as CUDA graphs, one for each kind of step. This
                is the fastest, and takes longest to compile. Where CUDA graphs are not possible (no GPU, offloading, a
                block cache), it warns and uses `blocks`. `whole` compiles the whole denoiser without CUDA graphs.
                `blocks` compiles block by block; blocks of one kind share their code, so this is quick.
            options: passed to `torch.compile`.

        Returns:
            The mode that is used.

        Call it once. A new image size is compiled when it first comes, the number of steps may change freely. `remove`
        undoes it. See docs/compile.md.
        """
        roots = self._roots()
        if mode == "graphs" and any(root.graphs_obstacle(model) for model, root in roots.items()):
            # All denoisers of a pipeline in one mode. The first that has an obstacle is asked first: it warns.
            roots = dict(sorted(roots.items(), key=lambda item: item[1].graphs_obstacle(item[0]) is None))
        taken = mode
        for model, root in roots.items():
            if root.outermost is not None:
                root.outermost.take_out()
            undo_compile(model)
            obstacle = root.graphs_obstacle(model) if taken == "graphs" else None
            blocks = root.compiled_blocks(model)
            taken = compile_denoiser(model, taken, blocks, obstacle, has_hooks=True, **options)
            root.is_compiled = True
            root.state.keeps_plans = taken == "graphs"
            if root.outermost is not None:
                root.outermost.put()
        return taken

    def reset(self) -> None:
        """Forget all choices, and what `begin` and `step` have set. The next call begins a new generation.

        Rarely needed with a pipeline. Buffers are kept.
        """
        for root in self._roots().values():
            root.state.steps.reset()
            root.forget()

    def learn(
        self,
        generations: Sequence[str | Callable[[], Any]],
        *,
        computed: int | float | Sequence[int | float] | None = None,
        minutes: float = 0.0,
        distance: Distance | None = None,
        folder: str | Path | Store | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        **call: Any,
    ) -> Learned:
        """Learn on this model which steps to compute and how to predict the others, and use it from now on.

        All generations are made whole, and weights are fitted to three quarters of them, at least two. The last ones
        check: what is not closer there than with nothing learned is refused.

        Args:
            generations: at least 3; 6 is a good number. Prompts, for which the pipeline that was passed to `apply_toma`
                is called with seeds 0, 1, …; or functions that generate, each the same whenever it is called:
                `lambda: pipe(prompt, generator=torch.Generator("cpu").manual_seed(7))`.
            computed: numbers of computed steps, or shares of the steps. Default: those of the presets and its own.
            minutes: how long to go on after that: other weights, corrections and other steps are tried on whole
                generations, and what is closer to the originals is kept.
            distance: how far what two calls returned is apart, for example LPIPS. It gets two lists of tensors:
                pictures as [height, width, 3] of bytes. Default: the root of the mean square of the difference.
            folder: keeps generations and the best that was found, so that the same call goes on where it was killed;
                the minutes begin anew. Delete it afterwards. Or an object with methods `read` and `write`.
            on_progress: is told where it is. Default: a progress bar.
            call: further arguments of the pipeline, if prompts were passed: `num_inference_steps=20`.

        Returns:
            What was learned, for `apply_toma(pipe, learned=…)`; `save` writes it to a file.

        Raises:
            UsageError: Nothing that was learned is closer. Then everything stays as it was.
        """
        from toma_diffusion.skip.learning import Learning
        from toma_diffusion.skip.store import FolderStore, NoStore

        skippers = self._skippers()
        calls = self._calls(generations, call)
        wanted = self._wanted(computed)
        if not (isinstance(minutes, (int, float)) and 0 <= minutes < math.inf):
            raise UsageError(f"minutes={minutes!r} is not allowed: it must be 0 or more, and finite.")
        settings = {
            "generations": [each if isinstance(each, str) else "a function" for each in generations],
            "computed": [str(each.computed) for each in wanted],
            "call": {name: str(value) for name, value in call.items()},
            "model": type(self.model).__name__,
            "scheduler": str(getattr(self._steps.pipeline, "scheduler", "")),
        }
        store: Store = NoStore()
        if folder is not None:
            store = FolderStore(Path(folder), settings) if isinstance(folder, (str, Path)) else folder
        with progress_bar() if on_progress is None else nullcontext(on_progress) as show:
            learned, refused = Learning(skippers, calls, wanted, minutes * 60, distance, store, show).run()
        worse = ", ".join(
            f"{each.count} computed steps (distance {each.distance:.4g}, without {each.distance_before:.4g})"
            for each in refused
        )
        if not learned.steps:
            raise UsageError(
                f"what was learned is not closer on the last generation, which it was checked on: {worse}. Nothing was "
                "changed. Learn from more generations, or longer."
            )
        if refused:
            warnings.warn(f"left as it was, because learning made it no closer: {worse}.", stacklevel=2)
        only = wanted[0].count(learned.num_steps) if len(wanted) == 1 else None
        self._use(learned, only, [each.count for each in refused])
        return learned

    def learn_from_next(self, count: int = 6, computed: int | float | Sequence[int | float] | None = None) -> None:
        """Let the next generations run whole and learn from them while they are used: weights, but no other steps.

        From the generation after them on steps are skipped again, as they were learned. What is not closer on the last
        of them is left as it was. `summary()` says what came of it.

        Args:
            count: how many generations, all of one kind.
            computed: as in `learn`.
        """
        from toma_diffusion.skip.learning import FEWEST, NextGenerations

        if isinstance(count, bool) or not isinstance(count, int) or count < FEWEST:
            raise UsageError(f"count={count!r} is not allowed: it must be a whole number of {FEWEST} or more.")
        skippers = self._skippers()

        reference, wanted = weakref.ref(self), self._wanted(computed)

        def when_done(learned: Learned | None, why: str) -> None:
            handle = reference()
            if handle is None:
                return
            notes = [f"nothing was learned: {why}"] if learned is None else []
            if learned is not None:
                handle._use(learned, wanted[0].count(learned.num_steps) if len(wanted) == 1 else None)
                text = f"learned from {count} generations: {', '.join(map(str, learned.counts))} computed steps"
                notes.append(f"{text}; {why}" if why else text)
            for root in handle._roots().values():
                root.state.notes.update(notes)

        recorder = NextGenerations(skippers, count, wanted, when_done)
        for skipper in skippers:
            skipper.recorder = recorder

    def save(self, path: str | Path) -> None:
        """Write what was learned to a file: `apply_toma(pipe, "fast", learned="learned.json")` reads it."""
        learned = self._learned or self._skippers()[0].skip.learned
        if learned is None:
            raise UsageError(f"nothing was learned that {str(path)!r} could hold: call handle.learn first.")
        with replacing(Path(path)) as file:
            file.write(learned.to_json())

    def remove(self) -> None:
        """Remove all hooks, and undo `compile`. The model is what it was before, bit for bit."""
        for model, root in self._roots().items():
            if root.outermost is not None:
                root.outermost.take_out()
            if root.is_compiled:
                undo_compile(model)
            for placement in root.placements:
                placement.take_out()
            remove_hooks(model, lambda hook: isinstance(hook, Hook))

    def summary(self) -> Summary:
        """What is merged, on which grids, how much it saves, and what is not merged and why. Print it.

        If there are several denoisers, it is that of the first, and has the summaries of the others in `others`.
        """
        first, *others = (summarize(root.state, root.records, root.outermost) for root in self._roots().values())
        return replace(first, others=tuple(others))

    def __enter__(self) -> ToMAHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if any(find_root(model) is not None for model in self.models):
            self.remove()

    def __repr__(self) -> str:
        root = next((root for model in self.models if (root := find_root(model)) is not None), None)
        what = "removed" if root is None else f"ratio={root.state.config.ratio:g}, enabled={root.state.enabled}"
        return f"ToMAHandle({', '.join(type(model).__name__ for model in self.models)}, {what})"

    def _skippers(self) -> list[Skipper]:
        """Of the denoisers. Raises `UsageError` if no steps are skipped."""
        found = [root.outermost for root in self._roots().values()]
        skippers = [each for each in found if isinstance(each, Skipper)]
        if not skippers:
            raise UsageError(
                "no steps are skipped, so there is nothing to learn: call apply_toma with a preset that does."
            )
        return skippers

    def _calls(self, generations: Sequence[Any], call: Mapping[str, Any]) -> list[Callable[[], Any]]:
        """A function for every generation."""
        if isinstance(generations, str) or not generations:
            raise UsageError(f"generations={generations!r} is not allowed: pass a list of prompts, or of functions.")
        if all(callable(each) for each in generations):
            if call:
                raise UsageError(f"{', '.join(call)} cannot be passed on to functions: put it into them.")
            return list(generations)
        if not all(isinstance(each, str) for each in generations):
            raise UsageError("generations must all be prompts, or all be functions.")
        pipeline = self._steps.pipeline
        if pipeline is None:
            raise UsageError("prompts need a pipeline, and apply_toma got a model: pass functions that generate.")

        def generate(prompt: str, seed: int) -> Any:
            return pipeline(prompt, generator=torch.Generator("cpu").manual_seed(seed), **call)

        return [partial(generate, prompt, seed) for seed, prompt in enumerate(generations)]

    def _wanted(self, computed: int | float | Sequence[int | float] | None) -> list[Skip]:
        if computed is not None:
            given: list[int | float] = list(computed) if isinstance(computed, Sequence) else [computed]
            if not given:
                raise UsageError("computed=[] is empty: give numbers of computed steps, or leave it out.")
            return [Skip(computed=each) for each in given]
        presets = [preset.skip for preset in PRESETS.values() if preset.skip is not None]
        return [*presets, replace(self._skippers()[0].skip, learned=None)]

    def _use(self, learned: Learned, count: int | None = None, refused: Collection[int] = ()) -> None:
        """Skip as it was learned for so many computed steps, or for as many as before."""
        self._learned = learned
        for root, skipper in zip(self._roots().values(), self._skippers(), strict=True):
            own = replace(skipper.skip, learned=None).count(learned.num_steps) if count is None else count
            if own in refused:
                continue
            if own not in learned.counts:
                numbers = " or ".join(map(str, learned.counts))
                warnings.warn(
                    f"{own} of {learned.num_steps} steps are computed, and what was learned is for {numbers}, so it is "
                    f"not used yet: save it, and call apply_toma with computed={learned.counts[0]} and learned.",
                    stacklevel=3,
                )
                continue
            skipper.skip = replace(skipper.skip, computed=own, fewest=1, learned=learned)
            root.state.config = replace(root.state.config, skip=skipper.skip)

    @property
    def _steps(self) -> StepCounter:
        return next(iter(self._roots().values())).state.steps

    def _roots(self) -> dict[nn.Module, RootHook]:
        """Of the denoisers from which it was not removed."""
        roots = {model: root for model in self.models if (root := find_root(model)) is not None}
        if not roots:
            raise RuntimeError("this handle was removed from its model: call apply_toma again for a new one.")
        return roots


@contextmanager
def progress_bar() -> Iterator[Callable[[Progress], None]]:
    """Shows how learning goes on."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(20), TimeElapsedColumn())
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("learning", total=None)

        def show(progress: Any) -> None:
            total = max(progress.planned, progress.generations + 1)
            bar.update(task, description=progress.text, completed=progress.generations, total=total)

        yield show
