"""Merging on every family and in every scope: it acts, it leaves no trace, it is said what it does."""

import pytest
import torch
from merging import merged, remove, steady
from observe import attention_lengths, bookkeeping, inputs_of, our_hooks, same_picture, state_of
from pairs import in_turn, named, pairwise
from tiny import (
    ALL,
    AUDIO_TOKENS,
    BUILDERS,
    EVERY_FAMILY,
    SCOPES,
    chosen,
    flux_transformer,
    one,
    outputs_of,
    sd15_unet,
    sdxl_unet,
)
from torch import nn

from toma_diffusion import Handle, Merge, UsageError, apply_toma, speed_up
from toma_diffusion.families import find_family, register_family

every_family = pytest.mark.parametrize("family", ALL, ids=named)
families_and_scopes = pytest.mark.parametrize(
    ("family", "scope"), [(family, scope) for family in ALL for scope in SCOPES], ids=named
)


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, ours, theirs))


@families_and_scopes
def test_it_changes_the_output_and_leaves_no_trace(family, scope):
    """Where no token is removed, switched off, and removed it is the original, bit for bit."""
    model, inputs = family.build(), family.inputs()
    whole, hooks = outputs_of(model, inputs), bookkeeping(model)
    with merged(model, min_tokens=1000, scope=scope), pytest.warns(UserWarning, match="no token is removed"):
        assert equal(outputs_of(model, inputs), whole)
    handle = merged(model, scope=scope)
    ours = outputs_of(model, inputs)
    assert [(each.shape, bool(each.isfinite().all())) for each in ours] == [(each.shape, True) for each in whole]
    assert not torch.allclose(ours[0], whole[0], atol=1e-3)
    handle.enabled = False
    assert equal(outputs_of(model, inputs), whole)
    handle.enabled = True
    assert not equal(outputs_of(model, inputs), whole)
    remove(model)
    assert equal(outputs_of(model, inputs), whole)
    assert our_hooks(model) == []
    assert bookkeeping(model) == hooks


@pytest.mark.parametrize(("family", "scope"), pairwise(BUILDERS, SCOPES), ids=named)
def test_an_error_half_way_leaves_nothing_behind(family, scope):
    model = family.build()
    before = family.call(model)
    steady(model, scope=scope)
    ours = family.call(model)

    def fail(*_):
        raise KeyboardInterrupt

    last = model.get_submodule(state_of(model).records[-1].name)
    broken = [layer for layer in last.modules() if isinstance(layer, nn.Linear)][-1].register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        family.call(model)
    broken.remove()
    same_picture(family.call(model), ours)
    remove(model)
    assert torch.equal(family.call(model), before)


def expected_lengths(family, whole: list[tuple[int, int]], ratio: float, scope: str) -> list[tuple[int, int]]:
    found = []
    for index, (queries, keys) in enumerate(whole):
        audio_asks = queries == AUDIO_TOKENS and scope == "module"  # then it sees the whole video
        lengths = queries if index < family.alone else family.reduced(queries, ratio)
        found.append((lengths, keys if index < family.alone or audio_asks else family.reduced(keys, ratio)))
    return found


@pytest.mark.parametrize(("family", "scope"), pairwise(ALL, ("module", "stage")), ids=named)
def test_attention_sees_fewer_tokens(family, scope):
    model = family.build()
    whole = attention_lengths(lambda: family.call(model))
    merged(model, scope=scope, ratio=0.75)
    lengths = attention_lengths(lambda: family.call(model))
    assert lengths == expected_lengths(family, whole, 0.75, scope) != whole


@every_family
def test_so_do_feed_forward_layers(family):
    """Of the first block of every kind. Flux's single blocks have theirs between norm and projection."""
    model = family.build()
    layers = {}
    for block in find_family(model).blocks(model):
        names = ("ff", "img_mlp", "ffn", "feed_forward", "proj_mlp")
        layers.setdefault(block.kind, [getattr(block.module, name) for name in names if hasattr(block.module, name)])
    whole, lengths = [], []
    for seen in (whole, lengths):
        for layer in [each for found in layers.values() for each in found]:
            args, kwargs = inputs_of(layer, lambda: family.call(model))[0]
            seen.append((args[0] if args else next(iter(kwargs.values()))).shape[1])
        if seen is whole:
            merged(model)
    assert lengths == [family.reduced(length) for length in whole]


WITH_BOTH = ("flux", "flux2", "chroma", "hunyuan", "hunyuan-replace")
"""Families with blocks in which attention and MLP are one site."""


@pytest.mark.parametrize("sites", [("attn",), ("ff",), ("cross_attn",)], ids=str)
@every_family
def test_only_the_sites_asked_for(family, sites):
    """Where attention and MLP are one site, it is merged for either."""
    model = family.build()
    roles = {role for block in find_family(model).blocks(model) for spec in block.sites for role in spec.roles}
    if not roles & set(sites):
        with pytest.raises(UsageError, match="has none of the sites cross_attn"):
            merged(model, sites=sites)
        return
    handle = merged(model, sites=sites)
    found = {spec.name for block in find_family(model).blocks(model) for spec in block.sites if spec.roles & set(sites)}
    assert {name.split(".")[-1] for record in state_of(model).records for name in record.merged} == found
    whole = attention_lengths(lambda: family.call(family.build()))
    lengths = attention_lengths(lambda: family.call(model))
    changed = [(ours, theirs) for ours, theirs in zip(lengths, whole, strict=True) if ours != theirs]
    cross_only = [ours for ours, theirs in changed if ours[1] == theirs[1] and "attn" not in sites]
    assert bool(changed) == ("attn" in sites or "cross_attn" in sites or family.name in WITH_BOTH)
    if sites == ("cross_attn",):
        assert len(cross_only) == len(changed)
    assert handle.summary().merge.kinds


@pytest.mark.parametrize(("family", "scope"), pairwise(BUILDERS, SCOPES), ids=named)
def test_blocks_in_skip_blocks_see_all_tokens(family, scope):
    model = family.build()
    handle = merged(model, scope=scope, skip_blocks=(0,))
    block = find_family(model).blocks(model)[0].module
    attention = next(getattr(block, name) for name in ("attn1", "attn", "attention") if hasattr(block, name))
    ours = inputs_of(attention, lambda: family.call(model))[0]
    remove(model)
    whole = inputs_of(attention, lambda: family.call(model))[0]
    for mine, theirs in ((ours[0], whole[0]), (ours[1].values(), whole[1].values())):
        shapes = [[each.shape for each in values if isinstance(each, torch.Tensor)] for values in (mine, theirs)]
        assert shapes[0] == shapes[1]
    handle = merged(model, scope=scope, skip_blocks=(0,))
    assert handle.summary().merge.left_whole == ((find_family(model).blocks(model)[0].name, "in skip_blocks"),)
    assert "left whole, 1 block: in skip_blocks" in str(handle.summary())


LEFT_WHOLE = {
    "flux": ("transformer_blocks", "single_transformer_blocks"),
    "flux2": ("transformer_blocks", "single_transformer_blocks"),
    "flux3": ("mode_blocks.image", "single_transformer_blocks"),
    "chroma": ("transformer_blocks", "single_transformer_blocks"),
    "hunyuan": ("transformer_blocks", "single_transformer_blocks"),
    "auraflow": ("joint_transformer_blocks", "single_transformer_blocks"),
    "z-image": ("layers",),
    "wan": ("blocks",),
}
"""The others have `transformer_blocks` alone."""
LAYERS = ("num_layers", "num_single_layers")


class TestDefaultsOfAFamily:
    @pytest.mark.parametrize("family", [family for family in ALL if family.name in [*LEFT_WHOLE, "krea2", "h3"]])
    def test_first_blocks_are_left_whole(self, family):
        """An eighth, of joint blocks before single ones a quarter; of Flux.1 five of each, as in the paper."""
        stacks = LEFT_WHOLE.get(family.name, ("transformer_blocks",))
        first, second = ("num_mmdit_layers", "num_single_dit_layers") if family.name == "auraflow" else LAYERS
        if family.name == "z-image":
            changes = {"n_layers": 16}
        else:
            changes = {first: 8, second: 16} if len(stacks) == 2 else {first: 16}
        model = family.build(**changes)
        number = 5 if family.name == "flux" else 2
        handle = speed_up(model, merge=Merge(num_regions=4))
        left_whole = handle.summary().merge.left_whole
        assert [name for name, _ in left_whole] == [f"{stack}.{index}" for stack in stacks for index in range(number)]
        assert all(reason.startswith("by default (skip_blocks=") for _, reason in left_whole)
        handle.remove()
        assert not merged(model, skip_blocks=()).summary().merge.left_whole

    def test_where_nothing_is_left_to_merge_the_error_is_short(self):
        """Five blocks of Flux: the family leaves all of them whole."""
        model = flux_transformer()
        for call in (apply_toma, lambda model: speed_up(model, merge=Merge())):
            with pytest.raises(
                UsageError, match=r"nothing would be merged .*5 transformer blocks.*skip_blocks=\(\)"
            ) as error:
                call(model)
            assert len(str(error.value)) < 200
            assert our_hooks(model) == []
        assert merged(model, skip_blocks=()).summary().merge.left_whole == ()

    @pytest.mark.parametrize("name", ["sd15", "sdxl", "sd3", "pixart"])
    def test_some_mind_nothing(self, name):
        assert speed_up(one(name).build(), merge=Merge(scope="block", num_regions=4)).summary().merge.left_whole == ()


class TestErrors:
    def test_pieces_of_the_sequence(self):
        """Chunking switched on later: refused at the call, in words."""
        model = sd15_unet()
        merged(model)
        for module in model.modules():
            if hasattr(module, "set_chunk_feed_forward"):
                module.set_chunk_feed_forward(chunk_size=8, dim=1)
        with pytest.raises(ValueError, match="calls this module on pieces of the sequence"):
            one("sd15").call(model)

    def test_an_attention_mask_over_image_tokens(self):
        model = sd15_unet()
        merged(model)
        with pytest.raises(UsageError, match="attention_mask over image tokens"), torch.no_grad():
            model(**one("sd15").inputs(), attention_mask=torch.ones(2, 256))

    @pytest.mark.parametrize("wrong", [3, nn.Linear, "flux"])
    def test_only_families_can_be_registered(self, wrong):
        with pytest.raises(UsageError, match="is not a subclass of"):
            register_family(wrong)


class TestSizes:
    @pytest.mark.parametrize("family", EVERY_FAMILY, ids=named)
    def test_sizes_and_batches_may_change_from_call_to_call(self, family):
        model = family.build()
        handle = steady(model)
        sizes = [(2, *family.odd[0]), (1, *family.odd[1]), (3, *family.odd[0])]
        fresh = []
        for batch, height, wide in sizes:
            other = family.build()
            steady(other)
            fresh.append(family.call(other, batch=batch, height=height, wide=wide))
        for (batch, height, wide), expected in zip([*sizes, *sizes], [*fresh, *fresh], strict=True):
            same_picture(family.call(model, batch=batch, height=height, wide=wide), expected)
            assert all(kind.tokens_after < kind.tokens_before for kind in handle.summary().merge.kinds)

    @pytest.mark.parametrize(
        ("family", "scope"), in_turn(chosen("sd15", "sd3", "pixart", "z-image", "wan"), SCOPES), ids=named
    )
    def test_a_batch_is_its_samples(self, family, scope):
        """Where samples do not share positions."""
        model, inputs = family.build(), family.inputs()
        steady(model, scope=scope, guidance_parts=1)
        together = outputs_of(model, inputs)[0]
        for index in range(2):
            alone = {name: of_sample(value, index) for name, value in inputs.items()}
            same_picture(outputs_of(model, alone)[0], together[index : index + 1])


def of_sample(value, index: int):
    if isinstance(value, dict):
        return {name: of_sample(inner, index) for name, inner in value.items()}
    if isinstance(value, list) or (isinstance(value, torch.Tensor) and value.ndim and len(value) == 2):
        return value[index : index + 1]
    return value


class TestSummary:
    @every_family
    def test_before_and_after_a_call(self, family):
        model = family.build()
        handle = merged(model)
        assert {kind.tokens_before for kind in handle.summary().merge.kinds} == {None}
        family.call(model)
        summary = handle.summary().merge
        assert len(summary.kinds) == family.kinds
        for kind in summary.kinds:
            assert kind.tokens_after == kind.tokens_before // 2
            assert f"{kind.tokens_before} → {kind.tokens_after}" in str(handle.summary())
            assert "4 tiles of" in kind.regions or family.given
            if not family.grids:
                assert kind.tokens_before == family.tokens
        assert 0.3 < summary.merged_multiplications / summary.multiplications < 0.8

    def test_multiplications_follow_the_paper(self):
        """One UNet level written out: 7d²N + 2dN² a block, and what merging adds."""
        model = sd15_unet(down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"))
        handle = merged(model, select_every=10, reweigh_every=5)
        model(torch.randn(1, 4, 32, 32), 3, torch.randn(1, 7, 32))
        d, n, k, regions, sites = 64, 256, 128, 4, 3
        summary = handle.summary().merge
        assert summary.multiplications == 7 * d**2 * n + 2 * d * n**2
        merging = sites * 2 * d * n * k / regions
        plan = n**2 * d / regions / 10 + (n * k * d / regions + n * d) / 5
        assert summary.merged_multiplications == pytest.approx(7 * d**2 * k + 2 * d * k**2 + merging + plan)

    def test_grids_on_which_nothing_is_removed(self):
        """A region of 2 tokens cannot lose a quarter of them; small grids can be left whole."""
        model = sdxl_unet(
            down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        )
        inputs = one("sdxl").inputs(height=16, wide=16)
        handle = merged(model, ratio=0.25, num_regions=64)
        outputs_of(model, inputs)
        (note,) = handle.summary().notes
        assert note.startswith("nothing was merged on the 8×8 grid of level 1: left whole")
        remove(model)
        handle = merged(model, min_tokens=100)
        outputs_of(model, inputs)
        regions = {kind.grid: kind.regions for kind in handle.summary().merge.kinds}
        assert regions == {"16×16": "4 tiles of 8×8", "8×8": "left whole: fewer than min_tokens=100"}


class TestSharing:
    """Runs of blocks of one kind have plans of their own, or share one."""

    @pytest.mark.parametrize("scope", SCOPES)
    @pytest.mark.parametrize("share_plan", [False, True])
    def test_plans(self, scope, share_plan):
        model = sdxl_unet()
        merged(model, scope=scope, share_plan=share_plan)
        one("sdxl").call(model)
        runs = sum(type(module).__name__ == "Transformer2DModel" for module in model.modules())
        plans = list(state_of(model).current.values())
        assert len(plans) == (1 if share_plan else runs)
        assert share_plan or not torch.equal(plans[0].positions, plans[1].positions)


class TestSeveralModels:
    def test_one_handle_for_two(self):
        family = one("sd15")
        first, second = sd15_unet(), sd15_unet()
        plain = family.call(first)
        handle = merged([first, second])
        ours = family.call(first)
        assert not torch.equal(ours, plain)
        same_picture(family.call(second), ours)
        assert len(handle.summary().others) == 1
        assert "Denoiser 2 of 2:" in str(handle.summary())
        handle.enabled = False
        assert torch.equal(family.call(first), plain)
        assert torch.equal(family.call(second), plain)
        Handle.of(first).remove()  # the rest of the handle goes on
        handle.enabled = True
        assert not torch.equal(family.call(second), plain)
        handle.remove()
        assert our_hooks(first) == our_hooks(second) == []
        with pytest.raises(RuntimeError, match="speed_up again"):
            handle.summary()
