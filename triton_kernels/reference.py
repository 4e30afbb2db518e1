"""Plain-torch twins of the device code: what the kernels must compute, differentiable, in any dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

#: Kinds of activations: of ``identity`` nothing but dropout is left.
ACTIVATIONS = ("identity", "relu", "leaky_relu", "elu")
_MASK = 0xFFFFFFFF


class Activation(NamedTuple):
    """What becomes of each number.

    Attributes:
        kind: One of :data:`ACTIVATIONS`.
        slope: Of negative numbers: that of ``leaky_relu``, and ``alpha`` of ``elu``; at least 0.
        p: Probability that it is dropped, less than 1.
    """

    kind: str
    slope: float
    p: float

    @staticmethod
    def of(kind: str, p: float, negative_slope: float, alpha: float) -> Activation:
        """Of all numbers the one that ``kind`` takes."""
        return Activation(kind, float({"leaky_relu": negative_slope, "elu": alpha}.get(kind, 0.0)), float(p))

    @property
    def draws(self) -> bool:
        """Whether there is a mask."""
        return self.p > 0

    @property
    def reads_seed(self) -> bool:
        """Whether backward draws the mask again."""
        return self.draws and self.kind != "relu"


def edge_softmax(logit: Tensor, dst: Tensor, num_dst: int) -> Tensor:
    """Softmax over the edges of each destination.

    Args:
        logit: ``[E, *shape]``, every feature on its own.
        dst: Destination of each edge, ``[E]``.
        num_dst: Number of destinations.

    Returns:
        ``[E, *shape]``, summing to one over the edges of each destination.
    """
    index = dst.reshape(-1, *(1,) * (logit.dim() - 1)).expand_as(logit)
    peak = logit.new_full((num_dst, *logit.shape[1:]), -math.inf).scatter_reduce(0, index, logit.detach(), "amax")
    weight = (logit - peak.index_select(0, dst)).exp()
    total = weight.new_zeros(peak.shape).index_add(0, dst, weight)
    return weight / total.index_select(0, dst)


def segment_reduce(value: Tensor, dst: Tensor, num_dst: int, kind: str) -> Tensor:
    """Reduce edge values by destination; destinations without edges get 0, products 1.

    Args:
        value: ``[E, *shape]``.
        dst: Destination of each edge, ``[E]``.
        num_dst: Number of destinations.
        kind: ``sum``, ``mean``, ``max``, ``min`` or ``mul``.
    """
    zeros = value.new_zeros((num_dst, *value.shape[1:]))
    if kind in ("sum", "mean"):
        out = zeros.index_add(0, dst, value)
        if kind == "sum":
            return out
        count = torch.bincount(dst, minlength=num_dst).clamp(min=1).to(value.dtype)
        return out / count.reshape(-1, *(1,) * (value.dim() - 1))
    index = dst.reshape(-1, *(1,) * (value.dim() - 1)).expand_as(value)
    if kind == "mul":
        return torch.ones_like(zeros).scatter_reduce(0, index, value, "prod")
    return zeros.scatter_reduce(0, index, value, "amax" if kind == "max" else "amin", include_self=False)


def philox(seed: Tensor, low: Tensor, high: Tensor) -> list[Tensor]:
    """The four words of Philox-4x32-10 with counter ``(low, high, 0, 0)`` and a 64-bit key.

    Args:
        seed: Key, int64 ``[1]``.
        low: Low counter word, int64, 32 bits used.
        high: High counter word, int64, 32 bits used.

    Returns:
        int64 tensors with values in ``[0, 2**32)``.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
    """
    low, high = torch.broadcast_tensors(low & _MASK, high & _MASK)
    c = [low, high, torch.zeros_like(low), torch.zeros_like(low)]
    key0, key1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        # int64 products wrap modulo 2**64, which keeps all 64 bits of a 32 x 32 bit product.
        first, second = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [((second >> 32) & _MASK) ^ c[1] ^ key0, second & _MASK,
             ((first >> 32) & _MASK) ^ c[3] ^ key1, first & _MASK]
        key0, key1 = (key0 + 0x9E3779B9) & _MASK, (key1 + 0xBB67AE85) & _MASK
    return c


def dropout_threshold(p: float) -> int:
    """Random words below this drop the value."""
    return min(round(p * 2.0**32), _MASK)


def dropout_mask(seed: Tensor, eid: Tensor, shape: tuple[int, ...], p: float,
                 dtype: torch.dtype = torch.float32) -> Tensor:
    """Dropout factors ``0`` or ``1 / (1 - p)`` that depend on seed, edge id and feature only.

    Args:
        seed: int64 ``[1]``.
        eid: Position of each edge in the user's ``edge_index``, ``[E]``.
        shape: Feature shape.
        p: Probability of dropping.
        dtype: Of the factors.

    Returns:
        ``[E, *shape]`` of ``dtype``.
    """
    if p >= 1.0:
        return torch.zeros((eid.numel(), *shape), dtype=dtype, device=eid.device)
    numel = max(math.prod(shape), 1)
    counter = eid.long()[:, None] * numel + torch.arange(numel, device=eid.device)
    word = philox(seed, counter, counter >> 32)[0]
    keep = (word >= dropout_threshold(p)).reshape(eid.numel(), *shape)
    return keep.to(dtype) * (1.0 / (1.0 - p))


def row_dropout_mask(seed: Tensor, ids: Tensor, num_features: int, p: float, dtype: torch.dtype) -> Tensor:
    """Dropout factors ``0`` or ``1 / (1 - p)`` of rows, which depend on seed, row and feature only.

    Args:
        seed: int64 ``[1]``.
        ids: ``[N]`` what each row is known by.
        num_features: K, of which each four share a counter.
        p: Probability of dropping, less than 1.
        dtype: Of the factors.

    Returns:
        ``[N, K]`` of ``dtype``.
    """
    num_groups = -(-num_features // 4)
    counter = ids.long()[:, None] * num_groups + torch.arange(num_groups, device=ids.device)
    words = torch.stack(philox(seed, counter, counter >> 32), -1).flatten(1)[:, :num_features]
    return (words >= dropout_threshold(p)).to(dtype) * (1.0 / (1.0 - p))


def row_dots(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """``(x * w).sum(-1)`` ``[N, H]`` of features ``[N, H, C]``, for each of ``weights`` ``[1, H, C]``."""
    return [(x * w).sum(-1) for w in weights]


def row_dots_backward(x: Tensor, weights: Sequence[Tensor], grads: Sequence[Tensor], g: Tensor | None,
                      needs_x: bool, needs_weight: bool) -> tuple[Tensor | None, list[Tensor]]:
    """The gradients of :func:`row_dots`, of features added to ``g``.

    Args:
        x, weights: as there.
        grads: ``[N, H]``, the gradient of each result.
        g: ``[N, H, C]``, another gradient of ``x``; None for zeros.
        needs_x, needs_weight: which gradients are wanted.
    """
    grad_x = g
    for d, w in zip(grads, weights, strict=True) if needs_x else ():
        grad_x = d.unsqueeze(-1) * w if grad_x is None else torch.addcmul(grad_x, d.unsqueeze(-1), w)
    # A product per head, which makes nothing of the size of the features.
    made = [torch.bmm(d.t().unsqueeze(1), x.transpose(0, 1)).transpose(0, 1) for d in grads] if needs_weight else []
    return grad_x if needs_x else None, made


def column_sum(x: Tensor) -> Tensor:
    """The sum of the rows of ``x`` ``[..., C]``."""
    return x.sum(list(range(x.dim() - 1)))


def activate(x: Tensor, activation: Activation, seed: Tensor | None, ids: Tensor | None) -> Tensor:
    """Rows ``[N, ...]`` through an activation and dropout, with a ``seed`` where there is a mask; see the kernel."""
    kind, slope, _ = activation
    functions = {"relu": F.relu, "leaky_relu": lambda t: F.leaky_relu(t, slope), "elu": lambda t: F.elu(t, slope)}
    y = functions[kind](x) if kind in functions else x
    return y if seed is None else y * _factors(x, activation, seed, ids)


def activate_backward(g: Tensor, kept: Tensor | None, activation: Activation, seed: Tensor | None, ids: Tensor | None,
                      is_input: bool, needs_sum: bool) -> tuple[Tensor, Tensor | None]:
    """The gradient of :func:`activate`, differentiable, and the sum of its rows; see the kernel."""
    kind, slope, p = activation
    if kind == "relu":
        assert kept is not None
        made = torch.where(kept <= 0, 0.0, g * (1.0 / (1.0 - p)))
    else:
        made = g if kept is None else g * _derivative(kept if is_input or kind != "elu" else kept * (1.0 - p), kind,
                                                      slope, is_input)
        made = made if seed is None else made * _factors(g, activation, seed, ids)
    return made, column_sum(made) if needs_sum else None


def _derivative(value: Tensor, kind: str, slope: float, is_input: bool) -> Tensor:
    """Of an activation, by what went in or what came out."""
    # What is not chosen must not overflow: its gradient would be no number.
    below = slope if kind == "leaky_relu" else value.clamp(max=0).exp() * slope if is_input else value + slope
    return torch.where(value > 0, torch.ones_like(value), below)


def _factors(like: Tensor, activation: Activation, seed: Tensor, ids: Tensor | None) -> Tensor:
    ids = torch.arange(like.shape[0], device=like.device) if ids is None else ids
    return row_dropout_mask(seed, ids, math.prod(like.shape[1:]), activation.p, like.dtype).view(like.shape)
