"""Edge phases: the cores of a program's stages with their plans, forward and backward, made once per content."""

from __future__ import annotations

import functools
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from pyg_fullgraph import ahead, columns
from pyg_fullgraph.chunks import as_dtype, compute_dtype
from pyg_fullgraph.edge_order import EdgeOrder
from pyg_fullgraph.execution import run_again, run_plan
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.adjoint import Adjoint, grad_input
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Node
from pyg_fullgraph.saga.passes import Split, Stage, is_one_sum, plan, reduction, split
from pyg_fullgraph.saga.plans import Plan, Target, addend
from pyg_fullgraph.saga.postpone import postpone_products
from pyg_fullgraph.saga.recenter import recenter
from pyg_fullgraph.saga.stored import adjoint_of
from pyg_fullgraph.selection import MIN_PIPELINE_WIDTH, target_of

__all__ = ["CompiledProgram", "EdgePhase", "Needs", "Orders", "compile_program", "has_long_rows", "has_short_rows",
           "own", "scaled_bytes", "stores_half"]

Needs = tuple[bool, ...]
#: Mean degree from which on products are postponed in backward, and the same on GPUs where results are in float32 or
#: float64, so that the array more is no larger than they are. Measured on H200s: of 490 edges GAT takes 0.86 of the
#: time and half of the memory; of 50 edges 0.94 of the time, with one or two heads 0.61 to 0.91; of 14, in seven
#: shapes, 0.75 to 0.99 and as much memory, in half precision up to twice as much. On a CPU it takes 0.9 of the time of
#: 50 edges per vertex, of 35 it is no faster.
LONG_ROWS, LONG_ROWS_ON_GPU = 32, 12
#: Mean degree up to which backward of attention sums up means of its own, in float32 and in half precision: one sum
#: more per edge then costs less than a pass over three rows of a vertex. From kernels on an H200 (docs/kernels.md).
SHORT_ROWS, SHORT_ROWS_IN_HALF = 32, 20
#: Bytes of a row, for each edge of its vertex, up to which it is multiplied by numbers of that before edges read it,
#: and edges from which it is whatever its size. Measured on an H100 in float32, ms of a sum with GCN's factors, of one
#: without, and of torch's pass over the vertices: 490 edges per vertex and 16, 41 and 256 features 1.04, 0.64 and 0.01,
#: 3.38, 2.15 and 0.04, 12.4, 8.7 and 0.2; 50 edges and 47, 128 and 256 features 4.84, 3.50 and 0.40, 9.38, 8.27 and
#: 1.07, 19.3, 15.7 and 2.1; 7 edges and 16, 40 and 128 features 0.059, 0.031 and 0.008, 0.131, 0.103 and 0.025, 0.189,
#: 0.183 and 0.076.
SCALED_BYTES, SCALED_EDGES, MAX_SCALED = 16, 32, 1 << 20
#: Edges of a graph from which on that saves a GPU more time than the host needs for a launch more.
MIN_SCALED_EDGES = 1 << 21


class Orders:
    """Both orders of a graph, as far as they are there."""

    def __init__(self, incoming: EdgeOrder, outgoing: EdgeOrder | None) -> None:
        self.incoming, self._outgoing = incoming, outgoing

    @property
    def outgoing(self) -> EdgeOrder:
        assert self._outgoing is not None
        return self._outgoing


class EdgePhase:
    """The core of a stage with its plans, made once per content and found by the operators through its key.

    Args:
        core: Outputs that one level of gathers makes.
        is_exact: Whether results keep the dtype of the arithmetic.
        added: Terms that are added to the one result, see :class:`Stage`.
        same: Rows among these, and the input of the core with the same tensor, whose sweep makes the gradient of both.
        postpones: Whether products with the row that edges share come after the sum (see :mod:`saga.postpone`).
        recenters: Whether gradients of a softmax do without the result (see :mod:`saga.recenter`).
        max_scaled: Features of rows that are multiplied before edges read them, at most (see :mod:`saga.scaling`).

    Attributes:
        steps: What :meth:`kept` says of each kind of step that was begun.
        forwards: Dtypes and devices of results that were computed without gradients.
        hoists: The same of what vertices were prepared for.
    """

    def __init__(self, core: EdgeProgram, is_exact: bool = False, added: tuple[Node, ...] = (),
                 same: tuple[tuple[Node, Node], ...] = (), postpones: bool = False, recenters: bool = False,
                 max_scaled: int = 0) -> None:
        self.core, self.is_exact, self.added, self.same = core, is_exact, added, dict(same)
        self.postpones, self.recenters, self.max_scaled = postpones, recenters, max_scaled
        more = [*(t.digest for t in added), *(f"{a.name}={b.name}" for a, b in same)]
        more += [f"scaled{max_scaled}"] * (max_scaled > 0)
        self.key = "-".join([core.digest, *["exact"] * is_exact, *["postponed"] * postpones,
                             *["recentered"] * recenters, *more])
        self._added_inputs = ir.inputs_of(*added)
        self._sums: dict[Needs, bool] = {}
        self._have_gradients: dict[Needs, bool] = {}
        self.inputs: tuple[Node, ...] = (*core.inputs, *self._added_inputs)
        between = {n.args[1] for n in ir.walk(*(o.value for o in core.outputs))
                   if n.op == "mm" and min(n.args[1].shape) >= MIN_PIPELINE_WIDTH}
        self._parameters = tuple(k for k, n in enumerate(self.inputs) if not n.is_row and n not in between)
        self.results = tuple(ir.input(f"out.{o.name}", o.domain, o.value.shape) for o in core.outputs)
        self.steps: dict[ahead.Kind, ahead.Step] = {}
        self.forwards: set[tuple[torch.dtype, torch.device]] = set()
        self.hoists: set[tuple[torch.dtype, torch.device]] = set()
        self._plans: dict[object, Plan] = {}
        self._chosen: dict[object, Plan] = {}  # forward and backward, by what tells them apart at once
        self._kept: dict[object, ahead.Step] = {}

    @cached_property
    def adjoint(self) -> Adjoint:
        return recenter(self._with_means) if self.recenters else self._with_means

    @cached_property
    def _in_half(self) -> Adjoint:
        """The adjoint where results are in half precision, for which the same is saved."""
        return recenter(self._with_means, is_half=True) if self.recenters else self._with_means

    @cached_property
    def _with_means(self) -> Adjoint:
        """The adjoint before means of gradients are summed up beside what reads them."""
        found = adjoint_of(self.core)
        return postpone_products(found) if self.postpones else found

    @cached_property
    def grads_of_added(self) -> dict[Node, Node]:
        """Rows and factors among what is added -> gradient, of a factor the part of each row.

        Parameters that are added are missing: theirs is the sum of the rows of the result's.
        """
        found: dict[Node, Node] = {}
        grad = grad_input(self.core.outputs[0])
        for factor, value in map(addend, self.added):
            if factor is not None:
                by_feature = ir.pointwise("mul", value, grad)
                found[factor] = ir.reduce_features("sum", by_feature, range(len(value.shape)))
                found[value] = ir.pointwise("mul", factor, grad)
            elif value.is_row:
                found[value] = grad
        return found

    def _grads(self, is_half: bool) -> Mapping[Node, Node | None]:
        """Gradients of the inputs of the core; where they read the result, they take it as exact as it was computed,
        and take off again what was added to it.
        """
        found = (self._in_half if is_half else self.adjoint).grads
        apart, rest = self.saved(is_half), self.rest if is_half else None
        bare = {}
        for name, (stand_in, _) in self.adjoint.saved.items():
            if name.startswith("out.") and name not in apart:
                whole = stand_in if rest is None else ir.pointwise("add", stand_in, rest)
                bare[stand_in] = functools.reduce(functools.partial(ir.pointwise, "sub"), self.added, whole)
        return {n: None if g is None else ir.substitute(g, bare) for n, g in found.items()}

    @cached_property
    def rest(self) -> Node | None:
        """Stands for what storing the result in half precision rounds off, if gradients read that and it is to be had.
        """
        output, *others = self.core.outputs
        is_read = f"out.{output.name}" in self.adjoint.saved
        return ir.input(f"saved.rest.{output.name}", output.domain, output.value.shape) \
            if is_read and not (self.is_exact or others) and is_one_sum(output) else None

    @cached_property
    def _grad_inputs(self) -> tuple[Node, ...]:
        return tuple(map(grad_input, self.core.outputs))

    @cached_property
    def _across(self) -> dict[Node, Node]:
        """The gradient of the result -> the same as rows of the sources, where those are the destinations."""
        return {g: ir.input(g.name, Domain.SRC, g.shape) for g in self._grad_inputs} if self.same else {}

    def saved(self, is_half: bool = False) -> dict[str, tuple[Node, Node]]:
        """What backward needs beside inputs, results and what these were rounded by: name -> (stand-in, expression).

        With half-precision storage gradients are not taken from rounded results, which would shift all gradients of a
        row the same way, and sums over the row would add that up. What one sum was rounded by is kept beside it, also
        in half precision, which makes 22 digits of float16, 16 of bfloat16; other results are saved in float32.
        """
        with_results = is_half and not self.is_exact and self.rest is None
        return {k: v for k, v in self.adjoint.saved.items() if with_results or not k.startswith("out.")}

    def statistics(self, is_half: bool = False) -> dict[str, Node]:
        """What forward gives beside results for the sake of backward: name -> stand-in."""
        found = {name: stand_in for name, (stand_in, _) in self.saved(is_half).items()}
        return found if self.rest is None or not is_half else {**found, "rest": self.rest}

    def forward_plan(self, target: Target, save: bool, is_half: bool = False) -> Plan:
        """The plan of the results; with ``save``, :meth:`statistics` follow them."""
        key = (target, save, is_half)
        if key not in self._plans:
            results, first = {o.name: reduction(o) for o in self.core.outputs}, self.core.outputs[0].name
            kept = {f"saved.{k}": node for k, (_, node) in self.saved(is_half).items()} if save else {}
            rests = {"saved.rest": first} if save and "rest" in self.statistics(is_half) else {}
            self._plans[key] = plan({**results, **kept}, target, exact=[*kept, *(results if self.is_exact else ())],
                                    added={first: self.added} if self.added else {}, rests=rests,
                                    max_scaled=self.max_scaled)
        return self._plans[key]

    def backward_plan(self, target: Target, needs: Needs, is_half: bool = False, back: int = -1) -> Plan:
        """The plan of the gradients of the inputs that ``needs`` picks; what is there of that of input ``back`` already
        is added where :meth:`adds_back`.
        """
        key = (target, needs, is_half, back)
        if key not in self._plans:
            grads = {**self._grads(is_half), **self.grads_of_added}
            wanted = {n.name: g for n, need in zip(self.inputs, needs, strict=True) if need
                      if (g := grads.get(n)) is not None}
            pairs = [(n.name, to.name) for n, to in self.same.items() if n.name in wanted and to.name in wanted]
            added = {to: (ir.substitute(wanted.pop(name), self._across),) for name, to in pairs}
            if back >= 0 and self.adds_back(back):
                node = self.inputs[back]
                added[node.name] = (*added.get(node.name, ()), _given_back(node))
            # What rows give to a factor is still to be added up, and sums may be as large as what is taken off them.
            exact = [n.name for n in self.grads_of_added if not n.is_row and n.name in wanted]
            exact += [name for name, g in wanted.items() if g.op != "gather" and g.domain in (Domain.SRC, Domain.DST)]
            made = plan(wanted, target, exact=exact, added=added, max_scaled=self.max_scaled)
            if self.adjoint is not self._with_means:  # sums in registers are not stored to be taken off each other
                ends = {r for s in made.sweeps for r, _ in s.finish} & {*made.outputs.values()}
                made = replace(made, exact=made.exact - ends)
            self._plans[key] = made
        return self._plans[key]

    def adds_back(self, back: int) -> bool:
        """Whether the kernel that sums up the gradient of input ``back`` can add what is there of it already."""
        grad = self.adjoint.grads.get(self.inputs[back])
        return grad is not None and grad.op == "gather" and grad.attr("kind") in ("sum", "mean")

    def sums_gradient(self, needs: Needs) -> bool:
        """Whether :meth:`backward` sums the gradient of the first result over its rows, as that of a bias is."""
        if needs not in self._sums:
            self._sums[needs] = any(need and not n.is_row and n not in self.grads_of_added for n, need in
                                    zip(self._added_inputs, needs[len(self.core.inputs):], strict=True))
        return self._sums[needs]

    def has_gradients(self, needs: Needs) -> bool:
        """Whether any of the inputs that ``needs`` picks has a gradient; none has, of a message that detaches them."""
        if needs not in self._have_gradients:
            self._have_gradients[needs] = any(
                need and (self.adjoint.grads.get(n) is not None or n in self._added_inputs)
                for n, need in zip(self.inputs, needs, strict=True))
        return self._have_gradients[needs]

    def laid_out(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """``tensors``, the inputs, with parameters contiguous, as kernels read them: a weight that was turned would be
        copied by each sweep. Those of products that may be between kernels are read as they lie.
        """
        turned = [k for k in self._parameters if not tensors[k].is_contiguous()]
        return [t.contiguous() if k in turned else t for k, t in enumerate(tensors)] if turned else tensors

    def place_to_give_back(self, tensors: Sequence[Tensor]) -> int:
        """The place of the first input that is features ``[N, K]`` with a gradient, -1 without any."""
        return next((k for k, (n, t) in enumerate(zip(self.core.inputs, tensors, strict=False))
                     if len(n.shape) == 1 and n.domain in (Domain.SRC, Domain.DST) and t.requires_grad), -1)

    def forward(self, graph: Graph | Orders, tensors: Sequence[Tensor], like: Tensor,
                save: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Results, and :meth:`statistics`, each in memory of its own."""
        key = like.dtype, like.device, save
        chosen = self._chosen.get(key)
        if chosen is None:
            chosen = self._chosen[key] = self.forward_plan(target_of(like.device), save, stores_half(like.dtype))
        env = dict(zip(self.inputs, tensors, strict=True))
        count = len(self.results)
        made = run_again(chosen, graph.incoming, None, env, like)
        if made is not None:
            return made[:count], made[count:]
        dtype = compute_dtype(like.dtype) if self.is_exact else like.dtype
        made = run_plan(chosen, graph.incoming, None, env, like)
        made = own([*(as_dtype(t, dtype) for t in made[:count]), *made[count:]], tensors)
        return made[:count], made[count:]

    def backward(self, graph: Graph | Orders, env: dict[Node, Tensor], grads: Sequence[Tensor], like: Tensor,
                 needs: Needs, back: int = -1, more: Tensor | None = None) -> list[Tensor | None]:
        """Gradients of the inputs that ``needs`` picks, None for the others and where a gradient is zero.

        Args:
            graph: Both orders, if a source has a gradient.
            env: The inputs, and the stand-ins of :attr:`adjoint`, that the plan reads. They are taken from it.
            grads: One gradient per output.
            like: A tensor whose dtype results have and whose device is used.
            needs: Which inputs.
            back: The place of one of them whose gradient has a part already, :attr:`more`.
            more: That part, of the shape of the input.
        """
        back = back if more is not None else -1
        key = like.dtype, like.device, needs, back
        chosen = self._chosen.get(key)
        if chosen is None:
            chosen = self._chosen[key] = self.backward_plan(target_of(like.device), needs, stores_half(like.dtype),
                                                            back)
        given = dict(zip(self._grad_inputs, grads, strict=True))
        env.update(given)
        if more is not None and self.adds_back(back):
            env[_given_back(self.inputs[back])], more = more.contiguous(), None
        if self.same:
            env.update((n, given[g]) for g, n in self._across.items())
        outgoing = graph.outgoing if chosen.walks_sources else None
        made = dict(zip(chosen.outputs, run_plan(chosen, graph.incoming, outgoing, env, like), strict=True))
        for node, need in zip(self._added_inputs, needs[len(self.core.inputs):], strict=True):
            if need and not node.is_row:
                by_row = made[node.name] if node in self.grads_of_added else grads[0]
                # What is known of a gradient is known of this tensor, and not of a view.
                by_row = by_row if by_row.dim() == 2 else by_row.view(by_row.shape[0], node.numel)
                made[node.name] = columns.column_sum(by_row).view(node.shape)
        if more is not None:
            name = self.inputs[back].name
            made[name] = more if name not in made else made[name] + more
        return [made.get(n.name) for n in self.inputs]

    def stand_ins(self, is_half: bool) -> list[Node | None]:
        """What stands for each result, None where gradients do not read it, and for each of :meth:`statistics`."""
        known = self.adjoint.saved
        names = [f"out.{o.name}" for o in self.core.outputs]
        return [*(known[n][0] if n in known else None for n in names), *self.statistics(is_half).values()]

    def kept(self, target: Target, needs: Needs, is_half: bool) -> ahead.Step:
        """What the backward plan reads: inputs and stand-ins, and the place of each among inputs, results and
        :meth:`statistics`, in this order. Where it reads a result, to which somebody may write, all inputs.
        """
        key = (target, needs, is_half)
        if key not in self._kept:
            pool = [*self.inputs, *self.stand_ins(is_half)]
            places = {n: k for k, n in enumerate(pool)}  # of what is there twice, the exact one, which comes later
            reads = self.backward_plan(target, needs, is_half).inputs
            results = range(len(self.inputs), len(self.inputs) + len(self.results))
            if any(n in reads and k in results for n, k in places.items()):
                reads |= set(self.inputs)
            kept = tuple(n for n in dict.fromkeys(pool) if n is not None and n in reads)
            self._kept[key] = kept, tuple(places[n] for n in kept)
        return self._kept[key]


@lru_cache(maxsize=1024)
def _given_back(node: Node) -> Node:
    """Stands for what is there of the gradient of ``node`` before an edge phase adds its own."""
    return ir.input(f"more.{node.name}", node.domain, node.shape)


class CompiledProgram:
    """A program split into stages.

    Attributes:
        program: As traced.
        split: Its parts.
        phases: The edge phase of each stage, shared with every program that has the same one.
        uses_degree: Whether degrees are read.
        constant: Per stage the inputs that it is made of, if all of them are constant; otherwise None.
        sole: The one phase whose results are the outputs, if there is nothing else to do.
    """

    def __init__(self, program: EdgeProgram, constant: Container[Node] = (),
                 same: tuple[tuple[Node, Node], ...] = (), postpones: bool = False, recenters: bool = False,
                 max_scaled: int = 0) -> None:
        self.program = program
        self.split: Split = split(program, constant=constant)
        self.constant = tuple(s.constant_inputs(constant) for s in self.split.stages)
        # What is constant has no backward to differ in, and is kept by its phase. Others are shared where they can be.
        self.phases = tuple(
            _phase_of(s.core, s.is_exact, s.added, _same_in(s, same), postpones and inputs is None,
                      recenters and inputs is None and _has_softmax(s.core), max_scaled)
            for s, inputs in zip(self.split.stages, self.constant, strict=True))
        steps = [e for s in self.split.stages for e in (*s.hoisted.values(), *(o.value for o in s.core.outputs))]
        self.uses_degree = any(n is ir.DEGREE or n is ir.INV_DEGREE for n in ir.walk(*steps, *self.split.outputs))
        self.sole = self.phases[0] if self._is_sole() else None

    def _is_sole(self) -> bool:
        if len(self.phases) != 1 or self.constant != (None,) or self.uses_degree or self.phases[0].is_exact:
            return False
        (stage,), outputs = self.split.stages, tuple(self.split.outputs)
        return not (stage.hoisted or stage.dots) and outputs == tuple(stage.results) and \
            len(set(outputs)) == len(outputs) and all(n.is_row for n in outputs)


@lru_cache(maxsize=1024)
def _phase_of(core: EdgeProgram, is_exact: bool, added: tuple[Node, ...], same: tuple[tuple[Node, Node], ...],
              postpones: bool, recenters: bool, max_scaled: int) -> EdgePhase:
    return EdgePhase(core, is_exact, added, same, postpones, recenters, max_scaled)


def _has_softmax(core: EdgeProgram) -> bool:
    return any(n.op == "softmax" for n in ir.walk(*(o.value for o in core.outputs)))


def _same_in(stage: Stage, same: tuple[tuple[Node, Node], ...]) -> tuple[tuple[Node, Node], ...]:
    """Of ``same`` what is added in ``stage`` and read by its core."""
    return tuple((a, b) for a, b in same if a in ir.inputs_of(*stage.added) and b in stage.core.inputs)


@lru_cache(maxsize=1024)
def compile_program(program: EdgeProgram, constant: frozenset[Node] = frozenset(),
                    same: tuple[tuple[Node, Node], ...] = (), postpones: bool = False, recenters: bool = False,
                    max_scaled: int = 0) -> CompiledProgram:
    """Compile ``program``, or return what was compiled for the same content before.

    Args:
        program: What to compile.
        constant: Inputs that are the same from run to run and have no gradient.
        same: Inputs of destinations and of sources that are one tensor.
        postpones: Whether products with the row that edges share come after the sum (see :mod:`saga.postpone`).
        recenters: Whether gradients of a softmax do without the result (see :mod:`saga.recenter`).
        max_scaled: Features of rows that are multiplied before edges read them, at most (see :mod:`saga.scaling`).
    """
    return CompiledProgram(program, constant, same, postpones, recenters, max_scaled)


def has_long_rows(graph: Graph, is_half: bool) -> bool:
    """Whether vertices have so many edges that an array more for each side costs less than numbers per edge.

    Args:
        graph: Where the edges are.
        is_half: Whether results are in half precision, so that the array, in float32, is twice as large.
    """
    least = LONG_ROWS_ON_GPU if graph.device.type == "cuda" and not is_half else LONG_ROWS
    return graph.num_edges >= least * max(graph.num_src, graph.num_dst)


def has_short_rows(graph: Graph, is_half: bool) -> bool:
    """Whether destinations have so few edges that a sum more per edge costs less than a pass over them. The same for
    all parts of a graph.

    Args:
        graph: Where the edges are.
        is_half: Whether results are in half precision, where edges cost less of their time in memory.
    """
    _, num_dst, num_edges = graph.whole_sizes
    return num_edges <= (SHORT_ROWS_IN_HALF if is_half else SHORT_ROWS) * num_dst


def scaled_bytes(graph: Graph) -> int:
    """Bytes of the rows of ``graph`` that cost less multiplied once per vertex than with a number beside per edge, at
    most: a power of two, so that few plans are made for many graphs. The same for all parts of a graph.
    """
    num_src, num_dst, num_edges = graph.whole_sizes
    mean_degree = num_edges / max(num_src, num_dst, 1)
    if num_edges < MIN_SCALED_EDGES:
        return 0
    if mean_degree >= SCALED_EDGES:
        return MAX_SCALED
    size = int(SCALED_BYTES * mean_degree)
    return 1 << (size.bit_length() - 1) if size else 0


def own(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """``results`` in memory of their own: operators may not return (views of) their inputs, nor one tensor twice.

    Nor views of what they made themselves, because the caller may write into a result.
    """
    taken = {t.untyped_storage().data_ptr() for t in inputs}
    out = []
    for result in results:
        fresh = result.clone() if result.untyped_storage().data_ptr() in taken else result
        fresh = fresh.contiguous()
        out.append(torch.ops.aten._unsafe_view(fresh, fresh.shape) if fresh._is_view() else fresh)
        taken.add(out[-1].untyped_storage().data_ptr())
    return out


def stores_half(dtype: torch.dtype) -> bool:
    return dtype.itemsize < 4
