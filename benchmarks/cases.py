"""Benchmark cases by name: layer x graph x widths x dtype x direction.

``CASES[name]`` says what is timed; :class:`Problem` draws its graph, features and weights once, so that every provider
works on the same numbers.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg_nn
from torch import Tensor, nn
from torch_geometric.utils import remove_self_loops

from benchmarks import graphs
from benchmarks.edge_phases import edge_phases
from pyg_fullgraph.data import load_dataset
from pyg_fullgraph.errors import UnknownDatasetError


@dataclass(frozen=True)
class Case:
    """What to time.

    Attributes:
        name: As given to ``--case``.
        layer: Key of :data:`LAYERS`.
        graph: Key of :data:`benchmarks.graphs.SIZES`, relabelled at random if ``-shuffled`` follows, and numbered again
            if then the name of an order follows (``-community``); or the name of a shared dataset, whose own features
            are used.
        device: ``cuda`` or ``cpu``.
        num_in: Width of the features of a synthetic graph.
        width: Output features of the layer, of all heads together; of the first layer of a model.
        heads: Attention heads.
        is_model: Time a training step of a model (loss, backward, Adam) instead of one layer.
        num_layers: Of a model.
        last_heads: Heads of the model's last layer, which are averaged.
        num_classes: Of a model on a synthetic graph.
        dtype: Of features and parameters.
        direction: ``forward``, or ``step``: forward and backward.
        node_data: Widths of further node tensors that the layer is given.
        edge_data: Features of each edge; 0 for none.
        edge_kinds: Of how many kinds edges are; 0 where they are of none.
        needs_grad_x: Whether the features of a single layer get a gradient, as they do inside a model.
        needs_grad_edges: Whether the features of edges do.
        is_sampled: Plain PyG does not fit: check sampled rows, and gradients on a small graph.
        dropout: On the input of each layer of a model and on its attention, where it has one.
        compiles_adam: Whether Adam's step goes through ``torch.compile``, of all providers.
        gathers: Source rows read per edge in one step, at least, in elements of a row; None where that says little.
    """

    name: str
    layer: str
    graph: str
    device: str = "cuda"
    num_in: int = 256
    width: int = 256
    heads: int = 1
    is_model: bool = False
    num_layers: int = 2
    last_heads: int = 1
    num_classes: int = 0
    dtype: str = "float32"
    direction: str = "step"
    node_data: tuple[int, ...] = ()
    edge_data: int = 0
    edge_kinds: int = 0
    needs_grad_x: bool = True
    needs_grad_edges: bool = False
    is_sampled: bool = False
    dropout: float = 0.0
    compiles_adam: bool = False
    gathers: int | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


class AtPositions(nn.Module):
    """A layer of points, which has their positions ``[N, 3]`` after the graph, as other layers have their data."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, graph: Any, positions: Tensor) -> Tensor:
        """``[N, out]`` from ``x`` ``[N, in]``."""
        return self.conv(x, positions, graph)


class FromFirst(nn.Module):
    """A layer that is also given features from before the first one, which are its input here."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, graph: Any) -> Tensor:
        """``[N, in]`` from ``x`` ``[N, in]``."""
        return self.conv(x, x, graph)


def _mlp(*widths: int) -> nn.Sequential:
    layers = [[nn.Linear(i, o), nn.ReLU()] for i, o in itertools.pairwise(widths)]
    return nn.Sequential(*[*itertools.chain.from_iterable(layers)][:-1])


#: name -> (namespace, in, out, heads, is_last) -> layer. ``out`` counts all heads, except for an averaged last layer.
CONVS: dict[str, Callable[[SimpleNamespace, int, int, int, bool], nn.Module]] = {
    "gcn": lambda ns, i, o, h, last: ns.GCNConv(i, o),
    "sage": lambda ns, i, o, h, last: ns.SAGEConv(i, o),
    "sage-max": lambda ns, i, o, h, last: ns.SAGEConv(i, o, aggr="max"),
    "gin": lambda ns, i, o, h, last: ns.GINConv(nn.Linear(i, o)),
    "gat": lambda ns, i, o, h, last: ns.GATConv(i, o if last else o // h, heads=h, concat=not last),
    "gatv2": lambda ns, i, o, h, last: ns.GATv2Conv(i, o if last else o // h, heads=h, concat=not last),
    "gatv2-edges": lambda ns, i, o, h, last: ns.GATv2Conv(i, o if last else o // h, heads=h, concat=not last,
                                                          edge_dim=EDGE_FEATURES["gatv2-edges"]),
    "edgeconv": lambda ns, i, o, h, last: ns.EdgeConv(nn.Linear(2 * i, o), aggr="max"),
    "gmm": lambda ns, i, o, h, last: ns.GMMConv(i, o, dim=EDGE_FEATURES["gmm"], kernel_size=3),
    "transformer": lambda ns, i, o, h, last: ns.TransformerConv(i, o // h, heads=h),
    "res-gated": lambda ns, i, o, h, last: ns.ResGatedGraphConv(i, o),
    "pna": lambda ns, i, o, h, last: ns.PNAConv(i, o, ["mean", "min", "max", "std"],
                                                ["identity", "amplification", "attenuation"], _DEGREES),
    "edge-mlp": lambda ns, i, o, h, last: ns.EdgeConv(_mlp(2 * i, o, o), aggr="max"),
}
#: The other layers that take features, and at most an array of edge features, in the order of PyG's list.
MORE_CONVS: dict[str, Callable[[SimpleNamespace, int, int, int, bool], nn.Module]] = {
    "cheb": lambda ns, i, o, h, last: ns.ChebConv(i, o, K=3),
    "graph": lambda ns, i, o, h, last: ns.GraphConv(i, o),
    "gated-graph": lambda ns, i, o, h, last: ns.GatedGraphConv(o, num_layers=2),
    "res-gated-edges": lambda ns, i, o, h, last: ns.ResGatedGraphConv(i, o, edge_dim=EDGE_FEATURES["res-gated-edges"]),
    "gat-edges": lambda ns, i, o, h, last: ns.GATConv(i, o if last else o // h, heads=h, concat=not last,
                                                      edge_dim=EDGE_FEATURES["gat-edges"]),
    "transformer-edges": lambda ns, i, o, h, last: ns.TransformerConv(i, o // h, heads=h,
                                                                      edge_dim=EDGE_FEATURES["transformer-edges"]),
    "agnn": lambda ns, i, o, h, last: ns.AGNNConv(),
    "tag": lambda ns, i, o, h, last: ns.TAGConv(i, o),
    "fa": lambda ns, i, o, h, last: FromFirst(ns.FAConv(i)),
    "gine": lambda ns, i, o, h, last: ns.GINEConv(nn.Linear(i, o), edge_dim=EDGE_FEATURES["gine"]),
    "arma": lambda ns, i, o, h, last: ns.ARMAConv(i, o),
    "sg": lambda ns, i, o, h, last: ns.SGConv(i, o, K=2),
    "appnp": lambda ns, i, o, h, last: ns.APPNP(K=10, alpha=0.1),
    "mf": lambda ns, i, o, h, last: ns.MFConv(i, o),
    "cg": lambda ns, i, o, h, last: ns.CGConv(i, dim=EDGE_FEATURES["cg"]),
    "feast": lambda ns, i, o, h, last: ns.FeaStConv(i, o, heads=h),
    "le": lambda ns, i, o, h, last: ns.LEConv(i, o),
    "pna-edges": lambda ns, i, o, h, last: ns.PNAConv(
        i, o, ["mean", "min", "max", "std"], ["identity", "amplification", "attenuation"], _DEGREES,
        edge_dim=EDGE_FEATURES["pna-edges"]),
    "cluster": lambda ns, i, o, h, last: ns.ClusterGCNConv(i, o),
    "gen": lambda ns, i, o, h, last: ns.GENConv(i, o, norm="layer"),
    "gen-edges": lambda ns, i, o, h, last: ns.GENConv(i, o, norm="layer", edge_dim=EDGE_FEATURES["gen-edges"]),
    "film": lambda ns, i, o, h, last: ns.FiLMConv(i, o),
    "supergat": lambda ns, i, o, h, last: ns.SuperGATConv(i, o // h, heads=h).eval(),
    "eg": lambda ns, i, o, h, last: ns.EGConv(i, o, ["sum", "mean", "max"]),
    "pdn": lambda ns, i, o, h, last: ns.PDNConv(i, o, edge_dim=EDGE_FEATURES["pdn"], hidden_channels=16),
    "general": lambda ns, i, o, h, last: ns.GeneralConv(i, o, in_edge_channels=EDGE_FEATURES["general"], attention=True,
                                                        heads=h),
    "mixhop": lambda ns, i, o, h, last: ns.MixHopConv(i, o // 2, powers=[1, 2]),
}
#: Those with a matrix per kind of edge; their ``edge_type`` is their third argument.
KIND_CONVS: dict[str, Callable[[SimpleNamespace, int, int, int, bool], nn.Module]] = {
    "rgat": lambda ns, i, o, h, last: ns.RGATConv(i, o // h, EDGE_KINDS, heads=h),
    "fast-rgcn": lambda ns, i, o, h, last: ns.FastRGCNConv(i, o, EDGE_KINDS),
    "rgcn": lambda ns, i, o, h, last: ns.RGCNConv(i, o, EDGE_KINDS),
}
#: The same for edge phases alone, see :mod:`benchmarks.edge_phases`.
PHASES: dict[str, Callable[[SimpleNamespace, int, int, int, bool], nn.Module]] = {
    "sum": lambda ns, i, o, h, last: ns.Sum(),
    "gat-phase": lambda ns, i, o, h, last: ns.GATAttention(h),
    "gatv2-phase": lambda ns, i, o, h, last: ns.GATv2Attention(h, o),
    "dot-phase": lambda ns, i, o, h, last: ns.DotAttention(h),
}
#: Layers with more products of edge values with matrices.
PRODUCT_CONVS: dict[str, Callable[[SimpleNamespace, int, int, int, bool], nn.Module]] = {
    # Not the maximum: where rounding makes another edge the largest, of two million, gradients are 1e-3 off.
    "edge-mlp-deep": lambda ns, i, o, h, last: ns.EdgeConv(nn.Sequential(_mlp(2 * i, o, o, o), nn.ReLU()), aggr="mean"),
    "point-transformer": lambda ns, i, o, h, last: AtPositions(ns.PointTransformerConv(
        i, o, _mlp(3, o, o), _mlp(o, o, o), add_self_loops=False)),
    "filters": lambda ns, i, o, h, last: ns.Filters(i, EDGE_FEATURES["filters"], o, o),
    "filters-16": lambda ns, i, o, h, last: ns.Filters(i, EDGE_FEATURES["filters-16"], 16, o),
    "scored": lambda ns, i, o, h, last: ns.Scored(i, o, h, o),
}
#: Layers whose ``forward`` computes with ids of edges, written out.
ID_CONVS: dict[str, Callable[[SimpleNamespace, int, int, int, bool], nn.Module]] = {
    "gcn-written-out": lambda ns, i, o, h, last: ns.Normalized(i, o),
}
LAYERS = {**CONVS, **MORE_CONVS, **KIND_CONVS, **PRODUCT_CONVS, **ID_CONVS, **PHASES}
#: Kinds of edges of the layers that have some.
EDGE_KINDS = 4
#: How many nodes have 0, 1, 2 ... edges, as far as PNA's scalers ask: a mean of log(degree + 1).
_DEGREES = torch.tensor([0, 10, 20, 30, 20, 10])
#: Features per edge of the layers that take some.
EDGE_FEATURES = {"gmm": 2, **dict.fromkeys(("gatv2-edges", "res-gated-edges", "gat-edges", "transformer-edges", "gine",
                                            "cg", "pna-edges", "gen-edges", "pdn", "general", "filters",
                                            "filters-16"), 8)}
_ATTENTION = ("gat", "gatv2", "gatv2-edges", "transformer", "gat-edges", "transformer-edges", "feast", "supergat",
              "general", "rgat", "scored")
#: Rows of the case's width that a step must read per edge: forward and backward, each source row once per pass.
_GATHERS = {("gcn", "forward"): 1, ("gcn", "step"): 2, ("sage", "forward"): 1, ("sage", "step"): 2,
            ("gin", "forward"): 1, ("gin", "step"): 2, ("gat", "forward"): 1, ("gat", "step"): 2,
            ("gatv2", "forward"): 1, ("gatv2", "step"): 4, ("sum", "forward"): 1, ("sum", "step"): 2,
            ("gat-phase", "forward"): 1, ("gat-phase", "step"): 2, ("gatv2-phase", "forward"): 1,
            ("gatv2-phase", "step"): 4, ("dot-phase", "forward"): 2, ("dot-phase", "step"): 5}


def _layer_case(layer: str, graph: str, dtype: str = "float32", direction: str = "step") -> Case:
    name = f"{layer}-{graph}" + ("" if dtype == "float32" else f"-{dtype}")
    gathers = _GATHERS.get((layer, direction))
    return Case(name + ("-forward" if direction == "forward" else ""), layer, graph, dtype=dtype, direction=direction,
                heads=4 if layer in _ATTENTION else 1, edge_data=EDGE_FEATURES.get(layer, 0),
                is_sampled=graph in _LARGE, gathers=None if gathers is None else 256 * gathers)


def _phase_case(layer: str, graph: str, width: int = 256, heads: int = 4, dtype: str = "float32",
                direction: str = "step") -> Case:
    """One edge phase without linear maps; ``graph`` may end in ``-shuffled`` and the name of an order."""
    more = {"gat-phase": (heads, heads), "gatv2-phase": (width,), "dot-phase": (width, width)}.get(layer, ())
    name = "-".join([layer, graph, str(width), *([] if dtype == "float32" else [dtype]),
                     *(["forward"] if direction == "forward" else [])])
    return Case(name, layer, graph, num_in=width, width=width, heads=heads, dtype=dtype, direction=direction,
                node_data=more, is_sampled=graphs.Name.of(graph).base in _LARGE,
                gathers=width * _GATHERS[layer, direction])


def first_use_case(layer: str, device: str) -> Case:
    """A layer of the usual width on a graph so small that a step takes little time."""
    width = 64 if layer == "edge-mlp" or device == "cpu" else 256  # as in the cases that time steps
    return Case(f"first-use-{layer}", layer, "tiny", device, width, width, heads=4 if layer in _ATTENTION else 1,
                edge_data=EDGE_FEATURES.get(layer, 0))


def _cpu_case(layer: str, graph: str, is_model: bool) -> Case:
    return Case(f"cpu-{layer}-{graph}-{'model' if is_model else 'layer'}", layer, graph, "cpu", width=64,
                heads=8 if layer in _ATTENTION else 1, is_model=is_model, needs_grad_x=False)


#: Graphs on which plain PyG runs out of memory.
_LARGE = ("reddit", "products")
_ORDERS = ("", graphs.SHUFFLED)
_PER_EDGE = (("filters", 64), ("filters-16", 100), ("scored", 100), ("edge-mlp", 64))
#: Graphs that nothing was made for, and layers on them with their widths.
_OTHER_GRAPHS = {
    "road": (*_PER_EDGE, *((layer, 64) for layer in {**CONVS, **MORE_CONVS, **ID_CONVS} if layer != "edge-mlp")),
    "filled": _PER_EDGE,
    "hubs": tuple((layer, 96) for layer in {**CONVS, **MORE_CONVS, **ID_CONVS}),
    "village": tuple((layer, 64) for layer in {**CONVS, **MORE_CONVS, **ID_CONVS}),
}
#: With what a name ends for each.
_DTYPES = (("float32", ""), ("bfloat16", "-bfloat16"))
#: Those that are timed in half precision, too.
_HALF = {"hubs": "bfloat16", "village": "float16"}
#: What an order is worth: of graphs that were relabelled at random, by reordering them.
_REORDERED = tuple(f"{graphs.SHUFFLED}-{method}" for method in ("degree", "rcm", "community"))
SHARED = ("cora", "citeseer", "amazon_computers", "coauthor_cs", "tolokers")
CASES: dict[str, Case] = {c.name: c for c in [
    Case("train-gat-reddit", "gat", "reddit", num_in=602, width=256, heads=4, is_model=True, last_heads=4,
         num_classes=41, is_sampled=True, gathers=2 * 256 + 2 * 4 * 41),
    *[Case(f"train-gat-cora{name}", "gat", "cora", width=64, heads=8, is_model=True, dropout=0.6,  # as in GAT's paper
           compiles_adam=bool(name)) for name in ("", "-compiled-adam")],
    *[Case(f"train-gcn-{graph}", "gcn", graph, num_in=num_in, width=256, is_model=True, num_layers=3,
           num_classes=num_classes, dropout=0.5, is_sampled=graph in _LARGE)
      for graph, num_in, num_classes in (("arxiv", 128, 40), ("products", 100, 47))],
    Case("train-gat-tiny", "gat", "tiny", "cpu", num_in=12, width=16, heads=4, is_model=True, last_heads=4,
         num_classes=5),
    Case("gcn-tiny", "gcn", "tiny", "cpu", num_in=12, width=16),
    *[_layer_case(layer, graph) for graph in ("arxiv", "reddit") for layer in CONVS if graph == "arxiv"
      or layer in ("gat", "gatv2", "sage")],
    *[_layer_case(layer, "arxiv") for layer in {**MORE_CONVS, **ID_CONVS}],
    *[Case(f"{layer}-arxiv-64", layer, "arxiv", num_in=64, width=64, heads=4 if layer in _ATTENTION else 1,
           edge_kinds=EDGE_KINDS, is_sampled=True) for layer in KIND_CONVS],  # of two PyG has a matrix per edge
    *[_layer_case(layer, "arxiv", "bfloat16") for layer in ("sage", "gat", "edge-mlp")],
    *[_layer_case(layer, "arxiv", direction="forward") for layer in ("sage", "gat")],
    *[Case(f"rgcn-{graph}-{width}", "rgcn", graph, num_in=width, width=width, edge_kinds=EDGE_KINDS)
      for graph, width in (("road", 64), ("hubs", 96), ("village", 64))],
    Case("edgeconv-points", "edgeconv", "points", num_in=256, width=256),
    Case("edge-mlp-points", "edge-mlp", "points", num_in=64, width=64),
    *[Case(f"edge-mlp-arxiv-{width}", "edge-mlp", "arxiv", num_in=width, width=width) for width in (64, 128)],
    *[Case(f"edge-mlp-deep-{graph}{end}", "edge-mlp-deep", graph, num_in=width, width=width, dtype=dtype)
      for graph, width in (("points", 64), ("mesh", 256)) for dtype, end in _DTYPES],
    *[Case(f"point-transformer-{graph}{end}", "point-transformer", graph, num_in=width, width=width, node_data=(3,),
           dtype=dtype) for graph, width in (("points", 64), ("mesh", 256)) for dtype, end in _DTYPES],
    *[Case("-".join([layer, graph, str(width), *([] if dtype == "float32" else [dtype])]), layer, graph, num_in=width,
           width=width, heads=4 if layer in _ATTENTION else 1, dtype=dtype, edge_data=EDGE_FEATURES.get(layer, 0))
      for graph, layers in _OTHER_GRAPHS.items() for layer, width in layers
      for dtype in ("float32", *([_HALF[graph]] if graph in _HALF else []))],
    *[_phase_case("sum", graph + order, width, 1, dtype, "forward") for graph in ("arxiv", *_LARGE)
      for order in _ORDERS for width in (32, 128, 256) for dtype in ("float32", "bfloat16")],
    *[_phase_case("sum", "small", width, 1, direction="forward") for width in (32, 256)],
    *[_phase_case("sum", graph + order, width, 1, direction="forward") for graph in ("arxiv", *_LARGE)
      for order in _REORDERED for width in (32, 128, 256)],
    *[_phase_case("gat-phase", graph + order) for graph in ("arxiv", *_LARGE)
      for order in (graphs.SHUFFLED, graphs.SHUFFLED + "-community")],
    *[_phase_case("sum", graph, heads=1) for graph in _LARGE],
    *[_phase_case(layer, graph, dtype=dtype) for layer in ("gat-phase", "gatv2-phase", "dot-phase")
      for graph in ("small", "arxiv", *_LARGE) for dtype in ("float32", "float16")],
    *[_phase_case("dot-phase", graph, 128, 1, "float16", direction) for graph in _LARGE
      for direction in ("forward", "step")],
    *[Case(f"dot-phase-{graph}", "dot-phase", graph, num_in=1024, width=1024, heads=16, dtype="float16",
           node_data=(1024, 1024), edge_data=1024, needs_grad_edges=True) for graph in ("mesh", "icosphere")],
    Case("gatv2-phase-tiny", "gatv2-phase", "tiny", "cpu", num_in=16, width=16, heads=4, node_data=(16,)),
    Case("sum-tiny", "sum", "tiny-shuffled", "cpu", num_in=16, width=16),
    Case("sum-tiny-community", "sum", "tiny-shuffled-community", "cpu", num_in=16, width=16),
    *[_cpu_case(layer, graph, is_model) for graph in SHARED for layer in ("gcn", "sage", "gat")
      for is_model in (False, True)],
]}


def select(patterns: str) -> list[Case]:
    """Cases whose names match any of the comma-separated shell patterns, in the order of the patterns.

    Raises:
        KeyError: A pattern matches nothing.
    """
    chosen: dict[str, Case] = {}
    for pattern in patterns.split(","):
        names = [n for n in CASES if fnmatchcase(n, pattern.strip())]
        if not names:
            raise KeyError(f"Expected the name of a case (got {pattern!r}); known: {', '.join(CASES)}")
        chosen.update((n, CASES[n]) for n in names)
    return list(chosen.values())


class CaseSkipped(Exception):
    """A case cannot run here; says why."""


class Net(nn.Module):
    """One layer, or several with an activation between them."""

    def __init__(self, layers: SimpleNamespace, case: Case, num_in: int, num_classes: int) -> None:
        super().__init__()
        make = LAYERS[case.layer]
        convs = [make(layers, num_in, case.width, case.heads, False)]
        if case.is_model:
            convs += [make(layers, case.width, case.width, case.heads, False) for _ in range(case.num_layers - 2)]
            convs.append(make(layers, case.width, num_classes, case.last_heads, True))
        self.convs = nn.ModuleList(convs)
        self.dropout = case.dropout
        for conv in convs if case.dropout else ():
            conv.dropout = case.dropout
        self.between = layers.between if case.is_model else None
        self.activation = "elu" if case.layer in _ATTENTION else "relu"

    def forward(self, x: Tensor, graph: Any, *data: Tensor) -> Tensor:
        """Scores ``[N, width]`` from ``x`` ``[N, in]``; ``data`` has a row per node or edge."""
        for k, conv in enumerate(self.convs):
            if k:
                x = self.between(x, self.activation, self.dropout, self.training)
            elif self.dropout:
                x = F.dropout(x, self.dropout, self.training)
            x = conv(x, graph, *data)
        return x


class Problem:
    """Graph, features, labels and weights of a case, drawn once from ``seed``.

    Attributes:
        edge_index: ``[2, E]``.
        x: ``[N, F]``.
        y, mask: Labels and training nodes, of a model.
        grad: What is fed back into a single layer, ``[N, width]``.
        node_data, edge_data: Further arguments of the layer, one row per node or edge.
        state: Weights, by PyG's names.
    """

    def __init__(self, case: Case, seed: int = 0, graph: str | None = None) -> None:
        self.case, device, dtype = case, case.device, case.torch_dtype
        torch.manual_seed(seed)
        generator = torch.Generator(device).manual_seed(seed)
        name = graph or case.graph
        num_classes = case.num_classes
        base = graphs.Name.of(name).base
        if base in graphs.SIZES:
            count = graphs.num_nodes(graphs.SIZES[base])
            self.edge_index = graphs.draw_named(name, device, seed)
            if case.layer == "pdn":  # of several loops of a node PyG's normalization takes the weight of any
                self.edge_index = remove_self_loops(self.edge_index)[0]
            self.x = torch.randn((count, case.num_in), generator=generator, device=device)
            if case.layer == "sage-max":
                # Ranks instead of values: where two sources tie, PyG and we give the gradient to other edges. None is
                # 0, from which torch's reduction starts, and which it takes for one more of those that tie.
                self.x = ((self.x.argsort(0).argsort(0) + 0.25) / count - 0.5) * 12**0.5
            self.x = self.x.to(dtype)
            if case.is_model:
                self.y = torch.randint(num_classes, (count,), generator=generator, device=device)
                self.mask = torch.rand(count, generator=generator, device=device) < 0.66
        else:
            data = _shared_dataset(name).to(device)
            num_classes, self.edge_index, self.x = data.num_classes, data.edge_index, data.x.to(dtype)
            self.y, self.mask = data.y, data.train_mask
        self.num_classes = num_classes
        self.num_nodes, self.num_edges = self.x.shape[0], self.edge_index.shape[1]
        self.node_data = tuple(torch.randn((self.num_nodes, width), generator=generator, device=device).to(dtype)
                               for width in case.node_data)
        edges = [case.edge_data] if case.edge_data else []
        self.edge_data = tuple(torch.rand((self.num_edges, width), generator=generator, device=device).to(dtype)
                               for width in edges)
        if case.edge_kinds:
            kinds = torch.randint(case.edge_kinds, (self.num_edges,), generator=generator, device=device)
            self.edge_data = (kinds, *self.edge_data)
        self.grad = None if case.is_model else torch.randn(
            (self.num_nodes, case.width), generator=generator, device=device).to(dtype)
        self.state = self.net(edge_phases(pyg_nn)).state_dict()

    def net(self, layers: SimpleNamespace) -> Net:
        """The module of the case out of the classes in ``layers``, with this problem's weights once it has them."""
        net = Net(layers, self.case, self.x.shape[1], self.num_classes)
        if hasattr(self, "state"):
            net.load_state_dict(self.state)
        return net.to(self.case.device, self.case.torch_dtype)


def shared_file(name: str) -> Path:
    """The file of a shared dataset. Raises: CaseSkipped where there is none."""
    folder = Path(os.environ.get("PFG_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")
    path = folder / f"{name}.npz"
    if not path.is_file():
        raise CaseSkipped(f"no file {path.name} in the data folder; set PFG_DATA")
    return path


def _shared_dataset(name: str) -> Any:
    try:
        return load_dataset(shared_file(name))
    except UnknownDatasetError as error:
        raise CaseSkipped(str(error)) from error
