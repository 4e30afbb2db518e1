"""The import table: what every ATen operation becomes in the IR.

A rule is called as ``rule(importer, fx, *args, **kwargs)`` with the imported arguments. Values are nodes, numbers,
constant tensors, :data:`INDEX`, or lists of them; the node of a tensor always has the feature shape of its form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._decomp import get_decompositions

from pyg_fullgraph.saga.rules import elementwise, layout, markers, reductions, rows
from pyg_fullgraph.saga.rules.markers import refusal_of
from pyg_fullgraph.saga.rules.rows import ROW_NUMBER

__all__ = ["DECOMPOSITIONS", "IMPORTS", "ROW_NUMBER", "refusal_of"]

aten = torch.ops.aten

#: ATen operation -> how it becomes IR. The rows an operation needs are one here and, if new, one in ``ir.OPS``.
IMPORTS: Mapping[str, Callable[..., Any]] = {
    **elementwise.IMPORTS, **layout.IMPORTS, **reductions.IMPORTS, **rows.IMPORTS, **markers.IMPORTS}

#: What is taken apart before it is imported, by torch or here.
DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {**get_decompositions([
    aten.addmm, aten.leaky_relu, aten.leaky_relu_backward, aten.elu_backward, aten.threshold,
    aten.threshold_backward, aten.sigmoid_backward, aten.tanh_backward, aten.gelu, aten.gelu_backward,
    aten.softplus_backward, aten.silu, aten.silu_backward, aten.hardtanh_backward, aten._softmax,
    aten._softmax_backward_data, aten._log_softmax, aten._log_softmax_backward_data, aten.rsub, aten.square,
    aten.log_sigmoid_forward, aten.log_sigmoid_backward, aten.addcmul, aten.addcdiv,
    aten.hardshrink, aten.softshrink, aten.glu,
    aten._prelu_kernel, aten.logsumexp, aten.logaddexp, aten.lerp, aten._safe_softmax, aten.logit,
    aten.baddbmm, aten.addmv, aten.mv, aten.dot, aten.addr, aten.index_select_backward, aten.heaviside,
    aten.deg2rad, aten.rad2deg, aten.isposinf, aten.isneginf, aten.logaddexp2, aten.tril, aten.triu,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten.softshrink_backward, aten.hardswish_backward, aten.hardsigmoid_backward, aten.mish_backward,
    aten.rrelu_with_noise, aten.count_nonzero, aten.narrow_copy,
]), aten.linalg_vector_norm.default: reductions.norm_from_the_front}
