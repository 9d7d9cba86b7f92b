"""The handle that `speed_up` and `apply_toma` return."""

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

from toma_diffusion.checks import check_integer, check_one_of
from toma_diffusion.engine.clock import StepCounter
from toma_diffusion.engine.compile import MODES, compile_denoiser
from toma_diffusion.engine.install import RootHook, find_denoisers, find_root, uninstall
from toma_diffusion.errors import UsageError
from toma_diffusion.files import replacing
from toma_diffusion.presets import PRESETS, Chosen
from toma_diffusion.skip.config import AfterLearning, Always, BySteps, Skip
from toma_diffusion.skip.denoiser import Skipper
from toma_diffusion.skip.learned import Learned
from toma_diffusion.summary import Summary, summary_of

if TYPE_CHECKING:
    from toma_diffusion.skip.learning import Distance, Progress
    from toma_diffusion.skip.store import Store


Computed = int | float | Sequence[int | float] | None
"""Numbers of computed steps, or shares of all steps; None: those of the presets, and one's own."""


class Handle:
    """What makes a denoiser faster, or all of a pipeline: inspect it, switch it off and on, compile it, remove it.

    As a context manager it removes all of it at the end of the `with` block. All state is in the hooks of the models; a
    handle holds nothing but them.
    """

    def __init__(self, *models: nn.Module) -> None:
        self.models = models

    @classmethod
    def of(cls, pipe: Any) -> Handle:
        """The handle of a pipeline or model that was sped up."""
        several = pipe if isinstance(pipe, (list, tuple)) else [pipe]
        if not several:
            raise UsageError(f"pipe={pipe!r} is empty: pass a pipeline, a model, or a list of them.")
        models = [model for each in several for model in find_denoisers(each) if find_root(model) is not None]
        if not models:
            raise UsageError(f"this {type(several[0]).__name__} was not sped up: there is no handle of it.")
        return cls(*models)

    @property
    def model(self) -> nn.Module:
        """The denoiser; the first if there are several."""
        return self.models[0]

    @property
    def enabled(self) -> bool:
        """Whether it does anything. If False, the output is that of the original model, bit for bit."""
        return all(root.session.enabled for root in self._roots().values())

    @enabled.setter
    def enabled(self, value: bool) -> None:
        for root in self._roots().values():
            if value and not root.session.enabled:
                root.forget()
            root.session.enabled = bool(value)

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
            root.session.steps.begin(num_steps, scheduler)
            root.forget()

    def step(self, index: int, pass_index: int | None = None, parts: int | None = None) -> None:
        """Set the step, counted from 0, that the following calls of the denoiser belong to.

        Several calls in one step are passes over it, such as the two halves of classifier-free guidance, or the tiles
        of a large image.

        Args:
            index: of the step.
            pass_index: which pass over the step the next call is, if passes do not always come in the same order. Call
                this before every pass then. What is kept from step to step is kept for every pass_index.
            parts: of how many parts the batch consists that are the same pictures with other prompts, if that is known.
        """
        for steps in {id(root.session.steps): root.session.steps for root in self._roots().values()}.values():
            steps.set_step(index, pass_index, parts)

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
        check_one_of("mode", mode, MODES)
        roots = self._roots()
        if mode == "graphs" and any(root.graphs_obstacle(model) for model, root in roots.items()):
            # All denoisers of a pipeline in one mode. The first that has an obstacle is asked first: it warns.
            roots = dict(sorted(roots.items(), key=lambda item: item[1].graphs_obstacle(item[0]) is None))
        taken = mode
        for model, root in roots.items():
            if root.outermost is not None:
                root.outermost.take_out()
            if root.compiled is not None:
                root.compiled.undo(model)
                root.compiled = None
            obstacle = root.graphs_obstacle(model) if taken == "graphs" else None
            blocks = root.compiled_blocks(model)
            try:
                root.compiled = compile_denoiser(model, taken, blocks, obstacle, has_hooks=True, **options)
            finally:
                if root.outermost is not None:
                    root.outermost.put()
            taken = root.compiled.mode
            if root.inside is not None:
                root.inside.keeps_plans = taken == "graphs"
        return taken

    def reset(self) -> None:
        """Forget all choices, and what `begin` and `step` have set. The next call begins a new generation.

        Rarely needed with a pipeline. Buffers are kept.
        """
        for root in self._roots().values():
            root.session.steps.reset()
            root.forget()

    def learn(
        self,
        generations: Sequence[str | Callable[[], Any]],
        *,
        computed: Computed = None,
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
            generations: at least 3; 6 is a good number. Prompts, for which the pipeline that was passed to `speed_up`
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
            What was learned, for `speed_up(pipe, learned=…)`; `save` writes it to a file.

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
            "computed": [name for name, _ in wanted],
            "call": {name: str(value) for name, value in call.items()},
            "model": type(self.model).__name__,
            "scheduler": str(getattr(self._steps.pipeline, "scheduler", "")),
        }
        store: Store = NoStore()
        if folder is not None:
            store = FolderStore(Path(folder), settings) if isinstance(folder, (str, Path)) else folder
        with progress_bar() if on_progress is None else nullcontext(on_progress) as show:
            by_steps = [each for _, each in wanted]
            learned, refused = Learning(skippers, calls, by_steps, minutes * 60, distance, store, show).run()
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
        self._use(learned, computed, [each.count for each in refused])
        return learned

    def learn_from_next(self, count: int = 6, computed: Computed = None) -> None:
        """Let the next generations run whole and learn from them while they are used: weights, but no other steps.

        From the generation after them on steps are skipped again, as they were learned. What is not closer on the last
        of them is left as it was. `summary()` says what came of it.

        Args:
            count: how many generations, all of one kind.
            computed: as in `learn`.
        """
        from toma_diffusion.skip.learning import FEWEST
        from toma_diffusion.skip.next_generations import NextGenerations

        count = check_integer("count", count, minimum=FEWEST)
        skippers = self._skippers()
        wanted = [each for _, each in self._wanted(computed)]
        references = [weakref.ref(model) for model in self.models]

        def when_done(learned: Learned | None, why: str) -> None:
            models = [model for each in references if (model := each()) is not None and find_root(model) is not None]
            if not models:
                return
            handle = Handle(*models)
            notes = [f"nothing was learned: {why}"] if learned is None else []
            if learned is not None:
                handle._use(learned, computed)
                text = f"learned from {count} generations: {', '.join(map(str, learned.counts))} computed steps"
                notes.append(f"{text}; {why}" if why else text)
            for root in handle._roots().values():
                root.session.notes.update(notes)

        recorder = NextGenerations(skippers, count, wanted, when_done)
        for skipper in skippers:
            skipper.recorder = recorder

    def save(self, path: str | Path) -> None:
        """Write what was learned to a file: `speed_up(pipe, "fast", learned="learned.json")` reads it."""
        learned = self._skippers()[0].learned
        if learned is None:
            raise UsageError(f"nothing was learned that {str(path)!r} could hold: call handle.learn first.")
        with replacing(Path(path)) as file:
            file.write(learned.to_json())

    def remove(self) -> None:
        """Remove all hooks, and undo `compile`. The model is what it was before, bit for bit."""
        for model, root in self._roots().items():
            uninstall(model, root)

    def summary(self) -> Summary:
        """What is done, in plain words, and what is not done and why. Print it.

        If there are several denoisers, it is that of the first, and has the summaries of the others in `others`.
        """
        first, *others = (summary_of(root) for root in self._roots().values())
        return replace(first, others=tuple(others))

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if any(find_root(model) is not None for model in self.models):
            self.remove()

    def __repr__(self) -> str:
        root = next((root for model in self.models if (root := find_root(model)) is not None), None)
        what = "removed" if root is None else f"enabled={root.session.enabled}"
        return f"Handle({', '.join(type(model).__name__ for model in self.models)}, {what})"

    def _skippers(self) -> list[Skipper]:
        found = [root.outermost for root in self._roots().values()]
        skippers = [each for each in found if isinstance(each, Skipper)]
        if not skippers:
            raise UsageError(
                "no steps are skipped, so there is nothing to learn: call speed_up with a preset that skips, or with "
                "skip=Skip(…)."
            )
        if len({id(skipper.session.steps) for skipper in skippers}) > 1:
            raise UsageError("this is the handle of several models: learn on each of them, Handle.of(pipe).learn(…).")
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
            raise UsageError("prompts need a pipeline, and none is known here: pass functions that generate.")

        def generate(prompt: str, seed: int) -> Any:
            return pipeline(prompt, generator=torch.Generator("cpu").manual_seed(seed), **call)

        return [partial(generate, prompt, seed) for seed, prompt in enumerate(generations)]

    def _wanted(self, computed: Computed) -> list[tuple[str, BySteps]]:
        """The numbers of computed steps to learn, each with a text that says which it is."""
        if computed is not None:
            given: list[int | float] = list(computed) if isinstance(computed, Sequence) else [computed]
            if not given:
                raise UsageError("computed=[] is empty: give numbers of computed steps, or leave it out.")
            return [(str(each), Always(Skip(computed=each))) for each in given]
        presets: list[tuple[str, BySteps]] = [(name, Chosen(preset).skips_in) for name, preset in PRESETS.items()]
        return [*presets, ("its own", self._skippers()[0].by_steps)]

    def _use(self, learned: Learned, computed: Computed, refused: Collection[int] = ()) -> None:
        """Skip as it was learned: for the one number of computed steps that was asked for, or for as many as before."""
        num_steps = learned.num_steps
        given = list(computed) if isinstance(computed, Sequence) else [] if computed is None else [computed]
        for skipper in self._skippers():
            skipper.learned = learned
            skip = Skip(computed=given[0]) if len(given) == 1 else skipper.by_steps(num_steps)
            own = num_steps if skip is None else replace(skip, learned=None).count(num_steps)
            if own in refused:
                continue
            if own not in learned.counts:
                numbers = " or ".join(map(str, learned.counts))
                warnings.warn(
                    f"{own} of {num_steps} steps are computed, and what was learned is for {numbers}, so it is not "
                    f"used yet: save it, and call speed_up with skip=Skip(computed={learned.counts[0]}) and learned.",
                    stacklevel=3,
                )
                continue
            skipper.by_steps = AfterLearning(Skip(computed=own, learned=learned), skipper.by_steps)

    @property
    def _steps(self) -> StepCounter:
        return next(iter(self._roots().values())).session.steps

    def _roots(self) -> dict[nn.Module, RootHook]:
        roots = {model: root for model in self.models if (root := find_root(model)) is not None}
        if not roots:
            raise RuntimeError("this handle was removed from its model: call speed_up again for a new one.")
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
