"""What the metrics load, tiny and untrained, in the files and folders that a user would give."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from toma_lab.metrics.lpips import AlexLpips
from torch import nn
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    ViTConfig,
    ViTImageProcessor,
    ViTModel,
)

from training import tokenizer as tokenizers

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def lpips_file(folder: Path) -> Path:
    """Named as the published weights are; heads that are not negative, as theirs."""
    torch.manual_seed(0)
    weights = {
        name: tensor.abs() if name.startswith("lin") else tensor for name, tensor in AlexLpips().state_dict().items()
    }
    save_file({name: tensor.half().contiguous() for name, tensor in weights.items()}, folder / "lpips.safetensors")
    return folder / "lpips.safetensors"


class MeanColour(nn.Module):
    """Three features of an image from -1 to 1, which can be computed by hand."""

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        assert pixels.shape[1:] == (3, 299, 299)
        return pixels.mean(dim=(2, 3))


@cache
def _mean_colour() -> torch.jit.ScriptModule:
    return torch.jit.script(MeanColour())


def inception_file(folder: Path) -> Path:
    _mean_colour().save(str(folder / "features.pt"))
    return folder / "features.pt"


def dino_folder(folder: Path) -> Path:
    torch.manual_seed(0)
    ViTModel(ViTConfig(**SMALL, image_size=32, patch_size=8)).save_pretrained(folder)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def clip_folder(folder: Path) -> Path:
    torch.manual_seed(0)
    tokenizer = tokenizers.train(("a red apple", "a blue shoe"), 520, 16, folder)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    text = {**SMALL, **ends, "vocab_size": len(tokenizer), "max_position_embeddings": 16}
    vision = {**SMALL, "image_size": 32, "patch_size": 8}
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).save_pretrained(folder)
    square = {"height": 32, "width": 32}
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=square).save_pretrained(folder)
    return folder
