"""A tiny Stable Diffusion checkpoint in a folder, with all that its pipeline needs for a prompt."""

import json
import string
from pathlib import Path

from tiny_pipelines import sd15_pipeline
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer


def save_checkpoint(folder: Path) -> None:
    folder.mkdir(parents=True)
    letters = list(string.ascii_lowercase)
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {word: index for index, word in enumerate(words)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    config = CLIPTextConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=vocabulary["<|startoftext|>"],
        eos_token_id=vocabulary["<|endoftext|>"],
    )
    pipeline = sd15_pipeline()
    pipeline.register_modules(
        tokenizer=CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=77),
        text_encoder=CLIPTextModel(config),
    )
    pipeline.save_pretrained(folder)
