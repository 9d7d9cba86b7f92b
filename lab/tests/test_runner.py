"""Making pictures: what is a failure and what is a bug, and what threads may not change."""

import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
from toma_lab.columns.block_caches import printed_by
from toma_lab.runner import failure_of, ignoring

from toma_diffusion import UsageError


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory\nTried to allocate"), "OutOfMemoryError: CUDA out of memory"),
        (MemoryError(), "MemoryError: "),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "RuntimeError: DefaultCPUAllocator: can't allo"),
        (UsageError("not with this model"), "UsageError: not with this model"),
    ],
)
def test_what_this_machine_cannot_do_is_a_failure(error, expected):
    assert failure_of(error).startswith(expected)


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), KeyError("x"), AttributeError("y")])
def test_a_bug_is_raised_again(error):
    with pytest.raises(type(error)):
        failure_of(error)


def in_a_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_warnings_are_filtered_in_the_main_thread_alone():
    before = list(warnings.filters)
    inside = []

    def note():
        with ignoring("nothing"):
            inside.append(list(warnings.filters))

    note()
    in_a_thread(note)
    assert inside[0] != before == inside[1] == warnings.filters


def test_only_the_module_s_own_printing_is_read(capsys):
    module = SimpleNamespace(__name__="a module")
    with printed_by(module) as lines:
        module.print("of the module", 1)
        in_a_thread(lambda: print("of another thread"))
    assert lines == ["of the module 1"]
    assert capsys.readouterr().out == "of another thread\n"
    assert not hasattr(module, "print")
