"""apply_toma on every family and scope: it acts, it is scheduled, and it leaves no trace."""

from functools import cache

import pytest
import torch
from observe import CountOperators, attention_lengths, bookkeeping, inputs_of, our_hooks, same_picture, state_of
from pairs import named, pairwise
from tiny import FAMILIES, SCOPES, SETTINGS, STRIDED, flux_transformer, sd15_unet
from tiny_pipelines import flux_pipeline, sd15_pipeline
from tiny_today import EVERY_FAMILY
from torch import nn

from toma_diffusion import PRESETS, ToMAConfig, apply_toma, register_adapter, remove_toma, toma_enabled
from toma_diffusion.engine.install import find_root

every_family = pytest.mark.parametrize("family", FAMILIES, ids=named)
and_todays = pytest.mark.parametrize("family", EVERY_FAMILY, ids=named)
every_scope = pytest.mark.parametrize("scope", SCOPES)


@and_todays
@every_scope
class TestLeavesNoTrace:
    def test_changes_the_output_and_restores_it(self, family, scope):
        model = family.build()
        before, hooks_before = family.call(model), bookkeeping(model)
        handle = apply_toma(model, **SETTINGS, scope=scope)
        assert not torch.equal(family.call(model), before)
        handle.enabled = False
        assert torch.equal(family.call(model), before)
        handle.enabled = True
        assert not torch.equal(family.call(model), before)
        remove_toma(model)
        assert torch.equal(family.call(model), before)
        assert our_hooks(model) == []
        assert bookkeeping(model) == hooks_before

    def test_ratio_zero_is_bit_exact(self, family, scope):
        model = family.build()
        before = family.call(model)
        apply_toma(model, **SETTINGS | {"ratio": 0.0}, scope=scope)
        assert torch.equal(family.call(model), before)

    def test_exception_half_way(self, family, scope):
        """A layer that fails in the middle of a call leaves nothing behind that the next call trips over."""
        model = family.build()
        before = family.call(model)
        apply_toma(model, **STRIDED, scope=scope)
        merged = family.call(model)

        def fail(*_):
            raise KeyboardInterrupt

        last = model.get_submodule(find_root(model).records[-1].name)
        broken = [layer for layer in last.modules() if isinstance(layer, nn.Linear)][-1].register_forward_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            family.call(model)
        broken.remove()
        same_picture(family.call(model), merged)
        remove_toma(model)
        assert torch.equal(family.call(model), before)

    def test_context_managers(self, family, scope):
        model = family.build()
        before = family.call(model)
        with apply_toma(model, **STRIDED, scope=scope) as handle:
            merged = family.call(model)
            with toma_enabled(model, False):
                assert torch.equal(family.call(model), before)
            assert handle.enabled
            same_picture(family.call(model), merged)
        assert our_hooks(model) == []


@every_family
class TestFewerTokens:
    @every_scope
    def test_attention_sees_the_merged_length(self, family, scope):
        model = family.build()
        whole = attention_lengths(lambda: family.call(model))
        apply_toma(model, **SETTINGS, scope=scope)
        merged = attention_lengths(lambda: family.call(model))
        text = {"flux": 6, "sd3": 6}.get(family.name, 0)
        assert len(merged) == len(whole)
        for (query, key), (old_query, old_key) in zip(merged, whole, strict=True):
            joint_text = text if old_key > old_query // 2 and not (family.name == "sd3" and old_query == 64) else 0
            assert query - joint_text == (old_query - joint_text) // 2
            assert key == old_key if old_key in (6, 7) else key == query

    def test_feed_forward_sees_the_merged_length(self, family):
        model = family.build()
        linear = next(
            module.net[0] if hasattr(module, "net") else module.proj_mlp
            for module in model.modules()
            if type(module).__name__ in ("FeedForward", "FluxSingleTransformerBlock")
        )
        whole = inputs_of(linear, lambda: family.call(model))[0][0][0].shape[1]
        apply_toma(model, **SETTINGS)
        assert inputs_of(linear, lambda: family.call(model))[0][0][0].shape[1] == whole // 2

    @pytest.mark.parametrize("sites", [("attn",), ("ff",), ("cross_attn",), ("attn", "ff")])
    def test_only_the_sites_asked_for(self, family, sites):
        model = family.build()
        if sites == ("cross_attn",) and family.name in ("flux", "sd3"):
            with pytest.raises(ValueError, match="has none of the sites cross_attn"):
                apply_toma(model, **SETTINGS, sites=sites)
            return
        whole = attention_lengths(lambda: family.call(model))
        apply_toma(model, **SETTINGS, sites=sites)
        merged = attention_lengths(lambda: family.call(model))
        for (query, _), (old_query, old_key) in zip(merged, whole, strict=True):
            is_cross = old_key == (7 if family.name.startswith("sd1") or family.name == "sdxl" else 6)
            single = family.name == "flux" and state_of(model).kinds >= {"single"}
            asked = "cross_attn" in sites if is_cross else "attn" in sites
            assert (query < old_query) == asked or single

    @pytest.mark.parametrize("preset", sorted(PRESETS))
    def test_every_preset_runs(self, family, preset):
        model = family.build()
        before = family.call(model)
        # There is no pipeline to tell the number of steps, and the grids are small.
        settings = SETTINGS | {"window": (0.0, 1.0), "min_tokens": 0}
        handle = apply_toma(model, preset, **settings)
        steps = 8 if PRESETS[preset].skip is not None else 1
        handle.begin(steps)
        for step in range(steps):
            handle.step(step)
            output = family.call(model)
        assert output.isfinite().all()
        _, predicted = handle.summary().steps
        assert predicted or not torch.equal(output, before)
        assert handle.summary().config == PRESETS[preset].changed(
            settings | ({"select_every": 1, "reweigh_every": 1} if family.name == "flux" else {})
        )


@pytest.mark.parametrize(("family", "scope", "passes"), pairwise(FAMILIES, SCOPES, (1, 2)), ids=named)
def test_two_generations_follow_the_schedule(family, scope, passes):
    """A direct loop over the denoiser, one or two calls a step; a new prompt begins a new generation. The second call
    of a step uses the plans of the first: it has the same sample."""
    model = family.build()
    apply_toma(model, **SETTINGS, select_every=4, reweigh_every=2, scope=scope, share="plan")
    for generation in range(2):
        prompts = [family.inputs(seed=10 * generation + index) for index in range(passes)]
        name = "sample" if "sample" in prompts[0] else "hidden_states"
        with CountOperators() as count, torch.no_grad():
            for _ in range(9):
                latent = torch.randn_like(prompts[0][name])
                for prompt in prompts:
                    model(**prompt | {name: latent}, return_dict=False)
        assert count.calls["facility_location"] == 3 * family.kinds  # in steps 0, 4 and 8
        assert count.calls["merge_weights"] == 5 * family.kinds  # and in 2 and 6


@every_family
class TestSchedule:
    def test_sizes_and_batches_between(self, family):
        model = family.build()
        apply_toma(model, **STRIDED)
        sizes = [(2, *family.odd[0]), (1, *family.odd[1]), (3, *family.odd[0]), (4, *family.odd[1])]

        @cache
        def of_a_fresh_one(batch, height, wide):
            fresh = family.build()
            apply_toma(fresh, **STRIDED)
            return family.call(fresh, batch=batch, height=height, wide=wide)

        for batch, height, wide in [*sizes, *sizes]:
            output = family.call(model, batch=batch, height=height, wide=wide)
            same_picture(output, of_a_fresh_one(batch, height, wide))

    def test_plans_of_sizes_no_longer_used_are_freed(self, family):
        model = family.build()
        apply_toma(model, **SETTINGS)
        for side in (8, 12, 16, 20, 24, 28):
            family.call(model, height=side, wide=side)
        assert len(state_of(model)._plans) <= 2 * len(state_of(model).slots)

    def test_reset_begins_anew(self, family):
        model = family.build()
        handle = apply_toma(model, **SETTINGS, select_every=10, reweigh_every=10, share="plan")
        inputs = family.inputs()
        with torch.no_grad(), CountOperators() as count:
            for _ in range(3):
                model(**inputs)
            handle.reset()
            model(**inputs)
        assert count.calls["facility_location"] == 2 * family.kinds

    def test_samples_are_independent_of_their_batch(self, family):
        """UNets, SD3 and PixArt choose per sample. Flux must choose jointly, so there a batch is its own choice."""
        model = family.build()
        apply_toma(model, **SETTINGS)
        inputs = family.inputs(batch=2)

        def one(index: int) -> dict:
            def take(value):
                if isinstance(value, dict):
                    return {name: take(inner) for name, inner in value.items()}
                batched = isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[0] == 2
                return value[index : index + 1] if batched else value

            return {name: take(value) for name, value in inputs.items()}

        with torch.no_grad():
            together = model(**inputs, return_dict=False)[0]
            alone = torch.cat([model(**one(index), return_dict=False)[0] for index in range(2)])
        # The median: a convolution rounds differently in another batch, and may tip a tie between two tokens. Another
        # choice moves it by 9e-3 in Flux.
        assert ((together - alone).abs().median() < 2e-3) == (family.name != "flux")


@every_family
class TestSkipBlocks:
    @every_scope
    def test_skipped_blocks_see_all_tokens(self, family, scope):
        model = family.build()
        handle = apply_toma(model, **SETTINGS | {"skip_blocks": (0,)}, scope=scope)
        block = next(module for module in model.modules() if type(module).__name__.endswith("TransformerBlock"))
        attention = getattr(block, "attn1", None) or block.attn
        args, kwargs = inputs_of(attention, lambda: family.call(model))[0]
        tokens = args[0] if args else kwargs["hidden_states"]
        whole = {"sd15": 256, "sdxl": 64, "flux": 64, "sd3": 64, "pixart": 64}[family.name]
        assert tokens.shape[1] == whole
        assert len(handle.summary().left_alone) == 1
        assert "left alone, 1 block: in skip_blocks" in str(handle.summary())

    def test_index_beyond_the_last(self, family):
        with pytest.raises(ValueError, match=r"names block 99, but this .* transformer blocks"):
            apply_toma(family.build(), **SETTINGS | {"skip_blocks": (99,)})

    def test_all_skipped_raises(self, family):
        model = family.build()
        apply_toma(model, **SETTINGS)
        number = len(find_root(model).records)
        remove_toma(model)
        with pytest.raises(ValueError, match="nothing would be merged"):
            apply_toma(model, **SETTINGS | {"skip_blocks": tuple(range(number))})
        assert our_hooks(model) == []


class TestErrors:
    def test_twice(self):
        model = sd15_unet()
        apply_toma(model, **SETTINGS)
        with pytest.raises(RuntimeError, match="remove_toma"):
            apply_toma(model, **SETTINGS)

    def test_nothing_to_remove(self):
        with pytest.raises(RuntimeError, match="nothing to remove"):
            remove_toma(sd15_unet())

    def test_handle_after_removal(self):
        handle = apply_toma(sd15_unet(), **SETTINGS)
        handle.remove()
        with pytest.raises(RuntimeError, match="apply_toma again"):
            handle.summary()
        assert "removed" in repr(handle)

    @pytest.mark.parametrize("wrong", [nn.Linear(2, 2), object(), "sdxl"])
    def test_unsupported_lists_the_supported(self, wrong):
        with pytest.raises(ValueError, match="Supported are") as error:
            apply_toma(wrong)
        for name in ("UNet2DConditionModel", "FluxTransformer2DModel", "SD3Transformer2DModel", "PixArtTransformer"):
            assert name in str(error.value)

    def test_unknown_preset_and_wrong_value(self):
        with pytest.raises(ValueError, match="preset='tome' is not known"):
            apply_toma(sd15_unet(), "tome")
        with pytest.raises(ValueError, match=r"ratio=2\.0"):
            apply_toma(sd15_unet(), ratio=2.0)
        with pytest.raises(ValueError, match="3 is not a configuration"):
            apply_toma(sd15_unet(), 3)

    def test_window_of_steps_that_nobody_tells(self):
        model = sd15_unet()
        apply_toma(model, **SETTINGS, window=(0.2, 1.0))
        with pytest.raises(RuntimeError, match=r"window=\(0\.2, 1\.0\) needs the number of steps.*handle\.begin"):
            model(torch.randn(1, 4, 16, 16), 10, torch.randn(1, 7, 32))

    def test_pieces_of_the_sequence(self):
        """Chunking switched on after applying: refused at the call, in words."""
        model = sd15_unet()
        apply_toma(model, **SETTINGS)
        for module in model.modules():
            if hasattr(module, "set_chunk_feed_forward"):
                module.set_chunk_feed_forward(chunk_size=8, dim=1)
        with pytest.raises(ValueError, match="calls this module on pieces of the sequence"):
            FAMILIES[0].call(model)

    def test_sites_with_whole_blocks(self):
        with pytest.raises(ValueError, match="counts only in scope 'module'"):
            apply_toma(sd15_unet(), **SETTINGS, scope="block", sites=("attn",))

    def test_config_object_is_taken_as_it_stands(self):
        handle = apply_toma(sd15_unet(), ToMAConfig(ratio=0.25, num_regions=4), select_every=3)
        assert handle.summary().config == ToMAConfig(ratio=0.25, num_regions=4, select_every=3)

    def test_attention_mask_over_image_tokens(self):
        model = sd15_unet()
        apply_toma(model, **SETTINGS)
        with pytest.raises(ValueError, match="attention_mask over image tokens"), torch.no_grad():
            model(**FAMILIES[0].inputs(), attention_mask=torch.ones(2, 256))


class TestFamilyDefaults:
    def test_flux_leaves_its_first_blocks_alone_and_selects_in_every_step(self):
        """The paper's: 5 joint and 5 single blocks; with a preset too, but not against a whole configuration."""
        model = flux_transformer(num_layers=7, num_single_layers=8)
        for chosen in (None, "toma-tile"):
            summary = apply_toma(model, chosen, ratio=0.5).summary()
            left_alone = [name for name, _ in summary.left_alone]
            assert left_alone == [f"transformer_blocks.{i}" for i in range(5)] + [
                f"single_transformer_blocks.{i}" for i in range(5)
            ]
            assert (summary.config.select_every, summary.config.reweigh_every) == (1, 1)
            remove_toma(model)
        assert apply_toma(model, ToMAConfig()).summary().left_alone == ()

    def test_flux_too_small_for_them(self):
        with pytest.raises(ValueError, match=r"nothing would be merged .*5 transformer blocks: in skip_blocks"):
            apply_toma(flux_transformer(), ratio=0.5)

    @pytest.mark.parametrize("family", [family for family in FAMILIES if family.name != "flux"], ids=lambda f: f.name)
    def test_others_take_the_papers_schedule_for_unets(self, family):
        summary = apply_toma(family.build()).summary()
        assert summary.config == ToMAConfig()
        assert summary.left_alone == ()


class TestDefault:
    """Without a name a pipeline gets `balanced`; a model does not know its steps, which that needs."""

    def test_of_a_pipeline(self):
        with apply_toma(sd15_pipeline(), ratio=0.25) as handle:
            assert handle.summary().config == ToMAConfig.from_preset("balanced", ratio=0.25)

    def test_of_a_model(self):
        with apply_toma(sd15_unet(), ratio=0.25) as handle:
            assert handle.summary().config == ToMAConfig(ratio=0.25)

    def test_what_the_family_wants_otherwise(self):
        with apply_toma(flux_pipeline(), skip_blocks=()) as handle:
            assert handle.summary().config == ToMAConfig.from_preset("balanced")

    def test_summary_names_the_grids_left_whole(self):
        model = sd15_unet()
        handle = apply_toma(model, **SETTINGS, min_tokens=100)
        model(torch.randn(1, 4, 16, 16), 10, torch.randn(1, 7, 32))
        regions = {kind.grid: kind.regions for kind in handle.summary().kinds}
        assert regions == {"16×16": "4 tiles of 8×8", "8×8": "left whole: fewer than min_tokens=100"}
        assert "grids of fewer than 100 tokens left whole" in str(handle.summary())


class TestRegister:
    @pytest.mark.parametrize("wrong", [3, nn.Linear, "flux"])
    def test_only_adapters(self, wrong):
        with pytest.raises(ValueError, match="is not a subclass of"):
            register_adapter(wrong)


class TestSummary:
    @every_family
    def test_before_and_after_a_call(self, family):
        model = family.build()
        handle = apply_toma(model, **SETTINGS)
        assert "not called yet" in str(handle.summary())
        family.call(model)
        summary = handle.summary()
        assert len(summary.kinds) == family.kinds
        for kind in summary.kinds:
            assert kind.tokens_after == kind.tokens_before // 2
            assert f"{kind.tokens_before} → {kind.tokens_after}" in str(summary)
            assert "4 tiles of" in kind.regions
        assert 0.3 < summary.merged_multiplications / summary.multiplications < 0.75

    def test_multiplications_follow_the_paper(self):
        """One UNet level written out: 7d²N + 2dN² a block, and what merging adds."""
        model = sd15_unet(down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"))
        handle = apply_toma(model, **SETTINGS, select_every=10, reweigh_every=5)
        model(torch.randn(1, 4, 32, 32), 3, torch.randn(1, 7, 32))
        d, n, k, regions, sites = 64, 256, 128, 4, 3
        summary = handle.summary()
        assert summary.multiplications == 7 * d**2 * n + 2 * d * n**2
        merging = sites * 2 * d * n * k / regions
        plan = n**2 * d / regions / 10 + (n * k * d / regions + n * d) / 5
        assert summary.merged_multiplications == pytest.approx(7 * d**2 * k + 2 * d * k**2 + merging + plan)

    def test_a_run_of_blocks_merges_once(self):
        costs = {}
        for scope in SCOPES:
            model = FAMILIES[1].build(transformer_layers_per_block=(1, 3))
            handle = apply_toma(model, **SETTINGS, scope=scope)
            FAMILIES[1].call(model)
            costs[scope] = handle.summary().merged_multiplications
        assert costs["stage"] < costs["block"] < costs["module"]
