"""The representation: equal expressions are one object, wrong ones are refused, contents have stable names."""

import copy
import gc
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from oracle import program_of
from programs import CASES
from pyg_fullgraph.saga import interpret, ir
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Node, Output

SRC, DST, EDGE, PARAM = Domain.SRC, Domain.DST, Domain.EDGE, Domain.PARAM
ROOT = Path(__file__).resolve().parents[1]


def example() -> EdgeProgram:
    x, y, w = ir.input("x", SRC, (2, 3)), ir.input("y", DST, (2, 1)), ir.input("w", PARAM, (3,))
    score = ir.reduce_features("sum", ir.pointwise("mul", ir.pointwise("add", x, y), w), (1,))
    weight = ir.softmax(ir.pointwise("relu", score))
    return EdgeProgram((Output("sum", ir.pointwise("mul", ir.view(weight, (2, 1)), x)), Output("edge", weight, "a")))


EXAMPLE = """\
x: src[2, 3] = input
y: dst[2, 1] = input
%2: edge[2, 3] = add(x, y)
w: param[3] = input
%4: edge[2, 3] = mul(%2, w)
%5: edge[2] = sum(%4, dims=(1,))
%6: edge[2] = relu(%5)
%7: edge[2] = softmax(%6)
%8: edge[2, 1] = view(%7)
%9: edge[2, 3] = mul(%8, x)
out = sum(%9)
a = edge(%7)"""


def test_listing():
    assert str(example()) == EXAMPLE


def test_a_pickled_program_has_no_hash_of_another_process():
    program = example()
    hash(program)
    assert "_hash" not in vars(pickle.loads(pickle.dumps(program)))
    assert hash(pickle.loads(pickle.dumps(program))) == hash(program)


def test_constants_stand_in_the_line_that_uses_them():
    x = ir.input("x", SRC, ())
    assert str(EdgeProgram((Output("max", ir.pointwise("mul", x, 0.5)),))) == (
        "x: src[] = input\n%1: src[] = mul(x, 0.5)\nout = max(%1)")


@pytest.mark.parametrize("name", CASES)
def test_every_program_has_a_listing_with_one_line_per_node(name):
    program = program_of(name)
    nodes = {n for n in ir.walk(*(o.value for o in program.outputs)) if n.op != "const"}
    lines = str(program).splitlines()
    assert len(lines) == len(nodes) + len(program.outputs)
    assert len(set(lines)) == len(lines)


# hash-consing


def test_equal_expressions_are_one_object():
    a, b = example(), example()
    assert all(p.value is q.value for p, q in zip(a.outputs, b.outputs, strict=True))
    assert a == b
    assert a.digest == b.digest


@pytest.mark.parametrize("other", [
    ir.input("x", SRC, (3,)), ir.input("y", SRC, (2,)), ir.input("x", DST, (2,)), ir.input("x", SRC, (2, 1)),
    ir.input("x", SRC, (2,), integer=True)], ids=repr)
def test_what_differs_is_another_object(other):
    x = ir.input("x", SRC, (2,))
    assert other is not x
    assert other.digest != x.digest


def test_threads_that_make_a_node_at_once_get_one_object(monkeypatch):
    is_integer, others = ir._is_integer, []

    def meanwhile(*args):
        monkeypatch.undo()
        others.append(ir.input("only here", SRC, (7,)))  # as another thread does
        return is_integer(*args)

    monkeypatch.setattr(ir, "_is_integer", meanwhile)
    assert ir.input("only here", SRC, (7,)) is others[0]


def test_one_and_true_are_not_confused():
    """Attributes are compared by their text: 1, 1.0 and True are equal in Python."""
    one, real = Node("slice", (), (1,), SRC, dim=1), Node("slice", (), (1,), SRC, dim=True)
    assert one is not real


def test_minus_zero_is_not_zero():
    assert ir.const(0.0) is not ir.const(-0.0)
    assert ir.const(float("nan")) is ir.const(float("nan"))


def test_nodes_nobody_holds_are_forgotten():
    before = len(Node._interned)
    kept = [ir.input(f"only here {k}", SRC, (2,)) for k in range(50)]
    assert len(Node._interned) == before + 50
    del kept
    gc.collect()
    assert len(Node._interned) <= before


@pytest.mark.parametrize("name", CASES)
def test_pickle_and_deepcopy_give_the_same_object(name):
    program = program_of(name)
    for other in (pickle.loads(pickle.dumps(program)), copy.deepcopy(program), copy.copy(program)):
        assert [o.value for o in other.outputs] == [o.value for o in program.outputs]
        assert all(a.value is b.value for a, b in zip(other.outputs, program.outputs, strict=True))
        assert other.digest == program.digest


def test_digests_are_the_same_in_every_process():
    code = ("from oracle import program_of; from programs import CASES; "
            "print({n: program_of(n).digest for n in CASES})")
    here = {n: program_of(n).digest for n in CASES}
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True,
                          env=environment)
    assert done.stdout.strip() == str(here)


def test_programs_that_differ_have_different_digests():
    x = ir.input("x", SRC, (2,))
    outputs = [(Output("sum", x),), (Output("mean", x),), (Output("sum", x, "b"),),
               (Output("sum", x), Output("sum", x, "b")), (Output("sum", ir.pointwise("neg", x)),)]
    assert len({EdgeProgram(o).digest for o in outputs}) == len(outputs)


def test_a_very_deep_expression():
    """Nothing walks by recursion: a loop unrolled in a user's message is a long chain."""
    x = first = ir.input("x", SRC, (2,))
    for _ in range(5000):
        x = ir.pointwise("sin", x)
    assert sum(1 for _ in ir.walk(x)) == 5001
    assert ir.inputs_of(x) == (first,)
    y = ir.input("y", DST, (2,))
    assert ir.inputs_of(ir.substitute(x, {first: y})) == (y,)
    assert len(x.digest) == 24


# domains and shapes


@pytest.mark.parametrize("domains, joined", [
    ((SRC, SRC), SRC), ((SRC, DST), EDGE), ((SRC, PARAM), SRC), ((PARAM, PARAM), PARAM), ((DST, EDGE), EDGE),
    ((DST, PARAM), DST), ((EDGE, PARAM), EDGE)])
def test_the_domain_of_an_expression_joins_its_operands(domains, joined):
    a, b = (ir.input(f"in{k}", d, (2,)) for k, d in enumerate(domains))
    for node in (ir.pointwise("add", a, b), ir.cat([a, b], 0)):
        assert node.domain == joined
        assert node.shape == ((2,) if node.op == "add" else (4,))


def test_gathers_and_softmax_choose_their_domain():
    x = ir.input("x", SRC, (2,))
    assert ir.softmax(x).domain == EDGE
    assert ir.gather("sum", DST, x).domain == DST
    assert ir.gather("argmax", DST, x).is_integer
    assert ir.lift(x).domain == EDGE
    assert ir.lift(ir.lift(x)) is ir.lift(x)
    changed = ir.substitute(ir.lift(x), {x: ir.input("w", PARAM, (2,))})
    assert changed.domain == EDGE


@pytest.mark.parametrize("a, b, shape", [
    ((2, 3), (3,), (2, 3)), ((2, 1), (1, 3), (2, 3)), ((4,), (), (4,)), ((1,), (1,), (1,))])
def test_features_broadcast(a, b, shape):
    left, right = ir.input("a", SRC, a), ir.input("b", PARAM, b)
    assert ir.pointwise("mul", left, right).shape == shape


def test_a_parameter_with_a_row_dimension_of_one_loses_it():
    """PyG writes parameters as [1, H, C] beside [E, H, C]."""
    x, p = ir.input("x", SRC, (2, 3)), ir.input("p", PARAM, (1, 2, 3))
    assert ir.pointwise("mul", x, p).shape == (2, 3)
    with pytest.raises(ValueError, match="Cannot broadcast a parameter of shape"):
        ir.pointwise("mul", x, ir.input("q", PARAM, (5, 2, 3)))


def test_shapes_that_do_not_broadcast():
    with pytest.raises(RuntimeError):
        ir.pointwise("add", ir.input("a", SRC, (2,)), ir.input("b", DST, (3,)))


def test_views():
    x = ir.input("x", SRC, (6,))
    assert ir.view(x, (6,)) is x
    assert ir.view(ir.view(x, (2, 3)), (6,)) is x
    assert ir.view(ir.const(2.0), (1, 1)) is ir.const(2.0, (1, 1))
    with pytest.raises(ValueError, match=r"Cannot view features of shape \[6\] as \[4\]"):
        ir.view(x, (4,))


def test_layout_shapes():
    x = ir.input("x", SRC, (2, 3))
    assert ir.permute(x, (1, 0)).shape == (3, 2)
    assert ir.permute(x, (0, 1)) is x
    assert ir.slice_(x, 1, 1, 3).shape == (2, 2)
    assert ir.slice_(x, 1, 0, 3) is x
    assert ir.cat([x, x], 1).shape == (2, 6)
    assert ir.reduce_features("sum", x, (0,)).shape == (3,)
    assert ir.reduce_features("amax", x, (0, 1), keepdim=True).shape == (1, 1)
    assert ir.reduce_features("sum", x, ()) is x
    assert ir.mm(ir.input("v", SRC, (3,)), ir.input("w", PARAM, (3, 4))).shape == (4,)


#: Operations that run in chunks only.
WITHOUT_KERNELS = ("tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "fmod", "remainder",
                   "floor_divide")


@pytest.mark.parametrize("op", [o for o in ir.OPS.values() if o.kind == "pointwise"], ids=lambda o: o.name)
def test_every_pointwise_operation_has_both_rules(op):
    assert op.torch is not None
    if not op.triton:
        assert op.name in WITHOUT_KERNELS
        return
    count = op.triton.count("{0}") and max(k for k in range(3) if f"{{{k}}}" in op.triton) + 1
    assert count
    args = [torch.tensor([1.0, 2.0], dtype=torch.float64)] * count
    if op.name in ("and", "or", "not", "where"):
        args[0] = args[0] > 1.5
    node = ir.pointwise(op.name, *(ir.input(f"in{k}", SRC, ()) for k in range(count)))
    assert interpret.apply(node, args, args[-1]).shape == (2,)
    # Linear operands: f(a + b) == f(a) + f(b), the others held.
    for k in op.linear_in:
        a, b = torch.randn(2, 5, dtype=torch.float64)
        rest = [torch.rand(5, dtype=torch.float64) + 1 for _ in range(count)]
        if op.name == "where":
            rest = [rest[0] > 1.5, *(torch.zeros(5, dtype=torch.float64) for _ in rest[1:])]
        if op.name in ("add", "sub"):
            rest = [torch.zeros(5, dtype=torch.float64) for _ in rest]
        parts = [op.torch(*rest[:k], v, *rest[k + 1:]) for v in (a, b, a + b)]
        assert torch.allclose(parts[0] + parts[1], parts[2])


# refusals


def test_verify_refuses_unknown_kinds():
    with pytest.raises(ValueError, match="Expected an output kind out of"):
        EdgeProgram((Output("median", ir.input("x", SRC, ())),))


@pytest.mark.parametrize("domain", [PARAM, SRC])
@pytest.mark.parametrize("cuts, is_one", [
    ([(0, 2), (2, 5), (5, 6)], True), ([(4, 6), (0, 4)], True), ([(0, 3), (3, 5)], False), ([(0, 4), (3, 6)], False),
    ([(0, 3), (0, 3)], False)])
def test_slices_that_are_all_of_a_value_are_one_split(cuts, is_one, domain):
    """So that their gradients are put together at once."""
    x = ir.input("x", domain, (2, 6))
    roots = [ir.pointwise("exp", ir.slice_(x, 1, *cut)) for cut in cuts]
    value = torch.randn(*(3,) * (domain == SRC), 2, 6, dtype=torch.float64, requires_grad=True)
    made = interpret.evaluate(roots, lambda n, args: value, value)
    wanted = [value[..., a:b].exp() for a, b in cuts]
    torch.testing.assert_close(made, wanted)
    assert {type(m.grad_fn.next_functions[0][0]).__name__ for m in made} == \
        {"SplitWithSizesBackward0" if is_one else "SliceBackward0"}
    torch.testing.assert_close(torch.autograd.grad(sum(m.sum() for m in made), value),
                               torch.autograd.grad(sum(w.sum() for w in wanted), value))


def test_verify_refuses_unknown_operations():
    with pytest.raises(ValueError, match="Unknown operation 'erfinv'"):
        EdgeProgram((Output("sum", Node("erfinv", (ir.input("x", SRC, ()),), (), SRC)),))


def test_verify_refuses_two_inputs_of_one_name():
    value = ir.pointwise("add", ir.input("x", SRC, (2,)), ir.input("x", DST, (2,)))
    with pytest.raises(ValueError, match="Two different inputs are named 'x'"):
        EdgeProgram((Output("sum", value),))


def test_verify_refuses_products_of_edge_values():
    rows = ir.input("x", SRC, (3,))
    with pytest.raises(ValueError, match="mm expects a parameter as its second operand"):
        EdgeProgram((Output("sum", Node("mm", (rows, ir.input("y", DST, (3, 4))), (4,), EDGE)),))


def test_unknown_gathers_are_refused():
    with pytest.raises(ValueError, match="Expected a reduction out of"):
        ir.gather("median", DST, ir.input("x", SRC, ()))


def test_substitute_composes_programs():
    program = example()
    x = ir.input("x", SRC, (2, 3))
    inner = ir.pointwise("sin", ir.input("z", SRC, (2, 3)))
    changed = ir.substitute(program, {x: inner})
    assert [n.name for n in changed.inputs] == ["z", "y", "w"]
    assert ir.substitute(changed, {inner: x}).digest == program.digest
