"""Torch's functions that a tape may have, by what they do."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_fullgraph import dense

__all__ = ["BY_INDEX", "FACTORIES", "FUNCTIONS", "LASTING", "NEW", "OF_FIXED", "PICKS", "QUESTIONS", "RUNNING"]


def _named(names: str) -> frozenset[Any]:
    """Torch's functions and methods of tensors of these names; also where PyG puts its own in the place of torch's."""
    spaces = torch, torch._C._VariableFunctions, Tensor, F
    found = (getattr(space, name, None) for name in names.split() for space in spaces)
    return frozenset(f for f in found if callable(f))


#: Questions whose answer follows from shape, dtype and device of what was given.
QUESTIONS = frozenset({
    Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__, Tensor.layout.__get__, Tensor.ndim.__get__,
    Tensor.is_cuda.__get__, Tensor.is_sparse.__get__, Tensor.is_sparse_csr.__get__, Tensor.requires_grad.__get__,
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__, torch.numel,
    Tensor.is_floating_point, Tensor.is_complex, torch.is_floating_point, torch.is_complex,
})
#: Functions that write to running means.
RUNNING = _named("batch_norm")
#: Those, and functions that leave another state of random numbers.
RANDOM = RUNNING | _named("dropout dropout_ feature_dropout alpha_dropout")
#: Those, and functions that write to what they are given.
LASTING = RANDOM | _named(
    "add_ sub_ mul_ div_ relu_ copy_ zero_ index_copy_ __iadd__ __isub__ __imul__ __itruediv__ __setitem__")
#: Those that are given no tensor.
FACTORIES = frozenset({torch.arange, torch.empty, torch.full, torch.ones, torch.zeros})
#: Functions that make a tensor whose numbers come from nowhere.
NEW = FACTORIES | _named("empty_like new_empty new_ones new_zeros ones_like zeros_like")
#: Those that pick rows by ids, and those that are given an index of any kind.
PICKS, BY_INDEX = _named("index_select"), _named("__getitem__ __setitem__")
#: Those that give tensors whose shapes follow from those of what was given, and nothing else.
FUNCTIONS = LASTING | NEW | dense.TAKEN | {Tensor.T.__get__, Tensor.mT.__get__} | _named(
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __neg__ __pow__ __rpow__ __matmul__ "
    "__getitem__ abs add addcdiv addcmul addmm amax amin atan2 baddbmm bmm cat celu chunk clamp clamp_max clamp_min "
    "clone concat contiguous cos cosh cumsum div einsum elu erf exp expand expand_as expm1 flatten flip gather gelu "
    "group_norm gru_cell hardsigmoid hardswish hardtanh hypot index_select layer_norm leaky_relu lerp linear log "
    "log10 log1p log2 log_softmax logsigmoid logsumexp lstm_cell masked_fill matmul maximum mean minimum mish mm mul "
    "narrow neg norm normalize permute pow prelu reciprocal relu relu6 repeat "
    "reshape rms_norm rsqrt select selu sigmoid silu sin sinh softmax softmin softplus softsign split sqrt square "
    "squeeze stack std sub sum t tan tanh tile transpose true_divide unbind unflatten unsqueeze var view view_as "
    "where")
#: Those that make the same of the same, for what is computed from ids; numbers may be asked for, too.
OF_FIXED = (FUNCTIONS - RANDOM - FACTORIES) | _named(
    "__and__ __bool__ __eq__ __float__ __floordiv__ __ge__ __gt__ __index__ __int__ __invert__ __le__ __lt__ __mod__ "
    "__ne__ __or__ __rfloordiv__ __rmod__ __xor__ all any argmax argmin argsort bincount bitwise_and "
    "bitwise_not bitwise_or bool bucketize ceil clamp_ cumprod div_ double eq fill_ float floor floor_divide "
    "full_like ge gt half index_add index_add_ index_fill index_put int isfinite isin isinf isnan item le logical_and "
    "logical_not logical_or long lt masked_fill_ masked_select max median min mode ne new_full nonzero one_hot pow_ "
    "prod reciprocal_ remainder repeat_interleave roll round rsqrt_ scatter scatter_ scatter_add scatter_add_ "
    "scatter_reduce scatter_reduce_ searchsorted sign sort sqrt_ tensor to tolist topk type unique unique_consecutive")
