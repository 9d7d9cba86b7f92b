"""The handle that `apply_toma` returns."""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType
from typing import Any

from torch import nn

from toma_diffusion.hooks.compiler import compile_denoiser, undo_compile
from toma_diffusion.hooks.root import RootHook, find_root
from toma_diffusion.hooks.sites import Hook, remove_hooks
from toma_diffusion.hooks.summary import Summary, summarize


class ToMAHandle:
    """What makes a denoiser faster, or all of a pipeline: inspect it, switch it off and on, compile it, remove it.

    As a context manager it removes all of it at the end of the `with` block. All state is in the hooks of the models; a
    handle holds nothing but them.
    """

    def __init__(self, *models: nn.Module) -> None:
        self.models = models

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

    def _roots(self) -> dict[nn.Module, RootHook]:
        """Of the denoisers from which it was not removed."""
        roots = {model: root for model in self.models if (root := find_root(model)) is not None}
        if not roots:
            raise RuntimeError("this handle was removed from its model: call apply_toma again for a new one.")
        return roots
