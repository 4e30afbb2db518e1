"""What checks places in memory under the interpreter notices what a kernel must not do."""

import sys

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

pytestmark = [pytest.mark.interpreter, pytest.mark.skipif("bounds" not in sys.modules, reason="nothing is checked")]


@triton.jit
def _copy(x_ptr, y_ptr, num_read, num_written, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < num_read, other=0.0), mask=at < num_written)


@triton.jit
def _copy_all(x_ptr, y_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y_ptr + at, tl.load(x_ptr + at))


def test_what_masks_leave_out_may_be_anywhere():
    x, y = torch.arange(10.0), torch.zeros(12)
    _copy[1,](x, y, 10, 12, SIZE=16)
    assert torch.equal(y, torch.cat([x, x.new_zeros(2)]))
    part = torch.zeros(20)[5:9]  # what is outside a view, but in its memory, is no matter
    _copy[1,](x, part, 10, 10, SIZE=16)
    _copy_all[1,](torch.ones(16), torch.zeros(16), SIZE=16)


@pytest.mark.parametrize("counts, what", [((11, 12), "read"), ((10, 13), "write")])
def test_places_outside_are_refused(counts, what):
    with pytest.raises(InterpreterError, match=f"Expected to {what} inside the arguments .got 1 of"):
        _copy[1,](torch.arange(10.0), torch.zeros(12), *counts, SIZE=16)


def test_without_a_mask():
    with pytest.raises(InterpreterError, match="got 6 of 16 places outside"):
        _copy_all[1,](torch.arange(10.0), torch.zeros(16), SIZE=16)
