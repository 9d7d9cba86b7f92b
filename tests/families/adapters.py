"""Adapters with random weights, as peft and diffusers put them into a model."""

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn


def add_lora(model: nn.Module, targets: list[str], name: str = "one", seed: int = 0) -> None:
    config = LoraConfig(r=2, lora_alpha=2, target_modules=targets, init_lora_weights=False)
    if hasattr(model, "add_adapter"):
        model.add_adapter(config, adapter_name=name)
    else:
        inject_adapter_in_model(config, model, name)
    generator = torch.Generator().manual_seed(seed)
    for key, parameter in model.named_parameters():
        if "lora_" in key and f".{name}." in key:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    model.requires_grad_(False)


def load_unet_ip_adapter(unet: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    width = unet.config.cross_attention_dim
    weights, key = {}, 1
    for name in unet.attn_processors:
        if not name.endswith("attn1.processor"):
            hidden = unet.get_submodule(name.removesuffix(".processor")).query_dim
            weights |= {f"{key}.to_k_ip.weight": random(hidden, width), f"{key}.to_v_ip.weight": random(hidden, width)}
            key += 2
    projection = {
        "proj.weight": random(4 * width, 16),
        "proj.bias": random(4 * width),
        "norm.weight": torch.ones(width),
        "norm.bias": torch.zeros(width),
    }
    unet._load_ip_adapter_weights([{"image_proj": projection, "ip_adapter": weights}], low_cpu_mem_usage=False)
    unet.requires_grad_(False)
