"""What ptxas is told of registers: by kernel, in the launch, and that all then fits into as many."""

import pytest
import torch

from oracle import check, random_case
from programs import attention, gates, gatv2, maxima
from pyg_fullgraph import selection
from pyg_fullgraph.phases import EdgePhase
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Output
from pyg_fullgraph.saga.kernel_source import Pieces
from pyg_fullgraph.saga.passes import split
from pyg_fullgraph.saga.plans import KERNELS
from pyg_fullgraph.selection import kernel_of
from triton_kernels import launch

SRC, DST = Domain.SRC, Domain.DST
#: Features per 16 bytes.
FLOAT64, FLOAT32, HALF = 2, 4, 8


def told(program, lanes):
    """By kernel of a training step, forward first, on which side its rows are and what ptxas is told."""
    phase = EdgePhase(split(program).stages[0].core)
    needs = tuple(not n.is_integer for n in phase.inputs)
    plans = phase.forward_plan(KERNELS, True, lanes == HALF), phase.backward_plan(KERNELS, needs, lanes == HALF)
    return [(s.rows, kernel_of(s, lanes).max_registers) for p in plans for s in p.sweeps]


def summed(features, power=0):
    value = ir.input("x", SRC, (features,))
    for _ in range(power):
        value = ir.pointwise("sin", value)
    return EdgeProgram((Output("sum", value),))


def powers(power):
    """Two rows, and two operations per edge more than so many."""
    value = ir.pointwise("add", ir.input("x", SRC, (256,)), ir.input("z", DST, (256,)))
    for _ in range(power):
        value = ir.pointwise("sin", value)
    return EdgeProgram((Output("sum", ir.pointwise("mul", value, ir.input("y", SRC, (256,)))),))


def weighted(width):
    """A gradient of a parameter without sums over features, and two rows by source."""
    value = ir.pointwise("mul", ir.input("x", SRC, (width,)), ir.input("w", Domain.PARAM, (width,)))
    return EdgeProgram((Output("sum", ir.pointwise("mul", value, ir.input("y", DST, (width,)))),))


def three_rows():
    x, y, z = (ir.input(n, SRC, (256,)) for n in "xyz")
    return EdgeProgram((Output("sum", ir.pointwise("mul", ir.pointwise("mul", x, y), z)),))


def multiplied(columns):
    """Two rows times a matrix."""
    met = ir.pointwise("sin", ir.pointwise("add", ir.input("x", SRC, (256,)), ir.input("z", DST, (256,))))
    value = ir.mm(ir.pointwise("mul", met, ir.input("y", SRC, (256,))), ir.input("w", Domain.PARAM, (256, columns)))
    return EdgeProgram((Output("sum", ir.pointwise("sin", value)),))


def with_edges(program):
    """The same, and what it multiplies as edge values."""
    (output,) = program.outputs
    return EdgeProgram((output, Output("edge", output.value, "kept")))


@pytest.mark.parametrize("program, lanes, want", [
    (attention(4, 64), FLOAT32, [(DST, 96), (DST, 96), (SRC, 96)]),
    (attention(16, 64), FLOAT32, [(DST, 96), (DST, 96), (SRC, 96)]),  # four programs per row
    (attention(4, 64), HALF, [(DST, 0), (DST, 0), (SRC, 0)]),
    (attention(4, 64), FLOAT64, [(DST, 0), (DST, 0), (SRC, 0)]),
    (attention(1, 128), FLOAT32, [(DST, 0), (DST, 0), (SRC, 0)]),
    (attention(1, 512), FLOAT32, [(DST, 0), (DST, 0), (SRC, 0)]),  # a program holds twice as much
    (attention(8, 32), FLOAT32, [(DST, 0), (DST, 0), (SRC, 0)]),
    (attention(4, 64, has_edges=True), FLOAT32, [(DST, 0), (DST, 0), (SRC, 0)]),
    (gatv2(64, 4)(), FLOAT32, [(DST, 0), (DST, 112), (SRC, 96)]),
    (gatv2(64, 4)(), HALF, [(DST, 0), (DST, 96), (SRC, 96)]),
    (gatv2(64, 4)(), FLOAT64, [(DST, 0), (DST, 0), (SRC, 0)]),
    (gatv2(512, 1)(), HALF, [(DST, 0), (DST, 0), (SRC, 0)]),
    (gatv2(64, 4, edge_dim=3)(), FLOAT32, [(DST, 0), (DST, 0), (SRC, 0)]),
    (maxima(256), FLOAT32, [(DST, 0), (SRC, 96)]), (maxima(256), HALF, [(DST, 0), (SRC, 96)]),
    (gates(256), FLOAT32, [(DST, 96), (DST, 96), (SRC, 0)]), (gates(256), HALF, [(DST, 0), (DST, 0), (SRC, 0)]),
    (gates(512), FLOAT32, [(DST, 96), (DST, 96), (SRC, 0)]),
    (three_rows(), FLOAT32, [(DST, 0), (SRC, 0)]),
    (weighted(256), FLOAT32, [(DST, 0), (DST, 0), (SRC, 96)]),
    (powers(8), FLOAT32, [(DST, 0), (DST, 96), (SRC, 0)]), (powers(9), FLOAT32, [(DST, 0), (DST, 0), (SRC, 0)]),
    (with_edges(powers(1)), FLOAT32, [(DST, 0), (DST, 0), (SRC, 0)]),
    (multiplied(1), FLOAT32, [(DST, 0), (DST, 0), (SRC, 0)]),
    (multiplied(16), FLOAT32, [(DST, 0), (DST, 0), (SRC, 0), (SRC, 0)]),
    (summed(256), FLOAT32, [(DST, 0), (SRC, 0)]), (summed(32), FLOAT32, [(DST, 96), (SRC, 96)]),
    (summed(32, power=12), FLOAT32, [(DST, 0), (SRC, 0)]),
    (summed(64), HALF, [(DST, 0), (SRC, 0)]), (summed(64, power=1), HALF, [(DST, 96), (SRC, 0)]),
    (summed(128), HALF, [(DST, 80), (SRC, 80)]), (summed(256), HALF, [(DST, 80), (SRC, 80)]),
], ids=lambda p: p if isinstance(p, int) else None)
def test_kernels_like_those_that_were_measured_are_told(program, lanes, want):
    assert sorted(told(program, lanes), key=str) == want


def test_slices_are_told_and_rounds_and_rows_side_by_side_are_not():
    (sweep,) = EdgePhase(split(summed(256)).stages[0].core).forward_plan(KERNELS, False).sweeps
    assert [kernel_of(sweep, FLOAT32, tile).max_registers for tile in (32, 64, 128)] == [96, 0, 0]
    assert [kernel_of(sweep, HALF, tile).max_registers for tile in (32, 64, 128)] == [0, 0, 80]
    assert selection.kernel_on(sweep, FLOAT32, 1 << 16, 1 << 25).max_registers == 96  # 512 edges per row
    (narrow,) = EdgePhase(split(summed(32)).stages[0].core).forward_plan(KERNELS, False).sweeps
    assert [kernel_of(narrow, FLOAT32, pieces=p).max_registers
            for p in (Pieces.ONE, Pieces.ROUNDS, Pieces.SIDE_BY_SIDE)] == [96, 0, 0]


@pytest.mark.interpreter
@pytest.mark.parametrize("hip, most", [(None, 96), ("6.4", None)], ids=["cuda", "hip"])
def test_launches_tell_it_for_loops_over_edges_alone(monkeypatch, hip, most):
    """And no other compiler than Nvidia's."""
    found = {}
    of = launch.Launch.of

    def recorded(source, name, programs, constants, *args):
        found[name] = constants.get("maxnreg")
        return of(source, name, programs, constants, *args)

    monkeypatch.setattr(launch.Launch, "of", recorded)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(selection, "MAX_PIECE", 32)
    monkeypatch.setattr(selection, "MIN_PIECES", 1)
    check(attention(4, 64), random_case(3, 4, 400), torch.float32)  # all rows are cut
    loops = {name for name in found if name.startswith(("softmax", "sum_by_"))}
    assert len(loops) == 3 and {found[name] for name in loops} == {most}
    assert sum(name.startswith("merge") for name in found) == 3
    assert {registers for name, registers in found.items() if name not in loops} == {None}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("program", [attention(4, 64), gatv2(64, 4)(), maxima(256), gates(256)],
                         ids=["attention", "gatv2", "maxima", "gates"])
def test_what_is_compiled_keeps_to_it_and_is_right(monkeypatch, program, dtype):
    found = {}
    plain = launch.Launch._launch

    def recorded(self, known, args, kinds):
        plain(self, known, args, kinds)
        compiled = known[kinds]._compiled
        found[compiled.name] = compiled.metadata.maxnreg, compiled.n_regs, compiled.n_spills

    monkeypatch.setattr(launch.Launch, "_launch", recorded)
    check(program, random_case(300, 200, 4000), dtype, "cuda")
    want = sorted(r for _, r in told(program, FLOAT32 if dtype == torch.float32 else HALF) if r)
    assert sorted(most for most, _, _ in found.values() if most) == want
    assert all(registers <= most and spills <= 16 for most, registers, spills in found.values() if most), found
