"""Activation and dropout between layers, of which one tensor is kept for backward: what the next layer keeps as well.

Torch keeps the result of a rectifier, the mask of dropout and its result, 2.25 arrays; here the mask is read off the
result, or drawn again. The gradient of the bias before it comes from the same pass.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from pyg_fullgraph import columns
from pyg_fullgraph.errors import InputError
from pyg_fullgraph.functions import PLAIN, applying, is_recorded, is_wrapped
from triton_kernels import activation as kernels
from triton_kernels import reference
from triton_kernels.reference import Activation

__all__ = ["ActivationDropout", "activation_dropout", "apply", "composed"]


def activation_dropout(x: Tensor, activation: str = "relu", p: float = 0.5, training: bool = True, *,
                       negative_slope: float = 0.01, alpha: float = 1.0) -> Tensor:
    """``F.dropout(F.relu(x), p, training)`` and its like in one pass forward and one backward.

        x = pfg.activation_dropout(conv(x, edge_index), "relu", 0.5, self.training)
    For backward the result alone is kept; of ``elu`` in half precision, whose slope a rounded result does not tell,
    ``x`` as well. Where there are no kernels (on a CPU, under ``torch.compile``, ``torch.export`` and transforms of
    ``torch.func``, for tensors of other classes) it is torch's functions, and so it is within ``message``, which is
    compiled as if they stood there.

    Args:
        x: [N, ...] features, of a floating dtype.
        activation: "relu", "leaky_relu", "elu", or "identity" for dropout alone.
        p: the probability that a number is dropped; what is kept is divided by 1 - p.
        training: whether there is dropout.
        negative_slope: of "leaky_relu", at least 0.
        alpha: of "elu", at least 0.
    Returns: [N, ...] of the dtype of ``x``.
    Raises: InputError (ValueError) for another activation, or a number out of its bounds.
    Numerics: computes in float32 (float64 for float64) and rounds once. The slope of ``elu`` in float32 and float64 is
        that of the result, with an error of ``alpha`` times what one is rounded by. Masks are a function of a seed from
        torch's generator, row and feature; they are others than ``F.dropout`` draws. In a :class:`DistributedModel`
        rows are known by their vertices or edges.
    """
    _check(activation, p, negative_slope, alpha)
    if has_torch_function_unary(x) and not torch.compiler.is_compiling():
        made: Tensor = handle_torch_function(activation_dropout, (x,), x, activation, p, training,
                                             negative_slope=negative_slope, alpha=alpha)
        return made
    what = Activation.of(activation, p if training else 0.0, negative_slope, alpha)
    if what.p < 1.0 and _has_kernel(x) and _pays(x, what):
        return _by_kernels(x, what, torch.randint(2**63 - 1, (1,), device=x.device) if what.draws else None)
    return composed(x, activation, p, training, negative_slope=negative_slope, alpha=alpha)


def composed(x: Tensor, activation: str = "relu", p: float = 0.5, training: bool = True, *,
             negative_slope: float = 0.01, alpha: float = 1.0) -> Tensor:
    """:func:`activation_dropout` by torch's functions."""
    what = Activation.of(activation, 0.0, negative_slope, alpha)
    return F.dropout(reference.activate(x, what, None, None), p, training)


class ActivationDropout(nn.Module):
    """:func:`activation_dropout` as a module, which drops while it trains.

        model = pyg_nn.GCN(100, 256, 3, 47, act=pfg.ActivationDropout("relu", 0.5))    # and no dropout of its own

    Args: as of the function.
    """

    def __init__(self, activation: str = "relu", p: float = 0.5, *, negative_slope: float = 0.01,
                 alpha: float = 1.0) -> None:
        super().__init__()
        _check(activation, p, negative_slope, alpha)
        self.activation, self.p, self.negative_slope, self.alpha = activation, p, negative_slope, alpha

    def forward(self, x: Tensor) -> Tensor:
        """[N, ...] from ``x`` [N, ...]."""
        return activation_dropout(x, self.activation, self.p, self.training, negative_slope=self.negative_slope,
                                  alpha=self.alpha)

    def extra_repr(self) -> str:
        more = {"leaky_relu": f", negative_slope={self.negative_slope}", "elu": f", alpha={self.alpha}"}
        return f"{self.activation!r}, p={self.p}{more.get(self.activation, '')}"


def apply(x: Tensor, activation: Activation, seed: Tensor | None, ids: Tensor | None = None) -> Tensor:
    """``x`` ``[N, ...]`` through ``activation``, by kernels where there are some for it, else by torch's functions;
    differentiable, also twice.

    Args:
        x, activation: What goes through what.
        seed: int64 ``[1]`` of the mask, None without one.
        ids: ``[N]`` what rows are known by there; their places without.
    """
    return _by_kernels(x, activation, seed, ids) if _has_kernel(x) else reference.activate(x, activation, seed, ids)


def _by_kernels(x: Tensor, activation: Activation, seed: Tensor | None, ids: Tensor | None = None) -> Tensor:
    if x.dim() == 2:
        made: Tensor = _apply(x, activation, seed, ids)
        return made
    made = _apply(x.reshape(x.shape[0], math.prod(x.shape[1:])), activation, seed, ids)
    return made.view(x.shape)


def _check(activation: str, p: float, negative_slope: float, alpha: float) -> None:
    if activation not in reference.ACTIVATIONS:
        raise InputError("activation", f"to be one of {', '.join(reference.ACTIVATIONS)}", repr(activation))
    if not 0.0 <= p <= 1.0:
        raise InputError("p", "to be in [0, 1]", p)
    for name, value in (("negative_slope", negative_slope), ("alpha", alpha)):
        if not value >= 0.0:
            raise InputError(name, "to be at least 0", value)


def _has_kernel(x: Tensor) -> bool:
    """Whether there are kernels for ``x``, and nobody looks at every operation or derives otherwise than backward."""
    return (not torch.compiler.is_compiling() and not is_recorded() and type(x) in PLAIN and x.dtype in columns.DTYPES
            and x.layout is torch.strided and x.dim() > 0 and x.numel() > 0 and not x.is_neg()
            and columns.has_kernels(x.device) and not columns.has_transform((x,)))


def _pays(x: Tensor, activation: Activation) -> bool:
    """Whether a kernel does what torch's functions do not do as well, in one pass that keeps one tensor."""
    if activation.draws or not (torch.is_grad_enabled() and x.requires_grad):
        return activation.draws
    return activation.kind in ("leaky_relu", "elu") or (activation.kind == "relu" and columns.is_summed(x))


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: Activation, seed: Tensor | None, ids: Tensor | None) -> Tensor:
        made = kernels.activate(x, activation, seed, ids)
        ctx.activation, ctx.is_input = activation, activation.kind == "elu" and x.dtype.itemsize == 2
        ctx.needs_sum = columns.is_summed(x)
        kept = None if activation.kind == "identity" else x if ctx.is_input else made
        ctx.save_for_backward(kept, *((seed, ids) if activation.reads_seed else (None, None)))
        return made

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        kept, seed, ids = ctx.saved_tensors
        # Gradients may be differentiated themselves, by torch, come many at a time, or with a tangent.
        is_last = not torch.is_grad_enabled() and not is_wrapped(g)
        module = kernels if is_last else reference
        made, total = module.activate_backward(g.resolve_neg(), kept, ctx.activation, seed, ids, ctx.is_input,
                                               ctx.needs_sum and is_last)
        if total is not None:
            columns.note_sum(made, total)
        return made, None, None, None


_apply = applying(_Activate)
