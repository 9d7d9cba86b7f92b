"""LPIPS v0.1 with AlexNet features (Zhang et al. 2018, arXiv 1801.03924): how different two images look.

The packages lpips and torchmetrics need torchvision for AlexNet, which must fit torch to the letter, and download its
weights. Here they come from a file.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from toma_lab.metrics.base import PairMetric, UnavailableError, check_file, describe_file

CONVOLUTIONS = ((64, 11, 4), (192, 5, 1), (384, 3, 1), (256, 3, 1), (256, 3, 1))
"""Of AlexNet: channels, kernel, stride."""
MEAN, DEVIATION = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
"""Of the pixels from -1 to 1 that AlexNet was trained on."""


class AlexLpips(nn.Module):
    """The network. Its weights have torchvision's names for AlexNet (`features.N`), and `linN.weight` for the heads."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for index, (channels, kernel, stride) in enumerate(CONVOLUTIONS):
            if index in (1, 2):
                layers.append(nn.MaxPool2d(3, stride=2))
            layers += [nn.Conv2d(before, channels, kernel, stride, 2 if kernel > 3 else 1), nn.ReLU()]
            self.add_module(f"lin{index}", nn.Conv2d(channels, 1, 1, bias=False))
            before = channels
        self.features = nn.Sequential(*layers)
        self.register_buffer("mean", torch.tensor(MEAN).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("deviation", torch.tensor(DEVIATION).view(1, 3, 1, 1), persistent=False)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """The distance of two batches of images, [B, 3, height, width] from 0 to 1. Returns [B]."""
        pairs = zip(self.activations(first), self.activations(second), strict=True)
        heads = [self.get_submodule(f"lin{index}")((one - other) ** 2) for index, (one, other) in enumerate(pairs)]
        return torch.stack([head.mean(dim=(1, 2, 3)) for head in heads]).sum(dim=0)

    def activations(self, pixels: Tensor) -> list[Tensor]:
        """After every ReLU, every place's channels scaled to length 1."""
        hidden = (pixels * 2 - 1 - self.get_buffer("mean")) / self.get_buffer("deviation")
        found = []
        for layer in self.features:
            hidden = layer(hidden)
            if isinstance(layer, nn.ReLU):
                found.append(hidden / (hidden.square().sum(dim=1, keepdim=True).sqrt() + 1e-10))
        return found


class Lpips(PairMetric):
    """0 for equal images; above about 0.3 hardly the same picture. Lower is nearer."""

    name = "lpips"

    def __init__(self, weights: Path | None, device: torch.device) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        super().__init__(device)
        path = check_file(weights, self.name, "--lpips-weights", "a .safetensors file of AlexNet and the five heads")
        network = AlexLpips()
        try:
            network.load_state_dict(load_file(path))
        except (SafetensorError, RuntimeError) as error:
            raise UnavailableError(
                f"lpips: {str(path)!r} does not hold the weights of LPIPS with AlexNet, named features.N.weight, "
                f"features.N.bias and linN.weight ({str(error).splitlines()[-1].strip()})."
            ) from error
        self.network = network.float().eval().requires_grad_(False).to(device)
        self.source = describe_file(path)

    def distances(self, images: Tensor, references: Tensor) -> Tensor:
        found: Tensor = self.network(images, references)
        return found
