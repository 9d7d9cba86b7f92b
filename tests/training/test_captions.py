"""What is said about images: wordings, weights, and which may be mirrored."""

import random

import numpy as np
import pytest
import torch

from training.captions import clean, colour_of, concept, may_mirror, variant, with_article
from training.data import load, sampling_weights


@pytest.mark.parametrize(
    ("caption", "cleaned"),
    [
        ("3d emoji of Japanese “here” button", "3d emoji of japanese here button"),
        ("3d emoji of woman’s hat", "3d emoji of woman's hat"),
        ("3d emoji of man: curly hair, dark skin tone", "3d emoji of man with curly hair, dark skin tone"),
        ("3d emoji of person: bald", "3d emoji of person, bald"),
        ("3d emoji of keycap: 7", "3d emoji of keycap 7"),
    ],
)
def test_clean(caption, cleaned):
    assert clean(caption) == cleaned


def test_skin_tones_are_one_concept():
    tones = ("light", "medium-light", "medium", "medium-dark", "dark")
    assert {concept(f"3d emoji of OK hand, {tone} skin tone") for tone in tones} == {"3d emoji of ok hand"}


@pytest.mark.parametrize(
    ("caption", "class_name", "mirrored"),
    [
        ("3d emoji of red apple", "Food & Drink", True),
        ("3d emoji of bright star", "Travel & Places", True),
        ("a photo of shoes", "Shoes", True),
        ("3d emoji of man running facing right", "People & Body", False),
        ("3d emoji of left-facing fist", "People & Body", False),
        ("3d emoji of four-thirty", "Travel & Places", False),
        ("3d emoji of OK button", "Symbols", False),
    ],
)
def test_what_may_be_mirrored(caption, class_name, mirrored):
    assert may_mirror(caption, class_name) is mirrored


@pytest.mark.parametrize(
    ("noun", "said"), [("axe", "an axe"), ("red apple", "a red apple"), ("kids shoes", "kids shoes")]
)
def test_articles(noun, said):
    assert with_article(noun) == said


def test_wordings_keep_what_is_shown():
    chance = random.Random(0)
    emoji = {variant("3d emoji of red apple", None, chance) for _ in range(100)}
    assert {"3d emoji of red apple", "3d emoji of a red apple"} <= emoji
    assert all("red apple" in text and "emoji" in text for text in emoji)
    shoes = {variant("a photo of shoes", "blue", chance) for _ in range(100)}
    assert {"a photo of shoes", "a photo of blue shoes"} <= shoes
    assert "a photo of a jacket" in {variant("a photo of outwear", None, chance) for _ in range(100)}
    assert "3d emoji of ear with dark skin" in {
        variant("3d emoji of ear, dark skin tone", None, chance) for _ in range(100)
    }


def test_colour_is_told_only_where_one_fills_the_middle():
    image = np.full((64, 64, 3), (180, 20, 30), dtype=np.uint8)
    assert colour_of(image) == "red"
    image[:, 32:] = (20, 20, 20)
    assert colour_of(image) is None


def test_frequent_concepts_weigh_less_each_and_more_together():
    weights = sampling_weights(["a photo of hat"] * 4 + ["a photo of skirt"], power=0.5)
    assert weights.sum().item() == pytest.approx(1)
    assert weights[0] < weights[4] < 4 * weights[0]


def test_with_a_power_of_one_concepts_are_drawn_equally_often():
    weights = sampling_weights(["a photo of hat"] * 4 + ["a photo of skirt"], power=1.0)
    assert weights[:4].sum().item() == pytest.approx(weights[4].item())


def test_sets_are_drawn_as_often_as_told(data):
    dataset = load(data, 64, limit=5)
    assert len(dataset) == 10
    assert dataset.images.shape == (10, 64, 64, 3)
    assert dataset.weights()[:5].sum().item() == pytest.approx(0.5)
    assert dataset.weights(emoji_share=0.75)[:5].sum().item() == pytest.approx(0.75)
    assert dataset.mirror.dtype == torch.bool


def test_missing_data_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"fluent_emoji.npz.*--data"):
        load(tmp_path, 64)
