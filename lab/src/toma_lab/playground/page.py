"""The page itself: its controls, and what happens when they are used. It alone knows gradio."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from io import BytesIO
from typing import Any, NamedTuple

import gradio as gr
from PIL.Image import Image
from PIL.Image import open as open_image

from toma_diffusion import UsageError, presets
from toma_diffusion.tuned import Tuned
from toma_lab.inspection.merge_map import plot_merge_maps
from toma_lab.pipelines.generation import ImageRequest
from toma_lab.playground import html
from toma_lab.playground.choice import MOST_STEPS, NAMES, Choice, as_code, request_of, usual
from toma_lab.playground.comparison import Comparer, Comparison
from toma_lab.playground.models import Models
from toma_lab.playground.search import LIMIT, SPEED, Searches, StoppedError, Wish
from toma_lab.prompts import built_in_prompts
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


Values = dict[Any, Any]
"""What gradio calls a function with: the value of each control."""


class Controls(NamedTuple):
    """What a user chooses before a comparison."""

    model: Any
    prompt: Any
    seed: Any
    steps: Any
    guidance: Any
    method: Any
    ratio: Any
    computed: Any

    def chosen(self, values: Values) -> tuple[ImageRequest, Choice]:
        """The picture and the method. Raises `UsageError` if they are not possible."""
        request = request_of(*(values[each] for each in (self.prompt, self.seed, self.steps, self.guidance)))
        method, ratio, computed = (values[each] for each in (self.method, self.ratio, self.computed))
        return request, Choice.of(method, ratio, computed, request.steps)


def build_page(comparer: Comparer, searches: Searches) -> Any:
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
            controls = Controls(model, *_request_controls(models), *_choice_controls(models))
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
            merged = gr.Image(
                label="What merged into what: destinations, and lines from other tokens to them",
                visible=False,
                format="png",
                interactive=False,
                buttons=["download", "fullscreen"],
                elem_id="maps",
            )
            code = gr.Code(
                language="python", interactive=False, label="Settings as code", elem_id="code", wrap_lines=True
            )
            with gr.Accordion("What was done, in detail", open=False):
                summary = gr.HTML(f'<p class="empty">{BEFORE_THE_FIRST}</p>', elem_id="summary")

    outputs = [pictures, figures, merged, summary]
    inputs = {*controls, again, maps}
    compare = compare_with(comparer, controls, again, maps)
    run.click(compare, inputs, outputs, show_progress_on=[pictures], **ONE_AT_A_TIME)
    choice, sliders = [controls.method, controls.steps], [controls.ratio, controls.computed]
    controls.method.input(own_values, choice, sliders, **AT_ONCE)
    controls.steps.change(own_values, choice, sliders, **AT_ONCE)
    changes = [each.change for each in controls]
    gr.on([*changes, page.load], describe_with(models, controls), {*controls}, [about, code], **AT_ONCE)
    of_model = [controls.prompt, controls.steps, controls.guidance]
    model.change(lambda name: (built_in_prompts(name)[0], *models.usual(name)), model, of_model, **AT_ONCE)


def _request_controls(models: Models) -> list[Any]:
    """Prompt, seed, steps and guidance."""
    steps, guidance = models.usual(models.first)
    prompt = gr.Textbox(built_in_prompts(models.first)[0], label="Prompt", lines=2, elem_id="prompt")
    gr.Examples([[each] for each in built_in_prompts(models.first)[:EXAMPLES]], [prompt], label="Try")
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


def compare_with(comparer: Comparer, controls: Controls, again: Any, maps: Any) -> Callable[..., Any]:
    def compare(
        values: Values,
        progress: Any = gr.Progress(),  # noqa: B008 - how gradio hands it over
    ) -> list[Any]:
        def report(what: str, share: float) -> None:
            progress(share, desc=what)

        with messages():
            request, choice = controls.chosen(values)
            model = values[controls.model]
            found = comparer.compare(model, request, choice, report, again=values[again], maps=values[maps])
        picture = picture_of(found)
        return [
            (found.original.image, found.accelerated.image),
            html.result(found),
            gr.Image(picture, visible=picture is not None),
            html.preformatted(found.summary),
        ]

    return compare


def picture_of(comparison: Comparison) -> Image | None:
    """What merged into what over the steps. None if nothing did: small grids may be left whole."""
    merged = [each for each in comparison.maps if not each.kept.all()]
    if not merged:
        return None
    written = BytesIO()
    plot_merge_maps(comparison.accelerated.image, merged).savefig(written, format="png", dpi=130)
    return open_image(written).convert("RGB")


def own_values(method: str, steps: int | None) -> list[Any]:
    """The sliders for a method that was chosen, or for another number of steps."""
    if steps is None or not 1 <= steps <= MOST_STEPS:
        return [gr.skip()] * 2  # to be refused when something is generated
    ratio, computed = usual(method, steps)
    return [ratio, gr.Slider(maximum=max(2, steps), value=computed)]


def describe_with(models: Models, controls: Controls) -> Callable[..., Any]:
    def describe(values: Values) -> tuple[str, str]:
        """What the settings do, in words, and as code."""
        try:
            request, choice = controls.chosen(values)
            code = as_code(values[controls.model], str(models.device), models.dtype, request, choice)
            return escape(choice.in_words(request.steps)), code
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
    wish = [model, want, limit, speed, num_steps, scale, prompts, budget, methods]  # in the order of `Wish`
    search = _search_with(searches, wish, stops)
    run.click(search, {*wish}, [answer, files, code], show_progress_on=[answer], **ONE_AT_A_TIME)
    stop.click(_stop_with(stops), None, None, **WITH_A_MESSAGE)
    want.change(
        lambda now: [gr.Number(visible=now == each) for each in (LIMIT, SPEED)], want, [limit, speed], **AT_ONCE
    )
    model.change(models.usual, model, [num_steps, scale], **AT_ONCE)


def _search_with(searches: Searches, controls: list[Any], stops: dict[str, bool]) -> Callable[..., Any]:
    """While a search runs, `stops` holds its session, and whether its user has asked to stop it."""

    def search(
        values: Values,
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
                wish = Wish(*(values[each] for each in controls))
                folder, outcome = searches.run(wish, report)
        except StoppedError as stopped:
            gr.Info(str(stopped), title="Stopped")
            return [gr.skip()] * 3
        finally:
            del stops[session]
        return [
            html.answer(folder, outcome),
            gr.File([str(folder.tuned_path), str(folder.path / "tune.html")], visible=True),
            gr.Code(usage(Tuned.read(folder.tuned_path), wish.model), visible=True),
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
