"""The meaning of the IR: expressions and programs evaluated with plain torch operations.

``evaluate`` is the rule book every other executor is tested against; ``run_reference`` runs a whole program the
way PyG does, one message per edge in memory, and is the oracle of the tests. Neither is used to train on a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_fullgraph import columns, dense
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Node
from triton_kernels import reference


def apply(node: Node, args: Sequence[Tensor], like: Tensor | None = None) -> Tensor:
    """One operation on tensors ``[rows, *shape]`` (or ``[*shape]`` for parameters).

    Args:
        node: What to compute; ``node.args`` tell the domains of ``args``.
        args: One tensor per operand, all with the same rows.
        like: A tensor whose dtype and device constants take.
    """
    lead = int(node.is_row)
    kind = ir.OPS[node.op].kind
    if node.op == "const":
        assert like is not None
        dtype = torch.int64 if node.is_integer else like.dtype
        return torch.full(node.shape, node.attr("value"), dtype=dtype, device=like.device)
    if node.op == "float":
        assert like is not None
        return args[0].to(like.dtype)
    if node.is_integer and kind == "pointwise":
        args = [a if a.dtype == torch.bool else a.long() for a in args]
    if node.op == "add":
        return columns.add(*args)
    if kind == "pointwise":
        function = ir.OPS[node.op].torch
        assert function is not None
        return function(*args)
    x = args[0]
    rows = tuple(x.shape[:lead])
    if node.op == "view":
        return x.reshape((*rows, *node.shape))
    if node.op == "lift":
        return x
    if node.op == "permute":
        return x.permute(*range(lead), *(d + lead for d in node.attr("dims")))
    if node.op == "expand":
        return x.reshape(*rows, *(1,) * (len(node.shape) - x.dim() + lead), *x.shape[lead:]).expand(*rows, *node.shape)
    if node.op == "slice":
        start, stop = node.attr("start"), node.attr("stop")
        return x.narrow(node.attr("dim") + lead, start, stop - start)
    if node.op == "cat":
        count = max((a.shape[0] for a, n in zip(args, node.args, strict=True) if n.is_row), default=0)
        parts = [a if n.is_row or not lead else a.expand(count, *n.shape) for a, n in zip(args, node.args, strict=True)]
        return torch.cat(parts, node.attr("dim") + lead)
    if node.op == "block_diagonal":
        by_head = x.reshape(x.shape[0], node.attr("heads"), -1)
        return torch.diag_embed(by_head.transpose(1, 2), dim1=0, dim2=2).reshape(node.shape)
    if node.op == "sum":
        return x.sum([d + lead for d in node.attr("dims")])
    if node.op == "amax":
        return x.amax([d + lead for d in node.attr("dims")])
    if node.op == "mm":
        return dense.matmul(x.to(args[1].dtype), args[1])
    if node.op == "lookup":
        return x.index_select(0, args[1].long())
    raise ValueError(f"No evaluation rule for operation {node.op!r}")


def evaluate(roots: Sequence[Node], leaf: Callable[[Node, list[Tensor]], Tensor], like: Tensor) -> list[Tensor]:
    """Evaluate expressions over one set of rows.

    Args:
        roots: What to compute.
        leaf: Gives the value of inputs, edge ids, dropout masks and of ``gather`` kinds, from their operands' values.
        like: A tensor whose dtype and device constants take.
    """
    values: dict[Node, Tensor] = {}
    for step in _steps(tuple(roots)):
        node, args = step.node, [values[a] for a in step.operands]
        if step.parts:
            made = args[0].split([p.shape[node.attr("dim")] for p in step.parts], node.attr("dim") + int(node.is_row))
            values.update(zip(step.parts, made, strict=True))
        elif step.is_linear:
            x, weight, added = args
            is_bias = not step.operands[2].is_row
            values[node] = dense.matmul(x.to(weight.dtype), weight, added) if is_bias else \
                dense.plus_product(x, weight, added)
        else:
            values[node] = leaf(node, args) if step.is_leaf else apply(node, args, like)
        for gone in step.dead:
            del values[gone]
    return [values[r] for r in roots]


class _Step(NamedTuple):
    """One of what is computed under some roots.

    Attributes:
        node: What.
        operands: From these.
        is_leaf: Whether the caller gives the value.
        is_linear: Whether it is the product of the first two operands plus the third, a bias or as many rows.
        parts: The slices that an operand is cut into as a whole, of which ``node`` is the first one met: gradients of
            all are put together at once.
        dead: What nothing reads from then on.
    """

    node: Node
    operands: tuple[Node, ...]
    is_leaf: bool
    is_linear: bool
    parts: tuple[Node, ...]
    dead: tuple[Node, ...]


@lru_cache(maxsize=4096)
def _steps(roots: tuple[Node, ...]) -> tuple[_Step, ...]:
    """The nodes under ``roots``, operands first."""
    nodes = tuple(ir.walk(*roots))
    kept = set(roots)
    users = Counter(a for n in nodes for a in n.args)
    operands = {n: n.args for n in nodes}
    for node in nodes:
        for product, added in (node.args, node.args[::-1]) if node.op == "add" else ():
            if _is_product(product) and users[product] == 1 and product not in kept and product in operands and \
                    added.shape == node.shape and (added.domain == Domain.PARAM or
                                                   added.domain == product.domain != Domain.EDGE):
                operands[node] = (*product.args, added)
                del operands[product]
                break
    parts = _parts(nodes)
    for first, others in parts.items():
        for other in others:
            if other is not first:
                del operands[other]
    last = {a: n for n, args in operands.items() for a in args if a not in kept}
    dead: dict[Node, list[Node]] = {}
    for a, n in last.items():
        dead.setdefault(n, []).append(a)
    return tuple(_Step(n, args, n.op != "const" and ir.OPS[n.op].kind in ("leaf", "gather"), args is not n.args,
                       parts.get(n, ()), tuple(dead.get(n, ()))) for n, args in operands.items())


def _parts(nodes: Sequence[Node]) -> dict[Node, tuple[Node, ...]]:
    """Slices that are all of what they are cut from, in order, by the one that comes first among ``nodes``."""
    cuts: dict[tuple[Node, int], list[Node]] = {}
    for node in nodes:
        if node.op == "slice":
            cuts.setdefault((node.args[0], node.attr("dim")), []).append(node)
    found = {}
    for (whole, dim), slices in cuts.items():
        ordered = sorted(slices, key=lambda n: n.attr("start"))
        bounds = [0, *(n.attr("stop") for n in ordered)]
        if len(ordered) > 1 and bounds[-1] == whole.shape[dim] and bounds[:-1] == [n.attr("start") for n in ordered]:
            found[slices[0]] = tuple(ordered)
    return found


def _is_product(node: Node) -> bool:
    """Whether ``node`` is a product of rows with a parameter."""
    return node.op == "mm" and len(node.shape) == 1 and node.args[0].is_row and node.args[1].domain == Domain.PARAM


def run_reference(program: EdgeProgram, src: Tensor, dst: Tensor, num_dst: int, tensors: Mapping[str, Tensor],
                  reduce: Callable[..., Tensor] = reference.segment_reduce) -> tuple[Tensor, ...]:
    """Run ``program`` with one message per edge, differentiable by torch's autograd.

    Args:
        program: What to compute.
        src: Source vertex of each edge, ``[E]``.
        dst: Destination vertex of each edge, ``[E]``.
        num_dst: Number of destination vertices.
        tensors: Inputs by name.
        reduce: ``(value, dst, num_dst, kind)``, how edge values become one row per destination.

    Returns:
        One tensor per output: ``[num_dst, *shape]``, or ``[E, *shape]`` for edge outputs.
    """
    like = next(t for t in tensors.values() if t.is_floating_point())
    ids = torch.arange(src.numel(), device=src.device)
    degree = torch.bincount(dst, minlength=num_dst).to(like.dtype)
    values = {**tensors, ir.DEGREE.name: degree, ir.INV_DEGREE.name: degree.clamp(min=1).reciprocal()}

    def leaf(node: Node, args: list[Tensor]) -> Tensor:
        if node.op == "eid":
            return ids
        if node.op == "dropout":
            return reference.dropout_mask(args[0], ids, node.shape, node.attr("p"), like.dtype)
        if node.op == "softmax":
            return reference.edge_softmax(args[0].expand(src.numel(), *node.shape), dst, num_dst)
        value = values[node.name]
        if node.domain == Domain.SRC:
            return value.index_select(0, src)
        return value.index_select(0, dst) if node.domain == Domain.DST else value

    known: dict[Node, Node] = {}

    def per_edge(node: Node) -> Tensor:
        return evaluate([ir.substitute(node, known)], leaf, like)[0].expand(src.numel(), *node.shape)

    for node in ir.walk(*(o.value for o in program.outputs)):
        if node.op == "gather":
            result = reduce(per_edge(node.args[0]), dst, num_dst, node.attr("kind"))
            known[node] = ir.input(f"gather.{node.digest}", Domain.DST, node.shape)
            values[known[node].name] = result
    results = []
    for output in program.outputs:
        if output.kind == "vertex":
            value = evaluate([ir.substitute(output.value, known)], lambda n, a: values[n.name], like)[0]
            results.append(value.expand(num_dst, *output.value.shape))
        else:
            value = per_edge(output.value)
            results.append(value if output.kind == "edge" else reduce(value, dst, num_dst, output.kind))
    return tuple(results)
