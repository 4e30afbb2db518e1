"""The page docs/coverage.md: every layer of PyG with what becomes of it, from traces on a small graph.

``python -m pyg_fullgraph coverage --write docs/coverage.md`` makes it; a test asserts that it is up to date.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import pyg_fullgraph.nn as fused_nn
from pyg_fullgraph.explanation import Explanation, explain
from pyg_fullgraph.nn.coverage import FUSED, OPTIONS, PARTS, PLAIN
from pyg_fullgraph.program_report import PhaseReport, ProgramReport, kernels
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, Node
from pyg_fullgraph.saga.plans import KERNELS, Plan
from pyg_fullgraph.selection import chunk_reasons

__all__ = ["EXAMPLES", "page"]

F, FE, R = 64, 16, 4
NUM_NODES, NUM_EDGES = 200, 1500
_METADATA = (["a", "b"], [("a", "to", "b"), ("b", "to", "a")])

Example = tuple[Callable[[Any], nn.Module], Mapping[str, Any]]


def _mlp(num_in: int, num_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(num_in, 32), nn.ReLU(), nn.Linear(32, num_out))


def _draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).requires_grad_()


def _ids(kinds: int, rows: int) -> Tensor:
    return torch.randint(kinds, (rows,), generator=torch.Generator().manual_seed(kinds))


_EDGES = torch.randint(NUM_NODES, (2, NUM_EDGES), generator=torch.Generator().manual_seed(0))
_X, _POS, _ATTR, _TYPE = _draw(NUM_NODES, F), _draw(NUM_NODES, 3), _draw(NUM_EDGES, FE), _ids(R, NUM_EDGES)
_TYPES = {"x_dict": {"a": _X, "b": _draw(NUM_NODES, F)}, "edge_index_dict": dict.fromkeys(_METADATA[1], _EDGES)}
_NORMAL = torch.nn.functional.normalize(_POS.detach(), dim=-1).requires_grad_()

#: Name of a layer -> how an ordinary one is made, and what its forward gets beside ``x`` and ``edge_index``. ``None``
#: takes an argument away.
EXAMPLES: Mapping[str, Example] = {
    "AGNNConv": (lambda n: n.AGNNConv(), {}),
    "APPNP": (lambda n: n.APPNP(2, 0.1), {}),
    "ARMAConv": (lambda n: n.ARMAConv(F, F), {}),
    "CGConv": (lambda n: n.CGConv(F, FE), {"edge_attr": _ATTR}),
    "ChebConv": (lambda n: n.ChebConv(F, F, 3), {}),
    "ClusterGCNConv": (lambda n: n.ClusterGCNConv(F, F), {}),
    "DNAConv": (lambda n: n.DNAConv(F, heads=4), {"x": _draw(NUM_NODES, 3, F)}),
    "EGConv": (lambda n: n.EGConv(F, F, ["sum", "max"], num_heads=4), {}),
    "EdgeConv": (lambda n: n.EdgeConv(_mlp(2 * F, F)), {}),
    "FAConv": (lambda n: n.FAConv(F), {"x_0": _X}),
    "FastRGCNConv": (lambda n: n.FastRGCNConv(F, F, R), {"edge_type": _TYPE}),
    "FeaStConv": (lambda n: n.FeaStConv(F, F, heads=4), {}),
    "FiLMConv": (lambda n: n.FiLMConv(F, F), {}),
    "GATConv": (lambda n: n.GATConv(F, 16, heads=4), {}),
    "GATv2Conv": (lambda n: n.GATv2Conv(F, 16, heads=4), {}),
    "GCN2Conv": (lambda n: n.GCN2Conv(F, 0.1), {"x_0": _X}),
    "GCNConv": (lambda n: n.GCNConv(F, F), {}),
    "GENConv": (lambda n: n.GENConv(F, F, edge_dim=FE, norm=None), {"edge_attr": _ATTR}),
    "GINConv": (lambda n: n.GINConv(_mlp(F, F)), {}),
    "GINEConv": (lambda n: n.GINEConv(_mlp(F, F), edge_dim=FE), {"edge_attr": _ATTR}),
    "GMMConv": (lambda n: n.GMMConv(F, F, FE, 3), {"edge_attr": _ATTR}),
    "GatedGraphConv": (lambda n: n.GatedGraphConv(F, 2), {}),
    "GeneralConv": (lambda n: n.GeneralConv(F, F, in_edge_channels=FE, attention=True), {"edge_attr": _ATTR}),
    "GraphConv": (lambda n: n.GraphConv(F, F), {}),
    "HANConv": (lambda n: n.HANConv(F, F, _METADATA, heads=4), {"x": None, "edge_index": None, **_TYPES}),
    "HEATConv": (lambda n: n.HEATConv(F, F, 2, R, 8, FE, 8, heads=4),
                 {"node_type": _ids(2, NUM_NODES), "edge_type": _TYPE, "edge_attr": _ATTR}),
    "HGTConv": (lambda n: n.HGTConv(F, F, _METADATA, 4), {"x": None, "edge_index": None, **_TYPES}),
    "HypergraphConv": (lambda n: n.HypergraphConv(F, F), {"edge_index": None, "hyperedge_index": _EDGES}),
    "LEConv": (lambda n: n.LEConv(F, F), {}),
    "LGConv": (lambda n: n.LGConv(), {}),
    "MFConv": (lambda n: n.MFConv(F, F, max_degree=4), {}),
    "MixHopConv": (lambda n: n.MixHopConv(F, F), {}),
    "NNConv": (lambda n: n.NNConv(8, 8, _mlp(FE, 64)), {"x": _draw(NUM_NODES, 8), "edge_attr": _ATTR}),
    "PDNConv": (lambda n: n.PDNConv(F, F, FE, 32), {"edge_attr": _ATTR}),
    "PNAConv": (lambda n: n.PNAConv(F, F, ["mean", "min", "max", "std"], ["identity", "amplification", "attenuation"],
                                    torch.bincount(torch.bincount(_EDGES[1]))), {}),
    "PPFConv": (lambda n: n.PPFConv(_mlp(F + 4, F)), {"pos": _POS, "normal": _NORMAL}),
    "PointGNNConv": (lambda n: n.PointGNNConv(_mlp(F, 3), _mlp(F + 3, F), _mlp(F, F)), {"pos": _POS}),
    "PointNetConv": (lambda n: n.PointNetConv(_mlp(F + 3, F)), {"pos": _POS}),
    "PointTransformerConv": (lambda n: n.PointTransformerConv(F, F), {"pos": _POS}),
    "RGATConv": (lambda n: n.RGATConv(F, 16, R, heads=4), {"edge_type": _TYPE}),
    "RGCNConv": (lambda n: n.RGCNConv(F, F, R), {"edge_type": _TYPE}),
    "ResGatedGraphConv": (lambda n: n.ResGatedGraphConv(F, F), {}),
    "SAGEConv": (lambda n: n.SAGEConv(F, F), {}),
    "SGConv": (lambda n: n.SGConv(F, F, 2), {}),
    "SSGConv": (lambda n: n.SSGConv(F, F, 0.1, 2), {}),
    "SignedConv": (lambda n: n.SignedConv(F, F, True),
                   {"edge_index": None, "pos_edge_index": _EDGES, "neg_edge_index": _EDGES.flip(0)}),
    "SimpleConv": (lambda n: n.SimpleConv(), {}),
    "SuperGATConv": (lambda n: n.SuperGATConv(F, 16, heads=4).eval(), {}),
    "TAGConv": (lambda n: n.TAGConv(F, F, 2), {}),
    "TransformerConv": (lambda n: n.TransformerConv(F, 16, heads=4), {}),
    "WLConvContinuous": (lambda n: n.WLConvContinuous(), {}),
}

#: Layers that look for neighbours with torch_cluster, which need not be here -> whose program they run.
_LIKE = {"DynamicEdgeConv": "that of EdgeConv, on the graph of the nearest neighbours",
         "GravNetConv": "a weighted mean and maximum in one pass, on the graph of the nearest neighbours",
         "PANConv": "a weighted sum, on a sum of sparse powers of the adjacency"}

_HEAD = """\
# Layers of PyG

Made by `python -m pyg_fullgraph coverage --write docs/coverage.md` from traces of one ordinary configuration of each
layer ({width} features, {edge_width} edge features, every input with a gradient); do not edit. Other options may give
other programs: `pyg_fullgraph.explain` says what a layer of yours does.

{num_fused} layers have a fused class in `pyg_fullgraph.nn`, {num_parts} pass messages through other layers, and
{num_plain} run as PyG has them. The configurations that are tested are in `tests/layers.py`.

- **once per vertex**: linear maps that `message` applies to nodes of an edge, or that the order of products moved, and
  that run once per vertex instead; sums over features of node data as well.
- **passes**: how often the edges are visited on a GPU, forward and backward, and in what: *kernels* are generated for
  the layer, *chunks* of edges run with torch where no kernel holds the work. On a CPU all passes run in chunks. Rows
  with very many edges are cut, and merged by the same kernel or a second small one. A program that a layer runs
  several times, as for powers of the adjacency, is counted once.
- **saved**: what backward needs beside the layer's own inputs, all with one row per vertex. Attention by dot products
  does without its result on a GPU where vertices have few edges.
"""


def page() -> str:
    """The text of the page."""
    names = sorted(FUSED)
    rows = [_row(name) for name in names]
    head = _HEAD.format(width=F, edge_width=FE, num_fused=len(FUSED), num_parts=len(PARTS), num_plain=len(PLAIN))
    parts = [f"| `{name}` | {where} |" for name, where in sorted(PARTS.items())]
    plain = [f"| `{name}` | {why} |" for name, why in sorted(PLAIN.items())]
    options = [f"| {_cell(what)} | {why} |" for what, why in OPTIONS.items()]
    columns = "| layer | for node i | once per vertex | passes forward | passes backward | saved |"
    lines = [head, "## Fused", "", columns, "|---|---|---|---|---|---|", *rows, "", "## Fused through their parts", "",
             "`convert` fuses the layers inside them. Models of `torch_geometric.nn.models`, `Sequential` and",
             "`to_hetero` are such wrappers too.", "", "| layer | its messages |", "|---|---|", *parts, "",
             "## Plain", "", "| layer | why |", "|---|---|", *plain, "", "## Plain by an option", "",
             "Of layers that are fused otherwise.", "", "| what | why |", "|---|---|", *options]
    return "\n".join(lines) + "\n"


def report(name: str) -> Explanation:
    """What the example of a layer does."""
    make, given = EXAMPLES[name]
    torch.manual_seed(0)
    args = {k: v for k, v in {"x": _X, "edge_index": _EDGES, **given}.items() if v is not None}
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        return explain(make(fused_nn), **args)


def _row(name: str) -> str:
    if name not in EXAMPLES:
        return f"| `{name}` | {_cell(FUSED[name])} | {_LIKE[name]} | | | |"
    layers = report(name).layers.values()
    parts = [p for layer in layers for p in layer.parts]
    reasons = [r for layer in layers for r in layer.reasons]
    phases = [(part, phase) for part in parts for phase in part.phases]
    forward = _passes([phase.forward(KERNELS) for _, phase in phases])
    backward = _passes([plan for _, phase in phases if (plan := phase.backward(KERNELS)) is not None])
    if reasons:
        forward += "; plain in part: " + "; ".join(reasons)
    moved, saved = _listed(_moved(phase) for _, phase in phases), _listed(_kept(*p) for p in phases)
    cells = (FUSED[name], moved, forward, backward, saved)
    return f"| `{name}` | " + " | ".join(_cell(c) for c in cells) + " |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _listed(texts: Any) -> str:
    count = Counter(t for group in texts for t in group)
    return ", ".join(t if n == 1 else f"{n} x {t}" for t, n in count.items()) or "-"


def _moved(phase: PhaseReport) -> list[str]:
    return [f"{_what(value)} {result.domain.label}{list(result.shape)}" for result, value in phase.hoisted.items()
            if result.domain != Domain.PARAM]


def _what(value: Node) -> str:
    ops = {n.op for n in ir.walk(value)}
    return "linear map" if "mm" in ops else "sum of features" if "sum" in ops else "features taken apart or joined"


def _kept(part: ProgramReport, phase: PhaseReport) -> list[str]:
    return [f"{part.saved_name(s, phase)} {list(s.node.shape)}" for s in phase.saved if not s.is_input]


def _passes(plans: list[Plan]) -> str:
    total, in_kernels = sum(len(p.sweeps) for p in plans), sum(kernels(p) for p in plans)
    reasons = dict.fromkeys(r for p in plans for sweep in p.sweeps for r in chunk_reasons(sweep))
    texts = [f"{in_kernels} in kernels"] * (in_kernels > 0)
    texts += [f"{total - in_kernels} in chunks ({'; '.join(reasons)})"] * (total > in_kernels)
    return ", ".join(texts) or "0"
