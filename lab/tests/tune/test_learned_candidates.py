"""A search learns first how to predict skipped steps, and tries that too."""

from __future__ import annotations

import pytest
from run_folders import FACTS
from tiny_text import PROMPTS, text_pipeline
from toma_lab.metrics import MetricSet
from toma_lab.tune.bar import SearchBar
from toma_lab.tune.candidates import open_candidates
from toma_lab.tune.folder import TuneFolder
from toma_lab.tune.learned import learned_texts
from toma_lab.tune.measure import Meter
from toma_lab.tune.plan import TunePlan

from toma_diffusion.skip.learned import Learned

STEPS = 8
PRESETS = ("balanced", "fast", "faster")


@pytest.fixture
def meter(tmp_path):
    pipe = text_pipeline()
    name = type(pipe.unet).__name__
    plan = TunePlan(model="", model_class=name, prompts=PROMPTS, steps=STEPS, guidance=4.0, width=32, height=32)
    return Meter(TuneFolder.start(tmp_path / "search", plan, FACTS), pipe, MetricSet())


def test_what_was_learned_is_a_candidate_of_every_preset_that_has_as_many_computed_steps(meter):
    texts, why_not = learned_texts(meter, SearchBar(None))
    if why_not:  # a network of random weights may be predicted as well with nothing learned
        assert not texts
        assert "not closer" in why_not[0]
        return
    assert texts == [f"{preset}:learned={meter.folder.learned_path}" for preset in PRESETS]
    assert not meter.folder.learning_path.exists()
    learned = Learned.read(meter.folder.learned_path)
    assert (learned.num_steps, learned.guidance) == (STEPS, 4.0)
    found = open_candidates(meter.pipe, texts, STEPS)
    assert [len(each.own.computed(STEPS)) for each in found.columns] == list(learned.counts)
    assert len(found.columns) + len(found.left_out) == len(PRESETS)


def test_a_resumed_search_does_not_learn_again(meter):
    texts, why_not = learned_texts(meter, SearchBar(None))
    if why_not:
        pytest.skip("nothing was learned on this machine")
    meter.pipe = None
    assert learned_texts(meter, SearchBar(None)) == (texts, [])
