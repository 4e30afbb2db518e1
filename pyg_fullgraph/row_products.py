"""One small matrix product per row of vertex values, ``[N, I, K]`` by ``[N, K, J]``, differentiable by the same kernel.

Layers find these products through the mode of :mod:`pyg_fullgraph.dense`, as EGConv's of the weights and the sums that
each vertex has. All others are torch's, and so are gradients of gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_fullgraph import columns
from pyg_fullgraph.functions import PLAIN, applying, has_transforms, is_recorded, is_wrapped
from triton_kernels import row_products as kernels

__all__ = ["may_take", "product", "takes"]

#: Rows from which on our kernel is used: of 16,384 of 8 x 12 by 12 x 8 torch's takes 0.03 to 0.06 ms, ours 0.02, which
#: is less than what Python takes for it (H200).
MIN_ROWS = 1 << 16


def may_take(value: Tensor) -> bool:
    """Whether in a layer with ``value`` for an argument there may be something for :func:`takes`."""
    return value.shape[0] >= MIN_ROWS and value.dtype in columns.DTYPES and columns.has_kernels(value.device)


def takes(a: Any, b: Any) -> bool:
    """Whether ``a @ b`` is a product for our kernel."""
    if type(a) not in PLAIN or type(b) not in PLAIN or a.dim() != 3 or b.dim() != 3:
        return False
    shape, other, device = a.shape, b.shape, a.device
    return (shape[0] == other[0] >= MIN_ROWS and shape[2] == other[1]
            and a.dtype == b.dtype and a.dtype in columns.DTYPES
            and kernels.can_take(shape[1], shape[2], other[2], a.itemsize == 2) and device == b.device
            and a.layout is b.layout is torch.strided and columns.has_kernels(device)
            and not a.is_neg() and not b.is_neg() and not torch.is_autocast_enabled(device.type)
            and not is_recorded() and not has_transforms() and not columns.has_transform((a, b)))


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b``, of which :func:`takes` holds."""
    made: Tensor = _apply_product(a, b)
    return made


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        # As torch does: what is not read may be written to, or freed, before backward.
        ctx.save_for_backward(a if ctx.needs_input_grad[1] else None, b if ctx.needs_input_grad[0] else None)
        return kernels.product(a, b)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        # Gradients may be differentiated themselves, come many at a time, or with a tangent: by torch.
        is_ours = not torch.is_grad_enabled() and not is_wrapped(g)
        multiply, g = (kernels.product, g.resolve_neg()) if is_ours else (torch.matmul, g)
        return (multiply(g, b.mT) if b is not None else None), (multiply(a.mT, g) if a is not None else None)


_apply_product = applying(_Product)
