"""What a sweep makes of the sums of a row: outputs that read nothing else, and what storing a result rounds off."""

import gc
import weakref

import pytest
import torch
from test_kernels import GPU, INTERPRETER
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.errors import OutOfResources

from oracle import check, error, gradients, make_tensors, program_of, random_case, run_oracle
from pyg_fullgraph import autograd, execution, phases, selection
from pyg_fullgraph.autograd import run
from pyg_fullgraph.estimate import Sizes, saved_by
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.finishing import finish
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Output
from pyg_fullgraph.saga.kernel_source import KernelSource
from pyg_fullgraph.saga.passes import is_one_sum, plan, split
from pyg_fullgraph.saga.plans import CHUNKS, KERNELS, Sweep
from pyg_fullgraph.selection import kernel_of

SRC, DST, PARAM = Domain.SRC, Domain.DST, Domain.PARAM
HALVES = [torch.float16, torch.bfloat16]
CASE = random_case(21, 17, 300)


def phase_of(program: EdgeProgram, postpones: bool = True) -> phases.EdgePhase:
    stage = split(program).stages[0]
    return phases.EdgePhase(stage.core, added=stage.added, postpones=postpones)


def sweep_by_source(name: str) -> Sweep:
    phase = phase_of(program_of(name))
    (sweep,) = phase.backward_plan(KERNELS, tuple(not n.is_integer for n in phase.inputs)).sweeps
    return sweep


def plan_of(*outputs: ir.Node, disable: tuple[str, ...] = ()):
    return plan({f"o{k}": e for k, e in enumerate(outputs)}, KERNELS, disable)


def summed(name: str = "x", rows: Domain = DST) -> ir.Node:
    """The sum of ``[4]`` features of the other side, each times the first of the own side."""
    other = ir.input(name, Domain.EDGE & ~rows, (4,))
    return ir.gather("sum", rows, ir.pointwise("mul", other, ir.input("scale", rows, (1,))))


# --- which outputs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gat", "gat-mean", "gat-dropout", "gat-wide"])
def test_the_sum_of_a_postponed_product_is_not_written(name):
    sweep = sweep_by_source(name)
    ((result, value),) = sweep.finish
    wide = [r for r, _ in sweep.gathers if r.numel > result.numel]
    assert len(wide) == 2 and len(sweep.inner) == 2 and set(sweep.inner) <= set(ir.inputs_of(value))
    assert len([r for r in sweep.results if r in wide]) == 1
    kernel = kernel_of(sweep)
    assert isinstance(kernel, KernelSource)
    assert [b.node for b in kernel.outputs] == list(sweep.results)
    assert [b.node for b in kernel.ends] == list(sweep.end_inputs) != []
    assert kernel.source.count(f"tl.load({kernel.ends[0].name}_ptr") == 2  # where a row is done, in both kernels


def test_a_minimum_is_negated_where_it_is():
    phase = phase_of(program_of("sage-min"))
    (sweep,) = phase.forward_plan(KERNELS, False).sweeps
    assert len(sweep.finish) == 1 and sweep.inner == tuple(r for r, _ in sweep.gathers)


def test_nothing_where_it_is_not_asked_for():
    phase = phase_of(program_of("gat"))
    needs = tuple(not n.is_integer for n in phase.inputs)
    assert all(s.is_bare for s in phase.backward_plan(CHUNKS, needs).sweeps)
    total = summed()
    assert all(s.is_bare for s in plan_of(ir.pointwise("neg", total), disable=("finish",)).sweeps)


def test_what_others_read_is_written():
    """An output, or what a later step reads."""
    total = summed()
    made = plan_of(ir.pointwise("exp", total), total)
    assert made.sweeps[0].finish and not made.sweeps[0].inner
    second = ir.gather("sum", SRC, ir.pointwise("mul", total, ir.input("y", SRC, (4,))))
    made = plan_of(ir.pointwise("exp", total), second)
    assert made.sweeps[0].finish and not made.sweeps[0].inner


def test_what_needs_two_sweeps_is_finished_by_the_last():
    first = summed()
    second = ir.gather("sum", DST, ir.pointwise("mul", ir.input("z", SRC, (4,)), first))
    made = plan_of(ir.pointwise("add", first, second))
    assert [len(s.finish) for s in made.sweeps] == [0, 1]
    assert made.sweeps[1].inner == (made.sweeps[1].gathers[0][0],) and not made.sweeps[0].inner


@pytest.mark.parametrize("output", [
    pytest.param(ir.pointwise("mul", summed(), ir.input("kind", DST, (), integer=True)), id="integers"),
    pytest.param(ir.pointwise("mul", summed(), ir.reduce_features("sum", ir.input("w", PARAM, (4, 4)), (0,))),
                 id="a sum of parameters"),
    pytest.param(ir.cat([summed(), summed("y")], 0), id="features side by side"),
    pytest.param(ir.lift(ir.pointwise("mul", summed(), summed("y", SRC))), id="both sides"),
    pytest.param(ir.gather("sum", PARAM, ir.pointwise("mul", ir.input("x", SRC, (4,)), ir.input("y", DST, (4,)))),
                 id="a sum over all edges")])
def test_what_a_row_does_not_have_is_left(output):
    assert all(s.is_bare for s in plan_of(output).sweeps)


def test_what_a_later_step_makes_is_left():
    """A step as wide as what edges read, which is kept in the dtype of the arithmetic; and what reads it."""
    (sweep,), later = plan_of(summed()).sweeps, ir.input("later", DST, (4,))
    value = ir.pointwise("mul", sweep.results[0], later)
    steps, results = finish((sweep, (later, ir.pointwise("neg", sweep.results[0]))), {"o": value})
    assert results == {"o": value} and steps[0] == sweep


def test_a_narrow_row_of_sums_that_edges_read_is_made_where_they_are():
    """Where edges would ask for two rows, and, in half precision, as exact as the sums are."""
    weights = [ir.input(name, SRC, (2, 1)) for name in "ab"]
    first, second = (ir.gather("sum", DST, ir.pointwise("mul", w, ir.input("e", Domain.EDGE, (2, 1)))) for w in weights)
    ratio = ir.pointwise("div", first, second)
    total = ir.gather("sum", DST, ir.pointwise("mul", ir.input("x", SRC, (2, 4)), ir.input("e", Domain.EDGE, (2, 1))))
    back = ir.gather("sum", SRC, ir.pointwise("mul", ratio, ir.input("y", DST, (2, 4))))
    made = plan_of(total, back)
    one, other = made.sweeps
    assert made.steps == (one, other)
    ((mean, value),) = one.finish
    assert value.op == "div" and mean in other.inputs and mean in made.exact
    assert set(one.inner) == set(ir.inputs_of(value)) and not set(one.inner) & set(other.inputs)
    # Along the rows of sums that stay where they are a row reads both once.
    again = ir.gather("sum", DST, ir.pointwise("mul", ratio, ir.input("x", SRC, (2, 4))))
    assert not plan_of(again).sweeps[0].finish


def test_a_sum_that_is_added_to_and_read_by_a_product():
    """As where a vertex is source and destination: the gradient takes both, the product one."""
    total = ir.gather("sum", DST, ir.pointwise("mul", ir.input("x", SRC, (4,)), ir.input("s", DST, (1,))))
    own, more = ir.input("own", DST, (4,)), ir.input("more", DST, (4,))
    product = ir.reduce_features("sum", ir.pointwise("mul", own, total), (0,))
    made = plan({"grad": total, "score": product}, KERNELS, added={"grad": (more,)})
    (sweep,) = made.sweeps
    assert len(sweep.finish) == 2 and len(sweep.inner) == 1
    generator = torch.Generator().manual_seed(0)
    tensors = {n: torch.randn(21 if n.domain == SRC else 17, *n.shape, generator=generator, dtype=torch.float64)
               for n in made.inputs if not n.name.startswith("%")}
    like = torch.empty((), dtype=torch.float64)
    order = Graph.from_edge_index(CASE.edge_index, CASE.size).incoming
    got = dict(zip(made.outputs, execution.run_plan(made, order, None, dict(tensors), like), strict=True))
    by_name = {n.name: t for n, t in tensors.items()}
    src, dst = CASE.edge_index
    bare = torch.zeros(17, 4, dtype=torch.float64).index_add_(0, dst, by_name["x"][src]) * by_name["s"]
    torch.testing.assert_close(got["grad"], bare + by_name["more"])
    torch.testing.assert_close(got["score"], (bare * by_name["own"]).sum(1))


# --- numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("name", ["gat", "gat-dropout", "gat-mean", "gat-bias", "sage-min"])
@pytest.mark.parametrize("how", ["whole rows", "cut rows", "after"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gradients(name, how, dtype, device, monkeypatch):
    """Of rows that one program has, of those that are merged, and where no kernel finishes them."""
    monkeypatch.setattr(autograd, "has_long_rows", lambda *args: True)
    if how == "cut rows":
        monkeypatch.setattr(selection, "max_piece_of", lambda *order: 8)
    elif how == "after":
        monkeypatch.setattr(execution, "_finishes", lambda *args: False)
    check(program_of(name), CASE, dtype, device)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_a_kernel_that_does_not_fit_the_device(device, monkeypatch):
    """The sums are then made without, and the rest after them."""
    refused, launch = [], execution._launch_in

    def launch_in(shape, sweep, *args):
        if sweep.finish:
            refused.append(sweep)
            raise OutOfResources(300_000, 200_000, "shared memory")
        return launch(shape, sweep, *args)

    monkeypatch.setattr(execution, "_launch_in", launch_in)
    monkeypatch.setattr(selection, "refused", set())
    monkeypatch.setattr(autograd, "has_long_rows", lambda *args: True)
    with pytest.warns(UserWarning, match="does not fit the device"):
        check(program_of("gat"), random_case(22, 18, 301), torch.float64, device)
    assert len(refused) == 1


# --- what storing rounds off ------------------------------------------------------------------------------------


@pytest.fixture
def forwards(monkeypatch):
    """The phase, results and statistics of each forward, but for those that only compile kernels ahead."""
    seen, plain = [], phases.EdgePhase.forward

    def forward(phase, graph, tensors, like, save):
        made = plain(phase, graph, tensors, like, save)
        seen.extend([(phase, *made)] * (like.device.type != "meta"))
        return made

    monkeypatch.setattr(phases.EdgePhase, "forward", forward)
    return seen


@pytest.mark.parametrize("dtype, digits", [(torch.float16, 21), (torch.bfloat16, 15)], ids=str)
@pytest.mark.parametrize("name", ["gat", "gatv2", "gat-bias"])
@pytest.mark.parametrize("device", ["cpu", INTERPRETER, GPU])
def test_result_and_rest_have_twice_the_digits(name, dtype, digits, device, forwards, monkeypatch):
    if name == "gat-bias":
        monkeypatch.setattr(selection, "max_piece_of", lambda *order: 8)
    tensors = make_tensors(program_of(name), CASE.num_src, CASE.num_dst, CASE.num_edges, dtype, device)
    graph = Graph.from_edge_index(CASE.edge_index.to(device), CASE.size)
    for kind in (dtype, torch.float64):
        run(program_of(name), graph, {n: t.to(kind) if t.is_floating_point() else t for n, t in tensors.items()})
    (phase, (out,), statistics), (_, (want,), _) = forwards
    assert phase.rest is not None and list(phase.statistics(True))[-1] == "rest"
    assert not any(n.startswith("out.") for n in phase.saved(True))
    assert out.dtype == statistics[-1].dtype == dtype
    largest = want.abs().amax().clamp(min=1)
    assert (out.double() - want).abs().max() > largest * 2.0**-digits
    assert (out.double() + statistics[-1].double() - want).abs().max() <= largest * 2.0**-digits


@pytest.mark.parametrize("name", ["gcn", "sage-max", "products", "many-outputs", "gmm"])
def test_other_programs_have_no_rest(name):
    phase = phase_of(program_of(name))
    assert phase.rest is None and "rest" not in phase.statistics(True)


def test_which_results_are_one_sum():
    """Features side by side, say, are several."""
    a, x = ir.input("a", SRC, (1,)), ir.input("x", SRC, (4,))
    weighted = ir.pointwise("mul", ir.softmax(a), x)
    assert is_one_sum(Output("sum", weighted)) and is_one_sum(Output("mean", x))
    assert not is_one_sum(Output("max", x)) and not is_one_sum(Output("edge", x))
    assert not is_one_sum(Output("sum", ir.cat([weighted, ir.pointwise("sin", x)], 0)))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("device", ["cpu", INTERPRETER, GPU])
@pytest.mark.parametrize("name", ["gat", "gatv2", "gat-bias"])
def test_results_written_to_in_place(name, dtype, device):
    """The result, and what it was rounded by, are then computed again: gradients have the same bits."""
    tensors = make_tensors(program_of(name), CASE.num_src, CASE.num_dst, CASE.num_edges, dtype, device)
    inputs = [t for t in tensors.values() if t.requires_grad]
    graph = Graph.from_edge_index(CASE.edge_index.to(device), CASE.size)
    found = []
    for writes in (False, True):
        (out,) = run(program_of(name), graph, tensors)
        if writes:
            out.mul_(2).add_(1)
        found.append(torch.autograd.grad(out.sum() * (1 if writes else 2), inputs))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_gradients_of_scores_do_not_add_up_what_is_rounded_off(forwards):
    """All edges of a row share it: with results as they are stored the error is many times as large, the more so of
    features far from zero.
    """
    program, case = program_of("gat"), random_case(40, 5, 20_000)
    tensors = make_tensors(program, case.num_src, case.num_dst, case.num_edges, torch.float16)
    tensors["message.x_j"].data += 10
    exact = {k: v.detach().double().requires_grad_() for k, v in tensors.items()}
    (want,) = run_oracle(program, case, exact)
    cotangent = torch.randn(want.shape, generator=torch.Generator().manual_seed(1)).half()
    want = gradients([want], exact, [cotangent.double()])
    graph = Graph.from_edge_index(case.edge_index, case.size)

    place = [k for k, t in tensors.items() if t.requires_grad].index("edge_update.alpha_i")

    def error_of_scores(has_rest: bool) -> float:
        (out,) = run(program, graph, tensors)
        phase, _, statistics = forwards[-1]
        assert phase.rest is not None and statistics[-1].any()
        if not has_rest:
            statistics[-1].data.zero_()
        return error(gradients([out], tensors, [cotangent])[place], want[place])

    right = error_of_scores(True)
    assert right < 2e-3 and error_of_scores(False) > 4 * right


@pytest.mark.parametrize("is_half, dtype", [(False, torch.float32), (True, torch.bfloat16)])
def test_what_explain_says_is_kept(is_half, dtype):
    phase = phase_of(program_of("gat"), postpones=False)
    needs = (True,) * len(phase.inputs)
    graph = Graph.from_edge_index(CASE.edge_index, CASE.size)
    found = saved_by(phase, needs, KERNELS, Sizes.of(graph, dtype), dtype, {})
    sizes = {s.node.name.split(".")[1]: s.num_bytes for s in found if not s.is_input}
    numel = CASE.num_dst * phase.results[0].numel
    assert sizes["out"] == numel * dtype.itemsize
    assert sizes.get("rest") == (2 * numel if is_half else None)
    assert [sizes[kind] for kind in ir.STATISTICS] == [4 * CASE.num_dst * 3] * 2


# --- memory -----------------------------------------------------------------------------------------------------


class Watched(TorchDispatchMode):
    """Whether a tensor is alive whenever something as large as a result is made."""

    def __init__(self, of: weakref.ref, numel: int):
        super().__init__()
        self.of, self.numel, self.seen = of, numel, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.numel() >= self.numel and not made._is_view():
            self.seen.append(self.of() is not None)
        return made


@pytest.mark.parametrize("keeps", [False, True])
def test_what_was_saved_is_freed_at_its_last_use(keeps, forwards, monkeypatch):
    """A sum that only the first step of backward reads is gone when the gradient of the features is made."""
    monkeypatch.setattr(autograd, "has_long_rows", lambda *args: True)
    program = program_of("gat")
    tensors = make_tensors(program, CASE.num_src, CASE.num_dst, CASE.num_edges, torch.float32)
    graph = Graph.from_edge_index(CASE.edge_index, CASE.size)
    (out,) = run(program, graph, tensors)
    made = weakref.ref(max(forwards.pop()[2], key=torch.numel))
    gc.collect()
    assert made() is not None
    with Watched(made, CASE.num_src * out[0].numel()) as watched:
        out.backward(torch.ones_like(out), retain_graph=keeps)
    assert watched.seen and watched.seen[-1] == keeps
    if keeps:
        first = [t.grad.clone() for t in tensors.values()]
        out.backward(torch.ones_like(out))
        assert all(torch.equal(2 * a, t.grad) for a, t in zip(first, tensors.values(), strict=True))
    assert made() is None
    with pytest.raises(RuntimeError, match="second time"):
        out.backward(torch.ones_like(out))
