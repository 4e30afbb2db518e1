"""Attention scores ``(x * weight).sum(-1)`` of vertex features, differentiable in one pass forward and one backward.

The features come back with the scores. Whoever goes on with what came back hands the other gradient of the features
to the same pass: it adds what the scores say, in place of a product and a sum of gradients for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pyg_fullgraph import columns
from pyg_fullgraph.functions import PLAIN, applying, is_wrapped
from triton_kernels import dots as kernels
from triton_kernels import reference

__all__ = ["can_take", "row_dots", "scores"]

#: Scores of the same features that one pass computes.
_TOGETHER = 2


def can_take(x: Any, weight: Any) -> bool:
    """Whether ``(x * weight).sum(-1)`` is made of features ``[N, H, C]`` and a weight ``[1, H, C]`` as they are."""
    if type(x) not in PLAIN or type(weight) not in PLAIN:
        return False
    shape, device, dtype = x.shape, x.device, x.dtype
    if len(shape) != 3 or weight.shape != (1, shape[1], shape[2]) or not kernels.can_take(shape[1], shape[2]):
        return False
    kind, is_wrapped = device.type, torch._C._functorch.is_functorch_wrapped_tensor
    # Not where somebody looks at every operation, or derives otherwise than backward.
    return (dtype.is_floating_point and weight.dtype is dtype and weight.device == device and kind in ("cpu", "cuda")
            and x.layout is weight.layout is torch.strided and not torch.is_autocast_enabled(kind)
            and not torch.compiler.is_compiling() and not torch._C._is_tracing() and forward_ad._current_level < 0
            and not is_wrapped(x) and not is_wrapped(weight))


def row_dots(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """``(x * w).sum(-1)`` ``[N, H]`` for each of ``weights``, of which :func:`can_take` holds.

    Args:
        x: ``[N, H, C]``.
        weights: one or two of ``[1, H, C]``.

    Returns: ``x``, or where it has a gradient what stands for it in the same memory; and the scores.
    Numerics: sums in float32 (float64 for float64); bit-identical from run to run. On a CPU as torch computes it.
    Cost: reads ``x`` once; backward reads ``x`` and its other gradient once and writes the sum of gradients once.
    """
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in (x, *weights)):
        return x, _module(x).row_dots(x, weights)
    made = list(_apply_dots(x, *weights))
    return made.pop(0) if x.requires_grad else x, made


def scores(asked: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
    """The scores of pairs of features and weight, those of the same tensor of features together.

    Returns: one ``[N, H]`` per pair; and features with what stands for them from now on, where it is another tensor.
    """
    made: dict[int, Tensor] = {}
    stand_ins: list[tuple[Tensor, Tensor]] = []
    groups: dict[int, list[int]] = {}
    for k, (x, _) in enumerate(asked):
        groups.setdefault(id(x), []).append(k)
    for places in groups.values():
        features = x = asked[places[0]][0]
        for start in range(0, len(places), _TOGETHER):
            some = places[start:start + _TOGETHER]
            x, found = row_dots(x, [asked[k][1] for k in some])
            made.update(zip(some, found, strict=True))
        if x is not features:
            stand_ins.append((features, x))
    return [made[k] for k in range(len(asked))], stand_ins


def _module(x: Tensor) -> Any:
    """Kernels where they run, else their twins."""
    return kernels if columns.has_kernels(x.device) else reference


class _RowDots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *weights)
        made = _module(x).row_dots(x, weights)
        needs_x, *needs = ctx.needs_input_grad
        if needs_x:
            return x, *made
        ctx.mark_non_differentiable(*(score for score, need in zip(made, needs, strict=True) if not need))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (x, *weights), (needs_x, *needs) = ctx.saved_tensors, ctx.needs_input_grad
        g, grads = (grads[0], grads[1:]) if needs_x else (None, grads)
        used = [k for k, d in enumerate(grads) if d is not None]
        if not used:
            return (g, *(None for _ in weights))
        # Gradients may be differentiated themselves, come many at a time, or with a tangent.
        module = reference if torch.is_grad_enabled() or any(map(is_wrapped, (g, *grads))) else _module(x)
        grad_x, made = module.row_dots_backward(x, [weights[k] for k in used], [grads[k] for k in used], g, needs_x,
                                                any(needs[k] for k in used))
        found = dict(zip(used, made, strict=False))  # none where no weight needs one
        return (grad_x, *(found.get(k) if needs[k] else None for k in range(len(weights))))


_apply_dots = applying(_RowDots)
