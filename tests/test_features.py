"""Slices and concatenations of features: the same values, and nothing left inside that a kernel could not hold."""

import math
import random

import pytest
import torch

from oracle import check, random_case
from pyg_fullgraph.saga import features, interpret, ir
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Node, Output

SRC, DST, EDGE, PARAM = Domain.SRC, Domain.DST, Domain.EDGE, Domain.PARAM
NUM_EDGES = 5


class Expressions:
    """Draws expressions full of slices, concatenations and reshapes."""

    def __init__(self, seed: int) -> None:
        self.random, self.count = random.Random(seed), 0

    def leaf(self, shape: ir.Shape, *domains: Domain, integer: bool = False) -> Node:
        self.count += 1
        return ir.input(f"t{self.count}", self.random.choice(domains or (SRC, DST, EDGE, EDGE, PARAM)), shape, integer)

    def parts_of(self, size: int) -> list[int]:
        cuts = sorted(self.random.sample(range(1, size), min(self.random.choice([1, 2]), size - 1)))
        return [b - a for a, b in zip([0, *cuts], [*cuts, size], strict=True)]

    def node(self, depth: int, shape: ir.Shape) -> Node:
        choice = self.random.choice
        forms = [self.unary, self.binary, self.binary, self.where, self.cut, self.moved, self.spread, self.viewed,
                 self.viewed, self.looked_up]
        forms += [self.joined] * 4 if max(shape) > 1 else []
        forms += [self.reduced] if len(shape) < 3 else [self.product] if len(shape) == 1 else []
        if depth == 0:
            return ir.const(choice([0.0, 2.0]), shape) if choice(range(10)) == 0 else self.leaf(shape)
        return choice(forms)(depth - 1, shape)

    def unary(self, depth: int, shape: ir.Shape) -> Node:
        return ir.pointwise(self.random.choice(["tanh", "neg", "relu"]), self.node(depth, shape))

    def binary(self, depth: int, shape: ir.Shape) -> Node:
        other = tuple(s if self.random.random() < 0.8 else 1 for s in shape)
        pair = [self.node(depth, shape), self.node(depth, other)]
        self.random.shuffle(pair)
        return ir.pointwise(self.random.choice(["add", "sub", "mul", "maximum"]), *pair)

    def where(self, depth: int, shape: ir.Shape) -> Node:
        mask = ir.pointwise("gt", self.node(depth, shape), 0.0)
        return ir.pointwise("where", mask, self.node(depth, shape), self.node(depth, shape))

    def joined(self, depth: int, shape: ir.Shape) -> Node:
        dim = self.random.choice([k for k, s in enumerate(shape) if s > 1])
        sizes = self.parts_of(shape[dim])
        return ir.cat([self.node(depth, (*shape[:dim], s, *shape[dim + 1:])) for s in sizes], dim)

    def cut(self, depth: int, shape: ir.Shape) -> Node:
        dim, low, more = self.random.randrange(len(shape)), self.random.randint(0, 3), self.random.randint(0, 3)
        whole = self.node(depth, (*shape[:dim], shape[dim] + low + more, *shape[dim + 1:]))
        return ir.slice_(whole, dim, low, low + shape[dim])

    def moved(self, depth: int, shape: ir.Shape) -> Node:
        dims = self.random.sample(range(len(shape)), len(shape))
        before = [shape[dims.index(k)] for k in range(len(shape))]
        return ir.permute(self.node(depth, tuple(before)), dims)

    def spread(self, depth: int, shape: ir.Shape) -> Node:
        return ir.expand(self.node(depth, tuple(s if self.random.random() < 0.7 else 1 for s in shape)), shape)

    def reduced(self, depth: int, shape: ir.Shape) -> Node:
        dim = self.random.randint(0, len(shape))
        whole = self.node(depth, (*shape[:dim], self.random.choice([2, 3, 4]), *shape[dim:]))
        return ir.reduce_features(self.random.choice(["sum", "amax"]), whole, (dim,))

    def viewed(self, depth: int, shape: ir.Shape) -> Node:
        numel = math.prod(shape)
        outer = self.random.choice([d for d in range(1, numel + 1) if numel % d == 0])
        return ir.view(self.node(depth, self.random.choice([(numel,), (outer, numel // outer)])), shape)

    def product(self, depth: int, shape: ir.Shape) -> Node:
        rows = self.random.choice([2, 3, 4])
        return ir.mm(self.node(depth, (rows,)), self.leaf((rows, shape[0]), PARAM))

    def looked_up(self, depth: int, shape: ir.Shape) -> Node:
        return ir.lookup(self.leaf((3, *shape), PARAM), self.leaf((), SRC, DST, EDGE, integer=True))


def evaluate(root: Node) -> torch.Tensor:
    """``root`` on random inputs, the same for the same names."""
    values = {}
    for node in ir.inputs_of(root):
        generator = torch.Generator().manual_seed(int(node.name[1:]))
        shape = (*((NUM_EDGES,) if node.is_row else ()), *node.shape)
        values[node] = (torch.randint(3, shape, generator=generator) if node.is_integer else
                        torch.randn(shape, generator=generator, dtype=torch.float64))
    (value,) = interpret.evaluate([root], lambda n, a: values[n], torch.zeros((), dtype=torch.float64))
    return value.expand(NUM_EDGES, *root.shape)


def is_split(root: Node) -> bool:
    """Whether nothing in it is cut or joined per edge, but for slices of inputs."""
    placed, _ = features.place_slices(features.parts(root))
    return all(n.domain != EDGE or n.op not in ("slice", "cat") for n in ir.walk(*placed))


def test_random_expressions_keep_their_values():
    num_whole = 0
    for seed in range(300):
        draw = Expressions(seed)
        shape = draw.random.choice([(4,), (6,), (2, 6), (3, 4), (1, 6), (2, 2, 3)])
        root = ir.lift(draw.node(draw.random.randint(2, 5), shape))
        (split,) = features.split_features([root])
        assert split.shape == root.shape
        torch.testing.assert_close(evaluate(split), evaluate(root), rtol=0, atol=1e-12, msg=f"seed {seed}")
        num_whole += is_split(split)
    assert num_whole > 285


@pytest.mark.parametrize("kind", ["sum", "mean", "max", "mul"])
def test_reductions_of_what_is_joined_are_taken_apart(kind):
    x, y = ir.input("x", SRC, (6,)), ir.input("y", DST, (4,))
    value = ir.pointwise("tanh", ir.cat([x, y], 0))
    (split,) = features.split_features([ir.gather(kind, DST, value)])
    assert split.op == "cat"
    assert [(a.op, a.shape) for a in split.args] == [("gather", (6,)), ("gather", (4,))]


def test_outer_products_of_what_is_joined():
    x, y, z = ir.input("x", SRC, (6,)), ir.input("y", DST, (4,)), ir.input("z", EDGE, (3,))
    (split,) = features.split_features([ir.gather("outer", PARAM, ir.cat([x, y], 0), z, shape=(10, 3))])
    assert split.op == "cat"
    assert split.attr("dim") == 0
    assert [a.shape for a in split.args] == [(6, 3), (4, 3)]


def test_padded_gradients_are_joined_without_zeros():
    """What two slices of one input send back: no sums with zeros, and nothing summed for what nobody read."""
    a, b = ir.input("a", EDGE, (2,)), ir.input("b", EDGE, (2,))
    total = ir.pointwise("add", ir.cat([ir.const(0.0, (2,)), a, ir.const(0.0, (2,))], 0),
                         ir.cat([b, ir.const(0.0, (4,))], 0))
    (split,) = features.split_features([ir.gather("sum", SRC, total)])
    assert [p.op for p in split.args] == ["gather", "gather", "const"]
    assert [p.args[0] for p in split.args[:2]] == [b, a]


def test_vertex_values_are_left_to_torch():
    x = ir.cat([ir.input("x", SRC, (2,)), ir.input("y", SRC, (3,))], 0)
    value = ir.pointwise("mul", x, ir.input("w", EDGE, (1,)))
    assert features.split_features([value]) == (value,)


def test_slices_of_edge_data_are_places():
    w = ir.input("w", EDGE, (12,))
    (root,) = features.split_features([ir.slice_(ir.view(w, (3, 4)), 1, 1, 3)])
    (leaf,), places = features.place_slices([root])
    assert leaf.op == "input"
    assert places[leaf] == features.Place(w, 1, (4, 1))


def test_a_program_of_cut_and_joined_features():
    """End to end, gradients too: of sliced edge data, of joined messages."""
    w, x, y = ir.input("w", EDGE, (6,)), ir.input("x", SRC, (4,)), ir.input("y", DST, (4,))
    joined = ir.cat([ir.pointwise("mul", ir.slice_(w, 0, 0, 4), x), ir.pointwise("add", y, ir.slice_(w, 0, 2, 6))], 0)
    outputs = Output("sum", ir.pointwise("tanh", joined)), Output("max", ir.slice_(joined, 0, 3, 7), "top")
    check(EdgeProgram(outputs), random_case(11, 9, 60))
