"""Rows with zeros behind them, so that each begins at a multiple of 16 bytes, as views that show the features alone."""

from __future__ import annotations

import contextlib

import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from triton_kernels import dense, launch
from triton_kernels import padding as kernels

__all__ = ["padded", "shown", "whole", "with_zeros"]

# What is a view of a tensor with zeros behind its rows.
_whole: WeakIdKeyDictionary = WeakIdKeyDictionary()


def with_zeros(x: Tensor, count: int) -> Tensor:
    """``x`` ``[N, K]`` with ``count`` zeros behind each row: a new tensor ``[N, K + count]``; not differentiable."""
    pitch = x.shape[1] + count
    has_kernel = x.device.type in ("cuda", "meta") or (x.device.type == "cpu" and dense.is_interpreted())
    if has_kernel and pitch <= kernels.MAX_PITCH:
        with contextlib.suppress(*launch.REFUSALS):
            return kernels.pad(x, pitch)
    return F.pad(x, (0, count))


def padded(x: Tensor, count: int) -> Tensor:
    """A copy of ``x`` ``[N, K]`` with ``count`` zeros behind each row."""
    return shown(with_zeros(x, count), x.shape[1])


def shown(rows: Tensor, num_features: int) -> Tensor:
    """The features of contiguous ``rows``, behind which there are zeros: a view ``[N, num_features]`` of unusual
    strides, of which :func:`whole` knows.
    """
    view = rows.narrow(1, 0, num_features)
    _whole[view] = rows
    return view


def whole(x: Tensor) -> Tensor | None:
    """The contiguous rows that the features ``x`` are a view of, with zeros behind them; None if nothing is known."""
    return _whole.get(x) if x.dim() == 2 and x.stride(0) > x.shape[1] else None
