"""The page itself: its controls, and what happens when they are used. It alone knows gradio."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

import gradio as gr

from toma_diffusion import UsageError, presets
from toma_diffusion.tuned import Tuned
from toma_lab.inspection.figures import choose_evenly
from toma_lab.inspection.merge_map import MergeMap, draw_merge_map
from toma_lab.playground import html
from toma_lab.playground.choice import MOST_STEPS, NAMES, Choice, as_code, request_of, usual
from toma_lab.playground.comparison import Comparer, Comparison
from toma_lab.playground.models import Models
from toma_lab.playground.search import LIMIT, SPEED, Searches, StoppedError, Wish
from toma_lab.report.tune_page import usage
from toma_lab.tune.goal import DEFAULT_TIER, TIERS, like_lpips
from toma_lab.tune.plan import BUDGETS

ONE_AT_A_TIME: dict[str, Any] = {
    "concurrency_limit": 1,
    "concurrency_id": "model",
    "api_visibility": "private",
    "scroll_to_output": True,
}
"""All that runs a model waits in one queue: two at once would disturb each other's times, and share one pipeline."""
AT_ONCE: dict[str, Any] = {"queue": False, "api_visibility": "private", "show_progress": "hidden"}
WITH_A_MESSAGE: dict[str, Any] = {"concurrency_limit": None, "api_visibility": "private", "show_progress": "hidden"}
"""Messages come through the queue alone. These do not wait in it."""
MOST_MAPS = 6
"""Of every kind of block, evenly over the steps."""
MESSAGE_SECONDS = 30
EXAMPLES = 4
INTRODUCTION = (
    "<h1>toma playground</h1><p>The same picture from the model as it is and from a faster one, on this machine. "
    "Nothing leaves it.</p>"
)
ABOUT_SEARCHES = (
    "A search measures many settings on this machine, as toma tune does, and shows here how far it is. One that was "
    "stopped goes on where it was."
)
BEFORE_THE_FIRST = "Choose a method, then press “Generate and compare”."


def build_page(comparer: Comparer, searches: Searches) -> Any:
    """The page as a `gradio.Blocks`."""
    models = comparer.models
    with gr.Blocks(title="toma playground", analytics_enabled=False, delete_cache=(3600, 24 * 3600)) as page:
        with gr.Row(elem_classes="head"):
            gr.HTML(INTRODUCTION, elem_classes="intro")
            model = gr.Dropdown(
                models.names, value=models.first, label="Model", visible=len(models.names) > 1, elem_id="model"
            )
        with gr.Tab("Compare"):
            _compare_tab(comparer, model, page)
        with gr.Tab("Tune"):
            _tune_tab(searches, model)
    return page


def _compare_tab(comparer: Comparer, model: Any, page: Any) -> None:
    models = comparer.models
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            prompt, *numbers = _request_controls(models)
            method, ratio, computed = _choice_controls(models)
            run = gr.Button("Generate and compare", variant="primary", elem_id="compare")
            again = gr.Checkbox(False, label="Generate the original again, to time both now", elem_id="again")
            maps = gr.Checkbox(True, label="Show what merges into what (takes one more run, which is not timed)")
            about = gr.HTML(elem_classes="about")
        with gr.Column(scale=3, min_width=300):
            pictures = gr.ImageSlider(
                label="Original and accelerated",
                show_label=False,
                format="png",
                interactive=False,
                buttons=["download", "fullscreen"],
                elem_id="pictures",
            )
            gr.HTML('<div class="sides"><span>◀ original</span><span>accelerated ▶</span></div>')
            figures = gr.HTML(f'<p class="empty">{BEFORE_THE_FIRST}</p>', elem_id="figures")
            gallery = gr.Gallery(
                label="What merged into what",
                visible=False,
                preview=True,
                height=400,
                object_fit="contain",
                buttons=["download", "fullscreen"],
                elem_id="maps",
            )
            code = gr.Code(
                language="python", interactive=False, label="Settings as code", elem_id="code", wrap_lines=True
            )
            with gr.Accordion("What was done, in detail", open=False):
                summary = gr.HTML(f'<p class="empty">{BEFORE_THE_FIRST}</p>', elem_id="summary")

    inputs = [model, prompt, *numbers, method, ratio, computed]
    outputs = [pictures, figures, gallery, summary]
    run.click(compare_with(comparer), [*inputs, again, maps], outputs, show_progress_on=[pictures], **ONE_AT_A_TIME)
    steps = numbers[1]
    method.input(own_values, [method, steps], [ratio, computed], **AT_ONCE)
    steps.change(own_values, [method, steps], [ratio, computed], **AT_ONCE)
    changes = [each.change for each in inputs]
    gr.on([*changes, page.load], describe_with(models), inputs, [about, code], **AT_ONCE)
    model.change(lambda name: (models.prompts(name)[0], *models.usual(name)), model, [prompt, *numbers[1:]], **AT_ONCE)


def _request_controls(models: Models) -> list[Any]:
    """Prompt, seed, steps and guidance."""
    steps, guidance = models.usual(models.first)
    prompt = gr.Textbox(models.prompts(models.first)[0], label="Prompt", lines=2, elem_id="prompt")
    gr.Examples([[each] for each in models.prompts(models.first)[:EXAMPLES]], [prompt], label="Try")
    with gr.Row():
        seed = gr.Number(0, label="Seed", precision=0, min_width=80, elem_id="seed")
        num_steps = gr.Number(steps, label="Steps", precision=0, min_width=80, elem_id="steps")
        scale = gr.Number(guidance, label="Guidance", min_width=80, placeholder="as usual", elem_id="guidance")
    return [prompt, seed, num_steps, scale]


def _choice_controls(models: Models) -> list[Any]:
    """Method, ratio and number of computed steps."""
    steps = models.usual(models.first)[0]
    own_ratio, own_computed = usual(presets.DEFAULT, steps)
    method = gr.Dropdown(list(NAMES), value=presets.DEFAULT, label="Preset or method", elem_id="method")
    ratio = gr.Slider(0, 0.95, own_ratio, step=0.05, label="Ratio of tokens removed", elem_id="ratio")
    computed = gr.Slider(
        1,
        max(2, steps),
        own_computed,
        step=1,
        label="Computed steps",
        info="The others are skipped: the model does not run in them, and its output is predicted.",
        elem_id="computed",
    )
    return [method, ratio, computed]


def compare_with(comparer: Comparer) -> Callable[..., Any]:
    def compare(
        model: str,
        prompt: str,
        seed: int | None,
        steps: int | None,
        guidance: float | None,
        method: str,
        ratio: float | None,
        computed: float | None,
        again: bool,
        maps: bool,
        progress: Any = gr.Progress(),  # noqa: B008 - how gradio hands it over
    ) -> list[Any]:
        with messages():
            request = request_of(prompt, seed, steps, guidance)
            choice = Choice.of(method, ratio, computed, request.steps)
            found = comparer.compare(
                model, request, choice, lambda what, share: progress(share, desc=what), again=again, maps=maps
            )
        frames = frames_of(found)
        return [
            (found.original.image, found.accelerated.image),
            html.result(found),
            gr.Gallery(frames, visible=bool(frames), selected_index=0 if frames else None),
            html.preformatted(found.summary),
        ]

    return compare


def frames_of(comparison: Comparison) -> list[tuple[Any, str]]:
    """What merged into what over the steps: pictures with their titles."""
    merged = [each for each in comparison.maps if not each.kept.all()]  # small grids may be left whole
    chosen: list[MergeMap] = []
    for kind in dict.fromkeys(each.kind for each in merged):
        chosen += choose_evenly([each for each in merged if each.kind == kind], MOST_MAPS)
    return [(draw_merge_map(comparison.accelerated.image, each), _title(each)) for each in chosen]


def _title(found: MergeMap) -> str:
    before, after = found.grid.num_tokens, int(found.kept.sum())
    return f"{found.kind}, from step {found.step + 1}: {before} → {after} tokens"


def own_values(method: str, steps: int | None) -> list[Any]:
    """The sliders for a method that was chosen, or for another number of steps."""
    if steps is None or not 1 <= steps <= MOST_STEPS:
        return [gr.skip()] * 2  # to be refused when something is generated
    ratio, computed = usual(method, steps)
    return [ratio, gr.Slider(maximum=max(2, steps), value=computed)]


def describe_with(models: Models) -> Callable[..., Any]:
    def describe(
        model: str,
        prompt: str,
        seed: int | None,
        steps: int | None,
        guidance: float | None,
        method: str,
        ratio: float | None,
        computed: float | None,
    ) -> tuple[str, str]:
        """What the settings do, in words, and as code."""
        try:
            request = request_of(prompt, seed, steps, guidance)
            choice = Choice.of(method, ratio, computed, request.steps)
            words = choice.in_words(request.steps)
            return escape(words), as_code(model, str(models.device), models.dtype, request, choice)
        except UsageError as error:
            return escape(str(error)), f"# {error}"

    return describe


def _tune_tab(searches: Searches, model: Any) -> None:
    models = searches.models
    steps, guidance = models.usual(models.first)
    tier = TIERS[DEFAULT_TIER]
    limit_label = "Largest LPIPS" if searches.measures_lpips else "Lowest PSNR, dB"
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            want = gr.Radio([LIMIT, SPEED], value=LIMIT, label="Find", elem_id="want")
            limit = gr.Number(tier if searches.measures_lpips else round(like_lpips(tier), 1), label=limit_label)
            speed = gr.Number(1.5, label="Times as fast", visible=False)
            with gr.Row():
                num_steps = gr.Number(steps, label="Steps", precision=0, min_width=80, elem_id="tune-steps")
                scale = gr.Number(guidance, label="Guidance", min_width=80, placeholder="the model's")
                prompts = gr.Number(4, label="Prompts", precision=0, min_width=80)
            budget = gr.Dropdown(list(BUDGETS), value="small", label="Budget")
            with gr.Accordion("Own candidates", open=False):
                methods = gr.Textbox(
                    label="Separated by commas",
                    placeholder="toma-stage@0.5, fast:computed=50%, steps:70%",
                    info="Empty: those of the budget, which take many minutes on a CPU.",
                    elem_id="methods",
                )
            with gr.Row():
                run = gr.Button("Search", variant="primary", min_width=80, scale=3, elem_id="tune")
                stop = gr.Button("Stop", min_width=80, elem_id="stop")
        with gr.Column(scale=3, min_width=300):
            gr.HTML(f'<p class="empty">{ABOUT_SEARCHES}</p>')
            answer = gr.HTML(min_height=120, elem_id="answer")
            files = gr.File(label="tuned.json, and the whole search as a page", visible=False, elem_id="files")
            code = gr.Code(language="python", interactive=False, label="Use it", visible=False, wrap_lines=True)

    stops: dict[str, bool] = {}
    inputs = [model, want, limit, speed, num_steps, scale, prompts, budget, methods]
    run.click(_search_with(searches, stops), inputs, [answer, files, code], show_progress_on=[answer], **ONE_AT_A_TIME)
    stop.click(_stop_with(stops), None, None, **WITH_A_MESSAGE)
    want.change(
        lambda now: [gr.Number(visible=now == each) for each in (LIMIT, SPEED)], want, [limit, speed], **AT_ONCE
    )
    model.change(models.usual, model, [num_steps, scale], **AT_ONCE)


def _search_with(searches: Searches, stops: dict[str, bool]) -> Callable[..., Any]:
    """While a search runs, `stops` holds its session, and whether its user has asked to stop it."""

    def search(
        model: str,
        want: str,
        limit: float | None,
        speed_up: float | None,
        steps: int | None,
        guidance: float | None,
        prompts: int | None,
        budget: str,
        methods: str,
        request: gr.Request,
        progress: Any = gr.Progress(),  # noqa: B008
    ) -> list[Any]:
        session = str(request.session_hash)
        stops[session] = False

        def report(what: str, share: float) -> None:
            if stops[session]:
                raise StoppedError("The search was stopped. The same search goes on where it was.")
            progress(share, desc=what)

        try:
            with messages():
                wish = Wish(model, want, limit, speed_up, steps, guidance, prompts, budget, methods or "")
                folder, outcome = searches.run(wish, report)
        except StoppedError as stopped:
            gr.Info(str(stopped), title="Stopped")
            return [gr.skip()] * 3
        finally:
            del stops[session]
        return [
            html.answer(folder, outcome),
            gr.File([str(folder.tuned_path), str(folder.path / "tune.html")], visible=True),
            gr.Code(usage(Tuned.read(folder.tuned_path), model), visible=True),
        ]

    return search


def _stop_with(stops: dict[str, bool]) -> Callable[..., None]:
    def stop(request: gr.Request) -> None:
        session = str(request.session_hash)
        if session not in stops:
            gr.Info("No search of yours is running.")
            return
        stops[session] = True
        gr.Info("The search stops after the pictures that it is measuring.")

    return stop


@contextmanager
def messages() -> Iterator[None]:
    """Show a user's mistake on the page. Messages are HTML there."""
    try:
        yield
    except UsageError as error:
        raise gr.Error(escape(str(error)), duration=MESSAGE_SECONDS, print_exception=False) from error
