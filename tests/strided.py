"""ToMA with every n-th token of a region as a destination.

Two tokens that cover none but each other tie exactly, and rounding decides which of them is picked. So where the
outputs of two models are compared, destinations must not depend on tokens: `speed_up(model, merge=Strided())`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from toma_diffusion import Merge
from toma_diffusion.merge import MergePlan
from toma_diffusion.merge.place import ToMA
from toma_diffusion.others import register_method


class StridedPlan(MergePlan):
    def choose(self, tokens: Tensor) -> Tensor:
        count = self.destinations_per_region
        choice = torch.arange(count, device=self.device) * self.regions.size // count
        return choice.expand(self.regions.count, -1)


@dataclass(frozen=True, kw_only=True)
class Strided(Merge):
    """Settings of ToMA."""


@register_method
class StridedMethod(ToMA):
    name = "strided-in-tests"
    config_class = Strided
    plan_class = StridedPlan
