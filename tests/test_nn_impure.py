"""Forwards of somebody's that do more than to compute: whatever they leave behind, they leave in each call."""

import functools
import random
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg_nn
from layers_own import EDGES, NUM_CALLS, SEEN, Layer, features, recording, shown
from torch import nn
from torch_geometric.utils import degree as degree_of

from pyg_fullgraph import convert
from pyg_fullgraph.nn import forwards

COUNT = 0


class Counting(Layer):
    def forward(self, x, edge_index):
        self.calls += 1
        return self.propagate(edge_index, x=x)


class CountingInProperty(Layer):
    @property
    def counted(self):
        SEEN.append(None)
        return 1.0

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x * self.counted)


class Keeping(Layer):
    def forward(self, x, edge_index):
        self.seen.append(x.shape)
        return self.propagate(edge_index, x=x)


class KeepingInLists(Layer):
    def forward(self, x, edge_index, seen):
        seen.append(None)
        return self.propagate(edge_index, x=x)


class KeepingInDefaults(Layer):
    def forward(self, x, edge_index, seen=SEEN):
        seen.append(None)
        return self.propagate(edge_index, x=x)


class KeepingInTensors(Layer):
    def forward(self, x, edge_index):
        x.tag = "seen"
        return self.propagate(edge_index, x=x)


class CountingOutside(Layer):
    def forward(self, x, edge_index):
        global COUNT
        COUNT += 1
        return self.propagate(edge_index, x=x)


class Showing(Layer):
    def forward(self, x, edge_index):
        print("forward")
        return shown(self.propagate(edge_index, x=x))


class ShowingIndirectly(Layer):
    def forward(self, x, edge_index):
        return self.inner(self.propagate(edge_index, x=x))

    def inner(self, x):
        return functools.reduce(lambda a, b: shown(a) + b, [x, x])


class Updated(Layer):
    def update(self, out):
        SEEN.append(None)
        return out


class Overridden(pyg_nn.GATConv):
    def __init__(self):
        super().__init__(6, 6)
        self.double()

    def edge_updater(self, *args, **kwargs):
        SEEN.append(None)
        return super().edge_updater(*args, **kwargs)


class Attributes(Layer):
    def __getattr__(self, name):
        if name == "counted":
            SEEN.append(None)
            return 1.0
        return super().__getattr__(name)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x * self.counted)


class Decorated(Layer):
    @recording
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)


def nonlocal_count():
    count = 0

    class Closed(Layer):
        def forward(self, x, edge_index):
            nonlocal count
            count += 1
            return self.propagate(edge_index, x=x)

        def seen_so_far(self):
            return count

    return Closed


class Warning_(Layer):
    def forward(self, x, edge_index):
        warnings.warn("seen", stacklevel=2)
        return self.propagate(edge_index, x=x)


class Logging(Layer):
    """Holds what has a name that tensors have."""

    def __init__(self):
        super().__init__()
        self.log, self.num_logged = {}, 0

    def forward(self, x, edge_index):
        self.log[len(self.log)] = None
        return self.propagate(edge_index, x=x)


class LoggingByAnotherName(Logging):
    def forward(self, x, edge_index):
        me = self
        me.log[len(me.log)] = None
        return self.propagate(edge_index, x=x)


class Helping(Layer):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.helped(x))

    def helped(self, x):
        SEEN.append(None)
        return x


def by_name_of_class():
    base = Helping

    class Named(base):
        def forward(self, x, edge_index):
            return base.forward(self, x, edge_index)

        def helped(self, x):
            return base.helped(self, x)

    return Named


class Wrapped(pyg_nn.SAGEConv):
    """Says that its forward is of PyG's module."""

    def __init__(self):
        super().__init__(6, 6)
        self.double()

    @functools.wraps(pyg_nn.SAGEConv.forward)
    def forward(self, *args, **kwargs):
        SEEN.append(None)
        return super().forward(*args, **kwargs)


class Elu(Layer):
    @staticmethod
    @functools.wraps(F.elu)
    def elu(x):
        SEEN.append(None)
        return F.elu(x)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.elu(x))


class Descriptor:
    def __get__(self, layer, kind):
        if layer is not None:
            SEEN.append(None)
        return 1.0


class Described(Layer):
    weight = Descriptor()  # as parameters of modules in it are called

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x * self.weight)


class Number(float):
    def __rmul__(self, other):
        SEEN.append(None)
        return other * float(self)


class WithNumber(Layer):
    def __init__(self):
        super().__init__()
        self.factor = Number(2.0)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=len(x.shape) * self.factor * x)


class Telling(Layer):
    def __repr__(self):
        SEEN.append(None)
        return "a layer"

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x * len(f"{self}"))


IMPURE = {
    Logging: lambda layer: len(layer.log), LoggingByAnotherName: lambda layer: len(layer.log),
    Helping: lambda layer: len(SEEN), by_name_of_class(): lambda layer: len(SEEN), Wrapped: lambda layer: len(SEEN),
    Elu: lambda layer: len(SEEN), Described: lambda layer: len(SEEN), WithNumber: lambda layer: len(SEEN),
    Telling: lambda layer: len(SEEN),
    Counting: lambda layer: layer.calls, Keeping: lambda layer: len(layer.seen),
    CountingInProperty: lambda layer: len(SEEN), KeepingInLists: lambda layer: len(SEEN),
    KeepingInDefaults: lambda layer: len(SEEN), CountingOutside: lambda layer: COUNT,
    Showing: lambda layer: len(SEEN), ShowingIndirectly: lambda layer: len(SEEN), Updated: lambda layer: len(SEEN),
    Overridden: lambda layer: len(SEEN), Attributes: lambda layer: len(SEEN), Decorated: lambda layer: len(SEEN),
    nonlocal_count(): lambda layer: layer.seen_so_far(),
}


@pytest.mark.parametrize("kind", IMPURE, ids=lambda kind: kind.__name__)
@pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning")
def test_what_a_forward_leaves_behind_it_leaves_in_each_call(kind, hits, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "COUNT", 0)
    SEEN.clear()
    layer = convert(kind())
    more = (SEEN,) if kind is KeepingInLists else ()
    for seed in range(2 * NUM_CALLS):
        layer(features(seed), EDGES, *more)
    assert IMPURE[kind](layer) == 2 * NUM_CALLS
    assert not hits


def test_tensors_are_marked_in_each_call(hits):
    layer = convert(KeepingInTensors())
    for seed in range(NUM_CALLS):
        x = features(seed)
        layer(x, EDGES)
        assert x.tag == "seen"
    assert not hits


def test_warnings_come_in_each_call():
    layer = convert(Warning_())
    for seed in range(NUM_CALLS):
        with pytest.warns(UserWarning, match="seen"):
            layer(features(seed), EDGES)


class Random(Layer):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x * random.random())


class Numbers(Layer):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x if x.sum() > 0 else x * 2)


class Degrees(Layer):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x) / degree_of(edge_index[1], x.size(0)).clamp(min=1).view(-1, 1)


class WithoutGradients(Layer):
    def forward(self, x, edge_index):
        with torch.no_grad():
            scale = self.lin(x).sigmoid()
        return self.propagate(edge_index, x=x * scale)


class ByIdentity(Layer):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x * (2 if type(x) is nn.Parameter else 1))


class Held(Layer):
    def __init__(self):
        super().__init__()
        self.options = {"factor": 2.0}

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x * self.options["factor"])


class Updating(Layer):
    def update(self, out):
        return out.tanh() * self.factor


@pytest.mark.parametrize("kind", [Updating, Random, Numbers, Degrees, WithoutGradients, ByIdentity, Held],
                         ids=lambda kind: kind.__name__)
def test_other_forwards_compute_what_they_did(kind):
    ours, theirs = convert(kind()), kind()
    for seed in range(2 * NUM_CALLS):
        if kind is Held and seed > NUM_CALLS:
            ours.options["factor"] = theirs.options["factor"] = float(seed)
        x = features(seed)
        x = nn.Parameter(x) if kind is ByIdentity and seed % 2 else x.requires_grad_()
        found = []
        for layer in (ours, theirs):
            random.seed(seed)
            out = layer(x, EDGES)
            found.append([out, *torch.autograd.grad(out.square().sum(), [x])])
        torch.testing.assert_close(*found)


def test_a_layer_without_tapes_is_not_asked_for_long(monkeypatch):
    asked, look = [], forwards._look
    monkeypatch.setattr(forwards, "_look", lambda *args: asked.append(None) or look(*args))
    layer = convert(Counting())
    for seed in range(3 * NUM_CALLS):
        layer(features(seed), EDGES)
    assert len(asked) == forwards.MIN_CALLS + 1
