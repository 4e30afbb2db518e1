"""Every place that a kernel reads or writes under Triton's interpreter lies in the memory of one of its arguments.

What masks leave out counts for nothing, as on a GPU. A plugin of the interpreter's session (``-p bounds``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

#: Of the kernels that run, the innermost last, where the memory of arguments starts and ends.
_spans: list[tuple[np.ndarray, np.ndarray]] = []


class OutOfBounds(AssertionError):
    """A kernel read or wrote where none of its arguments is."""


def _memory(values: Any) -> tuple[np.ndarray, np.ndarray]:
    """Where the memory of tensors starts and ends, in ascending order, what overlaps as one."""
    spans = sorted({(s.data_ptr(), s.data_ptr() + s.nbytes()) for v in values if isinstance(v, torch.Tensor)
                    for s in [v.untyped_storage()]})
    starts, ends = (np.array([span[k] for span in spans], dtype=np.int64) for k in (0, 1))
    return starts, np.maximum.accumulate(ends) if len(ends) else ends


def check(places: Any, mask: Any, num_bytes: int, what: str) -> None:
    """Raise if one of ``places`` that ``mask`` does not leave out is not inside the memory of an argument."""
    starts, ends = _spans[-1]
    asked = np.broadcast_to(places, np.broadcast_shapes(np.shape(places), np.shape(mask)))
    asked = asked[np.broadcast_to(mask, asked.shape).astype(bool)].astype(np.int64)
    if not asked.size:
        return
    k = np.searchsorted(starts, asked, side="right") - 1
    wrong = (k < 0) | (asked + num_bytes > ends[np.maximum(k, 0)]) if len(starts) else np.ones(asked.shape, bool)
    if wrong.any():
        place = int(asked[wrong][0])
        behind = min((place - int(end) for end in ends), key=abs, default=0)
        raise OutOfBounds(f"Expected to {what} inside the arguments (got {int(wrong.sum())} of {asked.size} places "
                          f"outside, one {behind} bytes behind the end of the next)")


def install() -> None:
    """Check all kernels from now on."""
    init, load, store = GridExecutor._init_args_hst, InterpreterBuilder.create_masked_load, \
        InterpreterBuilder.create_masked_store
    call = GridExecutor.__call__

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        depth = len(_spans)
        try:
            return call(self, *args, **kwargs)
        finally:
            del _spans[depth:]

    def converted(self: Any, args: Any, kwargs: Any) -> Any:
        made = init(self, args, kwargs)
        _spans.append(_memory([*made[0], *made[1].values()]))
        return made

    def loaded(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        check(ptrs.data, mask.data, interpreter._get_np_dtype(ptrs.get_element_ty()).itemsize, "read")
        return load(self, ptrs, mask, *rest)

    def stored(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(ptrs.data, mask.data, interpreter._get_np_dtype(ptrs.get_element_ty()).itemsize, "write")
        return store(self, ptrs, value, mask, *rest)

    GridExecutor.__call__, GridExecutor._init_args_hst = called, converted
    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = loaded, stored


install()
