"""Tiny models of ComfyUI with random weights: its own classes, inside its own ModelPatcher; and ways to watch them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from toma_diffusion import Merge, Skip
from toma_diffusion.comfyui.nodes import faster
from toma_diffusion.comfyui.upstream import wrapper_of

WIDTH = 16
"""Channels of the text."""
TEXT = 5
"""Tokens of the text."""
SCOPES = ("module", "block", "stage")
SKIP = {"skip": Skip(computed=(0, 2))}
"""Of 4 steps every second one is skipped."""


@dataclass(frozen=True)
class Family:
    """How to make a tiny model of a family, and what it takes."""

    make: Callable[[], Any]
    """A ModelPatcher."""
    latent: tuple[int, ...]
    """Shape of one picture."""
    tokens: int
    """Image tokens in the first merged block."""
    pooled: int | None = None


def patcher_of(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a configuration of ComfyUI, with random weights."""
    from comfy.model_patcher import ModelPatcher

    config.unet_config["dtype"] = dtype
    with torch.inference_mode(False):
        model = config.get_model({}).eval()
        model.diffusion_model.to(dtype)
        randomize(model.diffusion_model)
    return ModelPatcher(model, load_device=torch.device("cpu"), offload_device=torch.device("cpu"))


def randomize(model: nn.Module, seed: int = 0) -> None:
    """Give a model random weights; ComfyUI leaves them as they come."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        weight.requires_grad_(False)
        is_scale = weight.ndim == 1 and name.endswith((".weight", ".scale"))
        noise = torch.randn(weight.shape, generator=generator) / max(1, weight[0].numel()) ** 0.5
        weight.copy_(0.25 * noise + is_scale if weight.ndim < 2 else noise)


def sd15() -> Any:
    from comfy import supported_models

    return patcher_of(supported_models.SD15(unet_config(transformer_depth=[1, 1], adm_in_channels=None)))


def sdxl() -> Any:
    from comfy import supported_models

    config = unet_config(
        transformer_depth=[0, 2],
        transformer_depth_output=[0, 0, 2, 2],
        transformer_depth_middle=2,
        use_linear_in_transformer=True,
        num_classes="sequential",
        adm_in_channels=WIDTH + 6 * 256,
    )
    return patcher_of(supported_models.SDXL(config))


def unet_config(**changes: Any) -> dict[str, Any]:
    config = {
        "image_size": 32,
        "in_channels": 4,
        "out_channels": 4,
        "model_channels": 64,
        "num_res_blocks": [1, 1],
        "channel_mult": (1, 2),
        "transformer_depth_output": [1, 1, 1, 1],
        "transformer_depth_middle": 1,
        "use_spatial_transformer": True,
        "context_dim": WIDTH,
        "legacy": False,
    }
    return config | changes


def flux() -> Any:
    from comfy import supported_models

    return patcher_of(supported_models.Flux(flux_config()))


def flux_config(**changes: Any) -> dict[str, Any]:
    config = {
        "image_model": "flux",
        "in_channels": 16,
        "out_channels": 16,
        "vec_in_dim": WIDTH,
        "context_in_dim": WIDTH,
        "hidden_size": 32,
        "num_heads": 2,
        "mlp_ratio": 2.0,
        "depth": 2,
        "depth_single_blocks": 2,
        "axes_dim": [4, 6, 6],
        "theta": 10000,
        "patch_size": 2,
        "qkv_bias": True,
        "guidance_embed": True,
        "txt_ids_dims": [],
    }
    return config | changes


def flux2() -> Any:
    from comfy import supported_models

    config = {
        "image_model": "flux2",
        "in_channels": 128,
        "out_channels": 128,
        "vec_in_dim": None,
        "context_in_dim": WIDTH,
        "hidden_size": 32,
        "num_heads": 2,
        "mlp_ratio": 3.0,
        "depth": 2,
        "depth_single_blocks": 2,
        "axes_dim": [4, 4, 4, 4],
        "theta": 2000,
        "patch_size": 1,
        "qkv_bias": False,
        "guidance_embed": True,
        "global_modulation": True,
        "mlp_silu_act": True,
        "ops_bias": False,
        "txt_ids_dims": [3],
        "default_ref_method": "index",
        "ref_index_scale": 10.0,
    }
    return patcher_of(supported_models.Flux2(config))


def qwen_image(**changes: Any) -> Any:
    from comfy import supported_models

    config = {
        "image_model": "qwen_image",
        "in_channels": 64,
        "num_layers": 3,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": WIDTH,
        "axes_dims_rope": (4, 6, 6),
    }
    return patcher_of(supported_models.QwenImage(config | changes))


def wan() -> Any:
    from comfy import supported_models

    return patcher_of(supported_models.WAN21_T2V(wan_config()))


def wan_config() -> dict[str, Any]:
    return {
        "image_model": "wan2.1",
        "model_type": "t2v",
        "dim": 128,
        "out_dim": 16,
        "num_heads": 1,
        "ffn_dim": 64,
        "num_layers": 3,
        "patch_size": (1, 2, 2),
        "freq_dim": 256,
        "window_size": (-1, -1),
        "qk_norm": True,
        "cross_attn_norm": True,
        "eps": 1e-6,
        "in_dim": 16,
    }


def vace() -> Any:
    """A model whose tokens cannot be merged."""
    from comfy import supported_models

    return patcher_of(
        supported_models.WAN21_Vace(wan_config() | {"model_type": "vace", "vace_layers": 1, "vace_in_dim": 96})
    )


def controlnet(family: str) -> Any:
    """ComfyUI's own ControlNet for a family, with random weights."""
    from comfy import ops
    from comfy.cldm.cldm import ControlNet as ControlledUNet
    from comfy.controlnet import ControlNet
    from comfy.ldm.flux.controlnet import ControlNetFlux

    settings = {"dtype": torch.float32, "operations": ops.disable_weight_init}
    with torch.inference_mode(False):
        if family == "flux":
            network, extra = (
                ControlNetFlux(**flux_config(depth=1, depth_single_blocks=1), **settings),
                ["y", "guidance"],
            )
        else:
            config = unet_config(transformer_depth=[1, 1], adm_in_channels=None, num_heads=8, hint_channels=3)
            network, extra = ControlledUNet(**config, **settings), ["y"]
        randomize(network, seed=3)
    return ControlNet(network.eval(), load_device=torch.device("cpu"), extra_conds=extra)


WAN_TEXT = 4096
FAMILIES = {
    "sd15": Family(sd15, (4, 16, 16), 256),
    "sdxl": Family(sdxl, (4, 16, 16), 64, WIDTH),
    "flux": Family(flux, (16, 16, 16), 64, WIDTH),
    "flux2": Family(flux2, (128, 8, 8), 64, WIDTH),
    "qwen-image": Family(qwen_image, (16, 1, 16, 16), 64),
    "wan": Family(wan, (16, 3, 8, 8), 48),
}


def conditioning(family: str, seed: int, length: int = TEXT) -> list[list[Any]]:
    """What a text encoder would return."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randn(1, length, WAN_TEXT if family == "wan" else WIDTH, generator=generator)
    pooled = FAMILIES[family].pooled
    return [[text, {} if pooled is None else {"pooled_output": torch.randn(1, pooled, generator=generator)}]]


def sample(
    model: Any, family: str, *, steps: int = 4, batch: int = 1, cfg: float = 3.0, **changes: Any
) -> torch.Tensor:
    """Latents that ComfyUI's KSampler makes."""
    import nodes

    arguments = {
        "seed": 1,
        "steps": steps,
        "cfg": 3.0,
        "sampler_name": "euler",
        "scheduler": "normal",
        "positive": conditioning(family, 1),
        "negative": conditioning(family, 2),
        "latent_image": {"samples": torch.zeros(batch, *FAMILIES[family].latent)},
    }
    return nodes.KSampler().sample(model, **(arguments | changes))[0]["samples"]


def accelerated(model: Any, *, skip: Skip | None = None, **merge: Any) -> Any:
    """A clone, as the nodes make it, but with any settings of `Merge`."""
    settings = Merge(**{"skip_blocks": (), "region_tokens": 16} | merge) if merge else None
    return faster(model, skip=skip, merge=settings)[0]


def report(model: Any) -> str:
    """What the report node shows."""
    return str(wrapper_of(model).last)


def denoiser(model: Any) -> Any:
    return model.model.diffusion_model


class Lengths:
    """The lengths of queries and keys, through ComfyUI's own way to override attention."""

    def __init__(self, after=None):
        self.seen = []
        self.after = after
        """Called with the number of calls after every call."""

    def __call__(self, attention, *args, **kwargs):
        self.seen.append((args[0].shape[-2], args[1].shape[-2]))
        result = attention(*args, **kwargs)
        if self.after is not None:
            self.after(len(self.seen))
        return result

    def __deepcopy__(self, memo):
        return self

    def watch(self, model):
        """A clone of which every attention is watched."""
        clone = model.clone()
        clone.model_options["transformer_options"]["optimized_attention_override"] = self
        return clone

    @property
    def of_self_attention(self):
        return [query for query, key in self.seen if query == key]


def lengths_of(model, family, **changes):
    lengths = Lengths()
    sample(lengths.watch(model), family, **changes)
    return lengths.of_self_attention


def joint_text(family):
    """Tokens of text in the sequences of self-attention."""
    return {"flux": TEXT, "flux2": 512, "qwen-image": TEXT}.get(family, 0)  # ComfyUI pads the text of FLUX.2
