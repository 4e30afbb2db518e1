"""Linear maps of many rows: products by the kernels of :mod:`triton_kernels.dense`, where they pay and unless switched
off, gradients of what is added to every row by those of :mod:`triton_kernels.columns`, and one small product per row
by that of :mod:`triton_kernels.row_products`.

Torch multiplies float32 without tensor cores unless it may round to TF32; here they are used, and results are about as
exact as without. Layers find all of this through a mode around their forward (:func:`in_layer`), which does not see
calls that lazy tensors make: those go by :func:`call`. The executor has :func:`matmul`.

Products of the same features in one forward are a chain, where that and all modules in it are PyG's or torch's: each
gives back the features, as another tensor in the same memory, and the next one takes that. So backward comes to them
one after the other, and the kernel that computes what one of them says of the features adds what the later ones said,
in place of a sum of gradients for each. Products that lazy tensors and edge phases make within the forward are links
as any other. An edge phase is a link itself where a product of its features came after it in an earlier forward of the
layer, as in SAGEConv: what it sums up in backward is added to what that product said.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from pyg_fullgraph import columns, padding, row_products
from pyg_fullgraph.functions import PLAIN, LayerMode, applying, hooks_of_saved, is_wrapped, unseen
from triton_kernels import dense, launch

__all__ = ["SUMS", "TAKEN", "Products", "added", "call", "chain", "in_layer", "linear", "matmul", "multiplier", "outer",
           "padded", "plus_product", "takes", "use_tensor_cores"]

#: Multiplications (rows x widths) from which a product is taken: torch needs about 0.1 ms for as many on an H200, twice
#: what two launches from Python take longer than its one, as products were when this was measured.
MIN_PRODUCTS = 1 << 31
#: Bounds of the widths: below the first (their harmonic mean) memory bounds a product, and the weight has to be small.
MIN_WIDTH, MAX_WIDTH = 64, 1024
#: Numbers from which rows are padded.
MIN_PADDED = 1 << 20
#: Rows and least width from which on cuBLAS takes less time in TF32 for gradients of features by a copy of the weight
#: that lies turned. Measured on an H100, weight as it is and turned, ms: 2.4 million rows, 256 x 256 2.64 and 1.84, 128
#: x 128 0.98 and 0.93, 64 x 64 0.48 and 0.46, 47 x 256 1.33 and 1.36; 169 thousand rows, 256 x 256 0.19 and 0.15.
MIN_TURNED_ROWS, MIN_TURNED_WIDTH = 1 << 17, 128

_HALVES = (torch.float16, torch.bfloat16)

_is_on = True


def use_tensor_cores(enabled: bool = True) -> None:
    """Switch on (the default) or off that fused layers multiply float32 features by weights on tensor cores.

    Taken are products of float32 features ``[..., K]`` and weights ``[N, K]`` on a GPU of compute capability 9.0 with
    at least 2**31 multiplications, widths up to 1024 and not both small, outside autocast, where torch may not use TF32
    by itself. All other linear maps are torch's, and so are gradients of gradients. What is kept of numbers: see
    :mod:`triton_kernels.dense`.
    """
    global _is_on
    _is_on = bool(enabled)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x weight^T + bias``, differentiable: by our kernels where they pay, else by torch, but for the gradient of the
    bias.

    Args:
        x: ``[..., K]``.
        weight: ``[N, K]``, of any strides.
        bias: ``[N]``.
    """
    is_ours = _is_ours_or_derived(x, weight, bias)
    return F.linear(x, weight, bias) if is_ours is None else _linear(x, weight, bias, is_ours)


def added(total: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """``total + x weight^T + bias`` by one kernel, differentiable; None where product or sum are none for our kernels.

    Args:
        total: ``[..., N]``.
        x: ``[..., K]``.
        weight: ``[N, K]``, of any strides.
        bias: ``[N]``.
    """
    if not (takes(x, weight, bias) and type(total) in PLAIN and not torch.compiler.is_compiling()):
        return None
    fits = total.dtype == torch.float32 and total.device == x.device and total.is_contiguous() and \
        total.shape == (*x.shape[:-1], weight.shape[0]) and not columns.has_transform((total,))
    return _linear(x, weight, bias, True, total) if fits else None


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x weight + bias`` for a weight ``[K, N]``; see :func:`linear`."""
    if weight.dim() == 2 and (bias is None or bias.dtype == weight.dtype):
        x, weight = _with_zeros(x, weight)
        if bias is not None:
            return linear(x, weight.t(), bias)
        if takes(x, weight.t(), None):
            return _linear(x, weight.t(), None, True)
    y = x @ weight
    return y if bias is None else y + bias


def plus_product(x: Tensor, weight: Tensor, total: Tensor) -> Tensor:
    """``total + x weight`` for a weight ``[K, N]`` and a total like the product, in the wider of their dtypes; see
    :func:`added`.
    """
    if total.dim() != 2 or torch.is_autocast_enabled(x.device.type):
        return total + matmul(x.to(weight.dtype), weight)
    dtype = torch.promote_types(total.dtype, weight.dtype)
    total = total.to(dtype)
    x, weight = _with_zeros(x.to(dtype), weight.to(dtype))
    made = added(total, x, weight.t())
    return torch.addmm(total, x, weight) if made is None else made


def multiplier(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """What multiplies matrices ``[M, K]`` by ``weight`` ``[K, N]``, whatever M is: our kernel, or torch; in half
    precision with results in float32. Not differentiable.
    """
    turned = weight.t()
    if _fits(*weight.shape) and _is_ours(weight):
        return lambda x: dense.product(x, turned)
    if weight.dtype in _HALVES:
        return lambda x: _exact_product(x.to(weight.dtype), weight)
    return lambda x: x @ weight


def outer(a: Tensor, b: Tensor, summed: int | None = None,
          into: tuple[Tensor | None, Tensor | None] = (None, None)) -> tuple[Tensor, Tensor | None]:
    """``a^T b`` for ``[M, K]`` and ``[M, N]``, by our kernel whatever M is, or by torch; of half precision in float32.
    Not differentiable.

    Args:
        summed: Which of both, 0 or 1, is summed over its rows as well.
        into: Earlier results of such a call, to which these are added, or None.

    Returns: the product ``[K, N]``, of any strides, and that sum, or None.
    """
    if _fits(b.shape[1], a.shape[1]) and _is_ours(a, b):
        if summed != 1:
            return dense.weight_gradient(a, b, summed == 0, into=into)
        turned, total = dense.weight_gradient(b, a, True, into=(None if into[0] is None else into[0].t(), into[1]))
        return turned.t(), total
    halves = [t.dtype for t in (a, b) if t.dtype in _HALVES]
    made = _exact_product(a.t().to(halves[0]), b.to(halves[0])) if halves else a.t() @ b
    total = None if summed is None else columns.total((a, b)[summed], made.dtype, into[1])
    return made if into[0] is None else into[0].add_(made), total


def _exact_product(a: Tensor, b: Tensor) -> Tensor:
    """``a b`` of matrices of half precision in float32."""
    if a.is_cuda and torch.version.hip is None and a.numel() and b.numel():
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def padded(x: Tensor) -> Tensor:
    """Numbers that will be multiplied again and again: ``x`` ``[N, K]``, or a copy of it with zeros behind its rows.

    Libraries multiply in TF32 and half precision at less than half of their speed where rows do not start at multiples
    of 16 bytes. :func:`matmul` finds the zeros; for all others the copy is a view of unusual strides.
    """
    count = -x.shape[-1] % (16 // x.element_size())
    if not count or x.dim() != 2 or x.requires_grad or not x.is_floating_point() or x.numel() < MIN_PADDED or \
            not _pays_to_pad(x.device):
        return x
    return padding.padded(x, count)


def _with_zeros(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both factors with zeros where :func:`padded` has put some behind the rows of ``x``."""
    wide = padding.whole(x)
    return (x, weight) if wide is None else (wide, F.pad(weight, (0, 0, 0, wide.shape[1] - weight.shape[0])))


def _pays_to_pad(device: torch.device) -> bool:
    return device.type == "cuda"


def in_layer(layer: Module, values: Iterable[Any], has_chains: Callable[[Module], bool]) -> Products | None:
    """A context for the forward of ``layer`` with ``values`` for arguments, in which products and sums are taken; None
    if none may be.

    ``has_chains`` says whether products of the same features may be a chain.
    """
    for value in values:
        if _is_tall(value):
            return Products(has_chains(layer), layer)
    return None


def alone(products: Products | None) -> contextlib.AbstractContextManager[None]:
    """:meth:`Products.alone`, nothing where there are none."""
    return _nothing if products is None else products.alone()


_nothing = contextlib.nullcontext()


def chain() -> Products | None:
    """The forward that runs in this thread, if products of the same features may be a chain in it."""
    forward = _running.mode
    return forward if forward is not None and forward.has_chains else None


def _is_tall(value: Any) -> bool:
    if isinstance(value, (tuple, list, dict)):
        return any(_is_tall(v) for v in (value.values() if isinstance(value, dict) else value))
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 2:
        return False
    is_tall = value.dtype == torch.float32 and value.numel() * MAX_WIDTH >= MIN_PRODUCTS
    return columns.may_take(value) or row_products.may_take(value) or \
        (_is_on and is_tall and _is_wanted(value.device))


@torch.compiler.assume_constant_result
def _is_wanted(device: torch.device) -> bool:
    """Whether there are kernels for a device, and torch would multiply float32 as it is there."""
    device = launch.meant(device)
    return _has_kernels(device) and torch.backends.cuda.matmul.fp32_precision != "tf32" and \
        not torch.is_autocast_enabled(device.type)


def takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a product as of :func:`linear` is one for our kernels; cheap questions first."""
    if not (type(x) in PLAIN and type(weight) in PLAIN and x.dim() >= 2 and weight.dim() == 2):
        return False
    num_out, num_in = weight.shape
    given = (x, weight) if bias is None else (x, weight, bias)
    return (x.shape[-1] == num_in and x.numel() * num_out >= MIN_PRODUCTS and _fits(num_out, num_in)
            and (bias is None or (type(bias) in PLAIN and bias.shape == (num_out,)))
            and _is_ours(*given) and (torch.compiler.is_compiling() or not columns.has_transform(given)))


def _fits(num_out: int, num_in: int) -> bool:
    """Whether our kernels take a product of such widths."""
    return max(num_out, num_in) <= MAX_WIDTH and 2 * num_out * num_in >= MIN_WIDTH * (num_out + num_in)


def _is_ours(x: Tensor, *others: Tensor) -> bool:
    """Whether there are kernels for factors like these, and torch would multiply without tensor cores."""
    return _is_on and all(t.dtype == torch.float32 and t.device == x.device and t.layout == torch.strided
                          for t in (x, *others)) and _is_wanted(x.device)


def _is_ours_or_derived(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool | None:
    """Whether a product is one for our kernels; None where its gradients are none for them, either."""
    # Modes would see two dozen questions, of which each takes a microsecond or two.
    with contextlib.nullcontext() if torch.compiler.is_compiling() else unseen():
        return takes(x, weight, bias) or (False if _has_own_gradient(x, weight, bias) else None)


def _has_own_gradient(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether of a product that torch multiplies a gradient is ours: of the bias by a kernel, or of the features."""
    return _is_summed(x, weight, bias) or _is_turned(x, weight, bias)


def _is_turned(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the gradient of the features of a product that torch multiplies is one by a turned weight."""
    if torch.compiler.is_compiling():
        return False
    given = (x, weight) if bias is None else (x, weight, bias)
    return (all(type(t) in PLAIN and t.dtype == torch.float32 and t.device == x.device and t.layout == torch.strided
                for t in given)
            and x.requires_grad and torch.is_grad_enabled() and x.dim() >= 2 and weight.dim() == 2
            and x.shape[-1] == weight.shape[1] and (bias is None or bias.shape == weight.shape[:1])
            and _pays_to_turn(x.numel() // max(x.shape[-1], 1), weight) and not torch._C._is_tracing()
            and not columns.has_transform(given))


def _pays_to_turn(num_rows: int, weight: Tensor) -> bool:
    return num_rows >= MIN_TURNED_ROWS and min(weight.shape) >= MIN_TURNED_WIDTH and weight.dtype == torch.float32 and \
        _has_tf32(weight.device)


def _has_tf32(device: torch.device) -> bool:
    """Whether torch multiplies float32 in TF32 on ``device``."""
    return device.type == "cuda" and torch.version.hip is None and \
        torch.backends.cuda.matmul.fp32_precision == "tf32" and not torch.is_autocast_enabled(device.type)


def _is_summed(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the gradient of the bias of a product that torch multiplies is one for our kernel."""
    return (bias is not None and bias.requires_grad and x.dim() >= 2 and weight.dim() == 2
            and x.shape[-1] == weight.shape[1] and columns.takes(bias, (*x.shape[:-1], weight.shape[0]), x, weight))


@lru_cache
def _has_kernels(device: torch.device) -> bool:
    if device.type != "cuda":
        return device.type == "cpu" and dense.is_interpreted()
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, is_ours: bool, total: Tensor | None = None) -> Tensor:
    """By our kernels, with ``total`` added; or by torch, but for the gradient of the bias, and then no compiler is at
    work.
    """
    constant = None if total is None else _rows(total.detach())
    if is_ours and torch.compiler.is_compiling():
        y = linear_operator(_rows(x), weight, bias)
    elif is_ours and (forward := _running.mode) is not None and forward.has_chains and _is_chained(x, weight):
        y, stand_in = _apply_linear(forward.stand_in(x), weight, bias, constant, True, True)
        forward.give_back(x, stand_in)
        forward.note(x)
    else:
        y = _apply_linear(_rows(x), weight, bias, constant, is_ours, False)
    if total is not None and total.requires_grad and torch.is_grad_enabled():
        y = _apply_added(_rows(total), y)
    return y.view(*x.shape[:-1], weight.shape[0]) if x.dim() != 2 else y


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]) if x.dim() != 2 else x


def _is_chained(x: Tensor, weight: Tensor) -> bool:
    """Whether a product gives the features back: where they have a gradient to add to, and are saved as it is."""
    # A hook on a weight would be called without a gradient where only later products are asked for.
    hooks = weight._backward_hooks
    return (x.requires_grad and weight.requires_grad
            and (not hooks or all(getattr(hook, "takes_none", False) for hook in hooks.values()))
            and not weight._post_accumulate_grad_hooks and torch.is_grad_enabled() and not torch._C._is_tracing()
            and (x.dim() == 2 or x.is_contiguous()))  # others are copied


def _gradients(g: Tensor, x: Tensor | None, weight: Tensor | None, needs: Sequence[bool], is_ours: bool = True,
               add: Tensor | None = None) -> list[Tensor | None]:
    """Of features, with ``add`` added, weight and bias, as far as ``needs`` asks; products by our kernels or by torch.

    ``x`` is needed for the gradient of the weight, and ``weight`` for that of the features.
    """
    grad_x = grad_weight = grad_bias = None
    if needs[0] and weight is not None:
        if is_ours:
            grad_x = dense.product(g, weight.t(), add=add)
        else:
            turned = _pays_to_turn(g.shape[0], weight)
            grad_x = F.linear(g, weight.t().contiguous()) if turned else g @ weight
            grad_x = grad_x if add is None else grad_x + add
    if needs[1] and x is not None:
        if is_ours:
            grad_weight, grad_bias = dense.weight_gradient(g, x, needs[2])
        else:
            grad_weight = g.t() @ x
    if needs[2] and grad_bias is None:
        grad_bias = columns.column_sum(g)
    return [grad_x, grad_weight, grad_bias]


@lru_cache(maxsize=1024)
def _begin_gradients(x_shape: torch.Size, x_strides: tuple[int, ...], shape: torch.Size, strides: tuple[int, ...],
                     needs: tuple[bool, ...], may_add: bool, device: torch.device) -> None:
    """Let threads compile what the gradients of a product will launch, where that is not known yet.

    Args: as of the product, whose weight has ``shape`` and ``strides``; ``needs`` is for :func:`_gradients`, and
        ``may_add`` whether a gradient of the features may be added to.
    """
    def compute() -> None:
        g = torch.empty((x_shape[0], shape[0]), device="meta")
        x, weight = (torch.empty_strided(*of, device="meta") for of in ((x_shape, x_strides), (shape, strides)))
        _gradients(g, x, weight, needs)
        if may_add and needs[0]:
            dense.product(g, weight.t(), add=x.new_empty(x_shape))

    if any(needs):
        launch.foresee(compute, device)


class _Linear(torch.autograd.Function):
    """The product of plain tensors, and a constant; the operator below costs several times its overhead."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, constant: Tensor | None, is_ours: bool,
                is_chained: bool) -> Tensor | tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        # As torch does: what is not read may be written to, or freed, before backward.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
        ctx.is_ours, ctx.sums_gradient = is_ours, ctx.needs_input_grad[2] and not is_ours
        if is_ours:
            _begin_gradients(x.shape, x.stride(), weight.shape, weight.stride(), ctx.needs_input_grad[:3], is_chained,
                             x.device)
        y = dense.product(x, weight, bias, constant) if is_ours else F.linear(x, weight, bias)
        return (y, x) if is_chained else y

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, add: Tensor | None = None) -> tuple[Tensor | None, ...]:
        if g is None:  # only later products are asked for, and what is saved may be gone
            return add, None, None, None, None, None
        (x, weight), needs = ctx.saved_tensors, ctx.needs_input_grad
        # Gradients may be differentiated themselves, come many at a time, or with a tangent: by torch.
        is_ours = ctx.is_ours and not torch.is_grad_enabled() and not is_wrapped(g) and not is_wrapped(add)
        made = _gradients(g, x, weight, needs[:3], is_ours, add)
        return *made, None, None, None


class _Added(torch.autograd.Function):
    """A product to which a matrix was added already, as the sum of both.

    It has a node of its own, as a sum by torch has: gradients of the matrix do not depend on what became of what the
    product saved.
    """

    @staticmethod
    def forward(ctx: Any, total: Tensor, y: Tensor) -> Tensor:
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return g if ctx.needs_input_grad[0] else None, g if ctx.needs_input_grad[1] else None


_apply_linear, _apply_added = applying(_Linear), applying(_Added)


# --- operators --------------------------------------------------------------------------------------------------


@torch.library.custom_op("pyg_fullgraph::linear", mutates_args=())
def linear_operator(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x weight^T + bias`` for ``[M, K]`` and ``[N, K]``, for compilers."""
    return dense.product(x, weight, bias)


@linear_operator.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@torch.library.custom_op("pyg_fullgraph::linear_backward", mutates_args=())
def linear_backward(g: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool]) -> list[Tensor]:
    """Those gradients of features, weight and bias that ``needs`` picks, in order."""
    return [t for t in _gradients(g, x, weight, needs) if t is not None]


@linear_backward.register_fake
def _(g: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool]) -> list[Tensor]:
    shapes = (tuple(x.shape), tuple(weight.shape), (weight.shape[0],))
    return [g.new_empty(shape) for shape, need in zip(shapes, needs, strict=True) if need]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:3])
    made = iter(linear_backward(g, *ctx.saved_tensors, needs))
    return tuple(next(made) if need else None for need in needs)


linear_operator.register_autograd(_backward, setup_context=_setup_context)


# --- the mode ---------------------------------------------------------------------------------------------------

_LINEAR = frozenset({F.linear})
_MATMUL = frozenset({torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__})
#: Products of as many matrices by as many.
_BATCHED = _MATMUL - {torch.mm, Tensor.mm} | {torch.bmm, Tensor.bmm}
_ADDMM = frozenset({torch.addmm, Tensor.addmm})
#: Torch's functions that add, which multiply nothing.
SUMS = frozenset({torch.add, Tensor.add})
#: Cells of recurrent networks, and what torch makes on a GPU of the products that they begin with.
_CELLS = {torch.gru_cell: torch.ops.aten._thnn_fused_gru_cell, torch.lstm_cell: torch.ops.aten._thnn_fused_lstm_cell}
#: Torch's functions that :func:`call` may take.
TAKEN = _LINEAR | _MATMUL | _BATCHED | _ADDMM | SUMS | frozenset(_CELLS)


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func(*args, **kwargs)``; a linear map, those of a recurrent cell, one small product per row, or a sum with a
    bias, as torch's functions write it by ours where those take it.
    """
    if func in SUMS and len(args) == 2 and not kwargs and all(type(a) in PLAIN for a in args):
        return columns.add(*args)
    if func in _LINEAR and len(args) >= 2 and set(kwargs) <= {"bias"}:
        x, weight, bias = *args[:2], args[2] if len(args) > 2 else kwargs.get("bias")
    elif func in _MATMUL and len(args) == 2 and not kwargs and _is_matrix(args[1]):
        x, weight, bias = args[0], args[1].t(), None
    elif func in _ADDMM and len(args) == 3 and not kwargs and _is_matrix(args[2]):
        x, weight, bias = args[1], args[2].t(), args[0]
    elif func in _BATCHED and len(args) == 2 and not kwargs and _is_row_product(*args):
        return row_products.product(*args)
    else:
        made = _cell(func, *args) if func in _CELLS and not kwargs and 4 <= len(args) <= 6 else None
        return func(*args, **kwargs) if made is None else made
    is_ours = _is_ours_or_derived(x, weight, bias)
    return func(*args, **kwargs) if is_ours is None else _linear(x, weight, bias, is_ours)


def _is_row_product(a: Any, b: Any) -> bool:
    if torch.compiler.is_compiling():
        return False
    with unseen():
        return row_products.takes(a, b)


def _cell(func: Any, x: Tensor, state: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
          b_hh: Tensor | None = None) -> Any:
    """A cell of a recurrent network as torch computes it on a GPU, a kernel after two products, which are ours where
    they pay; None where neither does, and where torch would refuse.

    Args:
        func: ``torch.gru_cell`` or ``torch.lstm_cell``.
        x: ``[N, K]``.
        state: ``[N, H]``, of an LSTM two of them.
        w_ih, w_hh: ``[G H, K]`` and ``[G H, H]`` for G gates.
        b_ih, b_hh: ``[G H]``, or neither.
    """
    is_gru = func is torch.gru_cell
    states = (state,) if is_gru else state
    if torch.compiler.is_compiling() or not isinstance(states, (tuple, list)) or len(states) != (1 if is_gru else 2):
        return None
    with unseen():
        biases = [b for b in (b_ih, b_hh) if b is not None]
        given = (x, *states, w_ih, w_hh, *biases)
        if not all(type(t) in PLAIN and t.dtype == x.dtype and t.device == x.device for t in given) or \
                len(biases) == 1 or not _has_cells(x.device) or not x.dim() == w_hh.dim() == 2 or \
                columns.has_transform(given):
            return None
        width = w_hh.shape[1]
        wide = (3 if is_gru else 4) * width
        if w_ih.shape != (wide, x.shape[1]) or w_hh.shape[0] != wide or any(b.shape != (wide,) for b in biases) or \
                any(s.shape != (x.shape[0], width) for s in states) or \
                not (takes(x, w_ih, None) or takes(states[0], w_hh, None)):
            return None
    made = _CELLS[func](linear(x, w_ih), linear(states[0], w_hh), states[-1], b_ih, b_hh)
    return made[0] if is_gru else made[:2]


def _has_cells(device: torch.device) -> bool:
    """Whether torch has a kernel for what comes after the products of a cell."""
    return device.type == "cuda"


class _Link(NamedTuple):
    """Features of a product.

    Attributes:
        features: As a layer has them, kept so that nothing else gets their id.
        stand_in: What the next product takes in their place, a matrix.
        version: Of the features.
    """

    features: Tensor
    stand_in: Tensor
    version: int


class Products(LayerMode):
    """Every call of torch's functions by :func:`call`, but for those of an edge phase, which has ways of its own; and
    the chains of products in one forward, of ``layer`` if that is one.

    Attributes:
        has_chains: Whether products of the same features may be a chain.
        rejoins: Whether edge phases give back their features, for a product of them to come.
    """

    _links: dict[int, _Link]
    _taken: dict[int, Tensor]
    _outer: Products | None

    def __init__(self, has_chains: bool = False, layer: Module | None = None) -> None:
        super().__init__()
        self.has_chains, self.rejoins, self._layer = has_chains, layer in _rejoining, layer

    def __enter__(self) -> Products:
        self._begin()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.end()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """As around a forward, for who makes all calls of torch's functions by :func:`call`."""
        self._begin()
        try:
            yield
        finally:
            self.end()

    def _begin(self) -> None:
        self._hooks = hooks_of_saved(True)
        self._links, self._taken = {}, {}
        self._outer, _running.mode = _running.mode, self

    def end(self) -> None:
        """Let go of the chains; nothing where that was done."""
        if _running.mode is self:
            _running.mode = self._outer
            self._links.clear()
            self._taken.clear()

    def stand_in(self, x: Tensor) -> Tensor:
        """The rows of ``x``, as the last product of them gave them back if nothing wrote to them since."""
        link = self._links.get(id(x))
        return link.stand_in if link is not None and link.version == x._version else _rows(x)

    def give_back(self, x: Tensor, stand_in: Tensor) -> None:
        """Let the next product of ``x`` take ``stand_in``."""
        self._links[id(x)] = _Link(x, stand_in, x._version)

    def take(self, x: Tensor) -> None:
        """An edge phase took ``x``, and did not give it back."""
        self._taken[id(x)] = x

    def note(self, x: Tensor) -> None:
        """There was a product of ``x``: an edge phase before it had better give ``x`` back, in forwards to come."""
        if id(x) in self._taken and self._layer is not None:
            _rejoining.add(self._layer)

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        # A checkpoint in a forward runs again without this mode, and counts on what torch's functions save.
        is_ours = func in TAKEN and ((hooks := hooks_of_saved(True)) is None or (
            self._hooks is not None and hooks[0] is self._hooks[0]))
        return call(func, args, kwargs or {}) if is_ours else func(*args, **(kwargs or {}))


#: Layers in which a product of the features of an edge phase came after that once; without one they are given back, for
#: nobody, as well.
_rejoining: weakref.WeakSet[Module] = weakref.WeakSet()


class _Running(threading.local):
    """The mode around the forward that runs in this thread."""

    mode: Products | None = None


_running = _Running()


def _is_matrix(value: Any) -> bool:
    return type(value) in PLAIN and value.dim() == 2
