"""What ranks check in the tests of sharded graphs: a layer on a part computes its part of what it does on the whole."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import pickle
import re
import types
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_geometric.nn as pyg_nn
from layers import MORE, MORE_PAIRS, PAIRS, SQUARE, Layer
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Data

import pyg_fullgraph.nn as fused_nn
import zoo
from oracle import check, program_of, random_case
from pyg_fullgraph import columns, debug, edge_order, errors, execution, explain, phases, pipelines, selection
from pyg_fullgraph.activation import ActivationDropout
from pyg_fullgraph.autograd import run
from pyg_fullgraph.distributed import DistributedModel, Group, ShardedGraph, shard, shard_edges, timeline
from pyg_fullgraph.distributed.feature_split import FeatureSplit
from pyg_fullgraph.distributed.model import sum_gradients
from pyg_fullgraph.distributed.planner import Costs, prices
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.nn import order
from pyg_fullgraph.partition import Partition
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Output
from pyg_fullgraph.saga.plans import is_scaled
from triton_kernels import segment

LAYERS = {layer.name: layer for layer in (*SQUARE, *MORE, *PAIRS, *MORE_PAIRS)}


def make_case(name: str) -> zoo.Case:
    return getattr(zoo, name)()


def sharded(case: zoo.Case, way: str, size: int, uneven: bool = False) -> ShardedGraph:
    """This rank's part; ``uneven`` leaves the last part empty and gives the one before most of the vertices."""
    graph = Graph.from_edge_index(case.edge_index, case.size)
    parts: Any = "random"
    if uneven:
        def few(count: int) -> Partition:
            return Partition.from_owner((torch.arange(count) % max(2 * size, 3)).clamp(max=max(size - 2, 0)), size)

        parts = few(case.num_src)
        parts = parts if case.is_square else (parts, few(case.num_dst))
    return shard(graph, way, parts)


def check_layers(rank: int, size: int, names: list[str], case_name: str, *kinds: tuple[str, bool]) -> None:
    """Each layer by each way on even or uneven parts."""
    case = make_case(case_name)
    parts = {kind: sharded(case, kind[0], size, kind[1]) for kind in kinds}
    graph = Graph.from_edge_index(case.edge_index, case.size)
    for name in names:
        layer = LAYERS[name]
        module = layer.build(fused_nn)
        x, given = layer.inputs(case)
        found: list[Any] = [None]
        if rank == 0:
            whole = call(module, layer, x, graph, given)
            cotangent = torch.randn(whole.shape, generator=torch.Generator().manual_seed(7), dtype=whole.dtype)
            found = [(cotangent, [whole.detach(), *gradients(whole, (x, given), module, cotangent)])]
        if size > 1:
            dist.broadcast_object_list(found)
        cotangent, expected = found[0]
        for (way, uneven), part in parts.items():
            module.to(part.device)
            try:
                check_layer(layer, module, x, given, part, cotangent, expected)
            except Exception as error:
                where = f"{name} on {case_name}, rank {rank} of {size}, {way}{', uneven' * uneven}"
                raise AssertionError(f"{where}: {error}") from error


def check_spans(rank: int, size: int, *args: Any) -> None:
    """As :func:`check_layers`, with all products of edge values between kernels, over small spans of edges."""
    mine = [(selection, "MIN_PIPELINE_WIDTH", 1), (selection, "MIN_PIPELINE_BREADTH", (0, 0, 0)),
            (selection, "MIN_PIPELINE", 0), (selection, "MAX_PIECE", 8), (pipelines, "SPAN_BYTES", 0),
            (pipelines, "SPAN_STEP", 16)]
    taken: list[int] = []
    prepare = pipelines.PreparedPipeline.__init__
    with contextlib.ExitStack() as stack:
        for module, name, value in mine:
            stack.enter_context(mock.patch.object(module, name, value))
        stack.enter_context(mock.patch.object(pipelines.PreparedPipeline, "__init__", lambda self, *a: (
            prepare(self, *a), taken.append(len(self.spans)))[0]))
        check_layers(rank, size, *args)
    assert max(taken) > 1


def check_scaled(rank: int, size: int, *args: Any) -> None:
    """As :func:`check_layers`, with rows multiplied by numbers of their vertices before they are sent."""
    scaled: list[ir.Node] = []
    run_rows = execution.run_rows
    with mock.patch.object(phases, "MIN_SCALED_EDGES", 0), mock.patch.object(phases, "SCALED_EDGES", 0), \
            mock.patch.object(execution, "run_rows", lambda steps, *a, **k: (
                scaled.extend(r for r, _ in steps if is_scaled(r)), run_rows(steps, *a, **k))[1]):
        check_layers(rank, size, *args)
    assert {n.domain for n in scaled} == {Domain.SRC, Domain.DST}


def check_large(rank: int, size: int, *args: Any) -> None:
    """As :func:`check_layers`, where graphs count as so large that rows ascend by other endpoints."""
    known, segment.ASYNC_EDGES = segment.ASYNC_EDGES, 2
    try:
        check_layers(rank, size, *args)
    finally:
        segment.ASYNC_EDGES = known


def call(module: Any, layer: Layer, x: Any, edge_index: Any, given: Any) -> Tensor:
    if layer.call is not None:
        return layer.call(module, x, edge_index, **given)
    return module(x=x, edge_index=edge_index, **given, **layer.options)


def check_layer(layer: Layer, module: torch.nn.Module, x: Any, given: Any, part: ShardedGraph, cotangent: Tensor,
                expected: list[Tensor], tolerance: float = 1e-10) -> None:
    """Output and all gradients; those of parameters are sums over the ranks."""
    side = ("src", "dst") if layer.is_pair else ("dst", "dst")
    place_x = side if layer.is_pair and not layer.lacks_dst else side[0] if not layer.is_pair else (side[0], None)
    places = {k: "edge" if k in layer.edge else side if layer.is_pair else "dst" for k in given}
    taken_x, taken = (cut(part, v, p) for v, p in ((x, place_x), (given, places)))
    debug.reset()
    out = call(module, layer, taken_x, part, taken)
    assert debug.plain_reasons() == {}
    got = gradients(out, (taken_x, taken), module, part.take(cotangent))
    close(out, part.take(expected[0]), tolerance, "output")
    kinds = [p for p, v in zip(tree_leaves((place_x, places)), tree_leaves((x, given)), strict=True)
             if isinstance(v, Tensor) and v.requires_grad]
    for kind, mine, all_rows in zip(kinds, got, expected[1:], strict=False):
        close(mine, part.take(all_rows, kind), tolerance, f"gradient per {kind}")
    for mine, total in zip(got[len(kinds):], expected[1 + len(kinds):], strict=True):
        close(part.group.reduce(mine.clone()), total.to(mine.device), tolerance, "gradient of a parameter")


def cut(part: ShardedGraph, values: Any, place: Any) -> Any:
    """The rows of ``values`` that this rank has, as leaves of their own."""
    if isinstance(values, dict):
        return {k: cut(part, v, place[k]) for k, v in values.items()}
    if isinstance(values, tuple):
        return tuple(cut(part, v, p) for v, p in zip(values, place, strict=True))
    if values is None:
        return None
    return part.take(values.detach(), place).requires_grad_(values.requires_grad)


def gradients(out: Tensor, inputs: Any, module: torch.nn.Module, cotangent: Tensor) -> list[Tensor]:
    leaves = [t for t in tree_leaves(inputs) if isinstance(t, Tensor) and t.requires_grad]
    leaves += [p for p in module.parameters() if p.requires_grad]
    if not out.requires_grad:
        return [torch.zeros_like(t) for t in leaves]
    found = torch.autograd.grad(out, leaves, cotangent, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, found, strict=True)]


def close(got: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}")


# --- programs ---------------------------------------------------------------------------------------------------


class Cut(torch.autograd.Function):
    """This rank's rows of a whole tensor; a parameter is every rank's."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, part: ShardedGraph, per: str | None) -> Tensor:
        ctx.part, ctx.per = part, per
        return value.view_as(value) if per is None else part.take(value, per)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        part, grad = ctx.part, grads[0].contiguous()
        return part.group.reduce(grad.clone()) if ctx.per is None else part.join(grad, ctx.per), None, None


class Join(torch.autograd.Function):
    """The whole of the rows that ranks have."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, part: ShardedGraph, per: str) -> Tensor:
        ctx.part, ctx.per = part, per
        return part.join(value, per)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.part.take(grads[0], ctx.per), None, None


def run_in_parts(way: str, program: Any, graph: Graph, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """As :func:`pyg_fullgraph.autograd.run`, for whole tensors, by parts."""
    part, per = shard(graph, way), {Domain.SRC: "src", Domain.DST: "dst", Domain.EDGE: "edge"}
    domains = {n.name: per.get(n.domain) for n in program.inputs}
    made = run(program, part, {k: Cut.apply(t, part, domains[k]) for k, t in tensors.items()})
    return tuple(Join.apply(t, part, per[o.domain]) for t, o in zip(made, program.outputs, strict=True))


def repeated() -> EdgeProgram:
    """Two sums that are one where a slice is a single feature."""
    x = ir.input("x", Domain.SRC, (1,))
    sums = [ir.gather("sum", Domain.DST, value) for value in (ir.expand(x, (4,)), x)]
    return EdgeProgram(tuple(Output("vertex", g, f"out{k}") for k, g in enumerate(sums)))


def check_programs(rank: int, size: int, names: list[str], way: str) -> None:
    for name, program in {**{n: program_of(n) for n in names}, "repeated": repeated()}.items():
        try:
            check(program, random_case(11, 9, 70), runner=partial(run_in_parts, way))
        except Exception as error:
            raise AssertionError(f"{name}, rank {rank} of {size}, {way}: {error}") from error


# --- training ---------------------------------------------------------------------------------------------------


class Net(torch.nn.Module):
    """Two layers with batch norm, dropout on vertices, by torch or with the activation, and for attention on edges."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        if kind == "gcn":
            self.conv1, self.conv2 = fused_nn.GCNConv(6, 8), fused_nn.SAGEConv(8, 4)
        else:
            self.conv1, self.conv2 = fused_nn.GATConv(6, 4, heads=2, dropout=0.4), fused_nn.GATv2Conv(8, 4, dropout=0.3)
        self.norm = pyg_nn.BatchNorm(8)
        self.between = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Dropout(0.5)) if kind == "gcn" else \
            ActivationDropout("elu", 0.5)

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        x = F.dropout(x, 0.3, self.training)
        return self.conv2(self.between(self.norm(self.conv1(x, edge_index))), edge_index)


def device_of(rank: int) -> torch.device:
    """Where tensors have to be for the backend of these processes."""
    is_nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", rank) if is_nccl else torch.device("cpu")


def train(kind: str, graph: Graph, x: Tensor, y: Tensor, mask: Tensor) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of ten steps and of an evaluation, and the parameters and buffers after them."""
    torch.manual_seed(3)
    model = DistributedModel(Net(kind).to(x))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    torch.manual_seed(5)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        out = model(x, graph)
        loss = model.mean(F.cross_entropy(out[mask], y[mask]), mask.sum())
        loss.backward()
        losses += [loss.item(), model.clip_grad_norm(0.5).item()]
        optimizer.step()
    model.eval()
    with torch.no_grad():
        hits = (model(x, graph).argmax(-1) == y).double()
    losses.append(float(model.mean(hits.mean(), hits.numel())))
    return losses, model.state_dict()


def check_training(rank: int, size: int, kind: str, way: str) -> None:
    case = make_case("hub")
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(case.num_src, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(4, (case.num_src,), generator=generator)
    mask = torch.rand(case.num_src, generator=generator) < 0.4
    x, y, mask, edge_index = (t.to(device_of(rank)) for t in (x, y, mask, case.edge_index))
    graph = Graph.from_edge_index(edge_index, case.num_src)
    with alone():
        losses, state = train(kind, graph, x, y, mask)
    for uneven in (False, True):
        part = sharded(case, way, size, uneven)
        got, own = train(kind, part, part.take(x), part.take(y), part.take(mask))
        torch.testing.assert_close(got, losses, rtol=1e-9, atol=1e-9)
        assert own.keys() == state.keys() == Net(kind).state_dict().keys()
        for name, value in own.items():
            close(value, state[name], 1e-8, name)


def check_added(rank: int, size: int, *ways: str) -> None:
    """What layers add to sums on GPUs; here it is torch that adds. Ranks that would decide by what they have differ."""
    added = []
    case = make_case("hub")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "MIN_NUMBERS", 1 if rank else 1 << 60)
        patch.setattr(order, "has_kernels", lambda device: True)
        patch.setattr(order, "_added", lambda *given, made=order._added: added.append(given) or made(*given))
        for way in ways:
            check_layers(rank, size, ["gcn", "gcn_weight", "gin_train_eps"], "hub", (way, False), (way, True))
            assert len(added) == 6
            check_training(rank, size, "gcn", way)
            added.clear()
            part, layer = sharded(case, way, size), fused_nn.GCNConv(4, 4).bfloat16()
            layer(torch.ones(part.num_dst, 4, dtype=torch.bfloat16, requires_grad=True), part).sum().backward()
            assert added == []  # rows of float32 would go from rank to rank


def check_bytes(rank: int, size: int, way: str) -> list[float]:
    """Bytes per edge of this rank, home and away, that a part holds: at first, after training a SAGE, and a GCN;
    and the part with self-loops by itself.

    Kernels are not run: what they would read is there.
    """
    count, num_edges = 40, 20_000
    edge_index = torch.randint(count, (2, num_edges), generator=torch.Generator().manual_seed(0))
    part = shard(Graph.from_edge_index(edge_index, count), way, "random")
    num_edges = part.shard.incoming.rows.num_edges + part.shard.outgoing.rows.num_edges
    found = [num_bytes(part) / num_edges]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "interpreted", lambda: True)
        patch.setattr(execution.launch.Launch, "run", lambda *args: None)
        patch.setattr(edge_order, "_MAX_CACHED_ROWS", 0)  # as of a large graph
        patch.setattr(selection, "MIN_PIECES", 1)  # the same
        for layer in (fused_nn.SAGEConv(4, 4), fused_nn.GCNConv(4, 4)):
            for _ in range(3):
                DistributedModel(layer)(torch.ones(part.num_dst, 4, requires_grad=True), part).sum().backward()
            found.append(num_bytes(part) / num_edges)
    return [*found, num_bytes(part.rewired(None, part.num_dst)) / num_edges]


def num_bytes(root: Any) -> int:
    """Of all tensors that ``root`` holds, wherever."""
    known, storages, waiting = {id(root)}, {}, [root]
    while waiting:
        held = waiting.pop()
        if type(held) is Tensor:
            storages[held.untyped_storage().data_ptr()] = held.untyped_storage().nbytes()
        inner = held.__closure__ or () if isinstance(held, types.FunctionType) else gc.get_referents(held)
        for value in inner:
            if id(value) not in known and not isinstance(value, (type, types.ModuleType, Group)):
                known.add(id(value))
                waiting.append(value)
    return sum(storages.values())


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Groups that are made in this block are of one process."""
    is_initialized, dist.is_initialized = dist.is_initialized, lambda: False
    try:
        yield
    finally:
        dist.is_initialized = is_initialized


def check_accumulation(rank: int, size: int) -> None:
    """Gradients add up over backwards, summed each time or at the end; parameters become those of rank 0."""
    case = make_case("prime")
    torch.manual_seed(rank)
    model = DistributedModel(fused_nn.GCNConv(3, 2).double())
    part = sharded(case, "halo", size)
    x = part.take(torch.randn(case.num_src, 3, generator=torch.Generator().manual_seed(0)).double())

    def backward(factor: float) -> None:
        (model(x, part).square().sum() * factor).backward()

    weight = model.module.lin.weight
    backward(1.0)
    once = weight.grad.clone()
    assert len({str(v) for v in model.group.objects(once.tolist())}) == 1
    backward(2.0)
    close(weight.grad, 3 * once, 1e-12, "second backward")
    model.zero_grad()
    with model.no_sync():
        backward(1.0)
    backward(2.0)
    close(weight.grad, 3 * once, 1e-12, "after no_sync")
    with model.no_sync():  # after gradients that are sums
        backward(1.0)
    backward(2.0)
    close(weight.grad, 6 * once, 1e-12, "after sums and no_sync")
    with model.no_sync():
        out = model(x, part)
    close(weight.grad, 6 * once, 1e-12, "after no_sync without a backward")
    out.square().sum().backward()
    close(weight.grad, 7 * once, 1e-12, "after a forward in no_sync")
    out = model(x, part)
    with model.no_sync():
        out.square().sum().backward()
    backward(2.0)
    close(weight.grad, 10 * once, 1e-12, "after a backward in no_sync")
    model.zero_grad(set_to_none=False)
    backward(1.0)
    close(weight.grad, once, 1e-12, "after zero_grad")

    def fail(grad: Tensor) -> None:
        raise MemoryError("of a hook")

    x.requires_grad_()
    for before in (contextlib.nullcontext, model.no_sync):
        model.zero_grad()
        with before():
            backward(1.0)
        earlier, hook = weight.grad.clone(), x.register_hook(fail)
        refused(MemoryError, "of a hook", backward, 5.0)
        hook.remove()
        close(weight.grad, earlier, 0, "after a backward that failed")
        backward(2.0)
        close(weight.grad, 3 * once, 1e-12, "after the backward that followed")
    hook = x.register_hook(fail)
    with model.no_sync():
        refused(MemoryError, "of a hook", backward, 5.0)
    hook.remove()
    close(weight.grad, 3 * once, 1e-12, "after a backward in no_sync that failed")
    half, missing = (torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)) for _ in range(2))
    if rank == 1:
        half.grad = torch.ones_like(half)
    sum_gradients([half, missing], model.group)
    assert half.grad.tolist() == [1.0, 1.0] and half.grad.dtype == torch.bfloat16 and missing.grad is None


def check_copies(rank: int, size: int) -> None:
    """A copy is a model of the same processes; states have the names of the model, as a part of another one too."""
    part = sharded(make_case("prime"), "halo", size)
    model, x = DistributedModel(fused_nn.GCNConv(3, 2)), torch.ones(part.num_dst, 3)
    for made in (copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model).module):
        assert made.group is model.group and made.module is not model.module
        for one in (made, model):
            one.zero_grad()
            one(x, part).square().sum().backward()
        close(made.module.lin.weight.grad, model.module.lin.weight.grad, 0, "gradient of a copy")
    inside = torch.nn.Sequential(model)
    state = {name: value + 1 for name, value in inside.state_dict().items()}
    assert list(state) == ["0.bias", "0.lin.weight"]
    inside.load_state_dict(state)
    close(model.state_dict()["lin.weight"], state["0.lin.weight"], 0, "loaded")
    refused(errors.GroupPickleError, "Expected 'model.state_dict()' or 'model.module' to be saved", pickle.dumps, model)
    assert model.mean(torch.tensor(rank), 1).item() == (size - 1) / 2


class Elsewhere(torch.nn.Module):
    """A model whose results leave ``forward`` in many ways, with parameters that it does not use there."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = fused_nn.GCNConv(6, 4), torch.nn.Linear(4, 4)
        self.scale = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, edge_index: Any, kind: str = "") -> Any:
        out = self.conv(x, edge_index)
        if kind == "left":
            self.out = out
            return None
        return {"data": Data(out=out), "namespace": types.SimpleNamespace(out=out), "function": lambda: out}.get(
            kind, out)

    @staticmethod
    def run(model: Any, own: Any, x: Tensor, edge_index: Any, kind: str) -> Tensor:
        """The result, of a model or a DistributedModel and what that has, got in a way of its own."""
        if kind == "encode":
            return own.conv(x, edge_index)
        out = model(x, edge_index, kind)
        if kind in ("data", "namespace"):
            return out.out
        known = {"left": lambda: own.out, "function": lambda: out(), "head": lambda: own.head(out),
                 "scale": lambda: out * own.scale.exp(), "twice": lambda: out * model(x + 1, edge_index)}
        return known.get(kind, lambda: out)()


def check_gradients_elsewhere(rank: int, size: int) -> None:
    """Gradients are summed whatever became of results, and of parameters apart from ``forward``, where they add up."""
    case = make_case("prime")
    graph, part = Graph.from_edge_index(case.edge_index, case.size), sharded(case, "halo", size)
    generator = torch.Generator().manual_seed(0)
    x, target = (torch.randn(case.num_src, k, generator=generator).double() for k in (6, 4))
    own, y = part.take(x), part.take(target)
    torch.manual_seed(0)
    whole, module = Elsewhere().double(), Elsewhere().double()
    model = DistributedModel(module)
    whole.load_state_dict(model.state_dict())
    for kind in ("", "data", "namespace", "function", "left", "encode", "head", "scale", "twice"):
        (Elsewhere.run(whole, whole, x, graph, kind) - target).square().mean().backward()
        model.mean((Elsewhere.run(model, module, own, part, kind) - y).square().mean(), part.num_dst).backward()
        for got, want in zip(module.parameters(), whole.parameters(), strict=True):
            assert (got.grad is None) == (want.grad is None)
            if want.grad is not None:
                close(got.grad, want.grad, 1e-10, f"gradients up to {kind}")
    before = module.conv.lin.weight.grad.clone()
    other = DistributedModel(module)  # of which only one sums
    for one in (other, model):
        one.zero_grad()
        loss = sum((Elsewhere.run(one, module, own, part, kind) - y).square().mean() * 0 for kind in ("", "head"))
        (loss + module.scale.sum() / size).backward()
        close(module.scale.grad, torch.ones(4).double(), 1e-12, "of two models")
    assert not before.equal(module.conv.lin.weight.grad)


def check_take_and_join(rank: int, size: int, case_name: str) -> None:
    case = make_case(case_name)
    part = sharded(case, "halo", size)
    for per, count in (("src", case.num_src), ("dst", case.num_dst), ("edge", case.num_edges)):
        values = torch.randn(count, 2, generator=torch.Generator().manual_seed(0))
        mine = part.take(values, per)
        assert mine.shape[0] == {"src": part.num_src, "dst": part.num_dst, "edge": part.num_edges}[per]
        assert torch.equal(part.join(mine, per), values)
        whole = part.reverse().take(values, {"src": "dst", "dst": "src"}.get(per, per))
        assert torch.equal(whole, mine)
    assert part.whole_sizes == (case.num_src, case.num_dst, case.num_edges)
    assert part.to("cpu").num_edges == part.num_edges and part.detach().memo is part.memo


def check_edges(rank: int, size: int, case_name: str) -> None:
    """A part made of this rank's edges alone is the one made of the whole graph."""
    case = make_case(case_name)
    graph = Graph.from_edge_index(case.edge_index, case.size)
    sides = [Partition.from_owner(torch.arange(n) * 7 % size, size) for n in case.size]
    parts = sides[0] if case.is_square else (sides[0], sides[1])
    whole = shard(graph, "halo", parts)
    own = case.edge_index[:, whole.edge_ids]
    for ids in (whole.edge_ids, None):
        part = shard_edges(own, parts, ids, "halo")
        assert part.whole_sizes == whole.whole_sizes and (ids is None or torch.equal(part.edge_ids, whole.edge_ids))
        x = part.take(torch.randn(case.num_src, 3, generator=torch.Generator().manual_seed(0)).double(), "src")
        weight = whole.take(torch.arange(case.num_edges).double() + 1, "edge")
        results = []
        for each in (whole, part):
            leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
            rows = torch.zeros(each.num_dst, 3).double()
            out = fused_nn.SimpleConv(aggr="sum")((leaves[0], rows), each, leaves[1])
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        for a, b in zip(*results, strict=True):
            close(a, b, 1e-12, "by edges")
    refused(errors.InputError, "no process holds the whole graph: feature_split keeps all edges", shard_edges, own,
            parts, way="feature_split")
    asked = shard_edges(own, parts)
    assert str(asked.reasons[-1]) == "feature_split: not offered (the structure of the whole graph is on no process)"
    if case_name == "hub":  # where each rank has edges
        check_refused_edges(rank, case, own, parts, whole.edge_ids)


def check_refused_edges(rank: int, case: zoo.Case, own: Tensor, parts: Any, ids: Tensor) -> None:
    """By all ranks, also what is wrong on the first one only."""
    wrong = case.edge_index if rank == 0 else own
    refused(errors.GroupError, "rank 0: InputError: Expected 'edge_index' to hold edges that arrive at the vertices of "
            "this rank (got others), rank 1: no error", shard_edges, wrong, parts)
    for row, role in ((0, "source"), (1, "destination")):
        for index in (-1, case.size[row]):
            wrong = own.clone()
            wrong[row, 0] = index
            refused(errors.GroupError, f"the {role} ids in 'edge_index' to be valid indices in [0, {case.size[row]}) "
                    f"(got {index} at edge 0)", shard_edges, wrong if rank == 0 else own, parts)
    refused(errors.DtypeError, "'edge_index' to be of int64 (got torch.float32)", shard_edges, own.float(), parts)
    refused(errors.ShapeError, "'edge_index' to have shape [2, e]", shard_edges, own[0], parts)
    refused(errors.RowCountError, f"'edge_ids' to have {own.size(1)} rows, one per edge", shard_edges, own, parts,
            ids[1:])
    for others in (ids * 0, ids + 1, ids * 1000):
        refused(errors.InputError, f"'edge_ids' to be those from 0 to {case.num_edges - 1}, each once", shard_edges,
                own, parts, others)
    refused(errors.InputError, "Expected 'partition' to be a Partition", shard_edges, own, ())


def check_split(rank: int, size: int) -> None:
    """What takes features one by one, or in heads, runs over all edges on every rank; nothing is fetched for it."""
    ran: list[tuple[str, str]] = []

    class Watched(FeatureSplit):
        def takes_whole(self, sweep: Any) -> bool:
            taken = super().takes_whole(sweep)
            ran.append(("split", "") if taken else ("fetched", self.describe(sweep)))
            return taken

    case = make_case("prime")
    part = shard(Graph.from_edge_index(case.edge_index, case.size), Watched())
    for name, count, others in (("gcn", 2, 0), ("sage_max", 2, 0), ("sage_mul", 2, 0), ("gatv2", 3, 0),
                                ("transformer", 3, 0), ("gat", 2, 1)):
        layer = LAYERS[name]
        module = layer.build(fused_nn)
        x = part.take(layer.inputs(case)[0].detach()).requires_grad_()
        ran.clear()
        out = module(x, part)
        gradients(out, x, module, torch.ones_like(out))
        # The gradients of attention at its own side are a sum of values that the edges here have already.
        rest = [why for how, why in ran if how == "fetched"]
        assert rest == ["fetches rows by halo: it reads nothing of other vertices"] * others, name
        assert len(ran) == count + others, name
    report = str(explain(fused_nn.GATConv(3, 2, heads=4), torch.randn(part.num_dst, 3, requires_grad=True), part))
    assert "the forward pass by destination is split over 4 features\n" in report
    net = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    report = str(explain(fused_nn.EdgeConv(net), torch.randn(part.num_dst, 3), part))
    assert "the forward pass by destination fetches rows by halo: it multiplies edge values by a matrix\n" in report


def check_planner(rank: int, size: int) -> None:
    """Few remote rows make halo cheap, all of them broadcast or slices; every rank takes the same way, and says why."""
    ring = torch.stack([torch.arange(300), torch.arange(1, 301) % 300])
    dense = torch.cartesian_prod(torch.arange(60), torch.arange(60)).t()
    for edges, count, broadcast, cheap in ((ring, 300, 4e9, "halo"), (dense, 60, 4e9, "broadcast"),
                                           (dense, 60, 1e9, "feature_split")):
        costs = Costs(latency=1e-5, exchange=1e9, broadcast=broadcast, gather=1e12)
        part = shard(Graph.from_edge_index(edges, count), "halo", "ranges")
        found = prices(part.shard, part.group, costs, 1 << 12)
        assert found[0].way == cheap and found[0].seconds < found[1].seconds < found[2].seconds
        rows = {p.way: p.rows for p in found}
        share = count // size
        assert rows["halo"] == (2 if cheap == "halo" else 2 * (count - share))
        assert rows["feature_split"] == -(-4 * (count - share) // size) and rows["broadcast"] == 2 * (count - share)
        assert len({str(p) for p in part.group.objects([str(p) for p in found])}) == 1
    small = prices(part.shard, part.group, costs, 1 << 12, memory=1e5)[-1]
    assert str(small) == "feature_split: not offered (the structure of the whole graph takes 86.9 kB of 100.0 kB)"
    chosen = shard(Graph.from_edge_index(ring, 300))
    assert chosen.way.name == chosen.reasons[0].way and "rows" in str(chosen.reasons[0])
    assert len(set(chosen.group.objects(chosen.way.name))) == 1
    report = str(explain(fused_nn.GCNConv(3, 2), torch.randn(chosen.num_dst, 3), chosen))
    assert f"ShardedGraph(rank={rank} of {size}" in report and f"  {chosen.reasons[0]}" in report


def check_timeline(rank: int, size: int, way: str, folder: str) -> int:
    """A step of two GCN layers: a stage of each block, after the transfers that it reads; the same results."""
    case = make_case("hub")
    part = sharded(case, way, size)
    layers = [(fused_nn.GCNConv(6, 8), "x, e -> x"), torch.nn.ReLU(), (fused_nn.GCNConv(8, 5), "x, e -> x")]
    model = DistributedModel(pyg_nn.Sequential("x, e", layers).double())
    x = part.take(torch.randn(case.num_src, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64))

    def step() -> list[Tensor]:
        model.zero_grad()
        out = model(x, part)
        out.square().sum().backward()
        return [out.detach(), *(p.grad.clone() for p in model.parameters())]

    before = step()
    with timeline(folder) as found:
        recorded = step()
    assert all(map(torch.equal, before, recorded)), "recording changes results"
    count = len(found.events)
    step()
    assert len(found.events) == count and {e.rank for e in found.events} == set(range(size))
    assert [e.name for e in found.events if e.sweep < 0] == ["reduce"] * size
    sweeps = [e for e in found.events if e.kind == "sweep" and e.rank == rank]
    # Features need no gradient, and are summed before the product with the weight, which makes them wider.
    assert [e.layer for e in sweeps] == ["module_0", "module_2", "module_2 backward"]
    assert {e.way for e in sweeps} == {way} and next(s for s, _ in found.sweeps()).name == "sum by destination"
    bounds = part.shard.incoming.bounds
    for sweep, width in zip(sweeps, (6, 5, 5), strict=True):
        inside = [e for e in found.events if e.rank == rank and e.sweep == sweep.sweep]
        stages = [e for e in inside if e.kind == "stage"]
        sent = [e for e in inside if e.is_transfer]
        assert all(sweep.start_ms <= e.start_ms <= e.end_ms <= sweep.end_ms for e in inside)
        assert all(a.end_ms <= b.start_ms for a, b in itertools.pairwise(stages))
        if way == "broadcast":
            assert [e.block for e in stages] == list(range(size))
            owners = [rank, *(owner for owner in range(size) if owner != rank)]  # whose rows a stage reads
            for block in range(size):
                rows, read = bounds[block + 1] - bounds[block], [e for e in sent if e.block == block]
                # A row, and the root of its degree.
                # Two ranks exchange, of which only what arrives here is noted.
                assert sorted(e.num_bytes for e in read) == [8 * rows, 8 * rows * width] * (block != rank or size > 2)
                stage = owners.index(block)
                if block != rank:  # there when it is read, and on its way while the stage before is computed
                    assert all(e.end_ms <= stages[stage].start_ms for e in read)
                    assert all(e.start_ms <= stages[stage - 1].start_ms for e in read)
        else:
            side = part.shard.outgoing if "backward" in sweep.layer else part.shard.incoming
            # A kernel takes all edges at once, when all rows are there.
            assert [e.block for e in stages] == ([0] if selection.interpreted() else [0, 1])
            assert {e.name for e in sent} == {"exchange"}
            assert sorted(e.num_bytes for e in sent) == [8 * side.halo.numel(), 8 * side.halo.numel() * width]
            assert all(e.start_ms <= stages[0].start_ms and e.end_ms <= stages[-1].start_ms for e in sent)
    assert 0 <= found.overlap.share <= 1
    return count


# --- what is refused --------------------------------------------------------------------------------------------


def refused(kind: type[Exception], message: str, function: Any, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        function(*args, **kwargs)


def check_refused_options(rank: int, size: int) -> None:
    case = make_case("prime")
    graph = Graph.from_edge_index(case.edge_index, case.size)
    refused(errors.InputError, "Expected 'way' to be one of broadcast, halo, feature_split, auto (got 'hallo')", shard,
            graph, "hallo")
    refused(errors.InputError, "to have 2 parts, one per process (got [3])", shard, graph,
            partition=Partition.from_owner(torch.arange(97) % 3, 3))
    refused(errors.InputError, "a pair of them or the name of a method", shard, graph, partition=(1, 2))
    part = shard(graph)
    part.group.takes_cpu = False  # as of a group of NCCL
    refused(errors.InputError, "'tensor' to be on a GPU: this process group sends from GPUs only (got one on cpu)",
            part.group.reduce, torch.zeros(1))
    part.group.takes_cpu = True
    refused(errors.InputError, "to have 97 rows, one per dst", part.take, torch.zeros(96))
    refused(errors.InputError, "Expected 'per' to be 'src', 'dst' or 'edge'", part.take, torch.zeros(97), "node")
    refused(errors.InputError, "one per edge of this rank", part.join, torch.zeros(1), "edge")
    refused(errors.RowCountError, f"to have {part.num_dst} rows", fused_nn.GCNConv(3, 2), torch.zeros(97, 3), part)


def check_refused_operations(rank: int, size: int) -> None:
    part = sharded(make_case("prime"), "halo", size)
    for operation in (part.clone, lambda: part + 1, part.max, lambda: part[0].max(), lambda: pickle.dumps(part)):
        refused(errors.ShardedGraphError, "to be used by fused layers only", operation)
    assert part[1].max() < part.num_dst
    assert "rank=" in repr(part) and "way='halo'" in repr(part)


def check_refused_layers(rank: int, size: int) -> None:
    """Each on every rank alike, and named; nobody waits for the others."""
    case, pair = make_case("prime"), make_case("bipartite")
    part, between = sharded(case, "halo", size), sharded(pair, "halo", size)
    x = torch.zeros(part.num_dst, 6).double()
    for name, reason in (("rgat_add_within_None", "branches on values"), ("han", "averages over all nodes"),
                         ("hgt", "aten.clone")):
        layer = LAYERS[name]
        extra = {"edge_type": torch.zeros(part.num_edges, dtype=torch.int64)} if "rgat" in name else {"y": x}
        refused(errors.PygFullgraphError, reason, call, layer.build(fused_nn), layer, x, part, extra)
    sampling = LAYERS["supergat_mx"].build(fused_nn).train()
    refused(errors.ShardedGraphError, "(got SuperGATConv, whose forward needs more: aten.", sampling, x, part)
    layer = LAYERS["gat_pair_loops"]
    rows = torch.zeros(between.num_src, 6).double(), torch.zeros(between.num_dst, 4).double()
    refused(errors.ShardedGraphError, "self-loops on a graph with different sources", call, layer.build(fused_nn),
            layer, rows, between, {})


def check_mismatches(rank: int, size: int) -> None:
    """What differs between ranks is said by all of them at the start."""
    case = make_case("prime")
    graph = Graph.from_edge_index(case.edge_index, case.size)
    permuted = case.edge_index[:, torch.randperm(case.num_edges, generator=torch.Generator().manual_seed(0))]
    ends = case.edge_index[0]
    apart = int((ends != ends[0]).nonzero()[0])
    swapped = case.edge_index.clone()
    swapped[0, [0, apart]] = swapped[0, [apart, 0]]
    for other in (case.edge_index.flip(0), permuted, swapped):
        given = graph if rank == 0 else Graph.from_edge_index(other, case.size)
        refused(errors.GroupError, "Expected 'graph' to be the same on every rank (got rank 0: (97", shard, given)
    refused(errors.GroupError, "'graph' to be the same on every rank (got rank 0: no error, rank 1: GraphTypeError",
            shard, graph if rank == 0 else "graph")
    refused(errors.GroupError, "'way' to be the same on every rank (got rank 0: halo, rank 1: broadcast", shard, graph,
            "halo" if rank == 0 else "broadcast")
    refused(errors.GroupError, "'way' to be the same on every rank (got rank 0: halo, rank 1: hallo", shard, graph,
            "halo" if rank == 0 else "hallo")
    refused(errors.GroupError, "'partition' to be the same on every rank", shard, graph, seed=rank)
    refused(errors.GroupError, "'partition' to be the same on every rank (got rank 0: no error, rank 1: InputError: ",
            shard, graph, partition="random" if rank == 0 else "rondom")
    parts = Partition.from_owner(torch.arange(97) % (2 + rank), 2 + rank)
    refused(errors.GroupError, "rank 0: no error, rank 1: InputError: Expected 'partition' to have 2 parts", shard,
            graph, partition=parts)
    refused(errors.GroupError, "'partition' to be the same on every rank", shard_edges, case.edge_index, parts)
    refused(errors.GroupError, "'module' to be the same on every rank", DistributedModel, fused_nn.GCNConv(3, 2 + rank))
    refused(errors.GroupError, "'0.p=0.25'], rank 1: ['  (0): Dropout(p=0.5, inplace=False)', '0.p=0.5'])",
            DistributedModel, torch.nn.Sequential(torch.nn.Dropout((1 + rank) / 4), fused_nn.SAGEConv(3, 2)))
    refused(errors.GroupError, "rank 1: ['SAGEConv(3, 2, aggr=mean)', \"itself.aggr='mean'\"])", DistributedModel,
            fused_nn.SAGEConv(3, 2, aggr="mean" if rank else "sum"))
    layers = [(lambda x: x, "x -> x"), torch.nn.ReLU()]
    DistributedModel(pyg_nn.Sequential("x", layers))  # addresses are no difference
    with alone():
        part = shard(graph)
    refused(errors.InputError, "to be divided over the processes of the model, [0, 1] (got [0])",
            DistributedModel(fused_nn.GCNConv(3, 2)), torch.zeros(97, 3), part)
