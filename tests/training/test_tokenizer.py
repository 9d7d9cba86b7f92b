"""Our vocabulary in transformers' CLIPTokenizer."""

import pytest
from transformers import CLIPTokenizer

from training import tokenizer as tokenizers

TEXTS = ["3d emoji of a red apple", "a photo of shoes", "a photo of a t-shirt"] * 5


@pytest.fixture
def folder(tmp_path):
    tokenizers.train(TEXTS, size=600, max_tokens=16, folder=tmp_path)
    return tmp_path


@pytest.mark.parametrize("text", ["3 d emoji of a red apple", "a photo of purple zebras", "café, 漢字 😀"])
def test_round_trip_of_known_and_unknown_words(folder, text):
    tokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    decoded = tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True)
    assert decoded.replace(" ,", ",") == text


def test_files_are_enough(folder):
    assert {path.name for path in folder.iterdir()} == {"vocab.json", "merges.txt", "tokenizer_config.json"}
    tokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    assert tokenizer.model_max_length == 16
    assert len(tokenizer) <= 600


def test_case_does_not_matter_and_padding_is_as_clip_does_it(folder):
    tokenizer = tokenizers.load(folder)
    ids = tokenizer("A Photo of SHOES", padding="max_length", max_length=16, truncation=True).input_ids
    assert ids == tokenizer("a photo of shoes", padding="max_length", max_length=16, truncation=True).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert ids[5:] == [tokenizer.eos_token_id] * 11
    assert len(set(ids[1:5])) == 4


def test_frequent_words_become_one_token(folder):
    assert len(tokenizers.load(folder)("shoes").input_ids) == 3
