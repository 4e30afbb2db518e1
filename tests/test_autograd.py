"""run(): the operators' contract with torch, layouts of inputs, what needs a gradient, and refusals."""

import copy
from collections import Counter

import pytest
import torch
from test_kernels import GPU, INTERPRETER
from torch.utils._python_dispatch import TorchDispatchMode

import pyg_fullgraph as pfg
import zoo
from oracle import TOLERANCE, error, gradients, program_of, random_case, run_oracle
from programs import CASES, make_tensors
from pyg_fullgraph import autograd, operators
from pyg_fullgraph.autograd import run
from pyg_fullgraph.errors import DoubleBackwardError, InputError
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.phases import EdgePhase, compile_program
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Output

CASE = random_case(11, 9, 60)
GRAPH = Graph.from_edge_index(CASE.edge_index, CASE.size)
LIKE_LAYERS = ("gcn", "sage-mean", "sage-max", "gat-weights", "gat-dropout", "gatv2-edge-dropout", "edge-mlp", "gmm",
               "plus")
NAMES = (*CASES, "plus", "plus-mean", "plus-scaled")


def tensors_of(name, dtype=torch.float64):
    return make_tensors(program_of(name), *CASE.size, CASE.num_edges, dtype)


class Calls:
    """Keeps the arguments of an operator and calls it."""

    def __init__(self, operator):
        self.operator, self.args = operator, []

    def __call__(self, *args):
        self.args.append(args)
        return self.operator(*args)


@pytest.fixture
def calls(monkeypatch):
    """Runs go through the operators, as in a compiled graph."""
    found = {}
    monkeypatch.setattr(autograd, "PLAIN", ())
    for name in ("edge_phase", "edge_phase_backward"):
        found[name] = Calls(getattr(operators, name))
        monkeypatch.setattr(operators, name, found[name])
    return found


@pytest.mark.parametrize("name", LIKE_LAYERS)
def test_opcheck(name, calls):
    tensors = tensors_of(name)
    out = run(program_of(name), GRAPH, tensors)
    gradients(out, tensors, [torch.ones_like(o) for o in out])
    (forward,), (backward,) = calls["edge_phase"].args, calls["edge_phase_backward"].args
    torch.library.opcheck(calls["edge_phase"].operator, forward)
    without_history = tuple([t.detach() for t in a] if isinstance(a, (list, tuple)) and a and
                            isinstance(a[0], torch.Tensor) else a for a in backward)
    torch.library.opcheck(calls["edge_phase_backward"].operator, without_history)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_fake_results_have_the_shapes_and_dtypes_of_real_ones(name, dtype, calls):
    tensors = tensors_of(name, dtype)
    out = run(program_of(name), GRAPH, tensors)
    gradients(out, tensors, [torch.ones_like(o) for o in out])
    for call in calls.values():
        (args,) = call.args
        real = call.operator(*args)
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = call.operator(*torch.utils._pytree.tree_map_only(
                torch.Tensor, lambda t: mode.from_tensor(t, static_shapes=True), args))
        assert [(f.shape, f.dtype, f.stride()) for f in fake] == [(r.shape, r.dtype, r.stride()) for r in real]


@pytest.mark.parametrize("name", NAMES)
def test_results_keep_the_dtype_of_their_inputs(name):
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        tensors = tensors_of(name, dtype)
        out = run(program_of(name), GRAPH, tensors)
        assert {o.dtype for o in out} == {dtype}
        grads = gradients(out, tensors, [torch.ones_like(o) for o in out])
        assert [(g.dtype, g.shape) for g in grads] == [(t.dtype, t.shape) for t in tensors.values() if t.requires_grad]


def strided(t):
    """Every second feature of a wider tensor."""
    wide = torch.zeros((*t.shape[:-1], 2 * t.shape[-1]), dtype=t.dtype) if t.dim() else t
    wide[..., ::2] = t.detach()
    return wide[..., ::2]


def transposed(t):
    return t.detach().transpose(0, -1).contiguous().transpose(0, -1)


def sliced(t):
    """Rows in the middle of a taller and wider tensor."""
    big = torch.zeros([n + 3 for n in t.shape], dtype=t.dtype)
    inner = tuple(slice(1, n + 1) for n in t.shape)
    big[inner] = t.detach()
    return big[inner]


def expanded(t):
    """The first row in place of every row, with stride 0."""
    return t.detach()[:1].expand_as(t)


@pytest.mark.parametrize("layout", [strided, transposed, sliced, expanded], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", [n for n in NAMES if n != "wide"])
def test_any_memory_layout(name, layout):
    program, plain = program_of(name), tensors_of(name)
    odd = {k: layout(t).requires_grad_() if t.is_floating_point() and t.dim() > 0 else t for k, t in plain.items()}
    same = {k: t.detach().clone(memory_format=torch.contiguous_format).requires_grad_() if t.is_floating_point() else t
            for k, t in odd.items()}
    outs = run(program, GRAPH, odd), run(program, GRAPH, same)
    weights = [torch.randn_like(o) for o in outs[1]]
    # Not bit by bit: torch's matrix products round by layout.
    assert all(error(a, b) < TOLERANCE[torch.float64] for a, b in zip(*outs, strict=True))
    # Cotangents come expanded (from a sum) or strided (from a transpose).
    turned = [transposed(w) for w in weights]
    for a, b in zip(gradients(outs[0], odd, turned), gradients(outs[1], same, weights), strict=True):
        assert error(a, b) < TOLERANCE[torch.float64]


def test_a_turned_parameter_is_copied_once(monkeypatch):
    """Kernels of forward and backward read the copy, whatever becomes of the parameter meanwhile."""
    seen = []
    for name in ("forward", "backward"):
        plain = getattr(EdgePhase, name)

        def noted(phase, graph, given, *args, plain=plain):
            env = given if isinstance(given, dict) else dict(zip(phase.inputs, given, strict=True))
            seen.append({n.name: t for n, t in env.items() if n.domain == Domain.PARAM})
            return plain(phase, graph, given, *args)

        monkeypatch.setattr(EdgePhase, name, noted)
    tensors = tensors_of("gmm")
    plain_out = run(program_of("gmm"), GRAPH, tensors)
    wanted = gradients(plain_out, tensors, [torch.ones_like(plain_out[0])])
    turned = {k: t.detach().t().contiguous().t().requires_grad_() if k == "param.mu" else t for k, t in tensors.items()}
    seen.clear()
    out = run(program_of("gmm"), GRAPH, turned)
    with torch.no_grad():
        turned["param.mu"] *= 2
    got = gradients(out, turned, [torch.ones_like(out[0])])
    (before, after), name = seen, "param.mu"
    assert before[name].is_contiguous() and after[name].data_ptr() == before[name].data_ptr()
    assert all(error(a, b) < TOLERANCE[torch.float64] for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("width, is_copied", [(3, True), (16, False)])
def test_weights_of_products_that_may_be_between_kernels_are_read_as_they_lie(width, is_copied):
    value = ir.mm(ir.input("e", Domain.EDGE, (width,)), ir.input("w", Domain.PARAM, (width, 16)))
    phase = EdgePhase(EdgeProgram((Output("sum", value),)))
    given = [torch.zeros(5, width) if n.is_row else torch.zeros(16, width).t() for n in phase.inputs]
    (weight,) = (t for n, t in zip(phase.inputs, phase.laid_out(given), strict=True) if not n.is_row)
    assert weight.is_contiguous() == is_copied


def test_an_expanded_cotangent():
    tensors = tensors_of("gat")
    (out,) = run(program_of("gat"), GRAPH, tensors)
    out.sum().backward()
    (want,) = run_oracle(program_of("gat"), CASE, tensors)
    for g, t in zip(gradients((want,), tensors, [torch.ones_like(want)]), tensors.values(), strict=True):
        assert error(t.grad, g) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("name", LIKE_LAYERS)
def test_every_single_gradient_alone(name):
    program, tensors = program_of(name), tensors_of(name)
    floating = [k for k, t in tensors.items() if t.requires_grad]
    out = run(program, GRAPH, tensors)
    weights = [torch.randn_like(o) for o in out]
    want = dict(zip(floating, gradients(out, tensors, weights), strict=True))
    for k in floating:
        alone = {n: t.detach().requires_grad_(n == k) for n, t in tensors.items()} | {
            n: t for n, t in tensors.items() if not t.is_floating_point()}
        (got,) = gradients(run(program, GRAPH, alone), alone, weights)
        assert error(got, want[k]) < TOLERANCE[torch.float64]


def test_one_of_two_results_may_be_ignored():
    program, tensors = program_of("gat-weights"), tensors_of("gat-weights")
    for keep in (0, 1):
        out = run(program, GRAPH, tensors)
        want = run_oracle(program, CASE, tensors)
        weights = [torch.randn_like(o) if k == keep else torch.zeros_like(o) for k, o in enumerate(out)]
        got = torch.autograd.grad(out[keep], list(tensors.values()), weights[keep], allow_unused=True)
        for g, w in zip(got, gradients(want, tensors, weights), strict=True):
            assert error(torch.zeros_like(w) if g is None else g, w) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("name", LIKE_LAYERS)
def test_without_gradients_nothing_is_kept(name, calls):
    tensors = tensors_of(name)
    with_grad = run(program_of(name), GRAPH, tensors)
    with torch.no_grad():
        without = run(program_of(name), GRAPH, tensors)
    assert all(o.requires_grad for o in with_grad)
    assert not any(o.requires_grad for o in without)
    assert all(torch.equal(a, b) for a, b in zip(with_grad, without, strict=True))
    saves = [args[-1] for args in calls["edge_phase"].args]
    assert saves == [True, False]
    with torch.inference_mode():
        inside = run(program_of(name), GRAPH, tensors)
    assert all(torch.equal(a, b) for a, b in zip(with_grad, inside, strict=True))


def test_a_second_derivative_is_refused():
    tensors = tensors_of("gat")
    (out,) = run(program_of("gat"), GRAPH, tensors)
    first = torch.autograd.grad(out.square().sum(), list(tensors.values()), create_graph=True)
    with pytest.raises(DoubleBackwardError, match="first derivatives only"):
        torch.autograd.grad(sum(g.sum() for g in first), list(tensors.values()))


@pytest.mark.parametrize("differentiate", [
    lambda penalty, out, mu: (penalty + out).backward(), lambda penalty, out, mu: (penalty + out).backward(inputs=[mu]),
    lambda penalty, out, mu: torch.autograd.grad(penalty + out, mu),
    lambda penalty, out, mu: torch.autograd.grad(penalty, mu),
], ids=["backward", "backward to it", "grad", "grad of the penalty"])
def test_a_second_derivative_of_a_turned_parameter_alone_is_refused(differentiate):
    """Backward reads a copy of it, and nothing else that has a gradient."""
    held = {k: t.detach() for k, t in tensors_of("gmm").items()}
    turned = held["param.mu"].t().contiguous().t().requires_grad_()
    (out,) = run(program_of("gmm"), GRAPH, {**held, "param.mu": turned})
    (first,) = torch.autograd.grad(out.sum(), turned, create_graph=True)
    with pytest.raises(DoubleBackwardError, match="first derivatives only"):
        differentiate(first.square().sum(), out.sum(), turned)


def test_backward_twice_gives_the_same():
    tensors = tensors_of("gatv2")
    (out,) = run(program_of("gatv2"), GRAPH, tensors)
    wrt = list(tensors.values())
    first = torch.autograd.grad(out.sum(), wrt, retain_graph=True)
    second = torch.autograd.grad(out.sum(), wrt)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_inputs_changed_in_place_are_noticed():
    tensors = tensors_of("gat")
    held = {k: t * 1.0 for k, t in tensors.items()}
    (out,) = run(program_of("gat"), GRAPH, held)
    next(iter(held.values())).mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["gat", "gat-dropout", "gatv2", "many-outputs", "sage-max"])
def test_results_written_to_in_place(name, dtype):
    """As layers do that add a bias to their result: backward reads of it what it was."""
    tensors = tensors_of(name, dtype)
    inputs = [t for t in tensors.values() if t.requires_grad]
    grads = []
    for writes in (False, True):
        torch.manual_seed(3)
        results = run(program_of(name), GRAPH, tensors)
        for out in results if writes else ():
            out += 1
            out.view(-1).mul_(2)
        grads.append(torch.autograd.grad([out.sum() for out in results], inputs))
    assert all(torch.equal(2 * a, b) for a, b in zip(*grads, strict=True))


def test_one_tensor_under_two_names():
    x, y = ir.input("x", Domain.SRC, (3,)), ir.input("y", Domain.SRC, (3,))
    program = EdgeProgram((Output("sum", ir.pointwise("mul", x, ir.pointwise("sin", y))),))
    value = torch.randn(CASE.num_src, 3, dtype=torch.float64, requires_grad=True)
    (got,) = run(program, GRAPH, {"x": value, "y": value})
    (want,) = run_oracle(program, CASE, {"x": value, "y": value})
    assert error(got, want) < TOLERANCE[torch.float64]
    grads = [torch.autograd.grad(o.sum(), value)[0] for o in (got, want)]
    assert error(*grads) < TOLERANCE[torch.float64]


def test_the_same_result_twice():
    x = ir.input("x", Domain.SRC, (3,))
    program = EdgeProgram((Output("sum", x, "a"), Output("sum", x, "b")))
    value = torch.randn(CASE.num_src, 3, dtype=torch.float64, requires_grad=True)
    a, b = run(program, GRAPH, {"x": value})
    assert torch.equal(a, b)
    assert a.data_ptr() != b.data_ptr()
    (a.sum() + 2 * b.sum()).backward()
    assert error(value.grad, 3 * torch.bincount(CASE.edge_index[0], minlength=CASE.num_src)[:, None].expand(-1, 3)) == 0


@pytest.mark.parametrize("kind", ["sum", "mean", "max", "min"])
def test_rows_without_edges_are_zero(kind):
    graph = zoo.isolated()
    x = torch.full((graph.num_src, 2), -3.0 if kind == "max" else 3.0)
    program = EdgeProgram((Output(kind, ir.input("x", Domain.SRC, (2,))),))
    (out,) = run(program, Graph.from_edge_index(graph.edge_index, graph.size), {"x": x})
    empty = torch.bincount(graph.edge_index[1], minlength=graph.num_dst) == 0
    assert empty.any()
    assert (out[empty] == 0).all()
    assert (out[~empty] != 0).all()


def test_mixed_dtypes_promote_and_gradients_keep_their_own():
    """Parameters in float32 beside bfloat16 features, as autocast leaves them; wider rows decide the result."""
    program = program_of("gmm")
    tensors = tensors_of("gmm", torch.bfloat16)
    mixed = {k: t.detach().float().requires_grad_() if k.startswith("param.") else t for k, t in tensors.items()}
    (out,) = run(program, GRAPH, mixed)
    assert out.dtype == torch.bfloat16
    grads = torch.autograd.grad(out.sum(), list(mixed.values()))
    assert [g.dtype for g in grads] == [t.dtype for t in mixed.values()]
    wide = {k: t.detach().float().requires_grad_() if k.endswith("edge_attr") else t for k, t in tensors.items()}
    (out,) = run(program, GRAPH, wide)
    assert out.dtype == torch.float32


def test_dropout_masks_follow_torch_seeds():
    program = program_of("gat-dropout")
    tensors = {k: t for k, t in tensors_of("gat-dropout").items() if t.is_floating_point()}
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(run(program, GRAPH, tensors)[0])
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_a_missing_input_is_named():
    tensors = tensors_of("gcn")
    name = next(iter(tensors))
    with pytest.raises(InputError, match=f"Expected '{name}' among the inputs of the program"):
        run(program_of("gcn"), GRAPH, {k: t for k, t in tensors.items() if k != name})


@pytest.mark.parametrize("name, rows, per", [("message.x_j", 11, "source"), ("message.edge_weight", 60, "edge")])
def test_a_wrong_number_of_rows_is_named(name, rows, per):
    tensors = tensors_of("gcn")
    tensors[name] = tensors[name].detach()[:-1]
    with pytest.raises(InputError, match=rf"Expected '{name}' to have shape \[{rows}.*\], one row per {per} \(got"):
        run(program_of("gcn"), GRAPH, tensors)


def test_a_wrong_width_is_named():
    tensors = tensors_of("gcn")
    tensors["message.x_j"] = tensors["message.x_j"].detach()[:, :-1]
    with pytest.raises(InputError, match=r"Expected 'message.x_j' to have shape \[11, 5\], one row per source"):
        run(program_of("gcn"), GRAPH, tensors)


def test_a_wrong_parameter_is_named():
    tensors = tensors_of("gmm")
    name = next(k for k in tensors if k.startswith("param."))
    tensors[name] = tensors[name].detach()[..., :-1]
    with pytest.raises(InputError, match=f"Expected '{name}' to have shape .*, a parameter"):
        run(program_of("gmm"), GRAPH, tensors)


def test_programs_are_compiled_once_per_content():
    first = compile_program(CASES["gat"]())
    second = compile_program(copy.deepcopy(CASES["gat"]()))
    assert first is second


def test_programs_that_differ_in_vertex_work_share_their_edge_phase():
    """Two layers with different linear maps on the vertices run the same kernels."""
    x, w = ir.input("x", Domain.SRC, (4,)), ir.input("w", Domain.PARAM, (4, 3))
    one = compile_program(EdgeProgram((Output("sum", ir.mm(x, w)),)))
    again = compile_program(EdgeProgram((Output("sum", ir.mm(x, w)),)))
    assert one.phases == again.phases
    assert one.split.stages[0].hoisted


def test_what_both_ends_make_of_a_parameter_is_made_once():
    """Halves of EdgeConv's weight are one split, whose gradient is one concatenation, as the weight lies."""
    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen[func.overloadpacket] += 1
            return func(*args, **(kwargs or {}))

    edge_index = torch.randint(12, (2, 40), generator=torch.Generator().manual_seed(0))
    layer = pfg.nn.EdgeConv(torch.nn.Linear(12, 4)).double()
    x = torch.randn(12, 6, dtype=torch.float64, requires_grad=True)
    for _ in range(3):
        seen = Counter()
        with Count():
            layer(x, edge_index).sum().backward()
    aten = torch.ops.aten
    assert seen[aten.slice_backward] == 0 and seen[aten.cat] == 1 and seen[aten.split_with_sizes] == 1


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("shape", [(1,), (3,), (8,), (2, 1), (2, 3)], ids=str)
def test_signs_that_are_no_numbers(shape, device):
    """Of inputs and of gradients, as in the imaginary part of a conjugate."""
    case = random_case(20, 20, 90)
    src, dst = case.edge_index.to(device)
    x, y, w = (ir.input(n, domain, shape) for n, domain in (("x", Domain.SRC), ("y", Domain.DST), ("w", Domain.EDGE)))
    program = EdgeProgram((Output("sum", ir.pointwise("mul", ir.pointwise("mul", x, y), w)),))
    graph = Graph.from_edge_index(case.edge_index.to(device), case.size)

    def negative(t):
        made = torch.complex(torch.ones_like(t), t).conj().imag
        assert made.is_neg()
        return made

    leaves = {n: torch.randn(count, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(count)).to(
        device).requires_grad_() for n, count in (("x", 20), ("y", 20), ("w", 90))}
    given = {n: negative(t) for n, t in leaves.items()}
    (got,) = run(program, graph, given)
    want = torch.zeros_like(got).index_add(0, dst, given["x"][src] * given["y"][dst] * given["w"])
    got, want = ([t, *torch.autograd.grad(negative(t).sum(), list(leaves.values()), retain_graph=True)]
                 for t in (got, want))
    assert all(error(a, b) < TOLERANCE[torch.float64] for a, b in zip(got, want, strict=True))
