"""apply_toma on the newest families: what attention and feed-forward layers see, when plans choose, what is said.

That it leaves no trace is in test_apply.py, with all families; special inputs are in test_today_inputs.py.
"""

import pytest
import torch
from observe import CountOperators, attention_lengths, inputs_of, same_picture, state_of
from pairs import named, pairwise
from tiny import ONE_PLAN, SCOPES, SETTINGS, STRIDED, in_dtype, output_of, with_sample
from tiny_today import TODAY

from toma_diffusion import PRESETS, ToMAConfig, apply_toma, remove_toma

BY_NAME = {family.name: family for family in TODAY}
families = pytest.mark.parametrize("family", TODAY, ids=named)


def lengths_seen(name: str, kept: int) -> list[tuple[int, int]]:
    """(query, key) of every attention, with so many of 64 image tokens. The prompt has 6 tokens."""
    joint, captioned = (6 + kept, 6 + kept), (64 + kept, 64 + kept)
    return {
        "flux2": [joint] * 5,
        "flux3": [(6, 6)] * 2 + [(kept, kept)] * 2 + [joint] * 3,  # text alone, image alone, both
        "qwen-image": [joint] * 3,
        "qwen-image-21": [(6, 6), (kept, 6 + kept)] * 3,  # the prompt does not attend to the image
        "z-image": [(64, 64)] * 2 + [captioned] * 3,  # refiners of the image and of captions padded to 64
        "krea2": [(2, 2), (6, 6)] + [joint] * 3,  # the layers of the text encoder, the text
        "chroma": [joint] * 5,
        "auraflow": [(14 + kept, 14 + kept)] * 5,  # with 8 tokens of the model's own
    }[name]


@pytest.mark.parametrize(("family", "scope", "ratio"), pairwise(TODAY, SCOPES, (0.5, 0.75)), ids=named)
def test_lengths_that_attention_sees(family, scope, ratio):
    model = family.build()
    assert attention_lengths(lambda: family.call(model)) == lengths_seen(family.name, 64)
    apply_toma(model, **SETTINGS | {"ratio": ratio}, scope=scope)
    assert attention_lengths(lambda: family.call(model)) == lengths_seen(family.name, int(64 * (1 - ratio)))


FEED_FORWARD = {
    "flux2": {"transformer_blocks.0.ff": 32, "transformer_blocks.0.ff_context": 6},
    "flux3": {"mode_blocks.image.0.ff": 32, "single_transformer_blocks.0.ff": 38, "txt_mode_blocks.0.ff": 6},
    "qwen-image": {"transformer_blocks.0.img_mlp": 32, "transformer_blocks.0.txt_mlp": 6},
    "qwen-image-21": {"transformer_blocks.0.img_mlp": 38},
    "z-image": {"layers.0.feed_forward": 96, "noise_refiner.0.feed_forward": 64},
    "krea2": {"transformer_blocks.0.ff": 38},
    "chroma": {"transformer_blocks.0.ff": 32, "single_transformer_blocks.0.proj_mlp": 38},
    "auraflow": {"joint_transformer_blocks.0.ff": 32, "single_transformer_blocks.0.ff": 46},
}
"""Their lengths at ratio 0.5."""


@pytest.mark.parametrize(("family", "scope"), pairwise(TODAY, SCOPES), ids=named)
def test_lengths_that_feed_forward_layers_see(family, scope):
    model = family.build()
    apply_toma(model, **SETTINGS, scope=scope)
    for name, length in FEED_FORWARD[family.name].items():
        args, kwargs = inputs_of(model.get_submodule(name), lambda: family.call(model))[0]
        assert (args[0] if args else kwargs["hidden_states"]).shape[1] == length


FUSED = {"flux2": 3, "chroma": 3}
"""Single blocks whose attention and MLP run on the same merged tokens."""


@families
class TestSites:
    @pytest.mark.parametrize("site", ["attn", "ff"])
    def test_only_the_ones_asked_for(self, family, site):
        model = family.build()
        apply_toma(model, **SETTINGS, sites=(site,))
        whole, merged = lengths_seen(family.name, 64), lengths_seen(family.name, 32)
        fused = FUSED.get(family.name, 0)
        expected = merged if site == "attn" else whole[: len(whole) - fused] + merged[len(whole) - fused :]
        assert attention_lengths(lambda: family.call(model)) == expected

    def test_there_is_no_cross_attention(self, family):
        with pytest.raises(ValueError, match="has none of the sites cross_attn"):
            apply_toma(family.build(), **SETTINGS, sites=("cross_attn",))


@pytest.mark.parametrize(("family", "scope", "passes"), pairwise(TODAY, SCOPES, (1, 2)), ids=named)
def test_two_generations_follow_the_schedule(family, scope, passes):
    """A loop over the denoiser, one or two calls a step. The second call uses the plans of the first."""
    model = family.build()
    apply_toma(model, **SETTINGS, select_every=4, reweigh_every=2, scope=scope, share="plan")
    for generation in range(2):
        prompts = [family.inputs(seed=10 * generation + index) for index in range(passes)]
        with CountOperators() as count:
            for _ in range(5):
                latent = with_sample(prompts[0], torch.randn_like)
                name = next(name for name in ("hidden_states", "x") if name in latent)
                for prompt in prompts:
                    output_of(model, prompt | {name: latent[name]})
        assert count.calls["facility_location"] == 2 * family.kinds  # in steps 0 and 4
        assert count.calls["merge_weights"] == 3 * family.kinds  # and in 2


@families
class TestSizes:
    def test_sizes_and_batches_between(self, family):
        model = family.build()
        apply_toma(model, **STRIDED)
        for batch, (height, wide) in ((2, family.odd[0]), (1, family.odd[1]), (3, family.odd[0]), (2, family.odd[0])):
            output = family.call(model, batch=batch, height=height, wide=wide)
            fresh = family.build()
            apply_toma(fresh, **STRIDED)
            same_picture(output, family.call(fresh, batch=batch, height=height, wide=wide))

    def test_odd_sizes_are_merged(self, family):
        model = family.build()
        handle = apply_toma(model, **SETTINGS)
        for height, wide in family.odd:
            assert family.call(model, height=height, wide=wide).isfinite().all()
            latents = family.name in ("z-image", "auraflow")
            tokens = height * wide // (4 if latents else 1)
            for kind in handle.summary().kinds:
                assert kind.tokens_before == tokens
                assert kind.tokens_after < tokens

    def test_plans_of_sizes_no_longer_used_are_freed(self, family):
        model = family.build()
        apply_toma(model, **SETTINGS)
        for side in (8, 12, 16, 20):
            family.call(model, height=side, wide=side)
        assert len(state_of(model)._plans) <= 2 * len(state_of(model).slots)

    def test_reset_begins_anew(self, family):
        model = family.build()
        handle = apply_toma(model, **ONE_PLAN, select_every=10, reweigh_every=10)
        inputs = family.inputs()
        with CountOperators() as count:
            for _ in range(3):
                output_of(model, inputs)
            handle.reset()
            output_of(model, inputs)
        assert count.calls["facility_location"] == 2 * family.kinds


OWN_CHOICE = ("z-image", "auraflow")
"""Every sample has its own positions, or they are in the tokens already. The others have one table for the batch."""


@families
def test_samples_are_independent_of_their_batch(family):
    """Where one table is for all, a batch is its own choice."""
    model = family.build().double()
    apply_toma(model, **ONE_PLAN)
    inputs = in_dtype(family.inputs(), torch.float64)
    together = output_of(model, inputs)

    def one(index: int) -> dict:
        shared = {"img_ids", "txt_ids", "position_ids"}
        return {name: value if name in shared else value[index : index + 1] for name, value in inputs.items()}

    alone = torch.cat([output_of(model, one(index)) for index in range(2)])
    assert torch.allclose(alone, together, atol=1e-4) == (family.name in OWN_CHOICE)
    chosen = [plan.positions for plan in state_of(model).current.values()]
    assert chosen
    model(**inputs)
    for plan in state_of(model).current.values():
        assert torch.equal(plan.positions[0], plan.positions[-1]) == (family.name not in OWN_CHOICE)


class TestSkipBlocks:
    @pytest.mark.parametrize(("family", "scope"), pairwise(TODAY, SCOPES), ids=named)
    def test_skipped_blocks_see_all_tokens(self, family, scope):
        model = family.build()
        handle = apply_toma(model, **SETTINGS | {"skip_blocks": (0,)}, scope=scope)
        whole, merged = lengths_seen(family.name, 64), lengths_seen(family.name, 32)
        first = next(index for index, pair in enumerate(whole) if pair != merged[index])
        expected = [*merged[:first], whole[first], *merged[first + 1 :]]
        assert attention_lengths(lambda: family.call(model)) == expected
        assert [reason for _, reason in handle.summary().left_alone] == ["in skip_blocks"]


DEEP = {
    "flux2": {"num_layers": 8, "num_single_layers": 16},
    "flux3": {"num_layers": 8, "num_single_layers": 16},
    "qwen-image": {"num_layers": 16},
    "qwen-image-21": {"num_layers": 16},
    "z-image": {"n_layers": 16},
    "krea2": {"num_layers": 16},
    "chroma": {"num_layers": 8, "num_single_layers": 16},
    "auraflow": {"num_mmdit_layers": 8, "num_single_dit_layers": 16},
}
LEFT_WHOLE = {
    "flux2": ("transformer_blocks", "single_transformer_blocks"),
    "flux3": ("mode_blocks.image", "single_transformer_blocks"),
    "qwen-image": ("transformer_blocks",),
    "qwen-image-21": ("transformer_blocks",),
    "z-image": ("layers",),
    "krea2": ("transformer_blocks",),
    "chroma": ("transformer_blocks", "single_transformer_blocks"),
    "auraflow": ("joint_transformer_blocks", "single_transformer_blocks"),
}
"""The first two of each: an eighth of the blocks, of joint blocks before single ones a quarter."""


@families
class TestSummary:
    def test_defaults_of_the_family(self, family):
        """First blocks are left whole, and destinations are selected in every step; but not against a configuration."""
        model = family.build(**DEEP[family.name])
        summary = apply_toma(model, ratio=0.5).summary()
        left_whole = [f"{stack}.{index}" for stack in LEFT_WHOLE[family.name] for index in range(2)]
        assert [name for name, _ in summary.left_alone] == left_whole
        assert (summary.config.select_every, summary.config.reweigh_every) == (1, 1)
        text = " ".join(str(summary).split())
        used = f"select_every=1, reweigh_every=1, skip_blocks={summary.config.skip_blocks}"
        assert f"defaults of this model family: {used}" in text
        assert f"left alone, {len(left_whole)} blocks: in skip_blocks" in text
        remove_toma(model)
        summary = apply_toma(model, ToMAConfig()).summary()
        assert summary.left_alone == ()
        assert "defaults of this model family" not in str(summary)

    def test_what_is_merged(self, family):
        model = family.build()
        handle = apply_toma(model, **SETTINGS)
        assert "not called yet" in str(handle.summary())
        family.call(model)
        summary = handle.summary()
        assert len(summary.kinds) == family.kinds
        for kind in summary.kinds:
            assert (kind.grid, kind.tokens_before, kind.tokens_after) == ("8×8", 64, 32)
            assert "64 → 32" in str(summary)
        fused = FUSED.get(family.name, 0)
        blocks = sum(kind.blocks for kind in summary.kinds)
        assert sum(kind.sites for kind in summary.kinds) == 2 * blocks - fused
        assert summary.merged_multiplications < summary.multiplications


# Two families for each: presets are settings, which the tests above try on every family.
@pytest.mark.parametrize(
    ("family", "preset"),
    [(TODAY[(index + half) % 8], preset) for index, preset in enumerate(sorted(PRESETS)) for half in (0, 4)],
    ids=named,
)
def test_every_preset_runs(family, preset):
    model = family.build()
    before = family.call(model)
    settings = SETTINGS | {"window": (0.0, 1.0), "min_tokens": 0}  # the grids are small, and steps are few
    handle = apply_toma(model, preset, **settings)
    steps = 6 if PRESETS[preset].skip is not None else 1
    handle.begin(steps)
    for step in range(steps):
        handle.step(step)
        output = family.call(model)
    assert output.isfinite().all()
    _, predicted = handle.summary().steps
    assert predicted or not torch.equal(output, before)


class TestSizeAwareAttention:
    @pytest.mark.parametrize("scope", SCOPES)
    @pytest.mark.parametrize("family", [BY_NAME["flux2"]], ids=named)
    def test_it_changes_the_picture_a_little(self, family, scope):
        pictures = []
        for size_aware in (False, True):
            model = family.build()
            apply_toma(model, **SETTINGS, scope=scope, size_aware_attention=size_aware)
            pictures.append(family.call(model))
        assert not torch.equal(*pictures)
        assert (pictures[0] - pictures[1]).abs().mean() < 0.5 * pictures[0].abs().mean()

    @pytest.mark.parametrize("family", [family for family in TODAY if family.name != "flux2"], ids=named)
    def test_attention_without_a_bias_is_refused(self, family):
        with pytest.raises(ValueError, match="size_aware_attention=True is not possible here"):
            apply_toma(family.build(), **SETTINGS, size_aware_attention=True)
