"""Programs as differentiable functions: ``run``, and an edge phase as a ``torch.autograd.Function``.

Vertex work that was moved off the edges runs as ordinary torch operations, with PyTorch's own gradients; each edge
phase is one operation forward and one backward. Saved is what its backward reads of its inputs and results, and one
statistic per vertex, never anything of size edges x features (SAGA-opt 6).
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pyg_fullgraph import ahead, dense, dots, reuse
from pyg_fullgraph.chunks import as_dtype, compute_dtype, scalar_of
from pyg_fullgraph.errors import DoubleBackwardError, ForwardModeError, FunctionTransformError, InputError
from pyg_fullgraph.functions import (
    PLAIN,
    applying,
    has_tangent,
    has_transforms,
    hooks_of_saved,
    is_of_transform,
    is_wrapped,
    unseen,
)
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.memo import taken
from pyg_fullgraph.operators import call_operator
from pyg_fullgraph.phases import (
    CompiledProgram,
    EdgePhase,
    compile_program,
    has_long_rows,
    has_short_rows,
    scaled_bytes,
    stores_half,
)
from pyg_fullgraph.saga import hollow, interpret, ir
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Node
from pyg_fullgraph.saga.passes import Stage
from pyg_fullgraph.selection import has_kernels, target_of

# --- autograd ---------------------------------------------------------------------------------------------------


#: Arguments of the function below in front of the inputs of the phase.
_IN_FRONT = 4


class _EdgePhaseFunction(torch.autograd.Function):
    """An edge phase on plain tensors; an operator costs several times its overhead."""

    @staticmethod
    def forward(ctx: Any, phase: EdgePhase, graph: Graph, like: Tensor, back: int,
                *tensors: Tensor) -> tuple[Tensor, ...]:
        kind = ctx.needs_input_grad[_IN_FRONT:], like.dtype, like.device, back
        ctx.kept, places = phase.steps.get(kind) or _begin(phase, graph, like, tensors, kind)
        results, statistics = phase.forward(graph, tensors, like, True)
        ctx.phase, ctx.graph, ctx.like, ctx.back = phase, graph, like, back
        ctx.sums_gradient = phase.sums_gradient(kind[0])
        ctx.meta = [(t.dtype, t.shape) for t in tensors]
        if not ctx.kept and not phase.has_gradients(kind[0]):
            ctx.mark_non_differentiable(*results)
        pool = [*tensors, *results, *statistics]
        ctx.results = ()
        own = range(len(tensors), len(tensors) + len(results))
        saved = [k for k in places if k in own]
        if saved and hooks_of_saved(True) is not None:
            for k in saved:  # what hooks keep has no version, by which it would show that somebody has written to it
                pool[k] = pool[k].clone()
        elif saved and not graph.is_part:  # processes that have parts of a graph would have to agree
            ctx.results = tuple((pool[k].detach(), pool[k]._version) for k in saved)
            # As outputs they would be refused in backward if somebody has written to them.
            pool[own.start:own.stop] = [r.data for r in results]
        ctx.save_for_backward(*(pool[k] for k in places))
        if back < 0:
            return tuple(results)
        ctx.set_materialize_grads(False)
        return (*results, tensors[back])

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Tensor | None, ...]:
        if has_transforms() or any(map(is_wrapped, given)):
            raise ForwardModeError() if any(map(has_tangent, given)) else FunctionTransformError()
        grads, more = (given, None) if ctx.back < 0 else (given[:-1], given[-1])
        if grads[0] is None:  # what is saved may be gone
            return (*[None] * _IN_FRONT, *[more if k == ctx.back else None for k in range(len(ctx.meta))])
        if torch.is_grad_enabled():
            made = _OnlyOnce.apply(ctx, len(grads), more, *grads, *ctx.saved_tensors)
        else:
            made = _gradients(ctx, grads, dict(zip(ctx.kept, ctx.saved_tensors, strict=True)), more)
        return (*[None] * _IN_FRONT, *made)


def _begin(phase: EdgePhase, graph: Graph, like: Tensor, tensors: Sequence[Tensor], kind: ahead.Kind) -> ahead.Step:
    """What a step keeps, of its kind the first one, whose kernels are compiled from now on."""
    needs, dtype, device, back = kind
    kept = phase.steps[kind] = phase.kept(target_of(device), needs, stores_half(dtype))
    ahead.begin(phase, graph, like, tensors, needs, kept, back)
    return kept


def _gradients(ctx: Any, grads: Sequence[Tensor], env: dict[Node, Tensor],
               more: Tensor | None) -> list[Tensor | None]:
    """Gradients of all inputs, with ``more`` added to that of the one that was given back; what was saved is taken out
    of ``env``, and its memory is free from its last use on, unless backward may run again.
    """
    if any(view._version != version for view, version in ctx.results):
        env.update(_computed_again(ctx, env))
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        ctx.results = ()
        ctx.maybe_clear_saved_tensors()
    made = ctx.phase.backward(ctx.graph, env, [g.contiguous() for g in grads], ctx.like,
                              ctx.needs_input_grad[_IN_FRONT:], ctx.back, more)
    # What is handed through is no view: of one that nobody else seems to hold, leaves take the memory.
    return [None if g is None else as_dtype(g, dtype) if g.shape == shape else as_dtype(g, dtype).expand(shape)
            for g, (dtype, shape) in zip(made, ctx.meta, strict=True)]


def _computed_again(ctx: Any, env: Mapping[Node, Tensor]) -> dict[Node, Tensor]:
    """What backward reads of results that somebody has written to, as layers do that add a bias in place; and what
    they were rounded by, which is another number where the sums of another kernel end in another digit.
    """
    is_half = stores_half(ctx.like.dtype)
    save = "rest" in ctx.phase.statistics(is_half)
    results, statistics = ctx.phase.forward(ctx.graph, [env[n] for n in ctx.phase.inputs], ctx.like, save)
    stand_ins = zip(ctx.phase.stand_ins(is_half), [*results, *statistics], strict=False)
    return {n: t for n, t in stand_ins if n in env}


_apply_phase = applying(_EdgePhaseFunction)


class _OnlyOnce(torch.autograd.Function):
    """The backward of an edge phase where its result may be differentiated again, which is refused."""

    @staticmethod
    def forward(ctx: Any, phase_ctx: Any, count: int, more: Tensor | None,
                *tensors: Tensor) -> tuple[Tensor | None, ...]:
        env = dict(zip(phase_ctx.kept, tensors[count:], strict=True))
        return tuple(_gradients(phase_ctx, tensors[:count], env, more))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise DoubleBackwardError()


# --- the function -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What one call of :func:`run` did.

    Attributes:
        program: As it was given.
        compiled: What ran.
        constant: Inputs that were taken for constant.
        graph: What it ran on.
        dtype: That of the results.
        inputs: Per stage the inputs of its edge phase with their dtype, whether they need a gradient, and what tells
            tensors in other memory apart; those of a stage whose results were there already are missing.
        needs_grad: Whether a result has a gradient.
    """

    program: EdgeProgram
    compiled: CompiledProgram
    constant: frozenset[Node]
    graph: Graph
    dtype: torch.dtype
    inputs: tuple[Mapping[Node, tuple[torch.dtype, bool, int]], ...]
    needs_grad: bool


_observers: list[list[Run]] = []


@contextlib.contextmanager
def observing() -> Iterator[list[Run]]:
    """Collect what :func:`run` does in a block."""
    seen: list[Run] = []
    _observers.append(seen)
    try:
        yield seen
    finally:
        _observers[:] = [s for s in _observers if s is not seen]


def check_derivatives(tensors: Iterable[Tensor]) -> None:
    """Refuse tensors of derivatives that there are none of here.

    Raises:
        ForwardModeError: One carries a forward-mode tangent.
        FunctionTransformError: One is of a transform of ``torch.func``, or such a transform is at work.
    """
    if forward_ad._current_level >= 0 and any(map(has_tangent, tensors)):
        raise ForwardModeError()
    if has_transforms() or any(map(is_of_transform, tensors)):
        raise FunctionTransformError()


def run(program: EdgeProgram, graph: Graph, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Run ``program`` on ``graph``, differentiably.

    Args:
        program: What to compute per edge and how to reduce it.
        graph: ``S`` sources, ``N`` destinations, ``E`` edges.
        tensors: Inputs by name: ``[S, *shape]`` in domain SRC, ``[N, *shape]`` in DST, ``[E, *shape]`` in EDGE (the
            user's edge order), ``[*shape]`` in PARAM. Contiguous rows are fastest. Seeds of dropout masks are drawn
            from torch's generator where they are missing.

    Returns:
        One tensor per output: ``[N, *shape]`` (0 for destinations without edges), or ``[E, *shape]``.

    Raises:
        InputError: An input is missing, or its shape does not fit the graph.
        DoubleBackwardError: When a gradient is differentiated.
        FunctionTransformError: For a tensor of a transform of ``torch.func``; in backward for a batch of gradients.

    Numerics: float16 and bfloat16 are storage only, sums are in float32, and so are results of products, of which wide
        ones round what they multiply; bit-identical from run to run.
    Cost: saves what backward reads of the inputs and outputs, and one statistic per destination, feature group or head.
    """
    check_derivatives(tensors.values())
    return Way.of(program, graph, tensors).run(graph, tensors)


def _with_hollow(way: Way, made: Sequence[Tensor], graph: Graph, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """All outputs that were asked for, from those that have features; with a gradient, of zeros, for what is read by
    values without features only.
    """
    dtype, device = way.like or (torch.get_default_dtype(), graph.device)
    waiting, outputs = iter(made), []
    for output in way.asked.outputs:
        rows = graph.num_edges if output.domain == Domain.EDGE else graph.num_dst
        outputs.append(next(waiting).contiguous() if output.value.numel else
                       torch.empty((rows, *output.value.shape), dtype=dtype, device=device))
    given = [t for n in way.hollow if (t := tensors.get(n.name)) is not None and t.requires_grad]
    return list(_WithZeros.apply(len(outputs), *outputs, *given)) if given and torch.is_grad_enabled() else outputs


class _WithZeros(torch.autograd.Function):
    """The first ``count`` tensors as they are, where the others have a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.metas = [(t.shape, t.dtype, t.device) for t in tensors[count:]]
        ctx.set_materialize_grads(False)
        return tuple(t.detach() for t in tensors[:count])  # no views, to which nobody could write

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.metas]
        return None, *grads, *zeros


def _padded(run_stage: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
    return [dense.padded(t) for t in run_stage()]


def _run_stage(stage: Stage, phase: EdgePhase, call: Callable[..., Sequence[Tensor]], graph: Graph, like: Tensor,
               env: dict[Node, Tensor], is_plain: bool) -> Sequence[Tensor]:
    if is_plain and (known := (like.dtype, like.device)) not in phase.hoists:
        phase.hoists.add(known)
        ahead.begin_vertex_work(functools.partial(_hoist, stage.hoisted), graph, like, env)
    if stage.dots and is_plain:
        _hoist({x: stage.hoisted[x] for _, x, _ in stage.dots if x in stage.hoisted}, env, like)
        _take_dots(stage, env, like)
        _hoist(stage.beside_dots, env, like)
    else:
        _hoist(stage.hoisted, env, like)
    return call(phase, graph, like, [env[n] for n in phase.inputs])


_needs_grad: Callable[[Tensor], bool] = operator.attrgetter("requires_grad")


def _call(phase: EdgePhase, graph: Graph, like: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    if torch.is_grad_enabled() and any(map(_needs_grad, tensors)):
        tensors, forward = phase.laid_out(tensors), dense.chain()
        if forward is not None and len(phase.results) == 1 and not graph.is_part:
            return _linked(phase, graph, like, tensors, forward)
        return cast("tuple[Tensor, ...]", _apply_phase(phase, graph, like, -1, *tensors))
    if (like.dtype, like.device) not in phase.forwards:
        phase.forwards.add((like.dtype, like.device))
        ahead.begin(phase, graph, like, tensors)
    return phase.forward(graph, tensors, like, False)[0]


def _linked(phase: EdgePhase, graph: Graph, like: Tensor, tensors: Sequence[Tensor],
            forward: dense.Products) -> tuple[Tensor, ...]:
    """An edge phase in a layer's forward, of features as the last product gave them back; if a product of them is to
    come it gives them back as well.
    """
    back = phase.place_to_give_back(tensors)
    if back < 0:
        return cast("tuple[Tensor, ...]", _apply_phase(phase, graph, like, -1, *tensors))
    x, given = tensors[back], [*tensors]
    given[back] = forward.stand_in(x)
    if not forward.rejoins:
        forward.take(x)
        return cast("tuple[Tensor, ...]", _apply_phase(phase, graph, like, -1, *given))
    out, stand_in = _apply_phase(phase, graph, like, back, *given)
    forward.give_back(x, stand_in)
    return (out,)


def _hoist(hoisted: Mapping[Node, Node], env: dict[Node, Tensor], like: Tensor) -> None:
    """Put into ``env`` what is not there yet of ``hoisted``; what expressions of one dtype share is computed once."""
    groups: dict[Any, tuple[Tensor, list[Node]]] = {}
    for result, expression in hoisted.items():
        if result not in env:
            own = _like(expression, env, like)
            groups.setdefault((own.dtype, own.device), (own, []))[1].append(result)
    for own, results in groups.values():
        made = interpret.evaluate([hoisted[r] for r in results], lambda n, a: env[n], own)
        env.update(zip(results, made, strict=True))


def _like(expression: Node, env: Mapping[Node, Tensor], like: Tensor) -> Tensor:
    """The tensor whose dtype and device constants of a vertex expression take."""
    floats = [n for n in inputs_of(expression) if env[n].is_floating_point()]
    return next((env[n] for n in floats if n.is_row), env[floats[0]] if floats else like)


#: Inputs of an expression.
inputs_of: Callable[[Node], tuple[Node, ...]] = lru_cache(maxsize=4096)(ir.inputs_of)


def _vertex(expression: Node, env: Mapping[Node, Tensor], like: Tensor) -> Tensor:
    return interpret.evaluate([expression], lambda n, a: env[n], _like(expression, env, like))[0]


def _take_dots(stage: Stage, env: dict[Node, Tensor], like: Tensor) -> None:
    """Put the scores among what is hoisted into ``env``, and there what stands for the features they are of."""
    weights = {r: _vertex(weight, env, like) for r, _, weight in stage.dots}
    shapes = {r: stage.hoisted[r].args[0].shape for r, _, _ in stage.dots}
    given = {(x, shapes[r]): env[x] for r, x, _ in stage.dots}
    given = {(x, shape): t if t.shape[1:] == shape else t.view(-1, *shape) for (x, shape), t in given.items()
             if t.shape[1:] == shape or t.is_contiguous()}
    found = {r: (given[x, shapes[r]], weights[r].expand(shapes[r]).unsqueeze(0)) for r, x, _ in stage.dots
             if (x, shapes[r]) in given}
    asked = {r: pair for r, pair in found.items() if dots.can_take(*pair)}
    if asked:
        scores, stand_ins = dots.scores(list(asked.values()))
        env.update(zip(asked, scores, strict=True))
        known = {id(x): y for x, y in stand_ins}
        env.update({x: known[id(t)].view(env[x].shape) for (x, _), t in given.items() if id(t) in known})
        env.update({n: known[id(t)] for n, t in env.items() if id(t) in known})


def _result(value: Node, env: Mapping[Node, Tensor], graph: Graph, like: Tensor) -> Tensor:
    """An output as a tensor; what vertex expressions computed in a wider dtype is rounded."""
    made = as_dtype(env[value] if value in env else _vertex(value, env, like), like.dtype)
    return made if value.is_row else made.expand(graph.num_dst, *value.shape)


class _Kind(NamedTuple):
    """What a :class:`Way` depends on of one tensor that was given, and the name of the first input that is the same."""

    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    first: str


_NONE: frozenset[Node] = frozenset()


class Way:
    """How a program runs on a graph of some size with tensors of some kinds: all that :func:`run` finds out first.

    It holds for other tensors of these shapes and kinds, of which the same ones are the same, on other graphs of this
    size, while gradients are on or off as they were.

    Attributes:
        asked: The program as it was given.
        program: Where inputs that are one tensor are one input, without values of no features.
        hollow: Inputs that only such values read, and differentiably.
        is_whole: Whether there are no values without features.
        is_plain: Whether all tensors are plain and no compiler is at work.
        like: Dtype and device of the results; None where only torch's default says.
    """

    def __init__(self, program: EdgeProgram, kinds: tuple[_Kind | None, ...], is_plain: bool, is_whole: bool,
                 may_postpone: bool, may_recenter: bool, max_scaled_bytes: int, has_grad: bool) -> None:
        """See :meth:`of`.

        Args:
            program: What runs.
            kinds: Of each of its inputs, None of what is not given.
            is_plain: Whether all tensors are plain and no compiler is at work.
            is_whole: Whether inputs of both sides may be taken for one.
            may_postpone: Whether products may come after sums, if all vertices have gradients.
            may_recenter: Whether kernels may sum up the means of a softmax's gradients, if all vertices have some.
            max_scaled_bytes: Of the rows that may be multiplied before edges read them, at most.
            has_grad: Whether gradients are on.
        """
        given = {n: kind for n, kind in zip(program.inputs, kinds, strict=True) if kind is not None}
        merged, same = _merge_inputs(program, given)
        filled = hollow.filled(merged)
        left: tuple[Node, ...] = ()
        if filled is not merged:
            left = tuple(n for n in merged.inputs if n not in filled.inputs)
            same = tuple(pair for pair in same if not set(pair) & set(left))
            left = tuple(n for n in left if n in hollow.differentiated(merged))
        floating = {n: kind for n, kind in given.items() if kind.dtype.is_floating_point}
        vertices = [kind for n, kind in floating.items() if n.domain in (Domain.SRC, Domain.DST)]
        trains = not has_grad or all(kind.requires_grad for kind in vertices)
        # Row inputs decide, parameters follow, then torch's default.
        deciding = [kind for n, kind in floating.items() if n.is_row] or [*floating.values()]
        self.asked, self.program, self.is_plain = program, filled, is_plain
        self.hollow = left
        self.is_whole = not left and len(filled.outputs) == len(program.outputs)
        self.like = (functools.reduce(torch.promote_types, (kind.dtype for kind in deciding)), deciding[0].device) \
            if deciding else None
        self._scalar = scalar_of(*self.like) if is_plain and self.like is not None else None
        self._same = same if is_whole else ()
        self._postpones, self._recenters = may_postpone and trains, may_recenter and trains
        # Rows are to stay as narrow as they are, and float16 may hold fewer digits of what is much smaller than one.
        size = max((kind.dtype.itemsize for kind in vertices), default=0)
        may_scale = self.like is not None and self.like[0] != torch.float16 and \
            all(kind.dtype.itemsize == size for kind in vertices)
        self._max_scaled = max_scaled_bytes // max(size, 1) if may_scale else 0
        self._compiled = self._compile(_NONE)
        self._inputs = tuple((n, n.name) for n in filled.inputs if n is not ir.DEGREE and n is not ir.INV_DEGREE)
        self._draws = any(n not in given for n, _ in self._inputs)
        sole = self._compiled.sole if self.is_whole and not self._draws else None
        self._sole = None if sole is None or self._scalar is None else \
            (sole, self._scalar, tuple(n.name for n in sole.inputs))
        self._steady = tuple(n for n in filled.inputs
                             if n.is_row and n in floating and not floating[n].requires_grad)

    def _compile(self, constant: frozenset[Node]) -> CompiledProgram:
        return compile_program(self.program, constant, self._same, self._postpones, self._recenters, self._max_scaled)

    @staticmethod
    def of(program: EdgeProgram, graph: Graph, tensors: Mapping[str, Tensor]) -> Way:
        """The way of these tensors, which have as many rows as the graph has.

        Raises: InputError as :func:`run`.
        """
        kinds: list[_Kind | None] = []
        first: dict[int, str] = {}
        is_plain = not torch.compiler.is_compiling()
        for node in program.inputs:
            if node is ir.DEGREE or node is ir.INV_DEGREE:
                kinds.append(None)
                continue
            tensor = tensors.get(node.name)
            if tensor is None:
                if node not in _seeds(program):
                    raise InputError(node.name, "among the inputs of the program", sorted(tensors))
                kinds.append(None)
                continue
            kinds.append(_Kind(tensor.dtype, tensor.device, tensor.requires_grad,
                               first.setdefault(id(tensor), node.name)))
            is_plain = is_plain and type(tensor) in PLAIN
            rows, per = _rows_of(graph, node)
            want = node.shape if rows is None else (rows, *node.shape)
            if tensor.shape != want:
                what = "a parameter" if rows is None else f"one row per {per}"
                raise InputError(node.name, f"to have shape {list(want)}, {what}", list(tensor.shape))
        # Parts of a graph fetch rows on the way to a sweep, and a compiler adds up gradients by itself.
        is_whole = is_plain and not graph.is_part
        is_half = any(kind is not None and kind.dtype.is_floating_point and stores_half(kind.dtype) for kind in kinds)
        may_postpone = is_whole and has_long_rows(graph, is_half)
        is_eager = not torch.compiler.is_compiling()  # sizes may be symbols otherwise
        may_recenter = is_eager and has_kernels(graph.device) and has_short_rows(graph, is_half)
        most = scaled_bytes(graph) if is_eager else 0
        return _way(program, tuple(kinds), is_plain, is_whole, may_postpone, may_recenter, most,
                    torch.is_grad_enabled())

    @property
    def names(self) -> tuple[str, ...] | None:
        """The inputs of :meth:`run_alone`; None where there is more to do than one edge phase."""
        return None if self._sole is None or len(self._sole[2]) < len(self._inputs) else self._sole[2]

    def run_alone(self, graph: Graph, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """As :meth:`run` for the tensors of :attr:`names`, if there are such."""
        assert self._sole is not None
        phase, scalar, names = self._sole
        if _observers or (self._steady and reuse.is_on()):
            return self.run(graph, dict(zip(names, tensors, strict=True)))
        with unseen():
            taken(graph)
            return tuple(_call(phase, graph, scalar, tensors))

    def run(self, graph: Graph, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Go it, with tensors that :func:`check_derivatives` has seen; see :func:`run`."""
        if not self.is_plain:
            return self._run(graph, tensors)
        with unseen():
            return self._run(graph, tensors)

    def _run(self, graph: Graph, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        taken(graph)
        if self._sole is not None and not (_observers or (self._steady and reuse.is_on())):  # in most calls
            phase, scalar, names = self._sole
            return tuple(_call(phase, graph, scalar, [tensors[name] for name in names]))
        compiled, unchanged = self._compiled, _NONE
        if self._draws:
            env = {n: graph.draw_seed() if (t := tensors.get(name)) is None else t for n, name in self._inputs}
        else:
            env = {n: tensors[name] for n, name in self._inputs}
        if self._steady:
            unchanged = reuse.constant_inputs(self.program, graph, {n: env[n] for n in self._steady})
            if unchanged:
                compiled = self._compile(unchanged)
        like = self._scalar
        if like is None:
            dtype, device = self.like or (None, graph.device)
            like = torch.empty((), dtype=dtype, device=device)
        # The operator is for compilers, which see no parts of graphs: those are tensors of no plain kind.
        call = _call if self.is_plain or graph.is_part else call_operator
        outputs = self._run_stages(compiled, call, graph, like, env)
        if not self.is_whole:
            outputs = _with_hollow(self, outputs, graph, tensors)
        if _observers:
            metas = tuple({n: (t.dtype, t.requires_grad, t.data_ptr() if self.is_plain else id(t))
                           for n in p.inputs if (t := env.get(n)) is not None} for p in compiled.phases)
            report = Run(self.asked, compiled, unchanged, graph, like.dtype, metas,
                         any(t.requires_grad for t in outputs))
            for seen in _observers:
                seen.append(report)
        return tuple(outputs)

    def _run_stages(self, compiled: CompiledProgram, call: Callable[..., Sequence[Tensor]], graph: Graph, like: Tensor,
                    env: dict[Node, Tensor]) -> list[Tensor]:
        """The outputs of what runs; results of stages are put into ``env``."""
        if compiled.uses_degree:
            wide = compute_dtype(like.dtype)
            env[ir.DEGREE] = graph.incoming.degree.to(wide)
            env[ir.INV_DEGREE] = graph.incoming.inv_degree(wide)
        given: set[Node] = set()  # results that somebody else holds as well
        for stage, phase, constant in zip(compiled.split.stages, compiled.phases, compiled.constant, strict=True):
            if constant is None:
                made = _run_stage(stage, phase, call, graph, like, env, self.is_plain)
            else:
                run_stage = functools.partial(_run_stage, stage, phase, call, graph, like, env, self.is_plain)
                held = [env[n] for n in constant]
                made = reuse.kept(graph, (phase.key, like.dtype), held, functools.partial(_padded, run_stage))
                given.update(stage.results)
            env.update(zip(stage.results, made, strict=True))
        outputs = []
        for value in compiled.split.outputs:
            result = _result(value, env, graph, like)
            outputs.append(result.clone() if value in given else result)
            given.add(value)
        return outputs


_way = lru_cache(maxsize=1024)(Way)


class Ways:
    """The ways of programs on graphs of one size, with plain tensors of one shape, dtype and device per input.

    Attributes:
        adds: Whether their kernels can add something to what they compute; None until that was found.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Way] = {}
        self.adds: bool | None = None

    def run(self, program: EdgeProgram, graph: Graph, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """As :func:`run`, where ``program`` is always given its inputs in the same order, tensors that
        :func:`check_derivatives` has seen.
        """
        return self.way(program, graph, tensors).run(graph, tensors)

    def way(self, program: EdgeProgram, graph: Graph, tensors: Mapping[str, Tensor]) -> Way:
        """That of these tensors."""
        given = tensors.values()
        held = [*map(id, given)]
        key = program.digest, torch.is_grad_enabled(), *map(_needs_grad, given), *map(held.index, held)
        way = self._known.get(key)
        if way is None:
            way = self._known[key] = Way.of(program, graph, tensors)
        return way


def _merge_inputs(program: EdgeProgram,
                  given: Mapping[Node, _Kind]) -> tuple[EdgeProgram, tuple[tuple[Node, Node], ...]]:
    """Let inputs of one domain that are the same tensor be one input, so that its rows are read once.

    Returns: the program, and its inputs of destinations with those of sources that are the same tensor.
    """
    known: dict[object, Node] = {}
    merged = {n: known.setdefault((kind.first, n.domain, n.shape), n) for n, kind in given.items()}
    sides = [(n, known.get((given[n].first, Domain.SRC, n.shape))) for n in known.values() if n.domain == Domain.DST]
    merged = {n: other for n, other in merged.items() if n is not other}
    return ir.substitute(program, merged) if merged else program, \
        tuple((n, other) for n, other in sides if other is not None)


@lru_cache(maxsize=1024)
def _seeds(program: EdgeProgram) -> tuple[Node, ...]:
    """Inputs that hold the seed of a dropout mask; :func:`run` draws what it is not given."""
    nodes = ir.walk(*(o.value for o in program.outputs))
    return tuple(dict.fromkeys(n.args[0] for n in nodes if n.op == "dropout"))


def _rows_of(graph: Graph, node: Node) -> tuple[int | None, str]:
    """How many rows an input has, None for a parameter, and what each is of."""
    if node.domain == Domain.SRC:
        return graph.num_src, "source"
    if node.domain == Domain.DST:
        return graph.num_dst, "destination"
    return (graph.num_edges, "edge") if node.is_row else (None, "")
