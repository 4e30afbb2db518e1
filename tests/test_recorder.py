"""What the recorder is sure of, make_fx traces to the same nodes; the rest, and every refusal, is make_fx's."""

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch_geometric.utils import degree, scatter, softmax

from programs import DST, LAYERS, SRC, spec
from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.saga import trace as tracer
from pyg_fullgraph.saga.trace import INDEX, SIZE_I, trace_method, trace_propagate


class _Both:
    """Whether the recorder was sure, and what each of the two ways gave."""

    def __init__(self, monkeypatch):
        self.sure, self.recorded = [], tracer._Trace._recorded
        monkeypatch.setattr(tracer._Trace, "_recorded", lambda trace, call: self._note(trace, call))
        self.is_quick = True

    def _note(self, trace, call):
        found = self.recorded(trace, call) if self.is_quick else None
        self.sure.append(found is not None)
        return found

    def trace(self, run):
        """Results or reasons of both ways, of which the second never asks the recorder."""
        out = []
        for self.is_quick in (True, False):
            try:
                traced = run()
                out.append((traced.value, dict(traced.side), traced.dim, traced.reads_dtype))
            except NotFusable as error:
                out.append(error.reasons)
        return self.sure[0], *out


@pytest.fixture
def both(monkeypatch):
    return _Both(monkeypatch)


def message(body):
    """How to trace a layer whose message is ``body``."""
    class Layer(pyg.MessagePassing):
        def message(self, x_j, x_i, index, size_i):
            return body(x_j, x_i, index, size_i)

    args = dict(x_j=spec(SRC, 4), x_i=spec(DST, 4), index=INDEX, size_i=SIZE_I)
    return lambda: trace_method(Layer(), "message", args)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_recorded_as_they_are_traced(both, name):
    layer = LAYERS[name]
    for method, args in (("edge_update", layer.update), ("message", layer.args)):
        if args is not None:
            is_sure, quick, slow = both.trace(lambda m=method, a=args: trace_method(layer.make(), m, a))
            assert is_sure
            assert quick == slow
            both.sure.clear()


def test_several_aggregations_are_recorded(both):
    scalers = ["identity", "amplification", "attenuation", "linear", "inverse_linear"]
    conv = pyg.PNAConv(6, 8, ["mean", "min", "max", "std", "var", "sum"], scalers, torch.ones(5), towers=2)
    args = dict(x_j=spec(SRC, 2, 6), x_i=spec(DST, 2, 6), edge_attr=None)
    is_sure, quick, slow = both.trace(lambda: trace_propagate(conv, args, dict(index=INDEX, dim_size=SIZE_I, ptr=None)))
    assert is_sure
    assert quick == slow


def without_gradients(x_j, x_i, index, size_i):
    with torch.no_grad():
        scale = torch.zeros_like(x_j)
        scale.add_(x_j.relu())
        scale /= 2
    return x_j * scale


def written(x_j, x_i, index, size_i):
    out = x_j * 2
    same = out.contiguous()
    same.add_(x_i)
    same.clamp_(min=0)
    return out


RECORDED = {
    "activations": lambda x_j, x_i, index, size_i: F.gelu(x_j) + F.silu(x_i) + F.softplus(x_j) + F.leaky_relu(x_i),
    "norms": lambda x_j, x_i, index, size_i: F.normalize(x_j, dim=-1) + F.layer_norm(x_i, (4,)),
    "features": lambda x_j, x_i, index, size_i: torch.cat([x_j[:, :2] @ torch.eye(2), x_i.view(-1, 2, 2).sum(1)], -1),
    "a literal": lambda x_j, x_i, index, size_i: x_j * torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "a softmax": lambda x_j, x_i, index, size_i: x_j * softmax((x_j * x_i).sum(-1), index, None, size_i).view(-1, 1),
    "degrees": lambda x_j, x_i, index, size_i: x_j / degree(index, size_i, x_j.dtype)[index].view(-1, 1),
    "scatters": lambda x_j, x_i, index, size_i: scatter(x_j, index, 0, size_i, "max")[index] - x_j,
    "sizes": lambda x_j, x_i, index, size_i: x_j.view(x_j.size(0), 2, 2).expand(-1, 2, 2).reshape(x_j.size(0), 4),
    "dropout": lambda x_j, x_i, index, size_i: F.dropout(x_j, 0.5) + F.dropout(x_i, 0.1),
    "its type": lambda x_j, x_i, index, size_i: x_j if type(x_j) is torch.Tensor and x_j.device.type == "cpu" else x_i,
    "written": written,
    "written without gradients": without_gradients,
}


@pytest.mark.parametrize("what", RECORDED)
def test_operations_are_recorded_as_they_are_traced(both, what):
    is_sure, quick, slow = both.trace(message(RECORDED[what]))
    assert is_sure
    assert isinstance(slow[0], tracer.Node)
    assert quick == slow


class Reversed(torch.autograd.Function):
    """Dispatches nothing forward."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return -grad


def caught(x_j, x_i, index, size_i):
    """What cannot be recorded, where the method takes something else then."""
    try:
        out = torch.vmap(lambda x: x * 2)(x_j)
    except Exception:
        out = x_j * 3
    return out


def alias_written(x_j, x_i, index, size_i):
    out = x_j * 2
    out.detach().mul_(3)
    return out


def filled_written(x_j, x_i, index, size_i):
    """torch detaches what it fills by itself, which is not what the method does."""
    out = torch.zeros(4)
    out.detach().add_(1)
    return x_j * out


def detached_in_place(x_j, x_i, index, size_i):
    out = x_j * 2
    out.detach_()
    return out * x_i


def handed_over(x_j, x_i, index, size_i):
    if torch.overrides.has_torch_function_unary(x_j):
        return torch.overrides.handle_torch_function(handed_over, (x_j,), x_j, x_i, index, size_i)
    return Reversed.apply(x_j)


LEFT_TO_MAKE_FX = {
    "a function of one's own derivative": lambda x_j, x_i, index, size_i: Reversed.apply(x_j) * 2,
    "the same, out of sight": handed_over,
    "an error that is caught": caught,
    "a write to a view": lambda x_j, x_i, index, size_i: (x_j * 1).view(-1, 2, 2).mul_(2).view(-1, 4),
    "a write to an alias": alias_written,
    "a write to what was filled": filled_written,
    "a write to an argument": lambda x_j, x_i, index, size_i: x_j.mul_(2),
    "a detach in place": detached_in_place,
    "a hidden write": lambda x_j, x_i, index, size_i: setattr(out := x_j * 2, "data", x_i) or out,
    "text": lambda x_j, x_i, index, size_i: x_j * len(repr(x_j)),
    "a branch on the number of edges": lambda x_j, x_i, index, size_i: x_j if x_j.size(0) > 10**5 else x_i,
    "a branch on the number of nodes": lambda x_j, x_i, index, size_i: x_j if size_i > 10**8 else x_i,
    "the number of edges": lambda x_j, x_i, index, size_i: x_j / x_j.size(0),
    "the number of nodes": lambda x_j, x_i, index, size_i: x_j * float(size_i),
    "a branch on values": lambda x_j, x_i, index, size_i: x_j if (x_j > 0).any() else x_i,
    "an odd number of rows": lambda x_j, x_i, index, size_i: x_j + torch.ones(x_j.size(0) + x_j.size(0) % 2 - 1, 4),
    "random numbers": lambda x_j, x_i, index, size_i: x_j * torch.rand_like(x_i),
    "some edges": lambda x_j, x_i, index, size_i: x_j[:3],
    "many edges": lambda x_j, x_i, index, size_i: x_j[:2**40],
    "edges one by one": lambda x_j, x_i, index, size_i: torch.stack(list(x_j.unbind(0))),
    "as many edges as nodes": lambda x_j, x_i, index, size_i: torch.zeros(size_i, 4).scatter_add_(
        0, index.view(-1, 1).expand(-1, 4), torch.ones(size_i, 4)),
    "an unknown number of nodes": lambda x_j, x_i, index, size_i: scatter(x_j, index, 0)[index],
    "a mean over edges": lambda x_j, x_i, index, size_i: x_j - x_j.mean(0),
}


@pytest.mark.parametrize("what", LEFT_TO_MAKE_FX)
def test_what_is_not_sure_is_left_to_make_fx(both, what):
    is_sure, quick, slow = both.trace(message(LEFT_TO_MAKE_FX[what]))
    assert not is_sure
    assert quick == slow


def test_an_error_leaves_torch_as_it_was(both):
    """Guards that an error holds must not outlive those of the recorder."""
    with pytest.raises(NotFusable):
        message(lambda x_j, x_i, index, size_i: torch.vmap(lambda x: x.nonzero())(x_j))()
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0
    assert not torch.fx._symbolic_trace.is_fx_tracing()
    torch.testing.assert_close(torch.vmap(torch.sin)(torch.ones(3)), torch.ones(3).sin())
    assert torch.func.grad(torch.sin)(torch.zeros(())) == 1
