"""Stands in for ComfyUI where there is none: clones of a model, a sampler with its wrappers, a tiny Wan model.

Only what the nodes use of ComfyUI, in the same form. The tests with ComfyUI itself are in test_comfyui_*.py.
"""

import copy
from types import ModuleType, SimpleNamespace
from uuid import uuid4

import torch
from torch import nn

LEVELS = [1.0, 0.9, 0.75, 0.5, 0.25, 0.0]
WIDTH = 16
TOKENS = 64
"""Of a latent of 16 × 16."""


def comfy_modules() -> dict[str, ModuleType]:
    """What is imported of ComfyUI, for `sys.modules`."""
    extension = ModuleType("comfy.patcher_extension")
    extension.WrappersMP = SimpleNamespace(OUTER_SAMPLE="outer_sample", PREDICT_NOISE="predict_noise")
    return {"comfy": ModuleType("comfy"), "comfy.patcher_extension": extension}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)
        self.lengths = []

    def forward(self, x, freqs, transformer_options=None):
        self.lengths.append(x.shape[1])
        keys = x + freqs[:, :, 0, :, 0, 0].repeat(1, 1, 2)
        return self.project(nn.functional.scaled_dot_product_attention(x, keys, x))


class CrossAttention(nn.Module):
    def forward(self, x, context):
        return nn.functional.scaled_dot_product_attention(x, context, context)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.dim = WIDTH
        self.modulation = nn.Parameter(torch.randn(1, 6, WIDTH) / 4)
        self.norm1 = nn.LayerNorm(WIDTH)
        self.self_attn, self.cross_attn, self.ffn = Attention(), CrossAttention(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, e, freqs, context, transformer_options=None):
        shift, scale, *_ = (self.modulation + e).chunk(6, dim=1)
        x = x + self.self_attn(self.norm1(x) * (1 + scale) + shift, freqs)
        x = x + self.cross_attn(x, context)
        return x + self.ffn(x)


class WanModel(nn.Module):
    """Of the class and the module that ComfyUI's model has."""

    patch_size, ref_conv = (1, 2, 2), None

    def __init__(self, num_blocks=3):
        super().__init__()
        self.enter, self.leave = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, x, timestep, context, time_dim_concat=None, transformer_options=None, **kwargs):
        batch, channels, frames, height, width = x.shape  # [B, 4, F, H, W]
        patches = x.unfold(3, 2, 2).unfold(4, 2, 2).permute(0, 2, 3, 4, 1, 5, 6).flatten(4).flatten(1, 3)
        tokens = self.enter(patches)  # [B, F·H/2·W/2, 16]
        times = timestep[:, None, None] * torch.linspace(0, 1, 6 * WIDTH).reshape(1, 6, WIDTH)
        angles = torch.linspace(0, 1, tokens.shape[1])[None, :, None, None, None, None]
        freqs = angles * torch.ones(1, 1, 1, WIDTH // 2, 2, 2)
        for block in self.blocks:
            tokens = block(tokens, e=times, freqs=freqs, context=context, transformer_options=transformer_options)
        grid = self.leave(tokens).reshape(batch, frames, height // 2, width // 2, channels, 2, 2)
        return grid.permute(0, 4, 1, 2, 5, 3, 6).reshape(x.shape)


class OtherModel(WanModel):
    """Of a family whose tokens cannot be merged."""


WanModel.__module__ = OtherModel.__module__ = "comfy.ldm.wan.model"


class CONST:
    """How ComfyUI calls the noise levels of flow models."""


class Patcher:
    """A clone of a model. Clones share the model, and have wrappers of their own."""

    def __init__(self, model):
        self.diffusion_model, self.model_sampling = model, CONST()
        self.wrappers, self.object_patches = {}, {}

    def clone(self):
        clone = copy.copy(self)
        clone.wrappers = {
            place: {key: list(found) for key, found in each.items()} for place, each in self.wrappers.items()
        }
        clone.object_patches = dict(self.object_patches)
        return clone

    def get_model_object(self, name):
        return getattr(self, name)

    def add_wrapper_with_key(self, place, key, wrapper):
        self.wrappers.setdefault(place, {}).setdefault(key, []).append(wrapper)

    def remove_wrappers_with_key(self, place, key):
        self.wrappers.get(place, {}).pop(key, None)


def tiny(kind=WanModel):
    """A model with random weights, as a loader returns it."""
    return Patcher(kind().eval().requires_grad_(False))


class Executor:
    """Calls a function inside all wrappers of one place."""

    def __init__(self, owner, place, function):
        self.class_obj, self.function = owner, function
        found = owner.model_patcher.wrappers.get(place, {}).values()
        self.wrappers = [wrapper for each in found for wrapper in each]

    def __call__(self, *args, **kwargs):
        if not self.wrappers:
            return self.function(*args, **kwargs)
        inner = copy.copy(self)
        inner.wrappers = self.wrappers[1:]
        return self.wrappers[0](inner, *args, **kwargs)


class Prompt:
    """A conditioning, active from one noise level down to another."""

    def __init__(self, seed, kind=0, begins=1.0, ends=0.0):
        self.uuid, self.kind, self.begins, self.ends = uuid4(), kind, begins, ends
        self.text = torch.randn(1, 5, WIDTH, generator=torch.Generator().manual_seed(seed))

    def is_active(self, level):
        return self.ends <= level <= self.begins


class Sampling:
    """One sampling, with what ComfyUI's guider does for every evaluation: all prompts, together or one by one."""

    def __init__(self, patcher, prompts, apart, after_evaluation, options):
        self.model_patcher, self.prompts, self.apart = patcher, prompts, apart
        self.after_evaluation, self.options = after_evaluation, options

    def evaluate(self, latent, level, levels):
        active = [prompt for prompt in self.prompts if prompt.is_active(level)]
        groups = [[prompt] for prompt in active] if self.apart else [active]
        passes = [each for group in groups for each in self.run(latent, level, levels, group)]
        if self.after_evaluation is not None:
            self.after_evaluation(self)
        signs = [3.0 if prompt.kind == 0 else -2.0 for prompt in active]
        return sum(sign * each for sign, each in zip(signs, passes, strict=True)) / sum(signs)

    def run(self, latent, level, levels, prompts):
        options = {
            "sigmas": torch.tensor([level]),
            "sample_sigmas": levels,
            "cond_or_uncond": [prompt.kind for prompt in prompts],
            "uuids": [prompt.uuid for prompt in prompts],
            "wrappers": self.model_patcher.wrappers,
        }
        text = torch.cat([prompt.text.expand(len(latent), -1, -1) for prompt in prompts])
        count = len(prompts)
        return self.model_patcher.diffusion_model(
            latent.repeat(count, 1, 1, 1, 1),
            torch.full((count * len(latent),), level),
            text,
            transformer_options=options | self.options,
        ).chunk(count)

    def euler(self, latent, levels):
        predict = Executor(self, "predict_noise", self.evaluate)
        for level, following in zip(levels.tolist(), levels.tolist()[1:], strict=False):
            latent = latent + (following - level) * predict(latent, level, levels)
        return latent

    def heun(self, latent, levels):
        """Looks at the next level too."""
        predict = Executor(self, "predict_noise", self.evaluate)
        for level, following in zip(levels.tolist(), levels.tolist()[1:], strict=False):
            slope = predict(latent, level, levels)
            if following > 0:
                slope = (slope + predict(latent + (following - level) * slope, following, levels)) / 2
            latent = latent + (following - level) * slope
        return latent


def sample(
    patcher,
    levels=LEVELS,
    *,
    prompts=None,
    batch=1,
    size=16,
    apart=False,
    sampler="euler",
    name=None,
    after=None,
    **options,
):
    """The latents that a sampler of ComfyUI would make with this clone.

    Args:
        apart: whether every prompt has a call of its own.
        name: of the sampler, if it is not the method's.
        after: called after every evaluation.
        options: more `transformer_options`.
    """
    prompts = prompts or PROMPTS
    sampling = Sampling(patcher, prompts, apart, after, options)

    def outer_sample(noise, latent, sampler, sigmas):
        return sampler.sampler_function(noise, sigmas)

    method = getattr(sampling, sampler)

    def function(latent, sigmas):
        return method(latent, sigmas)

    function.__name__ = f"sample_{name or sampler}"
    noise = torch.randn(batch, 4, 1, size, size, generator=torch.Generator().manual_seed(1))
    run = Executor(sampling, "outer_sample", outer_sample)
    return run(noise, torch.zeros_like(noise), SimpleNamespace(sampler_function=function), torch.tensor(levels))


PROMPTS = (Prompt(1), Prompt(2, kind=1))


def lengths_of(patcher, **changes):
    """The tokens that attention saw, call by call."""
    attentions = [block.self_attn for block in patcher.diffusion_model.blocks]
    for attention in attentions:
        attention.lengths.clear()
    sample(patcher, **changes)
    return [attention.lengths.copy() for attention in attentions]
