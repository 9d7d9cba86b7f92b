"""Arguments of a call by the names of the parameters: by position, by name, and entries of dictionaries."""

import pytest
import torch
from torch import Tensor, nn

from toma_diffusion.engine.arguments import Given, given_to, parameter_names


class Block(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None, extra: dict | None = None) -> Tensor:
        return x


TOKENS, MASK = torch.zeros(1, 4, 2), torch.ones(1, 4)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((TOKENS, MASK), {}), ((TOKENS,), {"mask": MASK}), ((), {"x": TOKENS, "mask": MASK})],
    ids=["positions", "both", "names"],
)
class TestHoweverPassed:
    def test_reading(self, args, kwargs):
        given = given_to(Block(), args, kwargs)
        assert given.tokens is TOKENS
        assert given["mask"] is MASK
        assert given["extra"] is None
        assert given["unknown"] is None

    def test_another_value_is_passed_as_before(self, args, kwargs):
        other = torch.zeros(1, 4)
        given = given_to(Block(), args, kwargs).with_argument("mask", other).with_tokens(other)
        assert given["mask"] is other
        assert given.tokens is other
        assert len(given.args) == len(args)
        assert given.kwargs.keys() == kwargs.keys()

    def test_what_was_not_passed_is_passed_by_name(self, args, kwargs):
        given = given_to(Block(), args, kwargs).with_argument("extra", {"a": 1})
        assert given.kwargs["extra"] == {"a": 1}
        assert len(given.args) == len(args)


class TestEntries:
    def test_reading(self):
        assert given_to(Block(), (TOKENS, None, {"mask": MASK}), {})["extra.mask"] is MASK
        assert given_to(Block(), (TOKENS,), {"extra": {}})["extra.mask"] is None
        assert given_to(Block(), (TOKENS,), {})["extra.mask"] is None

    @pytest.mark.parametrize("by_name", [True, False])
    def test_another_value_leaves_the_users_dictionary(self, by_name):
        extra = {"mask": MASK, "scale": 2}
        args, kwargs = ((TOKENS,), {"extra": extra}) if by_name else ((TOKENS, None, extra), {})
        given = given_to(Block(), args, kwargs).with_argument("extra.mask", TOKENS)
        assert given["extra.mask"] is TOKENS
        assert given["extra.scale"] == 2
        assert extra["mask"] is MASK

    def test_a_dictionary_that_was_not_passed(self):
        assert given_to(Block(), (TOKENS,), {}).with_argument("extra.mask", MASK).kwargs == {"extra": {"mask": MASK}}


def test_names_are_those_of_the_class():
    """An instance may have a wrapper without names, such as that of an offloading hook."""
    block = Block()
    block.forward = lambda *args, **kwargs: None
    assert parameter_names(block) == ("x", "mask", "extra")


def test_hidden_states_come_first_also_by_name():
    given = Given(("sample",), (), {"hidden_states": TOKENS, "sample": MASK})
    assert given.tokens is TOKENS
