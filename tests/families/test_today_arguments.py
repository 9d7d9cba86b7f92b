"""What goes with the tokens of the newest families: a merged token has the rows of its destination; text and reference
images keep theirs, in place. Rows say their own index: put in before our hooks, read after them."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from observe import state_of
from pairs import named, pairwise
from tiny import ONE_PLAN, SCOPES, Family, output_of
from tiny_today import TODAY, flux2_edit, qwen21_edit, qwen21_padded, qwen_edit
from torch import Tensor, nn

from toma_diffusion import apply_toma

BY_NAME = {family.name: family for family in TODAY}
TEXT, IMAGE, REFERENCE = 6, 64, 24


@dataclass(frozen=True)
class Case:
    """An argument with a row for every token."""

    family: Family
    blocks: str
    """The name of the stack."""
    argument: str
    """Of the block."""
    dims: tuple[int, ...]
    start: int
    """Where the image begins among its rows."""
    length: int
    attention: str | None = ""
    """What it is called in the attention module; None if that does not get it. Default: as in the block."""
    kind: str = "block"
    inputs: Callable[[], dict] | None = None
    build: dict = field(default_factory=dict, hash=False)
    item: int | None = None
    """Which of a tuple has rows of the image."""

    @property
    def name(self) -> str:
        return f"{self.family.name}-{self.kind}-{self.argument}"

    @property
    def missing(self) -> str:
        return self.family.missing

    @property
    def in_attention(self) -> str | None:
        return self.argument if self.attention == "" else self.attention


def cached() -> dict:
    """Qwen-Image 2.1 in a later step: its prompt, which is padded, is in the cache."""
    from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

    inputs = qwen21_padded() | {"kv_cache": QwenImage21KVCache(3)}
    output_of(BY_NAME["qwen-image-21"].build(), inputs | {"kv_cache_mode": "extract"})
    return inputs | {"kv_cache_mode": "cached"}


def ragged() -> dict:
    """49 tokens, padded to 64, and captions of 32 and 64."""
    return BY_NAME["z-image"].inputs(height=14, wide=14)


BOTH, ALONE = TEXT + IMAGE, IMAGE
EDIT = {"inputs": partial(qwen_edit, (4, 6)), "build": {"zero_cond_t": True}}
REFERENCES = {"inputs": partial(flux2_edit, 10)}
F2, F3, QWEN, QWEN21, Z, KREA, CHROMA = (
    BY_NAME[name] for name in ("flux2", "flux3", "qwen-image", "qwen-image-21", "z-image", "krea2", "chroma")
)
JOINT, SINGLE = "transformer_blocks", "single_transformer_blocks"
CASES = [
    # A pair of tables for text and image, given by name or by position.
    Case(F2, JOINT, "image_rotary_emb", (0,), TEXT, BOTH + REFERENCE, kind="joint", **REFERENCES),
    Case(F2, SINGLE, "image_rotary_emb", (0,), TEXT, BOTH + REFERENCE, kind="single", **REFERENCES),
    Case(F3, "mode_blocks.image", "image_rotary_emb", (0,), 0, ALONE, kind="image"),
    Case(F3, SINGLE, "image_rotary_emb", (0,), TEXT, BOTH, kind="joint"),
    Case(KREA, JOINT, "image_rotary_emb", (0,), TEXT, BOTH),
    Case(CHROMA, JOINT, "image_rotary_emb", (0,), TEXT, BOTH, kind="joint"),
    Case(CHROMA, SINGLE, "image_rotary_emb", (0,), TEXT, BOTH, kind="single"),
    # The table of the image is the first of two; complex numbers; a table for every sample.
    Case(QWEN, JOINT, "image_rotary_emb", (0,), 0, ALONE + REFERENCE, kind="joint", item=0, **EDIT),
    Case(QWEN21, JOINT, "rotary_emb", (0,), TEXT, BOTH),
    Case(QWEN21, JOINT, "rotary_emb", (0,), TEXT + REFERENCE, BOTH + REFERENCE, inputs=qwen21_edit),
    Case(Z, "layers", "freqs_cis", (1,), 0, 128, inputs=ragged),
    # Modulation of every token.
    Case(F3, "mode_blocks.image", "temb_mod", (1,), 0, ALONE, None, "image"),
    Case(F3, SINGLE, "temb_mod", (1,), 0, ALONE, None, "joint"),
    Case(QWEN, JOINT, "modulate_index", (1,), 0, ALONE + REFERENCE, None, "joint", **EDIT),
    Case(QWEN21, JOINT, "target_token_mask", (0,), TEXT, BOTH, None),
    # Masks: of keys, in one form or another, and of queries and keys.
    Case(QWEN21, JOINT, "key_valid", (1,), TEXT, BOTH, inputs=qwen21_padded),
    Case(QWEN21, JOINT, "attention_mask", (3,), TEXT, BOTH, inputs=cached),
    Case(Z, "layers", "attn_mask", (1,), 0, 128, "attention_mask", inputs=ragged),
    Case(KREA, JOINT, "attention_mask", (3,), TEXT, BOTH),
    Case(CHROMA, JOINT, "attention_mask", (1,), TEXT, BOTH, kind="joint"),
    Case(CHROMA, SINGLE, "attention_mask", (1,), TEXT, BOTH, kind="single"),
]


def position_of(module: nn.Module, name: str) -> int:
    return list(inspect.signature(type(module).forward).parameters)[1:].index(name)


def read(module: nn.Module, args: tuple, kwargs: dict, name: str):
    return kwargs[name] if name in kwargs else args[position_of(module, name)]


def replaced(module: nn.Module, args: tuple, kwargs: dict, name: str, value) -> tuple[tuple, dict]:
    """As it was passed: by name or by position."""
    if name in kwargs:
        return args, {**kwargs, name: value}
    index = position_of(module, name)
    return (*args[:index], value, *args[index + 1 :]), kwargs


def numbered(table: Tensor, dims: tuple[int, ...], bit: int | None) -> Tensor:
    """A tensor of that form in which every row is its index, or one bit of it."""
    (dim,) = dims
    index = torch.arange(table.shape[dim])
    index = index if bit is None else index >> bit & 1
    shape = [1] * table.ndim
    shape[dim] = -1
    return index.reshape(shape).expand(table.shape).to(table.dtype)


class Rows:
    """Numbers an argument of all blocks, and notes what arrives at the blocks and in attention after our hooks."""

    def __init__(self, case: Case, scope: str) -> None:
        self.case, self.bit = case, None
        self.at_blocks: list = []
        self.in_attention: list = []
        self.model = case.family.build(**case.build)
        self.blocks = list(self.model.get_submodule(case.blocks))
        for block in self.blocks:
            block.register_forward_pre_hook(self._number, with_kwargs=True)
        apply_toma(self.model, **ONE_PLAN, scope=scope, select_every=100, reweigh_every=100)
        for block in self.blocks:
            block.register_forward_pre_hook(self._note(case.argument, self.at_blocks), with_kwargs=True)
            if case.in_attention is not None:
                attention = block.attention if hasattr(block, "attention") else block.attn
                attention.register_forward_pre_hook(self._note(case.in_attention, self.in_attention), with_kwargs=True)

    def _number(self, module, args, kwargs):
        value = read(module, args, kwargs, self.case.argument)
        if isinstance(value, tuple):
            value = tuple(numbered(each, self.case.dims, self.bit) for each in value)
        else:
            self.is_truth = value.dtype == torch.bool
            value = numbered(value, self.case.dims, self.bit)
        return replaced(module, args, kwargs, self.case.argument, value)

    def _note(self, name: str, noted: list):
        return lambda module, args, kwargs: noted.append(read(module, args, kwargs, name))

    def run(self) -> None:
        inputs = (self.case.inputs or self.case.family.inputs)()
        output_of(self.model, inputs)
        if getattr(self, "is_truth", False):
            self._spell(inputs)

    def _spell(self, inputs: dict) -> None:
        """A mask of truth values cannot hold an index: it is spelled in bits, one call for each."""
        totals: list[list] = [[], []]
        for self.bit in range(7):
            self.at_blocks.clear()
            self.in_attention.clear()
            output_of(self.model, inputs)
            for total, noted in zip(totals, (self.at_blocks, self.in_attention), strict=True):
                total.append([each.long() << self.bit for each in noted])
        self.at_blocks[:], self.in_attention[:] = ([sum(bits) for bits in zip(*total, strict=True)] for total in totals)

    def expected(self, sample: int) -> Tensor:
        """The indices that are left."""
        plan, case = state_of(self.model).plan_of(self.case.kind), self.case
        positions = plan.positions[sample if len(plan.positions) > 1 else 0]
        rest = torch.arange(case.start + plan.grid.num_tokens, case.length)
        return torch.cat([torch.arange(case.start), case.start + positions, rest])


def rows_of(table: Tensor, dims: tuple[int, ...], sample: int) -> Tensor:
    """The index of every row, which all its entries say alike."""
    (dim,) = dims
    table = table.real if table.is_complex() else table
    table = table if dim == 0 else table[sample].movedim(dim - 1, 0)
    rows = table.reshape(len(table), -1)
    assert (rows == rows[:, :1]).all()
    return rows[:, 0].long()


@pytest.mark.parametrize(("case", "scope"), pairwise(CASES, SCOPES), ids=named)
def test_a_merged_token_has_the_rows_of_its_destination(case, scope):
    rows = Rows(case, scope)
    rows.run()
    assert len(rows.at_blocks) == len(rows.blocks)
    assert len(rows.in_attention) == (len(rows.blocks) if case.in_attention else 0)
    samples = 2 if 0 not in case.dims else 1
    seen = [*(rows.at_blocks if scope != "module" else []), *rows.in_attention]
    for sample in range(samples):
        expected = rows.expected(sample)
        assert len(expected) < case.length
        for value in seen:
            tables = value if isinstance(value, tuple) else (value,)
            for index, table in enumerate(tables):
                if case.item not in (None, index):  # the other table, that of the text, is whole
                    assert torch.equal(rows_of(table, case.dims, sample), torch.arange(table.shape[0]))
                elif table.ndim == 4 and case.dims == (1,):  # of queries and keys: the product of both
                    assert torch.equal(table[sample, 0].long(), expected[:, None] * expected)
                else:
                    assert torch.equal(rows_of(table, case.dims, sample), expected)
    if scope == "module":  # the block itself works on all tokens
        for value in rows.at_blocks:
            whole = value[case.item or 0] if isinstance(value, tuple) else value
            assert whole.shape[case.dims[0]] == case.length


@dataclass(frozen=True)
class Sequence:
    """A stack of blocks on a sequence of more than the image."""

    family: Family
    blocks: str
    kind: str
    start: int
    length: int
    inputs: Callable[[], dict] | None = None

    @property
    def name(self) -> str:
        return f"{self.family.name}-{self.kind}"

    @property
    def missing(self) -> str:
        return self.family.missing


AURA = BY_NAME["auraflow"]
SEQUENCES = [
    Sequence(F2, JOINT, "joint", 0, IMAGE + REFERENCE, REFERENCES["inputs"]),
    Sequence(F2, SINGLE, "single", TEXT, BOTH + REFERENCE, REFERENCES["inputs"]),
    Sequence(QWEN, JOINT, "joint", 0, IMAGE + REFERENCE, EDIT["inputs"]),
    Sequence(QWEN21, JOINT, "block", TEXT + REFERENCE, BOTH + REFERENCE, qwen21_edit),
    Sequence(Z, "layers", "block", 0, 128, ragged),
    Sequence(KREA, JOINT, "block", TEXT, BOTH),
    Sequence(CHROMA, SINGLE, "single", TEXT, BOTH),
    Sequence(AURA, SINGLE, "single", TEXT + 8, BOTH + 8),
]


def tokens_of(args: tuple, kwargs: dict) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]


def index_of(tokens: Tensor) -> Tensor:
    """Every token is its index."""
    return torch.arange(tokens.shape[1], dtype=tokens.dtype)[None, :, None].expand_as(tokens).clone()


def number_tokens(module, args, kwargs):
    index = index_of(tokens_of(args, kwargs))
    return ((index, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": index})


@pytest.mark.parametrize(("sequence", "scope"), pairwise(SEQUENCES, SCOPES), ids=named)
def test_text_and_references_go_through_in_place(sequence, scope):
    """Into the first block, or the first module of it that is merged, and out again."""
    model = sequence.family.build()
    block = model.get_submodule(sequence.blocks)[0]
    first = last = block if scope != "module" else getattr(block, "attention", None) or block.attn
    if scope == "module" and sequence.family is CHROMA:  # merged after the norm, unmerged after the projection
        first, last = block.proj_mlp, block.proj_out
        block.norm.register_forward_hook(lambda module, args, output: (index_of(output[0]), *output[1:]))
    else:
        first.register_forward_pre_hook(number_tokens, with_kwargs=True)
    apply_toma(model, **ONE_PLAN, scope=scope)
    inputs, outputs = [], []
    first.register_forward_pre_hook(lambda _, args, kwargs: inputs.append(tokens_of(args, kwargs)), with_kwargs=True)
    last.register_forward_hook(lambda _, args, output: outputs.append(output))
    output_of(model, (sequence.inputs or sequence.family.inputs)())
    plan = state_of(model).plan_of(sequence.kind)
    start, end = sequence.start, sequence.start + plan.grid.num_tokens
    after = start + plan.num_destinations
    whole = torch.arange(sequence.length).float()
    for merged in inputs[0][..., 0]:
        assert torch.equal(merged[:start], whole[:start])
        assert torch.equal(merged[after:], whole[end:])
        assert merged[start:after].min() >= start
        assert merged[start:after].max() < end
    if scope != "stage":
        streams = outputs[0] if isinstance(outputs[0], tuple) else outputs[:1]
        assert sequence.length in {stream.shape[1] for stream in streams}
