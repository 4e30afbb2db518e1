"""Messages that count, keep or draw outside of their layer: fused layers find and leave there what PyG's do."""

import copy
import functools
import random
import sys
import types

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg_nn
from layers import reasons

import pyg_fullgraph as pfg
from pyg_fullgraph import debug
from pyg_fullgraph.nn import tracing

EDGES = torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]])
X = torch.arange(12.0, dtype=torch.float64).view(3, 4) - 2
MODULE = types.ModuleType("module_of_mine")
COUNT, TABLE, ROWS, MEMO, SYSTEM = 0, {}, [], {}, random.SystemRandom()


class Config:
    calls = 0

    def __init__(self):
        self.calls, self.table = 0, {"a": []}


class Helper:
    calls = 0


class Stored:
    """A number behind a property, in a table of its class."""

    store = {}

    @property
    def p(self):
        return self.store.get("p", 1.0)

    @p.setter
    def p(self, value):
        self.store["p"] = value


def helper():
    global COUNT
    COUNT += 1
    return COUNT


@functools.lru_cache(None)
def identity(n):
    return torch.eye(n, dtype=torch.float64)


def through_a_view(y):
    """What the quick recorder does not see to its end, so that the message is traced twice."""
    y[:, :2].mul_(2)
    return y


class Base(Stored, pyg_nn.MessagePassing):
    body = None

    def __init__(self):
        super().__init__(aggr="sum")
        self.config, self.generator, self.draws = Config(), np.random.default_rng(0), random.Random(0)
        self.legacy = np.random.RandomState(0)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)


def of_table(self, x_j):
    TABLE["n"] = TABLE.get("n", 0) + 1
    return x_j * TABLE["n"]


def of_list(self, x_j):
    ROWS.append(1)
    return x_j * len(ROWS)


def of_config(self, x_j):
    self.config.calls += 1
    return x_j * self.config.calls


def of_nested_list(self, x_j):
    self.config.table["a"].append(1)
    return x_j * len(self.config.table["a"])


def of_another_class(self, x_j):
    Helper.calls += 1
    return x_j * Helper.calls


def of_a_module(self, x_j):
    MODULE.calls = getattr(MODULE, "calls", 0) + 1
    return x_j * MODULE.calls


def of_a_property(self, x_j):
    self.p = self.p + 1
    return x_j * self.p


def of_a_function(self, x_j):
    helper.calls = getattr(helper, "calls", 0) + 1
    return x_j * helper.calls


def memoized(self, x_j):
    if "eye" not in MEMO:
        MEMO["eye"] = torch.eye(4, dtype=torch.float64)
    return x_j @ MEMO["eye"]


CHANGES = {
    "table": of_table, "list": of_list, "config": of_config, "nested list": of_nested_list,
    "another class": of_another_class, "module": of_a_module, "property": of_a_property, "function": of_a_function,
    "helper": lambda self, x_j: x_j * helper(), "memo": memoized,
    "generator of NumPy": lambda self, x_j: x_j * float(self.generator.random()),
    "legacy generator": lambda self, x_j: x_j * float(self.legacy.rand()),
    "generator of Python": lambda self, x_j: x_j * self.draws.random(),
}


def layer_of(body):
    class Layer(Base):
        def message(self, x_j):
            return body(self, through_a_view(x_j * 1))

    return Layer()


@pytest.fixture(autouse=True)
def reset():
    def clear():
        globals()["COUNT"], Helper.calls = 0, 0
        for container in (TABLE, ROWS, MEMO, Stored.store):
            container.clear()
        for owner in (MODULE, helper):
            vars(owner).pop("calls", None)
        identity.cache_clear()

    clear()
    yield clear
    clear()


@pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning")
@pytest.mark.parametrize("what", CHANGES)
def test_what_a_message_changes_outside_of_its_layer(what, reset):
    plain = layer_of(CHANGES[what])
    fused = pfg.convert(copy.deepcopy(plain))
    found = []
    for layer in (plain, fused):
        reset()
        found.append([layer(X, EDGES) for _ in range(4)])
    for ours, pygs in zip(*reversed(found), strict=True):
        torch.testing.assert_close(ours, pygs)
    assert all("outside of the layer" in reason or "reads a tensor" in reason or "neither an argument" in reason
               for reason in reasons())


def test_values_of_a_trace_stay_in_no_cache():
    layer = pfg.convert(layer_of(lambda self, x_j: x_j @ identity(4)))
    plain = layer_of(lambda self, x_j: x_j @ identity(4))
    for _ in range(3):
        torch.testing.assert_close(layer(X, EDGES), plain(X, EDGES))
    assert identity(4).sum() == 4
    identity.cache_clear()
    layer(X, EDGES)
    assert identity(4).sum() == 4


def test_a_variable_that_was_not_there_before():
    def make():
        class Layer(Base):
            def message(self, x_j):
                nonlocal seen
                seen = 1
                return x_j

        if False:
            seen = None
        return Layer(), lambda: seen

    layer, read = make()
    with pytest.warns(debug.PlainPathWarning, match="changes seen"):
        pfg.convert(layer)(X, EDGES)
    assert read() == 1


def test_a_generator_without_a_state_is_no_error():
    plain = layer_of(lambda self, x_j: x_j * (2.0 if SYSTEM is not None else 1.0))
    fused = pfg.convert(copy.deepcopy(plain))
    debug.reset()
    torch.testing.assert_close(fused(X, EDGES), plain(X, EDGES))
    assert debug.counters()["fused"] == 1


@pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning")
def test_iterators_go_on_as_in_pyg():
    steps, others = iter(range(9)), iter(range(9))
    plain, fused = layer_of(lambda self, x_j: x_j * next(steps)), layer_of(lambda self, x_j: x_j * next(others))
    pfg.convert(fused)
    for _ in range(4):
        torch.testing.assert_close(fused(X, EDGES), plain(X, EDGES))


def test_what_another_thread_sets_meanwhile_stays(monkeypatch):
    monkeypatch.setitem(globals(), "FACTOR", 1.0)
    trace = tracing._TRACERS["propagate"]
    monkeypatch.setitem(tracing._TRACERS, "propagate", lambda *args: globals().update(FACTOR=5.0) or trace(*args))
    pfg.convert(layer_of(lambda self, x_j: x_j * FACTOR))(X, EDGES)  # noqa: F821
    assert globals()["FACTOR"] == 5.0


def test_what_is_found_by_its_name(monkeypatch):
    """An attribute of a module by ``getattr``, what ``sys.modules`` has, a global that comes to lie over Python's."""
    monkeypatch.setitem(sys.modules, "module_of_mine", MODULE)
    messages = [lambda self, x_j: x_j * getattr(MODULE, "factor", None),
                lambda self, x_j: x_j * sys.modules["module_of_mine"].factor, lambda self, x_j: x_j * abs(-2.0)]
    layers = [(layer_of(m), pfg.convert(layer_of(m))) for m in messages]
    for factor in (1.0, 3.0, 4.0):
        monkeypatch.setattr(MODULE, "factor", factor, raising=False)
        if factor == 4.0:
            monkeypatch.setitem(globals(), "abs", lambda x: 7.0)
        for plain, fused in layers:
            for _ in range(3):
                torch.testing.assert_close(fused(X, EDGES), plain(X, EDGES))
