"""A vocabulary of our own for CLIPTokenizer: byte-level byte-pair encoding, learnt on the captions."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import CLIPTokenizer

START, END = "<|startoftext|>", "<|endoftext|>"
WORD_END = "</w>"
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
"""How CLIP splits text into words; merges never cross them."""


def train(texts: Iterable[str], size: int, max_tokens: int, folder: Path) -> CLIPTokenizer:
    """Learn at most `size` tokens from `texts` and write `vocab.json` and `merges.txt`, which every transformers reads.

    The vocabulary is laid out as CLIP's own: all bytes, all bytes that end a word, the merges in order, start, end. So
    any text has an encoding, whether its letters occur in `texts` or not.
    """
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix=WORD_END))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, min_frequency=2, end_of_word_suffix=WORD_END, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    merges = [tuple(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]

    tokens = [*alphabet, *(letter + WORD_END for letter in alphabet)]
    merges = merges[: size - len(tokens) - 2]
    tokens += dict.fromkeys(left + right for left, right in merges)
    vocabulary = {token: index for index, token in enumerate([*tokens, START, END])}

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    config = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": max_tokens,
        "bos_token": START,
        "eos_token": END,
        "pad_token": END,
        "unk_token": END,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return load(folder)


def load(folder: Path) -> CLIPTokenizer:
    """The tokenizer that `train` wrote."""
    return CLIPTokenizer.from_pretrained(folder, local_files_only=True)
