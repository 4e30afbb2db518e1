"""Vertex steps by one kernel: the numbers and dtypes of torch, and which steps are left to torch."""

import pytest
import torch
from test_kernels import GPU, INTERPRETER, poisoned  # noqa: F401
from triton.runtime.errors import OutOfResources

from oracle import error
from programs import NUM_KINDS, ROW_CASES, SRC, row_steps
from pyg_fullgraph import execution, selection
from pyg_fullgraph.chunks import compute_dtype
from pyg_fullgraph.saga import interpret, ir
from pyg_fullgraph.saga.ir import Domain
from pyg_fullgraph.saga.rows import generate, num_passes
from triton_kernels import launch

DST, PARAM = Domain.DST, Domain.PARAM
X, Y = ir.input("x", DST, (6,)), ir.input("y", DST, (6,))


def tensors_of(steps, num_rows, dtype, device, layout="plain"):
    """Random inputs: `sparse` are every second feature of every third row, `repeated` have one row for all."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for node in ir.inputs_of(*(e for _, e in steps)):
        lead = (num_rows,) * node.is_row
        if node.is_integer:
            made[node] = torch.randint(NUM_KINDS, (*lead, *node.shape), generator=generator).to(device)
            continue
        value = torch.randn(*lead, *node.shape, generator=generator, dtype=torch.float64)
        if node is ir.DEGREE:
            value = value.mul(3).round().abs()
        made[node] = value.to(device, compute_dtype(dtype) if node is ir.DEGREE else dtype)
        if node.is_row and layout == "sparse":
            spread = made[node].new_full((3 * num_rows, *(2 * s for s in node.shape)), float("nan"))
            view = spread[(slice(None, None, 3), *(slice(None, None, 2) for _ in node.shape))]
            view.copy_(made[node])
            made[node] = view
        elif node.is_row and layout == "repeated":
            made[node] = made[node][:1].expand_as(made[node])
    return made


def compare(steps, num_rows, dtype, device, layout="plain", widen=True, monkeypatch=None):
    """All steps leave one kernel as torch computes them in the same dtype, closer to what they are in float64."""
    given = tensors_of(steps, num_rows, dtype, device, layout)
    like = torch.empty((), dtype=compute_dtype(dtype) if widen else dtype, device=device)
    launched, plain = [], launch.Launch.run
    monkeypatch.setattr(launch.Launch, "run", lambda *args: (launched.append(args[0]), plain(*args)))
    got = execution.run_rows(steps, given.__getitem__, like, widen)
    assert len(launched) == 1
    monkeypatch.setattr(execution, "row_kernels", lambda *args: ())
    eager = execution.run_rows(steps, given.__getitem__, like, widen)
    exact = [given[n].double() if given[n].is_floating_point() else given[n] for n in given]
    known = dict(zip(given, exact, strict=True))
    want = interpret.evaluate([e for _, e in steps], lambda n, a: known[n], like.double())
    limit = {torch.float64: 1e-13, torch.float32: 2e-6}[like.dtype] if widen else 1e-3
    for (result, _), w in zip(steps, want, strict=True):
        assert got[result].dtype == eager[result].dtype
        assert got[result].is_contiguous()
        assert error(got[result], w) <= limit, result


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ROW_CASES)
def test_steps(name, dtype, device, monkeypatch):
    compare(ROW_CASES[name](), 37 if device == "cpu" else 40_001, dtype, device, monkeypatch=monkeypatch)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("layout", ["sparse", "repeated"])
@pytest.mark.parametrize("name", ["dots", "chain", "choices", "parts", "numbers"])
def test_layouts(name, layout, device, monkeypatch):
    compare(ROW_CASES[name](), 21, torch.float32, device, layout, monkeypatch=monkeypatch)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("num_rows", [0, 1, 1025])
@pytest.mark.parametrize("name", ["dots", "numbers"])
def test_numbers_of_rows(name, num_rows, device, monkeypatch):
    compare(ROW_CASES[name](), num_rows, torch.float64, device, monkeypatch=monkeypatch)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("name", ["chain", "parts"])
def test_outputs_keep_the_dtype_of_storage(name, device, monkeypatch):
    compare(ROW_CASES[name](), 21, torch.float16, device, widen=False, monkeypatch=monkeypatch)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_a_maximum_over_features_keeps_nan(device):
    steps = row_steps(ir.reduce_features("amax", ir.pointwise("neg", X), (0,)))
    nan, infinity = float("nan"), float("inf")
    x = torch.tensor([[1.0, nan, 2, 3, 4, 5], [infinity] * 6, [6.0, 5, 4, 3, 2, 1]], device=device)
    (made,) = execution.run_rows(steps, lambda n: x, x).values()
    assert made.tolist() == pytest.approx([nan, -infinity, -1.0], nan_ok=True)


def test_what_is_worth_a_kernel():
    """Two passes of torch or more; views cost none, widening half precision costs one per input."""
    once, view = ir.pointwise("mul", X, Y), ir.view(X, (2, 3))
    assert [num_passes([e], False) for e in (X, view, once, ir.pointwise("stop", once))] == [0, 0, 1, 1]
    assert [num_passes([e], True) for e in (X, once, ir.pointwise("mul", X, ir.DEGREE))] == [1, 3, 2]
    assert num_passes([once, ir.pointwise("exp", once)], False) == 2
    assert not execution.row_kernels(row_steps(once), False)
    assert execution.row_kernels(row_steps(once), True)
    parameter = ir.pointwise("exp", ir.pointwise("neg", ir.input("w", PARAM, (3,))))
    assert not execution.row_kernels(row_steps(parameter), True)


def test_sides_are_apart_and_products_with_matrices_stay_with_torch():
    """What one kernel cannot hold does not keep the rest from one."""
    twice, other = (ir.pointwise("exp", ir.pointwise("neg", n)) for n in (X, ir.input("z", SRC, (6,))))
    product = ir.mm(ir.pointwise("exp", twice), ir.input("w", PARAM, (6, 2)))
    joined = ir.cat([twice, Y], 0)
    steps = row_steps(twice, other, product, joined, ir.pointwise("add", twice, Y))
    groups = execution.row_kernels(steps, False)
    assert sorted([r.name for r, _ in group] for group, _ in groups) == [["%0"], ["%1"], ["%4"]]
    for left in (ir.pointwise("exp", ir.pointwise("tan", X)), ir.pointwise("exp", ir.pointwise(
            "mul", X, ir.reduce_features("sum", ir.input("w", PARAM, (6, 9)), (1,))))):
        assert execution.row_kernels(row_steps(left), False) == ()


def test_a_kernel_that_a_device_refuses_is_left_to_torch(monkeypatch):
    """Said once, and not tried again."""
    calls = []

    def refuse(self, args, *looks):
        calls.append(self)
        raise OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(selection, "interpreted", lambda: True)
    monkeypatch.setattr(selection, "refused", set())
    monkeypatch.setattr(launch.Launch, "run", refuse)
    steps = ROW_CASES["dots"]()
    given = tensors_of(steps, 9, torch.float32, "cpu")
    with pytest.warns(UserWarning, match="does not fit the device .* runs by torch"):
        made = execution.run_rows(steps, given.__getitem__, torch.empty(()))
    again = execution.run_rows(steps, given.__getitem__, torch.empty(()))
    out, grad = given.values()
    assert len(calls) == 1
    for values in (made, again):
        torch.testing.assert_close(*values.values(), (out * grad).sum(2))


@pytest.mark.gpu
def test_rows_beyond_two_billion_elements():
    """Offsets are 64 bits wide: 2.56e9 features per input, 5 GB in half precision."""
    steps = ROW_CASES["dots-64"]()
    given = {n: torch.zeros(10_000_000, 4, 64, dtype=torch.float16, device="cuda") for n in ir.inputs_of(steps[0][1])}
    for value in given.values():
        value[-1000:] = torch.randn(1000, 4, 64, device="cuda").half()
    (made,) = execution.run_rows(steps, given.__getitem__, torch.empty((), device="cuda"), widen=True).values()
    out, grad = (t[-1000:].double() for t in given.values())
    assert error(made[-1000:], (out * grad).sum(2)) < 1e-6
    assert not made[:-1000].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nothing_of_rows_by_features_in_between(dtype):
    """Peak above the inputs: the results."""
    steps = ROW_CASES["dots-64"]()
    given = tensors_of(steps, 200_000, dtype, "cuda")
    like = torch.empty((), device="cuda")
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        (made,) = execution.run_rows(steps, given.__getitem__, like, widen=True).values()
        peak = torch.cuda.max_memory_allocated() - before
    assert made.shape == (200_000, 4)
    assert peak <= 2 * made.numel() * made.element_size()


def test_blocks_of_rows():
    """A bounded number of values per program, whatever the width; only what does not meet is shared by programs."""
    for name, steps in ROW_CASES.items():
        kernel = generate(steps())
        values = kernel.block_r * sum(b.node.numel for b in kernel.inputs if b.node.is_row) / kernel.num_tiles
        assert kernel.block_r & (kernel.block_r - 1) == 0
        assert kernel.block_r == 1 or values <= 4096, name
        assert (kernel.num_tiles > 1) == (name == "wide")
