"""What the library promises holds for the other methods too: they act, leave no trace, and are the same each time.

Where two results are compared the models are in float64: in float32 another rounding may match other tokens.
"""

from functools import cache

import pytest
import torch
from method_cases import applied, cases, every_method
from observe import Graphs, attention_lengths, bookkeeping, compile_blocks, our_hooks, same_picture, state_of
from tiny import EVERY_FAMILY, flux_transformer, in_dtype, one, sd15_unet

from toma_diffusion import speed_up
from toma_diffusion.others import METHODS, PerBlockMethod, ToDo, ToFu, ToMeSD, register_method

SD15 = one("sd15")


class TestEveryFamily:
    @cases(EVERY_FAMILY)
    def test_acts_and_leaves_no_trace(self, method, family):
        model = family.build().double()
        before, hooks_before = family.call(model), bookkeeping(model)
        handle = applied(model, method)
        assert "not called yet" in str(handle.summary())
        changed = family.call(model)
        assert changed.isfinite().all()
        assert not torch.equal(changed, before)
        summary = handle.summary().merge
        assert {"tomesd": "ToMeSD", "tofu": "ToFu", "todo": "ToDo"}[method] in str(handle.summary())
        for kind in summary.kinds:
            assert kind.tokens_after == round(kind.tokens_before * (1 - summary.config.ratio))
        handle.enabled = False
        assert torch.equal(family.call(model), before)
        handle.enabled = True
        same_picture(family.call(model), changed)
        handle.remove()
        assert torch.equal(family.call(model), before)
        assert our_hooks(model) == []
        assert bookkeeping(model) == hooks_before

    @cases([one("sd15"), one("pixart"), one("z-image")])
    def test_sizes_and_batches_between(self, method, family):
        model = family.build().double()
        applied(model, method)
        sizes = [(2, *family.odd[0]), (1, *family.odd[1]), (4, *family.odd[0])]

        @cache
        def of_a_fresh_one(batch, height, wide):
            fresh = family.build().double()
            applied(fresh, method)
            return family.call(fresh, batch=batch, height=height, wide=wide)

        for batch, height, wide in [*sizes, *sizes]:
            output = family.call(model, batch=batch, height=height, wide=wide)
            same_picture(output, of_a_fresh_one(batch, height, wide))


class TestCompiled:
    @pytest.mark.parametrize(
        ("method", "family", "backend"),
        [
            ("tomesd", one("flux"), "eager"),
            ("tomesd", one("pixart"), "aot_eager"),
            ("tofu", one("pixart"), "eager"),
            ("todo", one("pixart"), "eager"),
        ],
        ids=lambda value: getattr(value, "name", value),
    )
    def test_the_whole_is_one_graph(self, method, family, backend):
        graphs = Graphs(backend)
        torch.compiler.reset()
        model, eager = (family.build(**family.shallow).double() for _ in range(2))
        for each in (model, eager):
            applied(each, method)
        model.compile(fullgraph=True, backend=graphs)
        for seed in range(2):
            assert torch.allclose(family.call(model, seed=seed), family.call(eager, seed=seed), atol=1e-5)
        assert graphs.count == 1
        torch.compiler.reset()

    @pytest.mark.parametrize(("method", "count"), [("tomesd", 2), ("tofu", 3), ("todo", 1)])
    def test_blocks_share_their_code(self, method, count):
        """Though every block has a plan of its own. Matching before a block is one graph, the block another; ToFu's
        blocks are of two sorts, those that prune and those that merge."""
        graphs, family = Graphs(), one("sdxl")
        torch.compiler.reset()
        model, eager = family.build().double(), family.build().double()
        for each in (model, eager):
            applied(each, method)
        compile_blocks(model, fullgraph=True, backend=graphs)
        assert torch.allclose(family.call(model), family.call(eager), atol=1e-5)
        assert graphs.count == count
        with torch.compiler.set_stance("fail_on_recompile"):
            assert torch.allclose(family.call(model, seed=1), family.call(eager, seed=1), atol=1e-5)
        torch.compiler.reset()


class TestWhere:
    @pytest.mark.parametrize("method", ["tomesd", "tofu"])
    @pytest.mark.parametrize("sites", [("attn",), ("cross_attn",), ("attn", "cross_attn", "ff")])
    def test_only_the_sites_asked_for(self, method, sites):
        family = one("pixart")
        model = family.build()
        applied(model, method, sites=sites)
        lengths = attention_lengths(lambda: family.call(model))
        assert {query for query, key in lengths if key == 6} == {32 if "cross_attn" in sites else 64}
        assert {pair for pair in lengths if pair[1] != 6} == {(32, 32) if "attn" in sites else (64, 64)}

    @every_method
    def test_self_attention_at_the_highest_level_by_default(self, method):
        model = sd15_unet()
        speed_up(model, merge=METHODS[method]())
        merged = {"todo": (256, 64)}.get(method, (128, 128))
        assert set(attention_lengths(lambda: SD15.call(model))) == {merged, (256, 7), (64, 64), (64, 7)}

    def test_flux_merges_only_the_image_and_leaves_its_first_blocks_alone(self):
        model = flux_transformer()
        applied(model, "tomesd")
        assert set(attention_lengths(lambda: one("flux").call(model))) == {(38, 38)}
        deep = flux_transformer(num_layers=7, num_single_layers=8)
        assert len(speed_up(deep, merge=ToMeSD()).summary().merge.left_whole) == 10


class TestRandomness:
    def output(self, seed, user_seed: int = 0) -> torch.Tensor:
        model = sd15_unet().double()
        applied(model, "tomesd", seed=seed)
        torch.manual_seed(user_seed)
        return SD15.call(model)

    def test_a_seed_makes_it_the_same_each_time_and_without_one_it_follows_the_user(self):
        same_picture(self.output(3), self.output(3, user_seed=9))
        assert not torch.equal(self.output(3), self.output(4))
        same_picture(self.output(None, user_seed=1), self.output(None, user_seed=1))
        assert not torch.equal(self.output(None, user_seed=1), self.output(None, user_seed=2))

    def test_every_generation_starts_over_and_every_step_and_block_draws_anew(self):
        model = sd15_unet().double()
        applied(model, "tomesd")
        inputs = in_dtype(SD15.inputs(), torch.float64)
        with torch.no_grad():
            first, second = (model(**inputs).sample for _ in range(2))
            assert not torch.equal(first, second)
            new = {name: inputs[name].clone() for name in ("sample", "encoder_hidden_states")}
            same_picture(first, model(**inputs | new).sample)
        offsets, *others = [plan.offsets for plan in state_of(model).current.values()]
        assert others
        assert not any(torch.equal(offsets, other) for other in others)

    @pytest.mark.parametrize("random", [True, False])
    def test_an_odd_batch_takes_the_corner(self, random):
        model = sd15_unet()
        handle = applied(model, "tomesd", random=random)
        SD15.call(model, batch=3)
        assert all(not plan.offsets.any() for plan in state_of(model).current.values())
        assert ("odd batch" in str(handle.summary())) == random

    @pytest.mark.parametrize("config", [ToMeSD(), ToMeSD(seed=1), ToFu(), ToFu(seed=1), ToDo()])
    def test_the_users_random_state_is_not_touched(self, config):
        model = sd15_unet()
        torch.manual_seed(5)
        before = torch.get_rng_state()
        speed_up(model, merge=config)
        for step in range(2):
            SD15.call(model, seed=step)
        assert torch.equal(torch.get_rng_state(), before)


class TestSettings:
    @pytest.mark.parametrize("config", [ToMeSD(seed=3, cell=(3, 3)), ToFu(prune_blocks=(1,)), ToDo()])
    def test_are_taken_as_they_stand_and_written_and_read(self, config):
        config = config.changed({"skip_blocks": (0,)})
        assert type(config).from_dict(config.to_dict()) == config
        handle = speed_up(sd15_unet(), merge=config)
        assert handle.summary().merge.config == config
        assert "left whole, 1 block: in skip_blocks" in str(handle.summary())

    @pytest.mark.parametrize(
        ("config", "wrong", "message"),
        [
            (ToMeSD, {"ratio": 0.8}, r"ratio=0.8 is not allowed: cells of 2×2 tokens .* 0.75 at most"),
            (ToMeSD, {"ratio": 0.6, "cell": (1, 2)}, "0.5 at most"),
            (ToMeSD, {"ratio": -0.1}, "ratio=-0.1 is not allowed"),
            (ToMeSD, {"max_downsample": 3}, "max_downsample=3 is not allowed: it must be 1, 2, 4 or 8"),
            (ToMeSD, {"cell": (2, 0)}, "cell=0 is not allowed"),
            (ToMeSD, {"cell": (2,)}, r"cell=\(2,\) is not allowed: it must be height and width"),
            (ToMeSD, {"cell": 2}, "cell=2 must be a tuple"),
            (ToMeSD, {"random": "yes"}, "random='yes' is not allowed"),
            (ToMeSD, {"seed": -1}, "seed=-1 is not allowed"),
            (ToMeSD, {"sites": ("atn",)}, "sites='atn' is not known.*Did you mean 'attn'"),
            (ToMeSD, {"sites": ()}, "names no module"),
            (ToFu, {"prune_share": 1.5}, "prune_share=1.5 is not allowed"),
            (ToFu, {"prune_blocks": (-1,)}, "prune_blocks=-1 is not allowed"),
            (ToDo, {"ratio": 0.5}, "ratio=0.5 is not allowed: every n-th row and column stays"),
            (ToDo, {"deeper_factors": (0,)}, "deeper_factors=0 is not allowed"),
            (ToDo, {"deeper_factors": 2}, "deeper_factors=2 must be a tuple"),
        ],
    )
    def test_wrong_values_are_quoted(self, config, wrong, message):
        with pytest.raises(ValueError, match=message):
            config(**wrong)


class TestRegister:
    """docs/add-a-method.md registers one, and the tests of the pages use it."""

    @pytest.mark.parametrize(
        ("method", "message"),
        [
            (ToMeSD, "is not a subclass of"),
            *(
                (type("Taken", (PerBlockMethod,), {"name": name, "config_class": ToMeSD}), f"the name '{name}' already")
                for name in ("toma", "tomesd", "toma-late")
            ),
            (
                type("Twin", (PerBlockMethod,), {"name": "twin", "config_class": ToMeSD}),
                "ToMeSD is the config_class of another method",  # by it a method is found: the other one would run
            ),
            (type("Half", (PerBlockMethod,), {"name": "half"}), "Half needs a name and a config_class"),
        ],
    )
    def test_what_cannot_be_registered_is_refused(self, method, message):
        before = dict(METHODS)
        with pytest.raises(ValueError, match=message):
            register_method(method)
        assert before == METHODS
