"""Inputs that only some families take: given pictures, padded prompts, KV caches, lists; and what is refused."""

from functools import partial

import diffusers
import pytest
import torch
from merging import remove, steady
from observe import AttentionLengths, attention_lengths, same_picture
from pairs import in_turn
from tiny import (
    SCOPES,
    flux2_edit,
    flux_inputs,
    flux_transformer,
    ids,
    missing,
    needs,
    one,
    output_of,
    qwen21_edit,
    qwen21_inputs,
    qwen21_padded,
    qwen_edit,
    random,
)
from torch import nn

from toma_diffusion import UsageError
from toma_diffusion.families.refused import REFUSED

scopes = pytest.mark.parametrize("scope", SCOPES)
FLUX2, FLUX3, QWEN, QWEN21, Z_IMAGE, KREA2, CHROMA = (
    needs(f"{name}Transformer2DModel")
    for name in ("Flux2", "Flux3", "QwenImage", "QwenImage21", "ZImage", "Krea2", "Chroma")
)
TEXT, IMAGE, REFERENCE = 6, 64, 24
"""Tokens of the prompt, of the picture that is made and of a given one, 4×6."""


def both(length: int) -> tuple[int, int]:
    """Queries and keys of a sequence, with half of the image."""
    return length + IMAGE // 2, length + IMAGE // 2


def kontext(*references: tuple[int, int]) -> dict:
    """Flux.1 Kontext: reference images follow the image that is being made, in one sequence."""
    inputs = flux_inputs()
    all_ids = [inputs["img_ids"], *(ids(*size, first=1 + index) for index, size in enumerate(references))]
    more = random(2, sum(height * width for height, width in references), 4)
    return inputs | {
        "img_ids": torch.cat(all_ids),
        "hidden_states": torch.cat([inputs["hidden_states"], more], dim=1),
    }


def without(name: str, argument: str) -> dict:
    return one(name).inputs() | {argument: None}


BEFORE = TEXT + REFERENCE
OTHER_INPUTS = [
    ("flux", {}, partial(kontext, (8, 8), (3, 5)), {both(TEXT + 79)}),
    ("flux2", {}, partial(flux2_edit, 10, 20), {both(TEXT + 2 * REFERENCE)}),
    ("qwen-image", {}, partial(qwen_edit, (4, 6), (8, 8)), {both(BEFORE + 64)}),
    ("qwen-image", {"zero_cond_t": True}, partial(qwen_edit, (4, 6), (8, 8)), {both(BEFORE + 64)}),
    ("qwen-image-21", {}, qwen21_padded, {(TEXT, TEXT), (IMAGE // 2, TEXT + IMAGE // 2)}),
    ("qwen-image-21", {}, qwen21_edit, {(2, 2), (REFERENCE, 26), (4, BEFORE), (IMAGE // 2, BEFORE + IMAGE // 2)}),
    # 49 tokens are padded to 64; the captions of 5 and 45 to 32 and 64, the shorter one then to 64.
    ("z-image", {}, partial(one("z-image").inputs, height=14, wide=14), {(64, 64), (104, 104)}),
    ("krea2", {}, partial(without, "krea2", "encoder_attention_mask"), {(2, 2), (6, 6), both(TEXT)}),
    ("chroma", {}, partial(without, "chroma", "attention_mask"), {both(TEXT)}),
]


@scopes
@pytest.mark.parametrize(("name", "changes", "make", "lengths"), OTHER_INPUTS)
def test_only_the_picture_that_is_made_is_merged(name, changes, make, lengths, scope):
    """Given pictures and text stay whole. Removed, the model is the original again."""
    model = one(name).build(**changes)
    plain = output_of(model, make())
    steady(model, scope=scope, num_regions=1)
    ours = output_of(model, make())
    assert set(attention_lengths(lambda: output_of(model, make()))) == lengths
    assert ours.isfinite().all()
    assert ours.shape == plain.shape
    assert not torch.allclose(ours, plain, atol=1e-3)
    remove(model)
    assert torch.equal(output_of(model, make()), plain)


def refuses(model: nn.Module, inputs: dict, match: str) -> None:
    """While merging is on. Switched off, the model is as it was."""
    plain = output_of(model, inputs)
    handle = steady(model)
    with pytest.raises(UsageError, match=match):
        output_of(model, inputs)
    handle.enabled = False
    assert torch.equal(output_of(model, inputs), plain)
    remove(model)
    assert torch.equal(output_of(model, inputs), plain)


@pytest.mark.parametrize(
    ("img_ids", "told"),
    [
        (ids(8, 8)[torch.randperm(64, generator=torch.Generator().manual_seed(0))], "64 image tokens"),
        (torch.cat([ids(7, 8), ids(7, 8)[:8]]), r"7×8, with 64 tokens"),
        (torch.cat([ids(4, 8), ids(4, 8)]), r"4×8, with 64 tokens"),
        (ids(8, 8)[:60], r"the 64 image tokens.*8×8, with 60 tokens"),
        (torch.cat([ids(4, 8), ids(2, 8, first=1), ids(2, 8)]), r"4×8, with 48 tokens"),
    ],
)
def test_ids_that_are_no_grid(img_ids, told):
    model = flux_transformer()
    steady(model)
    with pytest.raises(ValueError, match=told):
        output_of(model, flux_inputs() | {"img_ids": img_ids})


@FLUX2
class TestFlux2:
    def test_ids_of_every_sample_alike(self):
        """As the pipeline passes them: [B, tokens, 4]."""
        model, inputs = one("flux2").build(), flux2_edit(10)
        batched = {name: inputs[name].expand(2, -1, -1) for name in ("img_ids", "txt_ids")}
        steady(model)
        same_picture(output_of(model, inputs | batched), output_of(model, inputs))

    def test_a_cache_of_references_is_refused(self):
        """klein puts references first in the step that fills the cache."""
        model, inputs = one("flux2").build(), flux2_edit(10)
        if "kv_cache_mode" not in type(model).forward.__wrapped__.__code__.co_varnames:
            pytest.skip(f"diffusers {diffusers.__version__} has no KV cache for FLUX.2")
        model.set_attn_processor(kv_processors(model))
        cached = {"kv_cache_mode": "extract", "num_ref_tokens": REFERENCE}
        refuses(model, inputs | cached, "KV cache puts reference images before the image")


def kv_processors(model: nn.Module) -> dict:
    from diffusers.models.transformers import transformer_flux2

    return {
        name: transformer_flux2.Flux2KVParallelSelfAttnProcessor()
        if name.startswith("single")
        else transformer_flux2.Flux2KVAttnProcessor()
        for name in model.attn_processors
    }


@FLUX3
def test_flux3_with_references_is_refused():
    references = {"image_cond_hidden_states": random(2, REFERENCE, 8), "image_cond_ids": ids(4, 6, 4, 10)}
    refuses(one("flux3").build(), one("flux3").inputs() | references, r"FLUX\.3 with reference images")


@QWEN
class TestQwenEdit:
    def test_pictures_of_several_sizes_are_refused(self):
        inputs = qwen_edit((4, 6)) | {"img_shapes": [[(1, 8, 8), (1, 4, 6)], [(1, 4, 16), (1, 4, 6)]]}
        model = one("qwen-image").build()
        steady(model)
        with pytest.raises(UsageError, match=r"\(1, 8, 8\), \(1, 4, 16\).*images of one size"):
            output_of(model, inputs)

    def test_layered_is_refused(self):
        model = one("qwen-image").build(use_layer3d_rope=True)
        with pytest.raises(UsageError, match="Qwen-Image-Layered makes several layers"):
            steady(model)


@QWEN21
class TestQwen21:
    family = one("qwen-image-21")

    def build(self) -> nn.Module:
        return self.family.build()

    def test_what_is_padding_does_not_matter(self):
        model, inputs = self.build(), qwen21_padded()
        steady(model)
        other = inputs["encoder_hidden_states"].clone()
        other[1, -2:] = 7.0
        ours, theirs = (
            output_of(model, inputs | {"encoder_hidden_states": text})[:, TEXT:]
            for text in (inputs["encoder_hidden_states"], other)
        )
        same_picture(ours, theirs)

    @pytest.mark.parametrize(("make", "scope"), in_turn([qwen21_inputs, qwen21_padded, qwen21_edit], SCOPES))
    def test_the_cached_prefix_is_the_same(self, scope, make):
        """The prompt and given pictures do not attend to the picture that is made, so merging does not touch them."""
        from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

        inputs = make()
        prefixes, pictures = [], []
        for merges in (False, True):
            model, cache = self.build(), QwenImage21KVCache(3)
            if merges:
                steady(model, scope=scope)
            for mode in ("extract", "cached"):
                pictures.append(output_of(model, inputs | {"kv_cache": cache, "kv_cache_mode": mode})[:, -IMAGE:])
            with AttentionLengths() as lengths:
                output_of(model, inputs | {"kv_cache": cache, "kv_cache_mode": "cached"})
            before, made = TEXT + (REFERENCE if make is qwen21_edit else 0), IMAGE // 2 if merges else IMAGE
            assert set(lengths.seen) == {(made, before + made)}
            layers = [cache.get_layer(index) for index in range(3)]
            prefixes.append([each for layer in layers for each in tensors_of(layer)])
        assert len(prefixes[0]) == 6
        for whole, merged in zip(*prefixes, strict=True):
            torch.testing.assert_close(merged, whole)
        filled, decoded = pictures[2:]
        same_picture(decoded, filled)  # the same step, with the prefix computed or kept
        assert not torch.allclose(filled, pictures[0], atol=1e-3)

    def test_the_flex_processor_is_refused(self):
        from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21FlexAttnProcessor

        model = self.build()
        steady(model)
        model.set_attn_processor(QwenImage21FlexAttnProcessor())
        with pytest.raises(UsageError, match=r"QwenImage21FlexAttnProcessor.*use the default QwenImage21AttnProcessor"):
            output_of(model, self.family.inputs())


def tensors_of(layer_cache: object) -> list[torch.Tensor]:
    return [value for value in vars(layer_cache).values() if isinstance(value, torch.Tensor)]


@Z_IMAGE
class TestZImage:
    family = one("z-image")

    def test_every_caption_keeps_its_own_picture(self):
        """A batch is the same as its pictures one by one, whose captions are padded otherwise."""
        model = self.family.build()
        steady(model)
        inputs = self.family.inputs()
        together = output_of(model, inputs)
        for index in range(2):
            one = {name: inputs[name][index : index + 1] for name in ("x", "cap_feats", "t")}
            same_picture(output_of(model, one), together[index : index + 1])

    def test_omni_mode_is_refused(self):
        model = self.family.build()
        steady(model)
        inputs = self.family.inputs()
        with pytest.raises(UsageError, match="omni mode"):
            output_of(model, inputs | {"x": [[each] for each in inputs["x"]]})

    def test_pictures_of_several_sizes_are_refused(self):
        pictures = [random(4, 1, 16, 16), random(4, 1, 8, 16)]
        inputs = self.family.inputs() | {"x": pictures}
        model = self.family.build()
        handle = steady(model)
        with pytest.raises(UsageError, match=r"different sizes \(\[4, 1, 16, 16\], \[4, 1, 8, 16\]\)"):
            model(**inputs)
        handle.enabled = False
        with torch.no_grad():
            assert [each.shape for each in model(**inputs)[0]] == [each.shape for each in pictures]

    def test_frames_are_refused(self):
        inputs = self.family.inputs() | {"x": [random(4, 3, 16, 16)] * 2}
        refuses(self.family.build(), inputs, "a sample of 3 frames")


@KREA2
def test_krea2_looks_at_no_padding():
    model, inputs = one("krea2").build(), one("krea2").inputs()
    steady(model)
    other = inputs["encoder_hidden_states"].clone()
    other[:, -2:] = 7.0
    same_picture(output_of(model, inputs | {"encoder_hidden_states": other}), output_of(model, inputs))


class TestRefused:
    """Families that are not supported say why."""

    @pytest.mark.parametrize("name", REFUSED)
    def test_by_name(self, name):
        """With an empty model of that very class: the reason depends on nothing else."""
        if missing(name):
            pytest.skip(missing(name))
        model_class = getattr(diffusers, name)
        model = model_class.__new__(model_class)
        nn.Module.__init__(model)
        with pytest.raises(UsageError, match=f"{name} is not supported: {REFUSED[name]}"):
            steady(model)

    def test_every_name_is_one_of_diffusers(self):
        """Of the diffusers that this is developed with."""
        lacking = [name for name in REFUSED if missing(name)]
        assert not lacking or missing("Krea2Transformer2DModel")
