"""What is run: sweeps over the edges with vertex steps between them, and what each kind of executor pays for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any

from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, Node

#: Names of edge values that one sweep hands to another start like this.
STAGED = "%staged."
#: The same of vertex values that a vertex step puts side by side.
PACKED = "%packed."
#: The same of rows that a vertex step multiplies by numbers of their vertices.
SCALED = "%scaled."
#: The same of edge values that one kernel hands to another of the same sweep, for a span of edges at a time.
LOCAL = "%local."


def addend(term: Node) -> tuple[Node | None, Node]:
    """Factor, or None, and input of what a sweep adds to its result, see :attr:`Sweep.added`."""
    if term.op != "mul":
        return None, term
    a, b = term.args
    return (a, b) if b.is_row else (b, a)


def is_staged(node: Node) -> bool:
    """Whether ``node`` is an edge value on its way from one sweep to another, or a part of one."""
    return node.name.startswith(STAGED)


def is_local(node: Node) -> bool:
    """Whether ``node`` is a value of a span of edges, or a part of one, see :mod:`pipeline`."""
    return node.name.startswith(LOCAL)


def is_packed(node: Node) -> bool:
    """Whether ``node`` is vertex values that a vertex step puts side by side, see :mod:`packing`."""
    return node.name.startswith(PACKED)


def is_scaled(node: Node) -> bool:
    """Whether ``node`` is rows that a vertex step multiplies by numbers of their vertices, see :mod:`scaling`."""
    return node.name.startswith(SCALED)


@dataclass(frozen=True, eq=False)
class Target:
    """What the executor can do in one pass, and what it pays for (bytes per edge, see :mod:`recompute`).

    Compared by identity, as plans are looked up by it in every run.

    Attributes:
        dense: Products of edge values with edge values, summed over all edges, ride along with other reductions.
        sector: Fewest bytes that a row read from another place costs.
        write: Bytes read that one byte written costs.
        operation, product, spread: Bytes moved in the time of one operation on an element, of one in a matrix product,
            and of one in a product that is spread over a tile (see :func:`unrolled.is_spread`).
        gain: What is left of the price, at most, where numbers per edge are kept in order to save time.
        packs: Numbers of vertices that are read together through an index are packed (see :mod:`packing`).
        finishes: What is made of sums of a row alone is made where they are (see :mod:`finishing`).
        scales: Rows may be multiplied by numbers of their vertices before edges read them (see :mod:`scaling`).
    """

    dense: bool
    sector: int
    write: float
    operation: float
    product: float
    spread: float
    gain: float
    packs: bool = False
    finishes: bool = False
    scales: bool = False

    def row_bytes(self, node: Node) -> int:
        """One row of ``node`` in float32."""
        return max(4 * node.numel, self.sector)


#: Kernels read 32 bytes at least, and do three operations while a byte comes. Memory is what runs out on a GPU: numbers
#: per edge are kept where that saves a third of the time. Products that are spread over a tile are not to be: gradients
#: of attention by a network of 100 hidden features and 4 heads took 116 ms per sweep of a million edges (H200).
KERNELS = Target(dense=False, sector=32, write=2.0, operation=0.35, product=0.0625, spread=32.0, gain=0.67, packs=True,
                 finishes=True, scales=True)
#: Every operation in a chunk is an array that is written and read again.
CHUNKS = Target(dense=True, sector=4, write=1.0, operation=4.0, product=0.5, spread=0.5, gain=1.0)


#: A vertex step: its result, and the expression that makes it.
Step = tuple[Node, Node]


@dataclass(frozen=True)
class Sweep:
    """One pass over the edges, row by row of one side.

    Attributes:
        rows: ``DST`` walks incoming edges of each destination, ``SRC`` outgoing edges of each source.
        gathers: Result input -> gather node over inputs only. Targets are ``rows`` or ``PARAM``.
        edges: Result input -> edge expression that is written in the user's edge order.
        added: Terms that are added to :attr:`total`: inputs of domain ``rows`` or ``PARAM``, made by no other step;
            those of ``rows`` as they are or times a parameter that is one number.
        finish: Vertex steps over results of gathers, before anything is added to them, and inputs of ``rows`` or
            ``PARAM`` that are made by no later step.
        inner: Results of gathers that these steps alone read.
        rest: A result beside :attr:`total`, in the dtype of storage: what that one is rounded by when it is stored.
    """

    rows: Domain
    gathers: tuple[tuple[Node, Node], ...]
    edges: tuple[tuple[Node, Node], ...]
    added: tuple[Node, ...] = ()
    finish: tuple[Step, ...] = ()
    inner: tuple[Node, ...] = ()
    rest: Node | None = None

    @cached_property
    def bare(self) -> Sweep:
        """The gathers and edge values alone."""
        return Sweep(self.rows, self.gathers, self.edges)

    @cached_property
    def is_bare(self) -> bool:
        """Whether nothing is made of the results of gathers."""
        return not (self.added or self.finish or self.rest)

    @cached_property
    def results(self) -> tuple[Node, ...]:
        """What is written: results of gathers, what is made of them, and edge values."""
        ends = (*(r for r, _ in self.finish), *([] if self.rest is None else [self.rest]))
        return (*(r for r, _ in self.gathers if r not in self.inner), *ends, *(r for r, _ in self.edges))

    @cached_property
    def end_inputs(self) -> tuple[Node, ...]:
        """What :attr:`finish` reads beside results of gathers."""
        made = {r for r, _ in self.gathers}
        return tuple(n for n in ir.inputs_of(*(e for _, e in self.finish)) if n not in made)

    @cached_property
    def total(self) -> Node | None:
        """The first result with a row per vertex."""
        return next((r for r, _ in self.gathers if r.is_row), None)

    @cached_property
    def operands(self) -> tuple[Node, ...]:
        """The edge expressions of the sweep."""
        return tuple(a for _, g in self.gathers for a in g.args) + tuple(e for _, e in self.edges)

    def over(self, operands: Iterable[Node]) -> Sweep:
        """The same over other :attr:`operands`."""
        waiting = iter(operands)
        gathers = tuple((r, g.rebuild([next(waiting) for _ in g.args])) for r, g in self.gathers)
        return replace(self, gathers=gathers, edges=tuple((r, next(waiting)) for r, _ in self.edges))

    @cached_property
    def inputs(self) -> tuple[Node, ...]:
        return ir.inputs_of(*self.operands)

    @cached_property
    def kinds(self) -> Mapping[Node, str]:
        """Result of a gather -> how it is reduced."""
        return {result: gather.attr("kind") for result, gather in self.gathers}

    @cached_property
    def needs_ids(self) -> bool:
        """Whether results depend on edge ids: dropout masks, arguments of extrema."""
        return "argmax" in self.kinds.values() or any(n.op in ("eid", "dropout") for n in ir.walk(*self.operands))

    @cached_property
    def has_edge_data(self) -> bool:
        """Whether there are inputs or results with a row per edge."""
        return bool(self.edges) or any(n.domain == Domain.EDGE for n in self.inputs)

    @cached_property
    def _hash(self) -> int:
        return hash((self.rows, self.gathers, self.edges, self.added, self.finish, self.inner, self.rest))

    def __hash__(self) -> int:  # asked for in every run, to find what was made of the sweep
        return self._hash

    def __getstate__(self) -> dict[str, Any]:  # another process has other hashes
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @cached_property
    def digest(self) -> str:
        """A content hash that is the same in every process."""
        pairs = (*self.gathers, *self.edges, *self.finish)
        rest = [] if self.rest is None else [self.rest]
        parts = [*(node for pair in pairs for node in pair), *self.added, *self.inner, *rest]
        counts = {"finish": len(self.finish), "inner": len(self.inner), "rest": len(rest)}
        more = {name: count for name, count in counts.items() if count}
        return Node("gather", parts, (), self.rows, kind="sweep", gathers=len(self.gathers), **more).digest

    def __str__(self) -> str:
        names, lines = ir.listing(self.operands)
        side = "destinations" if self.rows == Domain.DST else "sources"
        body = [f"  {line}" for line in lines if not line.endswith("= input")]
        for result, g in self.gathers:
            args = ", ".join(names[a] for a in g.args)
            terms = self.added if result is self.total else ()
            plus = "".join(" + " + " * ".join(n.name for n in addend(t) if n is not None) for t in terms)
            body.append(f"  {result.name}: {result.domain.label}{list(result.shape)} = {g.attr('kind')}({args}){plus}")
        for result, e in self.finish:
            _, lines = ir.listing([e])
            text = "; ".join(line for line in lines if not line.endswith("= input"))
            body.append(f"  {result.name}: {result.domain.label}{list(result.shape)} = {text}")
        body += [f"  {self.rest.name}: what storing {self.total.name} rounds off"] if self.rest and self.total else []
        body += [f"  not written: {', '.join(r.name for r in self.inner)}"] if self.inner else []
        body += [f"  {r.name}: edge{list(r.shape)} = {names[e]}" for r, e in self.edges]
        return "\n".join([f"sweep over {side}, inputs {', '.join(n.name for n in self.inputs)}", *body])


#: What runs at a time: a sweep, or vertex steps.
Batch = Sweep | tuple[Step, ...]


def can_join(first: Sweep, second: Sweep) -> bool:
    """Whether ``second``, which comes after ``first``, may be part of it: both have products of edge values with
    matrices, or their gradients, and what they read of each edge for these is then made once.
    """
    return first.rows == second.rows and second.is_bare and all(map(_has_products, (first, second))) and \
        (first.is_bare or not any(r.is_row for r, _ in second.gathers)) and \
        not set(made_by(first)) & set(read_by(second))


@lru_cache(maxsize=4096)
def joined(sweeps: tuple[Sweep, ...]) -> Sweep:
    """One sweep for several, each of which :func:`can_join` all before it."""
    first, *others = sweeps
    return replace(first, gathers=(*first.gathers, *(g for s in others for g in s.gathers)),
                   edges=(*first.edges, *(e for s in others for e in s.edges)))


def can_cross(sweep: Sweep, other: Sweep) -> bool:
    """Whether ``other``, along the other side, may add up what spans of ``sweep`` give each of its rows: its results
    are sums of rows, and neither reads what the other makes, or what is handed on between sweeps.
    """
    return sweep.rows != other.rows and _has_products(sweep) and _has_products(other) and not other.edges and \
        all(r.is_row and kind in ("sum", "mean") for r, kind in other.kinds.items()) and \
        not any(map(is_staged, (*sweep.inputs, *other.inputs, *(r for r, _ in sweep.edges)))) and \
        not set(made_by(sweep)) & set(read_by(other)) and not set(made_by(other)) & set(read_by(sweep))


@lru_cache(maxsize=4096)
def _has_products(sweep: Sweep) -> bool:
    return "outer" in sweep.kinds.values() or any(n.op == "mm" for n in ir.walk(*sweep.operands))


def side_by_side(steps: Iterable[Step | Sweep]) -> tuple[Step | Sweep, ...]:
    """``steps`` with each sweep right after an earlier one that it can join, where nothing between makes what it reads.
    """
    placed: list[Step | Sweep] = []
    for step in steps:
        place = len(placed)
        if isinstance(step, Sweep):
            read = set(read_by(step))
            while place and not set(made_by(placed[place - 1])) & read:
                before = placed[place - 1]
                if isinstance(before, Sweep) and can_join(before, step):
                    break
                place -= 1
            else:
                place = len(placed)
        placed.insert(place, step)
    return tuple(placed)


def made_by(step: Step | Sweep) -> tuple[Node, ...]:
    """The results of a step."""
    return step.results if isinstance(step, Sweep) else step[:1]


def read_by(step: Step | Sweep) -> tuple[Node, ...]:
    """The inputs of a step, each once."""
    if not isinstance(step, Sweep):
        return ir.inputs_of(step[1])
    return tuple(dict.fromkeys((*step.inputs, *ir.inputs_of(*step.added), *step.end_inputs)))


@dataclass(frozen=True)
class Plan:
    """What is run, in order: vertex steps ``(result, expression)`` and sweeps; then ``outputs`` over their results.

    Results of sweeps in ``exact`` are kept in the dtype of the arithmetic, not of storage: those that are asked for so,
    and sums on their way to a later step that are narrower than what their sweep reads.
    """

    steps: tuple[Step | Sweep, ...]
    outputs: Mapping[str, Node]
    exact: frozenset[Node] = frozenset()

    @cached_property
    def done(self) -> tuple[tuple[Node, ...], ...]:
        """Per step the inputs and results of steps that nothing reads after it."""
        last: dict[Node, int] = {}
        for k, step in enumerate(self.steps):
            last.update(dict.fromkeys((*read_by(step), *made_by(step)), k))
        kept = set(ir.inputs_of(*self.outputs.values()))
        return tuple(tuple(n for n, at in last.items() if at == k and n not in kept) for k in range(len(self.steps)))

    @cached_property
    def batches(self) -> tuple[tuple[Batch, tuple[Node, ...]], ...]:
        """The steps in order, each with what nothing reads after it; vertex steps that need not wait are one."""
        batches: list[tuple[Batch, tuple[Node, ...]]] = []
        for step, done in zip(self.steps, self.done, strict=True):
            before, gone = batches[-1] if batches else ((), ())
            if isinstance(step, Sweep):
                batches.append((step, done))
            elif isinstance(before, Sweep) or not batches or {r for r, _ in before} & set(ir.inputs_of(step[1])):
                batches.append(((step,), done))
            else:
                batches[-1] = (*before, step), (*gone, *done)
        return tuple(batches)

    @cached_property
    def groups(self) -> tuple[tuple[tuple[Batch, tuple[Node, ...]], ...], ...]:
        """:attr:`batches`, with sweeps that can be joined together."""
        groups: list[tuple[tuple[Batch, tuple[Node, ...]], ...]] = []
        for batch in self.batches:
            step = batch[0]
            before = [s for s, _ in groups[-1]] if groups else []
            if isinstance(step, Sweep) and before and all(isinstance(s, Sweep) and can_join(s, step) for s in before):
                groups[-1] = (*groups[-1], batch)
            else:
                groups.append((batch,))
        return tuple(groups)

    def together(self, is_one: Callable[[Sweep], bool],
                 crosses: Callable[[Sweep, Sweep], bool]) -> Iterator[tuple[Batch, Sweep | None, tuple[Node, ...]]]:
        """:attr:`batches` as they run, with what nothing reads after each: sweeps that can be joined as one where that
        ``is_one`` pipeline, and with a sweep along the other side where that ``crosses`` the spans of the former.
        """
        waiting: list[tuple[Batch, tuple[Node, ...]]] = []
        for group in self.groups:
            sweeps = tuple(s for s, _ in group if isinstance(s, Sweep))
            one = joined(sweeps) if len(sweeps) > 1 else None
            waiting += group if one is None or not is_one(one) else [(one, tuple(n for _, done in group for n in done))]
        while waiting:
            step, done = waiting.pop(0)
            after, done_after = waiting[0] if waiting else ((), ())
            across = None
            if isinstance(step, Sweep) and isinstance(after, Sweep):
                for first, second in ((step, after), (after, step)):
                    if first.rows == Domain.DST and can_cross(first, second) and crosses(first, second):
                        step, across, done = first, second, (*done, *done_after)
                        waiting.pop(0)
                        break
            yield step, across, done

    @cached_property
    def sole(self) -> Sweep | None:
        """The sweep whose results are the outputs, each of them once, if there is nothing else to do."""
        step = self.steps[0] if len(self.steps) == 1 else None
        is_sole = isinstance(step, Sweep) and not self.degrees and all(r in step.results for r in self.results) and \
            len(set(self.results)) == len(self.results)
        return step if isinstance(step, Sweep) and is_sole else None

    @cached_property
    def results(self) -> tuple[Node, ...]:
        """The outputs: of a step or of :attr:`last`, or inputs."""
        return tuple(e if e.op == "input" else ir.input(f"%output{k}", e.domain, e.shape)
                     for k, e in enumerate(self.outputs.values()))

    @cached_property
    def last(self) -> tuple[Step, ...]:
        """The outputs that are made of results of steps, as steps."""
        return tuple((r, e) for r, e in zip(self.results, self.outputs.values(), strict=True) if r is not e)

    @cached_property
    def staging(self) -> Domain:
        """By whose rows edge values are ordered on their way between sweeps.

        The side along which most of them are written and read, which then is contiguous; the last reader's if both are
        equal, as where one sweep writes and one of the other side reads: a sweep waits for what it reads.
        """
        moved = {Domain.SRC: 0, Domain.DST: 0}
        last = Domain.DST
        for sweep in self.sweeps:
            read = sum(n.numel for n in sweep.inputs if is_staged(n))
            moved[sweep.rows] += read + sum(r.numel for r, _ in sweep.edges if is_staged(r))
            last = sweep.rows if read else last
        other = Domain.EDGE & ~last
        return other if moved[other] > moved[last] else last

    @cached_property
    def sweeps(self) -> tuple[Sweep, ...]:
        return tuple(s for s in self.steps if isinstance(s, Sweep))

    @cached_property
    def walks_sources(self) -> bool:
        """Whether a sweep walks the outgoing edges of sources."""
        return any(s.rows == Domain.SRC for s in self.sweeps)

    @cached_property
    def inputs(self) -> frozenset[Node]:
        """What the plan reads, its own results among it."""
        return frozenset((*(n for s in self.steps for n in read_by(s)), *ir.inputs_of(*self.outputs.values())))

    @cached_property
    def degrees(self) -> tuple[Node, ...]:
        """Those of the degrees of destinations, and their inverses, that are read."""
        return tuple(n for n in (ir.INV_DEGREE, ir.DEGREE) if n in self.inputs)

    def __str__(self) -> str:
        lines = []
        for step in self.steps:
            if isinstance(step, Sweep):
                lines.append(str(step))
            else:
                _, text = ir.listing([step[1]])
                lines.append(f"vertex {step[0].name} = " + "; ".join(t for t in text if not t.endswith("= input")))
        return "\n".join(lines)
