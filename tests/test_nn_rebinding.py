"""Forwards of somebody's that name PyG's preparation functions: all else that they name is what it is at the time."""

import sys
import types
from unittest import mock

import pytest
import torch
import torch_geometric.nn as pyg_nn
from torch_geometric import utils
from torch_geometric.utils import remove_self_loops

import pyg_fullgraph.nn as fused_nn
from pyg_fullgraph import convert, debug
from pyg_fullgraph.nn.rebinding import globals_of, rebind

EDGES = torch.tensor([[0, 1, 2, 2], [1, 2, 3, 2]])
X = torch.rand(4, 2, dtype=torch.float64)

SOURCE = """
import torch
from torch_geometric.utils import add_self_loops, degree, scatter

SCALE = 1.0
SEEN = []
NUM_CALLS = 0


class Layer(base):
    def forward(self, x, edge_index):
        SEEN.append(len(x))
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        return shift(self.scaled(self.propagate(edge_index, x=x * SCALE)))

    def scaled(self, x):
        return scatter(x, torch.arange(4) // 2, 0) * SCALE

    def message(self, x_j):
        return self.bounded(x_j)

    def bounded(self, x):
        degree  # a name that we have another function for
        return x.clamp(max=SCALE / 2)


class Asking(base):
    def forward(self, x, edge_index):
        class Local:
            factor = SCALE

        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        factor = Local.factor * eval("SCALE") * globals().get("SCALE", 0) * ("SCALE" in globals().keys())
        globals()["NUM_CALLS"] = NUM_CALLS + 1
        return self.propagate(edge_index, x=x * factor)


class Counting(base):
    def forward(self, x, edge_index):
        global NUM_CALLS
        NUM_CALLS += 1
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        return self.propagate(edge_index, x=x)


def shift(x):
    return x + 1
"""


@pytest.fixture
def written(monkeypatch):
    """The same source in a module of its own over our base class and over PyG's."""
    made = []
    for name, base in (("of_ours", fused_nn.MessagePassing), ("of_pygs", pyg_nn.MessagePassing)):
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        module.base = base
        exec(SOURCE, vars(module))
        made.append(module)
    return made


def both(written, layers):
    debug.reset()
    ours, theirs = (layer(X, EDGES) for layer in layers)
    torch.testing.assert_close(ours, theirs)
    assert debug.counters()["plain"] == 0
    return ours


def change(written, **values):
    for module in written:
        vars(module).update(values)


def test_numbers_and_functions_may_be_replaced_between_calls(written):
    layers = [module.Layer() for module in written]
    first = both(written, layers)
    change(written, SCALE=0.5)
    second = both(written, layers)
    assert not torch.equal(first, second)
    change(written, shift=lambda x: x - 1)
    torch.testing.assert_close(both(written, layers), second - 2)
    change(written, SCALE=1.0, shift=lambda x: x + 1)
    assert torch.equal(both(written, layers), first)


def test_a_function_of_pygs_may_be_replaced_by_ones_own(written):
    layers = [module.Layer() for module in written]
    before = both(written, layers)
    change(written, add_self_loops=lambda edge_index, num_nodes: (edge_index.flip(0), None))
    after = both(written, layers)
    assert not torch.equal(before, after)
    change(written, add_self_loops=utils.add_self_loops)
    assert torch.equal(both(written, layers), before)


def test_what_is_defined_after_the_first_layer_is_found(written):
    for module in written:
        del module.shift
    layers = [module.Layer() for module in written]
    with pytest.raises(NameError, match="shift"):
        layers[0](X, EDGES)
    change(written, shift=torch.neg)
    both(written, layers)


def test_writes_reach_the_module(written):
    for kind in ("Counting", "Asking"):
        layers = [getattr(module, kind)() for module in written]
        change(written, NUM_CALLS=0)
        for count in (1, 2):
            both(written, layers)
            assert [module.NUM_CALLS for module in written] == [count, count]
    layers = [module.Layer() for module in written]
    both(written, layers)
    assert [module.SEEN for module in written] == [[4], [4]]


def test_copies_of_copies():
    def function():
        return first(), second(), third, len  # noqa: F821

    module = {"__builtins__": __builtins__, "first": abs, "second": max, "third": []}
    function = types.FunctionType(function.__code__, module)
    once = rebind(function, {abs: lambda: 1}, own={"third": 3})
    twice = rebind(once, {max: lambda: 2})
    assert twice() == (1, 2, 3, len)
    assert globals_of(twice) is globals_of(once) is module
    module["second"] = lambda: 5
    assert twice() == (1, 5, 3, len)
    module["len"] = 7
    assert twice() == (1, 5, 3, 7)
    assert set(module) == {"__builtins__", "first", "second", "third", "len"}


# --- methods that change after a layer was fused ----------------------------------------------------------------


def _layer_class():
    class Layer(pyg_nn.MessagePassing):
        def forward(self, x, edge_index):
            edge_index, _ = remove_self_loops(edge_index)
            return self.around(x, edge_index)

        def around(self, x, edge_index):
            edge_index, _ = remove_self_loops(edge_index)
            return self.propagate(edge_index, x=x)

        def message(self, x_j):
            return x_j

    return Layer


def twice(self, x, edge_index):
    edge_index, _ = remove_self_loops(edge_index)
    return 2 * self.propagate(edge_index, x=x)


@pytest.mark.parametrize("num_calls", [0, 1, 6])
@pytest.mark.parametrize("method", ["forward", "around"])
@pytest.mark.parametrize("is_in_place", [False, True])
def test_a_method_changes_on_the_class(is_in_place, method, num_calls):
    kind = _layer_class()
    layer, plain = convert(kind()), kind()
    for _ in range(num_calls):
        layer(X, EDGES)
    for new in (twice, _layer_class().forward) if method == "forward" else (twice,):
        if is_in_place:
            getattr(kind, method).__code__ = new.__code__
        else:
            setattr(kind, method, new)
        for _ in range(3):
            torch.testing.assert_close(layer(X, EDGES), plain(X, EDGES))
        torch.testing.assert_close(convert(kind())(X, EDGES), plain(X, EDGES))


@pytest.mark.parametrize("num_calls", [0, 6])
@pytest.mark.parametrize("is_subclass", [False, True])
def test_a_test_puts_something_in_the_place_of_a_forward_for_a_while(is_subclass, num_calls):
    class Used(fused_nn.SAGEConv):
        def forward(self, x, edge_index):
            return super().forward(x, edge_index)

    layer = (Used if is_subclass else fused_nn.SAGEConv)(2, 2).double()
    before = [layer(X, EDGES) for _ in range(num_calls + 1)][-1]
    with mock.patch.object(pyg_nn.SAGEConv, "forward", return_value=3) as called:
        assert layer(X, EDGES) == 3
    called.assert_called_once()
    torch.testing.assert_close(layer(X, EDGES), before)
    with mock.patch.object(pyg_nn.SAGEConv, "forward", lambda self, x, edge_index: x + 1):
        torch.testing.assert_close(layer(X, EDGES), X + 1)
    torch.testing.assert_close(layer(X, EDGES), before)


def test_a_class_of_no_module():
    space = {"MessagePassing": pyg_nn.MessagePassing}
    exec("class Layer(MessagePassing):\n"
         "    def forward(self, x, edge_index):\n        return self.propagate(edge_index, x=x)\n"
         "    def message(self, x_j):\n        return x_j.relu()\n", space)
    assert space["Layer"].forward.__module__ is None
    layer = convert(space["Layer"]())
    for _ in range(4):
        torch.testing.assert_close(layer(X, EDGES), space["Layer"]()(X, EDGES))
