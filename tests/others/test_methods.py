"""What apply_toma promises holds for the other methods too: they act, leave no trace, and are the same each time.

Where two results are compared the models are in float64: in float32 another rounding may match other tokens.
"""

import copy
import csv
from functools import cache

import pytest
import torch
from method_cases import every_case
from observe import Graphs, attention_lengths, bookkeeping, compile_blocks, our_hooks, same_picture, state_of
from tiny import FAMILIES, flux_transformer, in_dtype, sd15_unet
from toma_lab.cli import app
from typer.testing import CliRunner

from toma_diffusion import METHODS, ToDoConfig, ToFuConfig, ToMAConfig, ToMeSDConfig, apply_toma, remove_toma
from toma_diffusion.others import PerBlockMethod, register_method

BY_NAME = {family.name: family for family in FAMILIES}
RATIOS = {"tomesd": 0.5, "tofu": 0.5, "todo": 0.75}
every_method = pytest.mark.parametrize("method", METHODS)


def settings(method: str, **changes) -> dict:
    seed = {} if method == "todo" else {"seed": 1}
    return {"ratio": RATIOS[method], "skip_blocks": ()} | seed | changes


@every_case
class TestEveryFamily:
    def test_acts_and_leaves_no_trace(self, method, family):
        model = family.build().double()
        before, hooks_before = family.call(model), bookkeeping(model)
        handle = apply_toma(model, method, **settings(method))
        changed = family.call(model)
        assert changed.isfinite().all()
        assert not torch.equal(changed, before)
        handle.enabled = False
        assert torch.equal(family.call(model), before)
        handle.enabled = True
        same_picture(family.call(model), changed)
        remove_toma(model)
        assert torch.equal(family.call(model), before)
        assert our_hooks(model) == []
        assert bookkeeping(model) == hooks_before

    def test_ratio_zero_is_bit_exact(self, method, family):
        model = family.build()
        before = family.call(model)
        apply_toma(model, method, **settings(method, ratio=0))
        assert torch.equal(family.call(model), before)

    def test_sizes_and_batches_between(self, method, family):
        model = family.build().double()
        apply_toma(model, method, **settings(method))
        sizes = [(2, *family.odd[0]), (1, *family.odd[1]), (4, *family.odd[0]), (3, *family.odd[-1])]

        @cache
        def of_a_fresh_one(batch, height, wide):
            fresh = family.build().double()
            apply_toma(fresh, method, **settings(method))
            return family.call(fresh, batch=batch, height=height, wide=wide)

        for batch, height, wide in [*sizes, *sizes]:
            output = family.call(model, batch=batch, height=height, wide=wide)
            same_picture(output, of_a_fresh_one(batch, height, wide))

    def test_the_summary_tells(self, method, family):
        model = family.build()
        handle = apply_toma(model, method, **settings(method))
        assert "not called yet" in str(handle.summary())
        family.call(model)
        summary = handle.summary()
        assert summary.config.label in str(summary)
        assert {"tomesd": "ToMeSD", "tofu": "ToFu", "todo": "ToDo"}[method] == summary.config.label
        for kind in summary.kinds:
            assert kind.tokens_after == round(kind.tokens_before * (1 - summary.config.ratio))
            assert f"{kind.tokens_before} → {kind.tokens_after}" in str(summary)
            assert kind.sites >= kind.blocks >= 1
        assert summary.multiplications is None


class TestCompiledWhole:
    # Compiling takes seconds: ToMeSD on every family, the others on the smallest; once as torch's own compiler sees it.
    @pytest.mark.parametrize(
        ("method", "name", "backend"),
        [
            *(("tomesd", name, "aot_eager" if name == "pixart" else "eager") for name in BY_NAME),
            ("tofu", "pixart", "eager"),
            ("todo", "pixart", "eager"),
        ],
    )
    def test_one_graph(self, method, name, backend):
        graphs, family = Graphs(backend), BY_NAME[name]

        torch.compiler.reset()
        model, eager = (family.build(**family.shallow).double() for _ in range(2))
        for each in (model, eager):
            apply_toma(each, method, **settings(method))
        model.compile(fullgraph=True, backend=graphs)
        for seed in range(3):
            assert torch.allclose(family.call(model, seed=seed), family.call(eager, seed=seed), atol=1e-5)
        assert graphs.count == 1
        torch.compiler.reset()


class TestCompiledByBlock:
    @pytest.mark.parametrize(("method", "count"), [("tomesd", 2), ("tofu", 3), ("todo", 1)])
    def test_blocks_share_their_code(self, method, count):
        """Though every block has a plan of its own. Matching before a block is one graph, the block another; ToFu's
        blocks are of two sorts, those that prune and those that merge."""
        graphs, family = Graphs(), BY_NAME["sdxl"]

        torch.compiler.reset()
        model, eager = family.build().double(), family.build().double()
        for each in (model, eager):
            apply_toma(each, method, **settings(method))
        compile_blocks(model, fullgraph=True, backend=graphs)
        assert torch.allclose(family.call(model), family.call(eager), atol=1e-5)
        assert graphs.count == count
        with torch.compiler.set_stance("fail_on_recompile"):
            assert torch.allclose(family.call(model, seed=1), family.call(eager, seed=1), atol=1e-5)
        torch.compiler.reset()


class TestAttention:
    @pytest.mark.parametrize("method", ["tomesd", "tofu"])
    @pytest.mark.parametrize("sites", [("attn",), ("cross_attn",), ("attn", "cross_attn", "ff")])
    def test_only_the_sites_asked_for(self, method, sites):
        family, model = BY_NAME["pixart"], BY_NAME["pixart"].build()
        apply_toma(model, method, **settings(method, sites=sites))
        lengths = attention_lengths(lambda: family.call(model))
        assert {query for query, key in lengths if key == 6} == {32 if "cross_attn" in sites else 64}
        assert {pair for pair in lengths if pair[1] != 6} == {(32, 32) if "attn" in sites else (64, 64)}

    @every_method
    def test_self_attention_alone_by_default(self, method):
        family, model = BY_NAME["sd15"], sd15_unet()
        apply_toma(model, method)
        lengths = attention_lengths(lambda: family.call(model))
        merged = {"todo": (256, 64)}.get(method, (128, 128))
        assert set(lengths) == {merged, (256, 7), (64, 64), (64, 7)}

    def test_flux_merges_only_the_image_and_takes_its_positions(self):
        family, model = BY_NAME["flux"], flux_transformer()
        apply_toma(model, "tomesd", **settings("tomesd"))
        assert set(attention_lengths(lambda: family.call(model))) == {(38, 38)}


class TestRandomness:
    def output(self, seed, user_seed: int = 0, **changes) -> torch.Tensor:
        model = sd15_unet().double()
        apply_toma(model, "tomesd", **settings("tomesd", seed=seed, **changes))
        torch.manual_seed(user_seed)
        return BY_NAME["sd15"].call(model)

    def test_a_seed_makes_it_the_same_each_time(self):
        same_picture(self.output(3), self.output(3, user_seed=9))
        assert not torch.equal(self.output(3), self.output(4))

    def test_without_one_it_follows_the_user(self):
        same_picture(self.output(None, user_seed=1), self.output(None, user_seed=1))
        assert not torch.equal(self.output(None, user_seed=1), self.output(None, user_seed=2))

    def test_every_generation_starts_over_and_every_step_draws_anew(self):
        model, family = sd15_unet().double(), BY_NAME["sd15"]
        apply_toma(model, "tomesd", **settings("tomesd"))
        inputs = in_dtype(family.inputs(), torch.float64)
        with torch.no_grad():
            first, second = (model(**inputs).sample for _ in range(2))
            assert not torch.equal(first, second)
            new = {name: inputs[name].clone() for name in ("sample", "encoder_hidden_states")}
            again = model(**inputs | new).sample
        same_picture(first, again)

    def test_blocks_draw_for_themselves(self):
        model, family = sd15_unet(), BY_NAME["sd15"]
        apply_toma(model, "tomesd", **settings("tomesd"))
        family.call(model)
        first, *others = [plan.offsets for plan in state_of(model).current.values()]
        assert others
        assert not any(torch.equal(first, other) for other in others)

    @pytest.mark.parametrize("random", [True, False])
    def test_an_odd_batch_takes_the_corner(self, random):
        model, family = sd15_unet(), BY_NAME["sd15"]
        handle = apply_toma(model, "tomesd", **settings("tomesd", random=random))
        family.call(model, batch=3)
        assert all(not plan.offsets.any() for plan in state_of(model).current.values())
        assert ("odd batch" in str(handle.summary())) == random

    @every_method
    @pytest.mark.parametrize("seed", [None, 1])
    def test_the_users_random_state_is_not_touched(self, method, seed):
        model, family = sd15_unet(), BY_NAME["sd15"]
        torch.manual_seed(5)
        before = torch.get_rng_state()
        apply_toma(model, method, **settings(method) | ({} if method == "todo" else {"seed": seed}))
        for step in range(2):
            family.call(model, seed=step)
        assert torch.equal(torch.get_rng_state(), before)


class TestCopies:
    @every_method
    def test_a_copy_is_independent(self, method):
        model, family = sd15_unet().double(), BY_NAME["sd15"]
        whole = family.call(model)
        apply_toma(model, method, **settings(method))
        changed = family.call(model)
        twin = copy.deepcopy(model)
        same_picture(family.call(twin), changed)
        remove_toma(model)
        assert torch.equal(family.call(model), whole)
        same_picture(family.call(twin, seed=1), family.call(copy.deepcopy(twin), seed=1))
        remove_toma(twin)
        same_picture(family.call(twin), whole)

    def test_plans_of_sizes_no_longer_used_are_freed(self):
        model, family = sd15_unet(), BY_NAME["sd15"]
        apply_toma(model, "tomesd")
        for side in (8, 12, 16, 20, 24):
            family.call(model, height=side, wide=side)
        assert len(state_of(model)._plans) <= 2 * 3

    def test_inference_mode_before_and_after(self):
        model, family = sd15_unet().double(), BY_NAME["sd15"]
        apply_toma(model, "tomesd", **settings("tomesd"))
        with torch.inference_mode():
            first = model(**in_dtype(family.inputs(), torch.float64)).sample
        same_picture(family.call(model), first)


class TestSettings:
    @pytest.mark.parametrize(
        "config", [ToMeSDConfig(ratio=0.25, cell=(2, 3)), ToFuConfig(prune_blocks=(1,)), ToDoConfig()]
    )
    def test_a_configuration_is_taken_as_it_stands(self, config):
        handle = apply_toma(sd15_unet(), config, skip_blocks=(0,))
        assert handle.summary().config == type(config).from_dict(config.to_dict() | {"skip_blocks": (0,)})
        assert "left alone, 1 block: in skip_blocks" in str(handle.summary())

    @pytest.mark.parametrize("config", [ToMeSDConfig(seed=3, cell=(3, 3)), ToFuConfig(prune_blocks=(1,)), ToDoConfig()])
    def test_json_and_back(self, config):
        assert type(config).from_json(config.to_json()) == config

    def test_flux_leaves_its_first_blocks_alone(self):
        model = flux_transformer(num_layers=7, num_single_layers=8)
        assert len(apply_toma(model, "tomesd").summary().left_alone) == 10

    @pytest.mark.parametrize(
        ("config", "wrong", "message"),
        [
            (ToMeSDConfig, {"ratio": 0.8}, r"ratio=0.8 is not allowed: cells of 2×2 tokens .* 0.75 at most"),
            (ToMeSDConfig, {"ratio": 0.6, "cell": (1, 2)}, "0.5 at most"),
            (ToMeSDConfig, {"ratio": -0.1}, "ratio=-0.1 is not allowed"),
            (ToMeSDConfig, {"max_downsample": 3}, "max_downsample=3 is not allowed: it must be 1, 2, 4 or 8"),
            (ToMeSDConfig, {"cell": (2, 0)}, "cell=0 is not allowed"),
            (ToMeSDConfig, {"cell": (2,)}, r"cell=\(2,\) is not allowed: it must be height and width"),
            (ToMeSDConfig, {"cell": 2}, "cell=2 must be a tuple"),
            (ToMeSDConfig, {"random": "yes"}, "random='yes' is not allowed"),
            (ToMeSDConfig, {"seed": -1}, "seed=-1 is not allowed"),
            (ToMeSDConfig, {"sites": ("atn",)}, "sites='atn' is not known.*Did you mean 'attn'"),
            (ToMeSDConfig, {"sites": ()}, "names no module"),
            (ToMeSDConfig, {"window": (0.5, 0.5)}, "window"),
            (ToFuConfig, {"prune_share": 1.5}, "prune_share=1.5 is not allowed"),
            (ToFuConfig, {"prune_blocks": (-1,)}, "prune_blocks=-1 is not allowed"),
            (ToFuConfig, {"ratio": 0.8}, "0.75 at most"),
            (ToDoConfig, {"deeper_factors": (0,)}, "deeper_factors=0 is not allowed"),
            (ToDoConfig, {"deeper_factors": 2}, "deeper_factors=2 must be a tuple"),
        ],
    )
    def test_wrong_values(self, config, wrong, message):
        with pytest.raises(ValueError, match=message):
            config(**wrong)

    @pytest.mark.parametrize(
        ("method", "wrong", "message"),
        [
            ("tomesd", {"max_downsampel": 2}, "'max_downsampel' is not a field of ToMeSDConfig.*'max_downsample'"),
            ("tofu", {"select_every": 2}, "'select_every' is not a field of ToFuConfig"),
            ("todo", {"sites": ("ff",)}, "'sites' is not a field of ToDoConfig"),
            ("tomsd", {}, "preset='tomsd' is not known.*'toma', .*'tomesd', 'tofu', 'todo'.*Did you mean 'tomesd'"),
        ],
    )
    def test_unknown_fields_and_names(self, method, wrong, message):
        with pytest.raises(ValueError, match=message):
            apply_toma(sd15_unet(), method, **wrong)

    def test_window_of_steps_that_are_told(self):
        model = sd15_unet()
        handle = apply_toma(model, "tomesd", window=(0.5, 1.0))
        handle.begin(2)
        merged = []
        for step in range(2):
            handle.step(step)
            model(torch.randn(2, 4, 16, 16), 10, torch.randn(2, 7, 32))
            merged.append(state_of(model).active)
        assert merged == [False, True]

    def test_toma_and_the_others_do_not_mix(self):
        model = sd15_unet()
        apply_toma(model, "tomesd")
        with pytest.raises(RuntimeError, match="remove_toma"):
            apply_toma(model, ToMAConfig())


class TestBench:
    def test_the_command_times_them_all(self, tmp_path):
        path = tmp_path / "rows.csv"
        arguments = "bench --model sd15 --size small --device cpu --resolution 64 --steps 1 --repeats 1 --modes eager"
        chosen = ["--methods", "tomesd,tofu,todo", "--ratios", "0.5,0.75", "--output", str(path)]
        result = CliRunner().invoke(app, [*arguments.split(), *chosen])
        assert result.exit_code == 0, result.output
        assert "todo cannot have ratio 0.5" in result.output
        with path.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["method"] in METHODS]
        assert [(row["method"], row["ratio"]) for row in rows] == [
            ("tomesd", "0.5"),
            ("tomesd", "0.75"),
            ("tofu", "0.5"),
            ("tofu", "0.75"),
            ("todo", "0.75"),
        ]
        for row in rows:
            assert (row["scope"], row["assign"], row["backend"]) == ("module", "", "torch")
            assert row["lower_bound_ms"] == row["floor_ms"] == row["over_floor"] == ""
            assert float(row["step_ms"]) > 0


class TestRegister:
    """docs/add-a-method.md registers one, and the tests of the pages use it."""

    def test_what_is_no_method_is_refused(self):
        with pytest.raises(ValueError, match="is not a subclass of"):
            register_method(ToMeSDConfig)

    @pytest.mark.parametrize("name", ["toma", "tomesd", "balanced"])
    def test_a_name_that_is_taken_is_refused(self, name):
        taken = type("Taken", (PerBlockMethod,), {"name": name, "config_class": ToMeSDConfig})
        with pytest.raises(ValueError, match=f"the name '{name}' already"):
            register_method(taken)

    def test_settings_of_another_method_are_refused(self):
        """By the class of its settings a method is found: the other one would run."""
        twin = type("Twin", (PerBlockMethod,), {"name": "twin", "config_class": ToMeSDConfig})
        with pytest.raises(ValueError, match="ToMeSDConfig is the config_class of another method"):
            register_method(twin)
        with pytest.raises(ValueError, match="Half needs a name and a config_class"):
            register_method(type("Half", (PerBlockMethod,), {"name": "half"}))
        assert "twin" not in METHODS
        assert "half" not in METHODS
