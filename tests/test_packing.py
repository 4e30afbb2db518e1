"""Numbers of vertices packed for edges: which are, what of the steps before is left, and who reads them how."""

import pytest
import torch
from test_kernels import GPU, INTERPRETER

from oracle import check, program_of, random_case
from pyg_fullgraph import autograd, chunks, execution, phases, selection
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain
from pyg_fullgraph.saga.kernel_source import KernelSource
from pyg_fullgraph.saga.packing import columns_of, pack
from pyg_fullgraph.saga.passes import split
from pyg_fullgraph.saga.plans import CHUNKS, KERNELS, PACKED, Plan, Sweep, is_packed
from pyg_fullgraph.selection import kernel_of

SRC, DST = Domain.SRC, Domain.DST


def backward_of(name, target=KERNELS, postpones=False):
    stage = split(program_of(name)).stages[0]
    phase = phases.EdgePhase(stage.core, added=stage.added, postpones=postpones)
    return phase.backward_plan(target, tuple(not n.is_integer for n in phase.inputs))


def packed_in(plan):
    return [s for s in plan.steps if not isinstance(s, Sweep) and is_packed(s[0])]


def narrow(sweep):
    """What is read of vertices through an index, but for rows of features."""
    return [n for n in sweep.inputs if n.domain == Domain.EDGE & ~sweep.rows and (n.numel <= 4 or is_packed(n))]


@pytest.mark.parametrize("name, postpones, shape", [("gat", False, (3, 4)), ("gat", True, (3, 4)),
                                                   ("gatv2", False, (3, 2)), ("gat-dropout", False, (3, 4))])
def test_edges_of_attention_read_one_narrow_row(name, postpones, shape):
    plan = backward_of(name, postpones=postpones)
    ((packed, row),) = packed_in(plan)
    assert packed.shape == row.shape == shape and len(columns_of(row)) == shape[1]
    assert [narrow(s) for s in plan.sweeps if s.rows == SRC] == [[packed]]
    # What is packed alone is no result of its own any more.
    made = [s[0] for s in plan.steps if not isinstance(s, Sweep)]
    assert all(any(n in s.inputs for s in plan.sweeps) or n in ir.inputs_of(*plan.outputs.values()) for n in made)
    # The step stands beside others that read the same rows, in one batch.
    assert packed in [r for r, _ in plan.batches[0][0]]


@pytest.mark.parametrize("name", ["gcn", "sage-mean", "gin", "edge-max"])
def test_nothing_is_packed_where_one_row_is_read(name):
    assert not packed_in(backward_of(name))


def test_chunks_read_each_for_itself():
    assert not packed_in(backward_of("gat", CHUNKS))


def sweep_over(*values):
    total = values[0]
    for value in values[1:]:
        total = ir.pointwise("mul", total, value)
    result = ir.input("%total", SRC, total.shape)
    return Sweep(SRC, ((result, ir.gather("sum", SRC, ir.lift(total))),), ()), result


def made(name, shape):
    """A step, and its result."""
    return ir.input(name, DST, shape), ir.pointwise("exp", ir.input(f"{name}.of", DST, shape))


def test_only_what_is_made_by_a_step():
    a, b = ir.input("a", DST, (3,)), ir.input("b", DST, (3,))
    given, result = sweep_over(a, b)
    assert pack([given], [result]) == (given,)  # a pass of its own would have to do it
    before, early = sweep_over(ir.input("x", DST, (3,)))
    step = made("b", (3,))
    assert is_packed(pack([step, before, given], [result, early])[0][0])
    # The last of them comes from a sweep, after which it is done.
    late = ir.input("%total", DST, (3,))
    before = Sweep(DST, ((late, ir.gather("sum", DST, ir.lift(ir.input("x", SRC, (3,))))),), ())
    after, result = sweep_over(step[0], late)
    *given, (packed, row), last = pack([step, before, after], [result])
    assert given == [step, before] and columns_of(row) and packed in last.inputs and late not in last.inputs


@pytest.mark.parametrize("shapes, groups", [
    ([(3,), (3,), (3,)], [(3, 4)]),
    ([(3,), (2,), (3,), (1,)], [(3, 2)]),
    ([(9,), (9,)], []),
    ([(2,)] * 7, [(2, 4), (2, 4)]),
    ([(), ()], [(2,)]),
], ids=str)
def test_arrays_of_one_shape_are_packed(shapes, groups):
    steps = [made(f"n{k}", shape) for k, shape in enumerate(shapes)]
    total = ir.const(1.0, ())
    for result, _ in steps:
        total = ir.pointwise("mul", total, ir.reduce_features("sum", result, range(len(result.shape))))
    result = ir.input("%total", SRC, ())
    sweep = Sweep(SRC, ((result, ir.gather("sum", SRC, ir.lift(total))),), ())
    plan = pack([*steps, sweep], [result])
    assert [s[0].shape for s in plan if not isinstance(s, Sweep) and is_packed(s[0])] == groups


def test_what_others_read_stays_a_result():
    (a, value), b = made("a", (3,)), ir.input("b", DST, (3,))
    sweep, result = sweep_over(a, b)
    plan = pack([(a, value), sweep], [result, ir.pointwise("neg", a)])
    assert next(s[0] for s in plan if not isinstance(s, Sweep)) is a
    assert len(plan) == 3


def test_columns():
    x = ir.input("x", DST, (3, 1))
    assert columns_of(ir.cat([x, x], 1)) == (x, x)
    assert columns_of(ir.cat([x, x], 0)) == columns_of(x) == ()
    assert columns_of(ir.cat([x, ir.input("y", DST, (3, 2))], 1)) == ()


def test_one_load_brings_what_a_head_needs():
    """But beside sums of features, see `Emitter.load_narrow`."""
    for name, postpones, loads in (("gat", True, 1), ("gat", False, 4), ("gatv2", False, 2)):
        (sweep,) = (s for s in backward_of(name, postpones=postpones).sweeps if s.rows == SRC)
        kernel = kernel_of(sweep)
        assert isinstance(kernel, KernelSource)
        (packed,) = (b for b in kernel.inputs if is_packed(b.node))
        assert kernel.source.count(f"tl.load({packed.name}_ptr") == loads


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("shape", [(2,), (4,), (3, 2), (3, 4), (8, 2)], ids=str)
def test_columns_that_one_load_brings(shape, device):
    """Of one head and of several, as many as fill a power of two or not."""
    packed, x = ir.input(f"{PACKED}0", DST, shape), ir.input("x", DST, (*shape[:-1], 5))
    dim = len(shape) - 1
    weight = ir.const(0.5, (*shape[:-1], 1))
    for k in range(shape[-1]):
        column = ir.view(ir.slice_(packed, dim, k, k + 1), (*shape[:-1], 1))
        weight = ir.pointwise("add", ir.pointwise("mul", weight, column), 0.25 * k)
    result = ir.input("%total", SRC, x.shape)
    sweep = Sweep(SRC, ((result, ir.gather("sum", SRC, ir.pointwise("mul", ir.lift(weight), x))),), ())
    kernel = kernel_of(sweep)
    assert isinstance(kernel, KernelSource) and "tl.split" in kernel.source
    case = random_case(21, 17, 300)
    order = Graph.from_edge_index(case.edge_index.to(device), case.size).outgoing
    given = {n: torch.randn(case.num_dst, *n.shape, dtype=torch.float64, device=device) for n in (packed, x)}
    like = torch.empty((), dtype=torch.float64, device=device)
    got = execution.run_sweep(sweep, order, given.__getitem__, like)[result]
    want = chunks.run_sweep(sweep, order, given.__getitem__, like)[result]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("heads, first, end", [(3, 0, 1), (3, 1, 2), (4, 0, 1), (4, 1, 3), (4, 0, 2), (4, 0, 4)])
def test_heads_of_a_column(heads, first, end, device, monkeypatch):
    """What takes some heads of a packed value gets those, and not others or another column."""
    (a, value), b, x = made("a", (heads,)), ir.input("b", DST, (heads,)), ir.input("x", DST, (heads,))
    y, total = ir.input("y", DST, (end - first,)), ir.input("%t", SRC, x.shape)
    part = ir.input("%p", SRC, y.shape)
    whole = ir.pointwise("mul", ir.lift(ir.pointwise("mul", a, b)), x)
    some = ir.pointwise("mul", ir.lift(ir.slice_(a, 0, first, end)), y)
    steps = pack([(a, value), Sweep(SRC, ((total, ir.gather("sum", SRC, whole)),
                                          (part, ir.gather("sum", SRC, some))), ())], [total, part])
    (sweep,) = (s for s in steps if isinstance(s, Sweep))
    assert any(map(is_packed, sweep.inputs))
    case = random_case(21, 17, 300)
    given = {n: torch.randn(case.num_dst, *n.shape, dtype=torch.float64, device=device)
             for n in (*ir.inputs_of(value), b, x, y)}
    like, plan = torch.empty((), dtype=torch.float64, device=device), Plan(steps, {"t": total, "p": part})

    def run():
        graph = Graph.from_edge_index(case.edge_index.to(device), case.size)  # a new one, of which nothing is kept
        return execution.run_plan(plan, graph.incoming, graph.outgoing, dict(given), like)

    kernel = kernel_of(sweep)
    assert isinstance(kernel, KernelSource) and "tl.split" in kernel.source
    got = run()
    monkeypatch.setattr(selection, "kernel_for", lambda *args: None)
    torch.testing.assert_close(got, run(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["gat", "gatv2"])
def test_gradients(name, dtype, device, monkeypatch):
    monkeypatch.setattr(autograd, "has_long_rows", lambda *args: True)
    check(program_of(name), random_case(21, 17, 300), dtype, device)
