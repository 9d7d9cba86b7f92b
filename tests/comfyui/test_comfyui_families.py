"""What ComfyUI's model families say of models that have the names of its classes. Without ComfyUI."""

import pytest
import torch
from observe import our_hooks
from torch import nn

from toma_diffusion import Merge
from toma_diffusion.api import speed_up_model
from toma_diffusion.comfyui.families import find_comfy_family
from toma_diffusion.families import Given
from toma_diffusion.merge import Grid
from toma_diffusion.presets import Chosen


def named(name, module="", **attributes):
    """A module of a class with this name, that holds these modules and values."""
    made = type(name, (nn.Module,), {"__module__": module, "forward": lambda self, x: x})()
    for key, value in attributes.items():
        setattr(made, key, value)
    return made


def linear():
    return nn.Linear(4, 4)


def flux():
    def double():
        attention = named("Attention", qkv=linear(), proj=linear())
        return named("DoubleStreamBlock", hidden_size=4, img_attn=attention, img_mlp=linear())

    def single():
        return named("SingleStreamBlock", hidden_size=4, linear1=linear(), linear2=linear())

    blocks = {"double_blocks": nn.ModuleList(double() for _ in range(4))}
    blocks["single_blocks"] = nn.ModuleList(single() for _ in range(8))
    return named("Flux", "comfy.ldm.flux.model", patch_size=2, **blocks)


def qwen_image():
    blocks = [named("Block", dim=4, attn=linear(), img_mlp=linear()) for _ in range(8)]
    return named(
        "QwenImageTransformer2DModel",
        "comfy.ldm.qwen_image.model",
        patch_size=2,
        default_ref_method="index",
        transformer_blocks=nn.ModuleList(blocks),
    )


def unet(**attributes):
    def transformer():
        parts = {"attn1": linear(), "attn2": linear(), "ff": linear(), "norm1": nn.LayerNorm(4)}
        block = named("BasicTransformerBlock", n_heads=2, d_head=2, disable_self_attn=False, **parts)
        return named("SpatialTransformer", transformer_blocks=nn.ModuleList([block]))

    return named(
        "UNetModel",
        "comfy.ldm.modules.diffusionmodules.openaimodel",
        input_blocks=nn.ModuleList(
            nn.Sequential(*layers)
            for layers in ([transformer()], [named("Downsample", use_conv=True)], [transformer()])
        ),
        middle_block=nn.Sequential(transformer()),
        output_blocks=nn.ModuleList([nn.Sequential(transformer(), named("Upsample")), nn.Sequential(transformer())]),
        **attributes,
    )


MODELS = {"flux": flux, "qwen-image": qwen_image, "unet": unet}


def read(model, latent, **arguments):
    """What its family reads from a call."""
    given = {"x": torch.zeros(latent), "context": torch.zeros(1, 5, 4), "timestep": torch.ones(1)}
    return find_comfy_family(model).read_call(model, Given((), (), given | arguments))


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("scope", ["module", "block", "stage"])
def test_all_blocks_get_hooks_which_can_be_removed(make, scope):
    model = make()
    handle = speed_up_model(find_comfy_family(model), model, Chosen(merge=Merge(scope=scope, skip_blocks=())))
    assert handle.summary().merge.left_whole == ()
    assert len(our_hooks(model)) > 4
    handle.remove()
    assert our_hooks(model) == []


class TestFlux:
    def test_the_image_is_between_text_and_references(self):
        call = read(flux(), (1, 16, 17, 16), ref_latents=[torch.zeros(1, 16, 8, 8)])
        assert call.grids == {"double": Grid(9, 8), "single": Grid(9, 8)}
        assert call.image_at == -(72 + 16)
        assert (call.length("double"), call.length("single")) == (88, 93)
        assert call.joint

    def test_the_first_blocks_are_left_whole(self):
        assert find_comfy_family(flux()).skip_blocks(flux()) == (0, 4)

    def test_calls_that_cannot_be_merged(self):
        size = (1, 16, 16, 16)
        assert "mask" in read(flux(), size, attention_mask=torch.ones(1)).left_whole
        options = {"patches": {"post_input": [print]}}
        assert "post_input" in read(flux(), size, transformer_options=options).left_whole
        assert "ControlNet" in read(flux(), size, control={"input": []}).block_by_block
        replaced = {"patches_replace": {"dit": {("double_block", 0): print}}}
        assert "replace blocks" in read(flux(), size, transformer_options=replaced).block_by_block
        assert read(flux(), size).left_whole is read(flux(), size).block_by_block is None


class TestQwenImage:
    def test_calls_that_cannot_be_merged(self):
        reference = {"ref_latents": [torch.zeros(1, 16, 1, 8, 8)], "ref_latents_method": "index_timestep_zero"}
        assert "time of their own" in read(qwen_image(), (1, 16, 1, 16, 16), **reference).blocks_left_whole
        assert "3 layers" in read(qwen_image(), (1, 16, 3, 16, 16)).left_whole


class TestUNet:
    def test_patches_of_other_nodes(self):
        def call(**options):
            return read(unet(), (1, 4, 16, 16), timesteps=torch.ones(1), transformer_options=options)

        assert "patch its blocks (attn1)" in call(patches_replace={"attn1": {0: print}}).blocks_left_whole
        assert "attn2_patch" in call(patches={"attn2_patch": [print]}).blocks_left_whole
        assert "resize the picture" in call(patches={"input_block_patch": [print]}).left_whole
        assert call().left_whole is call().blocks_left_whole is None

    def test_models_of_videos_are_others(self):
        video = unet()
        for module in video.modules():
            if type(module).__name__ == "SpatialTransformer":
                module.__class__ = type("SpatialVideoTransformer", (nn.Module,), {})
        assert "cannot be merged" in find_comfy_family(video).obstacle(video)


def test_a_subclass_is_another_model():
    class Vace(type(flux())):
        pass

    assert "tokens of Vace cannot be merged" in find_comfy_family(Vace()).obstacle(Vace())
