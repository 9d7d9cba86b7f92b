"""What goes with the tokens: a merged token has the rows of its destination; everything else keeps its place."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import diffusers
import pytest
import torch
from merging import merged
from observe import inputs_of, state_of
from pairs import named, pairwise
from tiny import ALL, Family, flux2_edit, one, output_of, qwen21_edit, qwen21_padded, qwen_edit
from torch import Tensor, nn

from toma_diffusion.engine.arguments import Given, given_to
from toma_diffusion.families import find_family

WRITTEN_FOR = "0.42"
"""The names of arguments are those of this version of diffusers; with others only their rows are compared."""
TOKENS_OF = ("hidden_states", "encoder_hidden_states", "audio_hidden_states", "x")


@dataclass(frozen=True)
class Case:
    """A family with inputs, and what surrounds the image in its sequences."""

    name: str
    family: Family
    inputs: Callable[[], dict]
    build: tuple[tuple[str, object], ...] = ()
    after: int = 0
    """Tokens of references after the image."""
    per_token: frozenset[str] = frozenset()
    """Arguments with a row for every token, besides those of the family."""

    @property
    def missing(self) -> str:
        return self.family.missing

    def rows(self, positions: Tensor, length: int, tokens: int) -> Tensor:
        """[B, rows left] of a table for so many tokens."""
        start = self.family.start if self.family.start is not None else length - tokens - self.after
        around = [torch.arange(start), torch.arange(start + tokens, length)]
        return torch.stack([torch.cat([around[0], start + chosen, around[1]]) for chosen in positions])


def cached() -> dict:
    """Qwen-Image 2.1 in a later step: its prompt, which is padded, is in the cache."""
    from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

    inputs = qwen21_padded() | {"kv_cache": QwenImage21KVCache(3)}
    output_of(one("qwen-image-21").build(), inputs | {"kv_cache_mode": "extract"})
    return inputs | {"kv_cache_mode": "cached"}


CASES = [
    *(Case(family.name, family, family.inputs) for family in ALL),
    Case("flux2-edit", one("flux2"), partial(flux2_edit, 10), after=24),
    Case(
        "qwen-edit",
        one("qwen-image"),
        partial(qwen_edit, (4, 6)),
        (("zero_cond_t", True),),
        after=24,
        per_token=frozenset({"modulate_index"}),
    ),
    Case("qwen-21-edit", one("qwen-image-21"), qwen21_edit),
    Case("qwen-21-padded", one("qwen-image-21"), qwen21_padded, per_token=frozenset({"key_valid"})),
    Case("qwen-21-cached", one("qwen-image-21"), cached, per_token=frozenset({"attention_mask"})),
    Case("z-image-padded", one("z-image"), partial(one("z-image").inputs, height=14, wide=14)),
]


def first_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The first of every kind."""
    found: dict[str, nn.Module] = {}
    for block in find_family(model).blocks(model):
        found.setdefault(block.kind, block.module)
    return found


def attention_of(block: nn.Module) -> nn.Module:
    return next(getattr(block, name) for name in ("attn1", "attn", "attention") if hasattr(block, name))


def arguments(module: nn.Module, model: nn.Module, inputs: dict) -> Given:
    args, kwargs = inputs_of(module, lambda: output_of(model, inputs))[0]
    return given_to(module, args, kwargs)


def tensors(value) -> list[Tensor]:
    return [each for each in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(each, Tensor)]


def reduced(case: Case, table: Tensor, like: Tensor, positions: Tensor, tokens: int) -> Tensor:
    """The table with the rows of destinations, in the dimensions in which it has fewer rows now."""
    if like.ndim > table.ndim:  # one table for all samples, of which each has rows of its own now
        rows = case.rows(positions, len(table), tokens)
        return torch.stack([table[each] for each in rows])
    for dim in range(table.ndim):
        if table.shape[dim] == like.shape[dim] or (dim == 0 and len(table) == 1):
            continue
        rows = case.rows(positions, table.shape[dim], tokens)
        if dim == 0:
            return table[rows[0]]
        samples = table.expand(len(rows), *table.shape[1:])
        table = torch.stack([one.index_select(dim - 1, each) for one, each in zip(samples, rows, strict=True)])
    return table


cases_and_scopes = pytest.mark.parametrize(("case", "scope"), pairwise(CASES, ("module", "stage")), ids=named)


@cases_and_scopes
def test_a_merged_token_has_the_rows_of_its_destination(case, scope):
    """Of every argument of blocks and their attention; all others are untouched."""
    whole, model = (case.family.build(**dict(case.build)) for _ in range(2))
    merged(model, scope=scope, num_regions=1 if case.name == "z-image-padded" else 4)
    found = set()
    for (kind, block), ours in zip(first_blocks(whole).items(), first_blocks(model).values(), strict=True):
        blocks = [] if scope == "module" else [(block, ours)]
        for theirs, mine in [*blocks, (attention_of(block), attention_of(ours))]:
            before, after = arguments(theirs, whole, case.inputs()), arguments(mine, model, case.inputs())
            plan = state_of(model).plan_of(kind)
            for name in {*before.names, *before.kwargs} - set(TOKENS_OF):
                for table, rows in zip(tensors(before[name]), tensors(after[name]), strict=True):
                    assert torch.equal(rows, reduced(case, table, rows, plan.positions, plan.grid.num_tokens)), name
                    found |= {name} if rows.shape != table.shape else set()
    expected = case.family.per_token | case.per_token
    if diffusers.__version__.startswith(WRITTEN_FOR):
        assert found <= expected if scope == "module" else found == expected


@cases_and_scopes
def test_text_references_and_given_frames_go_through_in_place(case, scope):
    """Into the first block, or its attention, and out of the block again."""
    whole, model = (case.family.build(**dict(case.build)) for _ in range(2))
    merged(model, scope=scope, num_regions=1 if case.name == "z-image-padded" else 4)
    (kind, block), ours = next(iter(first_blocks(whole).items())), next(iter(first_blocks(model).values()))
    watched = (attention_of(block), attention_of(ours)) if scope == "module" else (block, ours)
    before, after = (
        arguments(each, of, case.inputs()).tokens for each, of in zip(watched, (whole, model), strict=True)
    )
    plan = state_of(model).plan_of(kind)
    start = case.family.start
    start = before.shape[1] - plan.grid.num_tokens - case.after if start is None else start
    end = start + plan.grid.num_tokens
    assert before.shape[1] - after.shape[1] == plan.grid.num_tokens - plan.num_destinations > 0
    assert torch.equal(after[:, :start], before[:, :start])
    assert torch.equal(after[:, start + plan.num_destinations :], before[:, end:])
    assert not torch.equal(after[:, start : start + 8], before[:, start : start + 8])


class TestSingleBlocksOfFlux:
    """Text and image are one sequence only inside of them."""

    def test_text_comes_through_in_place(self):
        model = one("flux").build()
        block = model.single_transformer_blocks[0]

        def number_tokens(module, args, output):
            tokens, gate = output
            index = torch.arange(tokens.shape[1], dtype=tokens.dtype)[None, :, None].expand_as(tokens)
            return index.clone(), gate

        block.norm.register_forward_hook(number_tokens)
        merged(model)
        tokens = inputs_of(block.proj_mlp, lambda: one("flux").call(model))[0][0][0]
        assert tokens.shape[1] == 6 + 32
        assert torch.equal(tokens[0, :6, 0], torch.arange(6).float())
        assert (tokens[0, 6:, 0] >= 6).all()
