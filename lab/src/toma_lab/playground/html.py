"""What the page shows of a comparison or a search, as HTML. Prompts and errors may hold any sign: all are escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from itertools import groupby

from toma_lab.playground.choice import COMPUTED, MERGED, SKIPPED
from toma_lab.playground.comparison import Comparison
from toma_lab.report.tune_plots import front_plot, kinds_shown
from toma_lab.tune.folder import ORIGINAL, TuneFolder
from toma_lab.tune.outcome import Outcome

LABELS = {
    "psnr": ("PSNR", "{:.1f} dB", "higher is closer"),
    "ssim": ("SSIM", "{:.3f}", "1 is equal"),
    "lpips": ("LPIPS", "{:.3f}", "0 is equal"),
}
EARLIER = "The machine may have been busier or quieter then: to be sure, generate the original again."
MEANINGS = {
    COMPUTED: "computed as usual",
    MERGED: "computed on merged tokens",
    SKIPPED: "skipped, the output predicted",
}


def result(comparison: Comparison) -> str:
    """Times, figures and steps."""
    return _cards(comparison) + _times(comparison) + steps_strip(comparison.steps) + _notes(comparison.notes)


def _cards(comparison: Comparison) -> str:
    kind = "faster" if comparison.speed_up > 1 else "slower"
    against = "original / accelerated" if comparison.is_original_new else "against an earlier time"
    cards = [_card("speed-up", f"{comparison.speed_up:.2f}×", against, kind)]
    for name, value in comparison.scores.items():
        title, form, hint = LABELS[name]
        cards.append(_card(title, form.format(value), hint))
    return f'<div class="cards">{"".join(cards)}</div>'


def _card(title: str, value: str, hint: str, kind: str = "") -> str:
    return f'<div class="card {kind}"><span>{title}</span><strong>{escape(value)}</strong><small>{hint}</small></div>'


def _times(comparison: Comparison) -> str:
    original, accelerated = comparison.original, comparison.accelerated
    longest = max(original.seconds, accelerated.seconds)
    when = "" if comparison.is_original_new else f"measured at {original.at}, not generated again. {EARLIER}"
    rows = [("original", original.seconds, when), ("accelerated", accelerated.seconds, "")]
    lines = [
        f'<div class="time {name}"><span>{name}</span><div class="bar"><i style="width:{100 * seconds / longest:.1f}%">'
        f"</i></div><b>{seconds:.2f} s</b>{f'<small>{when}</small>' if when else ''}</div>"
        for name, seconds, when in rows
    ]
    return f'<div class="times" role="group" aria-label="Times">{"".join(lines)}</div>'


def steps_strip(steps: Iterable[str]) -> str:
    """One square for each step, and what the colours mean."""
    steps = list(steps)
    squares = "".join(f'<i class="{kind}" title="step {place}: {kind}"></i>' for place, kind in enumerate(steps, 1))
    words = ", ".join(f"{len(list(run))} {kind}" for kind, run in groupby(steps))
    legend = "".join(
        f'<li><i class="{kind}"></i>{steps.count(kind)} {meaning}</li>'
        for kind, meaning in MEANINGS.items()
        if kind in steps
    )
    return (
        f'<div class="steps"><h4>Steps</h4><div class="strip" role="img" aria-label="{words}">{squares}</div>'
        f"<ul>{legend}</ul></div>"
    )


def _notes(notes: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<ul class="notes">{items}</ul>' if items else ""


def preformatted(text: str) -> str:
    """A text with its own lines, which scrolls if it is wider than the page."""
    return f'<pre class="summary" tabindex="0">{escape(text)}</pre>'


def answer(folder: TuneFolder, outcome: Outcome) -> str:
    """The answer of a search in words, and its plot."""
    steps = folder.plan.steps
    chosen = outcome.chosen.column if outcome.chosen else ORIGINAL
    words = "".join(f"<li>{escape(sentence)}</li>" for sentence in chosen.in_sentences(steps))
    state = "" if outcome.is_reached else " missed"
    return f'<p class="answer{state}">{escape(outcome.sentence)}</p><ul>{words}</ul>{_front(folder, outcome)}'


def _front(folder: TuneFolder, outcome: Outcome) -> str:
    plot = front_plot(outcome, folder.plan.steps)
    if plot is None:
        return ""
    keys = "".join(
        f'<li><span style="color:{key.color}" aria-hidden="true">{key.sign}</span> {escape(key.name)}</li>'
        for key in kinds_shown(outcome, folder.plan.steps)
    )
    figure = f'<figure class="front" role="img" aria-label="{escape(plot.description)}">{plot.svg}</figure>'
    return f'<ul class="legend">{keys}</ul>{figure}'
