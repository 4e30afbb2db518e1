"""What is added to every row of vertex values, such as a bias, with a gradient that is one pass over the rows.

Layers find these sums through the mode of :mod:`pyg_fullgraph.dense`, the executor has :func:`add`. Where no kernel
pays, and for gradients of gradients, everything is torch's.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.weak import WeakIdKeyDictionary

from pyg_fullgraph.functions import PLAIN, applying, is_of_transform, is_wrapped
from triton_kernels import columns as kernels
from triton_kernels import dense, launch, reference

__all__ = ["DTYPES", "add", "column_sum", "has_kernels", "has_transform", "is_summed", "may_take", "note_sum", "takes",
           "total"]

#: Numbers from which a gradient is summed by our kernel: torch takes 138 us for 43 million in float32 on an H200, 2.5
#: times what reading them takes, and launches two kernels less; narrower rows it adds as well as any. Not measured.
MIN_NUMBERS, MIN_COLUMNS = 1 << 22, 16
#: How many times wider than its arguments what a layer adds to may be.
_WIDENS = 4
#: Of tensors that there are kernels for.
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

# Gradients whose sum was computed with them: the backward that runs and their version then, and the sum.
_sums: WeakIdKeyDictionary = WeakIdKeyDictionary()


def may_take(value: Tensor) -> bool:
    """Whether in a layer with ``value`` for an argument there may be something for :func:`takes`."""
    return value.is_floating_point() and value.numel() * _WIDENS >= MIN_NUMBERS and torch.is_grad_enabled() and \
        has_kernels(value.device)


def takes(bias: Any, shape: tuple[int, ...], *others: Any) -> bool:
    """Whether ``bias`` ``[C]`` has a gradient that our kernel sums over the rows of a result of ``shape`` ``[..., C]``.

    Args:
        bias, shape: as above.
        others: what the result is made of beside it.
    """
    given = (bias, *others)
    if not (type(bias) in PLAIN and bias.requires_grad and bias.dim() == 1 and torch.is_grad_enabled()
            and len(shape) >= 2 and shape[-1] == bias.shape[0] >= MIN_COLUMNS and math.prod(shape) >= MIN_NUMBERS):
        return False
    device = bias.device
    return (bias.dtype in DTYPES and has_kernels(device) and not torch.is_autocast_enabled(device.type)
            and all(type(t) in PLAIN and t.dtype == bias.dtype and t.device == device and t.layout == torch.strided
                    for t in given)
            and not torch.compiler.is_compiling() and not torch._C._is_tracing() and not has_transform(given))


def has_transform(tensors: tuple[Tensor, ...]) -> bool:
    """Whether forward mode or a transform of ``torch.func`` is at work, which torch's operations know."""
    return forward_ad._current_level >= 0 or any(map(is_of_transform, tensors))


def add(x: Tensor, y: Tensor) -> Tensor:
    """``x + y``; where one is added to every row of the other, its gradient is one pass over the rows."""
    if torch.is_grad_enabled() and x.dim() != y.dim():
        bias, rows = (x, y) if x.dim() < y.dim() else (y, x)
        if takes(bias, tuple(rows.shape), rows):
            made: Tensor = _apply_add(rows, bias)
            return made
    return x + y


def column_sum(g: Tensor) -> Tensor:
    """The sum ``[C]`` of the rows of ``g`` ``[..., C]``, differentiable where gradients are on.

    Numerics: sums in float32 (float64 for float64); bit-identical from run to run.
    """
    known = _sums.pop(g, None) if _sums else None
    if known is not None and known[:2] == _now(g) and not torch.is_grad_enabled():
        total: Tensor = known[2]
        return total
    rows = g.view(-1, g.shape[-1]) if g.dim() > 2 and g.is_contiguous() else g
    pays = type(rows) is Tensor and rows.dim() == 2 and rows.stride(1) == 1 and rows.shape[1] >= MIN_COLUMNS and \
        rows.numel() >= MIN_NUMBERS and rows.dtype in DTYPES and has_kernels(rows.device)
    if pays and not torch.is_grad_enabled() and not is_wrapped(rows):
        return kernels.column_sum(rows)
    return reference.column_sum(rows)


def total(x: Tensor, dtype: torch.dtype, into: Tensor | None = None) -> Tensor:
    """The sum ``[*shape]`` of the rows of ``x`` ``[N, *shape]`` in ``dtype``, float32 or float64, which that of ``x``
    is summed in; or ``into``, an earlier one, with that added. Not differentiable.

    Numerics: bit-identical from run to run.
    """
    if x.dtype in DTYPES and has_kernels(launch.meant(x.device)) and x.is_contiguous():
        earlier = None if into is None else into.view(-1)
        return kernels.column_sum(x.flatten(1), dtype, earlier).view(x.shape[1:])
    made = x.sum(0, dtype=dtype)
    return made if into is None else into.add_(made)


def is_summed(x: Tensor) -> bool:
    """Whether backward will ask :func:`column_sum` for the sum of the gradient of ``x`` ``[N, C]``, and that is large:
    who computes the gradient may sum it up in the same pass, and :func:`note_sum`.
    """
    return x.dim() == 2 and x.shape[1] >= MIN_COLUMNS and x.numel() >= MIN_NUMBERS and \
        getattr(x.grad_fn, "sums_gradient", False)


def note_sum(g: Tensor, total: Tensor) -> None:
    """Let :func:`column_sum` of the tensor ``g`` be ``total`` within this backward, unless ``g`` is written to before,
    as where gradients are added up. Hooks, which torch asks not to write, may do so in ways that torch counts.
    """
    if not g.is_inference():
        _sums[g] = *_now(g), total


def _now(g: Tensor) -> tuple[int, int]:
    return torch._C._current_graph_task_id(), g._version


def has_kernels(device: torch.device) -> bool:
    """Whether kernels for rows of vertices run on tensors of ``device``."""
    return device.type == "cuda" or (device.type == "cpu" and dense.is_interpreted())


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor) -> Tensor:
        ctx.sums_gradient = True
        return rows + bias

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor]:
        return g if ctx.needs_input_grad[0] else None, column_sum(g)


_apply_add = applying(_Add)
