"""What a message reads besides its arguments: a trace is kept as long as all of that is the same, and no longer."""

import array
import collections
import functools
import importlib
import math
import random
import sys
import types

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg_nn
from layers import reasons
from torch_geometric.data import Data

import pyg_fullgraph.nn as fused_nn
from pyg_fullgraph import debug
from pyg_fullgraph.nn import tracing

EDGES, X = torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]]), torch.arange(6.0, dtype=torch.float64).view(3, 2) - 2
FACTOR = 1.0
TABLE = {"slope": 1.0, "more": [1.0]}


class Config:
    """What users hang on a layer or keep in a module."""

    def __init__(self):
        self.slope, self.inner, self.table = 1.0, types.SimpleNamespace(slope=1.0), {"slope": 1.0}

    def times(self, x):
        return x * self.slope


class Slots:
    __slots__ = ("slope",)

    def __init__(self):
        self.slope = 1.0


class Scale:
    def __init__(self):
        self.slope = 1.0

    def __call__(self, x):
        return x * self.slope


class Settings:
    slope = 1.0


class Factor(torch.nn.Module):
    def forward(self, x):
        return x * FACTOR


class Reader:
    """Reads a global by a method of its own."""

    def times(self, x):
        return x * FACTOR


CONFIG = Config()
HELPERS = types.ModuleType("helpers_of_mine")
HELPERS.slope = 1.0
sys.modules[HELPERS.__name__] = HELPERS
exec("def scaled(layer, x):\n    return layer.act(x) * layer.slope", vars(HELPERS))


def helper(layer, x):
    return layer.act(x) * layer.slope


def deeper(layer, x):
    return helper(layer, x)


def logged(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def message_of(kind):
    """`message` by what it reads; each of them is scaled by one number that starts as 1."""
    def from_base(self, x_j):
        return super(type(self), self).message(x_j) * FACTOR

    return {
        "helper": lambda self, x_j: helper(self, x_j),
        "helper-of-helper": lambda self, x_j: deeper(self, x_j),
        "decorated": logged(lambda self, x_j: self.act(x_j) * self.slope),
        "no-grad": torch.no_grad()(lambda self, x_j: self.act(x_j) * self.slope),
        "comprehension": lambda self, x_j: x_j * sum([self.slope for _ in range(1)]),
        "global": lambda self, x_j: x_j * FACTOR,
        "global-in-a-generator": lambda self, x_j: sum(x_j * FACTOR for _ in range(1)),
        "global-and-super": from_base,
        "global-object": lambda self, x_j: x_j * CONFIG.slope,
        "global-dict": lambda self, x_j: x_j * TABLE["slope"],
        "global-list": lambda self, x_j: x_j * TABLE["more"][0],
        "other-module": lambda self, x_j: x_j * HELPERS.slope,
        "function-of-other-module": lambda self, x_j: HELPERS.scaled(self, x_j),
        "other-class": lambda self, x_j: x_j * Settings.slope,
        "object": lambda self, x_j: x_j * self.config.slope,
        "object-in-object": lambda self, x_j: x_j * self.config.inner.slope,
        "dict-in-object": lambda self, x_j: x_j * self.config.table["slope"],
        "method-of-object": lambda self, x_j: self.config.times(x_j),
        "global-in-a-module": lambda self, x_j: self.factor(x_j),
        "global-in-an-object": lambda self, x_j: self.reader.times(x_j),
        "slots": lambda self, x_j: x_j * self.slots.slope,
        "callable": lambda self, x_j: self.scale(x_j),
        "function": lambda self, x_j: self.function(self, x_j),
        "partial": lambda self, x_j: self.partial(x_j),
        "array": lambda self, x_j: x_j * float(self.array[0]),
        "set": lambda self, x_j: x_j * max(self.set),
        "class-attribute": lambda self, x_j: x_j * self.power,
    }[kind]


def replaced(layer, monkeypatch, value):
    """Set the number that every message reads."""
    space = globals()
    monkeypatch.setitem(space, "FACTOR", value)
    for holder in (CONFIG, HELPERS, Settings, layer.config, layer.config.inner, layer.slots, layer.scale):
        monkeypatch.setattr(holder, "slope", value)
    for table in (TABLE, layer.config.table):
        monkeypatch.setitem(table, "slope", value)
    monkeypatch.setitem(TABLE, "more", [value])
    layer.slope = value
    layer.partial = functools.partial(torch.mul, other=value)
    layer.array[0] = value
    layer.set.clear()
    layer.set.add(value)
    type(layer).power = value


def make(base, kind):
    class Layer(base):
        power = 1.0

        def __init__(self):
            super().__init__(aggr="sum")
            self.slope, self.act = 1.0, torch.nn.ReLU()
            self.config, self.slots, self.scale = Config(), Slots(), Scale()
            self.function, self.partial = helper, functools.partial(torch.mul, other=1.0)
            self.array, self.set, self.factor, self.reader = np.ones(1), {1.0}, Factor(), Reader()

        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

    Layer.message = named(message_of(kind))
    return Layer


def named(function):
    """PyG finds the arguments of a message by its name."""
    function.__name__ = "message"
    return function


KINDS = ["helper", "helper-of-helper", "decorated", "no-grad", "comprehension", "global", "global-in-a-generator",
         "global-and-super", "global-object", "global-dict", "global-list", "other-class", "object", "object-in-object",
         "dict-in-object", "method-of-object", "slots", "callable", "global-in-a-module",
         "global-in-an-object", "function", "partial", "array", "set",
         "class-attribute", "other-module", "function-of-other-module"]


@pytest.fixture
def traces(monkeypatch):
    """The traces that are made."""
    made, trace = [], tracing._TRACERS["propagate"]
    monkeypatch.setitem(tracing._TRACERS, "propagate", lambda *args: made.append(args) or trace(*args))
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_that_changes(kind, monkeypatch, traces):
    ours, pygs = make(fused_nn.MessagePassing, kind)(), make(pyg_nn.MessagePassing, kind)()
    for value in (1.0, 3.0, 1.0):
        for layer in (ours, pygs):
            replaced(layer, monkeypatch, value)
        for _ in range(2):
            torch.testing.assert_close(ours(X, EDGES), pygs(X, EDGES), rtol=0, atol=1e-12)
    assert debug.counters() == {"fused": 6, "plain": 0}
    assert 1 <= len(traces) <= 3  # kept while nothing changes


@pytest.mark.parametrize("kind", ["helper", "decorated", "no-grad", "comprehension", "callable"])
def test_instances_have_numbers_of_their_own(kind):
    layer = make(fused_nn.MessagePassing, kind)
    one, other = layer(), layer()
    other.slope = other.scale.slope = 10.0
    torch.testing.assert_close(other(X, EDGES), 10 * one(X, EDGES))


@pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning")
@pytest.mark.parametrize("kind", ["helper", "decorated"])
def test_modules_and_hooks_behind_a_helper(kind):
    ours, pygs = make(fused_nn.MessagePassing, kind)(), make(pyg_nn.MessagePassing, kind)()
    for change in (lambda m: None, lambda m: setattr(m, "act", torch.nn.Tanh()),
                   lambda m: setattr(m, "act", torch.nn.Dropout(0.5).eval()),
                   lambda m: m.act.register_forward_hook(lambda module, args, out: 3 * out)):
        for layer in (ours, pygs):
            change(layer)
        torch.testing.assert_close(ours(X, EDGES), pygs(X, EDGES))


def test_a_helper_that_is_replaced(monkeypatch):
    layer = make(fused_nn.MessagePassing, "helper")()
    first = layer(X, EDGES)
    monkeypatch.setitem(globals(), "helper", lambda layer, x: 2 * layer.act(x))
    torch.testing.assert_close(layer(X, EDGES), 2 * first)
    layer.slope = 5.0
    torch.testing.assert_close(layer(X, EDGES), 2 * first)


def test_an_object_that_contains_itself():
    layer = make(fused_nn.MessagePassing, "object")()
    layer.config.table["self"] = layer.config
    first = layer(X, EDGES)
    layer.config.slope = 2.0
    torch.testing.assert_close(layer(X, EDGES), 2 * first)


REFUSED = {
    "python": (lambda self, x_j: x_j * random.random(), "draws random numbers other than dropout"),
    "numpy": (lambda self, x_j: x_j * float(np.random.rand()), "draws random numbers"),  # noqa: NPY002
    "requires-grad": (lambda self, x_j: x_j * (2.0 if x_j.requires_grad else 1.0), "asks whether a tensor has a grad"),
    "grad-mode": (lambda self, x_j: x_j * (2.0 if torch.is_grad_enabled() else 1.0), "calls is_grad_enabled"),
    "autocast": (lambda self, x_j: x_j * (2.0 if torch.is_autocast_enabled("cpu") else 1.0), "is_autocast_enabled"),
    "deterministic": (lambda self, x_j: x_j * (2.0 if torch.are_deterministic_algorithms_enabled() else 1.0),
                      "calls are_deterministic_algorithms_enabled"),
    "threads": (lambda self, x_j: x_j * torch.get_num_threads(), "calls get_num_threads"),
    "backends": (lambda self, x_j: x_j * (2.0 if torch.backends.cudnn.benchmark else 1.0), "calls backends"),
    "seed": (lambda self, x_j: x_j * (torch.initial_seed() % 7), "calls initial_seed"),
}


@pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning")
@pytest.mark.parametrize("what", REFUSED)
def test_what_no_trace_can_answer_runs_plain(what):
    layers = [make(base, "global") for base in (fused_nn.MessagePassing, pyg_nn.MessagePassing)]
    for layer in layers:
        layer.message = named(REFUSED[what][0])
    ours, pygs = (layer() for layer in layers)
    for x in (X, X.clone().requires_grad_()):
        for mode in (torch.enable_grad(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16)):
            answers = []
            for layer in (ours, pygs):
                random.seed(0)
                np.random.seed(0)  # noqa: NPY002
                with mode:
                    answers.append(layer(x, EDGES).detach())
            torch.testing.assert_close(*answers)
    (reason,) = reasons()
    assert REFUSED[what][1] in reason


def test_classes_are_not_kept_alive():
    import gc
    import weakref

    def use():
        layer = make(fused_nn.MessagePassing, "global-and-super")
        layer()(X, EDGES)
        return weakref.ref(layer)

    found = use()
    gc.collect()
    assert found() is None




class Tempered:
    """A descriptor of a user's, which finds its value anywhere on the layer, and may not be asked by the class."""

    def __get__(self, layer, owner):
        if layer is None:
            raise TypeError("of instances only")
        return vars(layer)["hidden"]["tau"]

    def __set__(self, layer, value):
        vars(layer)["hidden"]["tau"] = value


class Above:
    rate = 1.0


class Below(Above):
    @property
    def from_global(self):
        return TABLE["slope"]

    @classmethod
    def of_class(cls):
        return TABLE["slope"]

    @staticmethod
    def static():
        return TABLE["slope"]


class Part(torch.nn.Module):
    rate = 1.0

    @property
    def from_global(self):
        return TABLE["slope"]


def scaled(value):
    return value * scaled.factor


@functools.lru_cache
def remembered():
    return TABLE["slope"]


class Odd:
    """What layers may be that read themselves in ways of their own."""

    tau = Tempered()
    shared = 1.0

    def __init__(self):
        vars(self)["hidden"] = {"tau": 1.0, "magic": 1.0, "zero": -0.0}
        super().__init__(aggr="sum")
        self.size, self.items, self.is_set, self.number = 1, [1.0], True, 1.0
        self.below, self.part, self.user_dict, self.chain = Below(), Part(), collections.UserDict(a=1.0), \
            collections.ChainMap({"a": 1.0})
        self.data = Data(scale=1.0)
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        self.get = self.hidden.get

    def __len__(self):
        return self.size

    def __getitem__(self, place):
        return self.items[place]

    def __bool__(self):
        return self.is_set

    def __contains__(self, name):
        return name in self.hidden

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)


class Magic(Odd):
    def __getattr__(self, name):
        return self.hidden["magic"] if name == "magic" else super().__getattr__(name)


ARRAY = array.array("d", [1.0])


def set_table(layer):
    TABLE["slope"] = 3.0


def imports_a_name(layer):
    from helpers_of_mine import slope
    return slope


def imports_a_module(layer):
    import helpers_of_mine as mine
    return mine.slope


def set_helpers(layer):
    HELPERS.slope = 3.0


ODD = {
    "hasattr": (lambda self: 3.0 if hasattr(self, "more") else 1.0, lambda layer: setattr(layer, "more", 1)),
    "dir": (lambda self: 3.0 if "more" in dir(self) else 1.0, lambda layer: setattr(layer, "more", 1)),
    "getattr-of-class": (lambda self: getattr(self, "sha" + "red"), lambda layer: setattr(type(layer), "shared", 3.0)),
    "hasattr-of-class": (lambda self: 3.0 if hasattr(self, "mo" + "re") else 1.0,
                         lambda layer: setattr(type(layer), "more", 3.0)),
    "globals": (lambda self: globals()["TABLE"]["slope"], set_table),
    "function-attribute": (lambda self: scaled.factor, lambda layer: setattr(scaled, "factor", 3.0)),
    "function-attribute-inside": (lambda self: scaled(1.0), lambda layer: setattr(scaled, "factor", 3.0)),
    "inherited-by-class": (lambda self: Below.rate, lambda layer: setattr(Above, "rate", 3.0)),
    "class-of-object": (lambda self: self.below.rate, lambda layer: setattr(Above, "rate", 3.0)),
    "class-of-module": (lambda self: self.part.rate, lambda layer: setattr(Part, "rate", 3.0)),
    "property-of-object": (lambda self: self.below.from_global, set_table),
    "property-of-module": (lambda self: self.part.from_global, set_table),
    "classmethod": (lambda self: Below.of_class(), set_table),
    "staticmethod": (lambda self: Below.static(), set_table),
    "classmethod-of-object": (lambda self: self.below.of_class(), set_table),
    "descriptor": (lambda self: self.tau, lambda layer: setattr(layer, "tau", 3.0)),
    "len": (lambda self: len(self), lambda layer: setattr(layer, "size", 3)),
    "item": (lambda self: self[0], lambda layer: layer.items.__setitem__(0, 3.0)),
    "bool": (lambda self: 1.0 if self else 3.0, lambda layer: setattr(layer, "is_set", False)),
    "contains": (lambda self: 3.0 if "more" in self else 1.0, lambda layer: layer.hidden.update(more=1)),
    "getattr-of-user": (lambda self: self.magic, lambda layer: layer.hidden.update(magic=3.0)),
    "method-of-dict": (lambda self: self.get("magic"), lambda layer: layer.hidden.update(magic=3.0)),
    "user-dict": (lambda self: self.user_dict["a"], lambda layer: layer.user_dict.update(a=3.0)),
    "chain-map": (lambda self: self.chain["a"], lambda layer: layer.chain.update(a=3.0)),
    "data": (lambda self: self.data.scale, lambda layer: setattr(layer.data, "scale", 3.0)),
    "typed-array": (lambda self: ARRAY[0], lambda layer: ARRAY.__setitem__(0, 3.0)),
    "optimizer": (lambda self: self.optimizer.param_groups[0]["lr"],
                  lambda layer: layer.optimizer.param_groups[0].update(lr=3.0)),
    "lru-cache": (lambda self: remembered(), lambda layer: (set_table(layer), remembered.cache_clear())),
    "import-of-a-name": (imports_a_name, set_helpers),
    "import-of-a-module": (imports_a_module, set_helpers),
    "import-by-a-function": (lambda self: [imports_a_module][0](self), set_helpers),
    "import-by-name": (lambda self: importlib.import_module("helpers_of_mine").slope, set_helpers),
    "minus-zero": (lambda self: math.copysign(2.0, self.hidden["zero"]) + 1.0,
                   lambda layer: layer.hidden.update(zero=0.0)),
}


def odd(base, what):
    """A class of layers that scale their sources by what `what` reads."""
    read = ODD[what][0]

    class Layer(Magic if what == "getattr-of-user" else Odd, base):
        def message(self, x_j):
            return x_j * read(self)

    return Layer


@pytest.fixture
def reset(monkeypatch):
    """Numbers that outlive a layer, as they were, and so again afterwards."""
    monkeypatch.setitem(TABLE, "slope", 1.0)
    for holder in (Above, Part):
        monkeypatch.setattr(holder, "rate", 1.0)
    monkeypatch.setattr(scaled, "factor", 1.0, raising=False)
    monkeypatch.setattr(HELPERS, "slope", 1.0)
    remembered.cache_clear()
    ARRAY[0] = 1.0


@pytest.mark.parametrize("what", ODD)
def test_what_changes_in_ways_of_its_own(what, reset):
    ours, pygs = (odd(base, what)() for base in (fused_nn.MessagePassing, pyg_nn.MessagePassing))
    before = [[layer(X, EDGES) for _ in range(4)][-1] for layer in (ours, pygs)]
    torch.testing.assert_close(*before)
    for layer in (ours, pygs):
        ODD[what][1](layer)
    after = [layer(X, EDGES) for layer in (ours, pygs)]
    torch.testing.assert_close(*after)
    assert not torch.equal(after[0], before[0])
    assert debug.counters() == {"fused": 5, "plain": 0}


@pytest.mark.parametrize("what", ["descriptor", "len", "hasattr", "bool", "getattr-of-user"])
def test_instances_that_differ_in_ways_of_their_own(what, reset):
    layer = odd(fused_nn.MessagePassing, what)
    one, other = layer(), layer()
    ODD[what][1](other)
    torch.testing.assert_close(other(X, EDGES), 3 * one(X, EDGES))


def test_objects_that_stay_the_same_are_traced_once(reset, traces):
    for what in ("hasattr", "data", "user-dict", "optimizer", "classmethod", "len", "descriptor"):
        layer = odd(fused_nn.MessagePassing, what)()
        traces.clear()
        for _ in range(3):
            layer(X, EDGES)
        assert len(traces) == 1, what


def test_an_import_in_a_function_that_a_layer_holds(monkeypatch):
    layer = make(fused_nn.MessagePassing, "function")()
    layer.function = lambda layer, x: x * imports_a_name(layer)
    before = [layer(X, EDGES) for _ in range(3)][-1]
    monkeypatch.setattr(HELPERS, "slope", 3.0)
    torch.testing.assert_close(layer(X, EDGES), 3 * before)


def test_globals_with_the_names_of_attributes_are_not_read(monkeypatch, traces):
    """In a notebook a global may well be named as an attribute of a layer, whatever it is."""
    layer = make(fused_nn.MessagePassing, "decorated")()
    for _ in range(3):
        for name in ("slope", "act"):
            monkeypatch.setitem(globals(), name, iter([]))
        layer(X, EDGES)
    assert len(traces) == 1


@pytest.mark.parametrize("num_calls", [1, 6])
def test_a_number_in_a_slot_of_the_layer(num_calls):
    class Slotted(fused_nn.MessagePassing):
        __slots__ = "slope"

        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

        def message(self, x_j):
            return x_j * self.slope

    layer = Slotted()
    for slope in (1.0, 3.0):
        layer.slope = slope
        for _ in range(num_calls):
            out = layer(X, EDGES)
        torch.testing.assert_close(out, slope * pyg_nn.SimpleConv()(X, EDGES))
