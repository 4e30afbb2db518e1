"""``python -m benchmarks.locality --graph arxiv-shuffled --method given,rcm,community``: what orders of vertices should
be worth, without a GPU. ``benchmarks/gpu.sh orders`` measures what they are.
"""

from __future__ import annotations

import time
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import graphs
from benchmarks.cases import CaseSkipped, shared_file
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.locality import locality
from pyg_fullgraph.order import ORDERS, Permutation, order_vertices

#: Bytes of a gathered row, and the megabytes of L2 up to which an H200 gathers at full speed (docs/results.md).
ROW_BYTES = (128, 512, 1024)
CACHE_MB = 32
#: Caches that hold these shares of all rows, for graphs whose rows all fit in L2.
SHARES = (0.01, 0.03, 0.1)
COLUMNS = ("graph", "order", "CPU s", "mean gap", *(f"hits, {share:.0%} of rows" for share in SHARES),
           *(f"hits, rows of {size} B" for size in ROW_BYTES))


def graph_of(name: str) -> Graph:
    """The graph of a name as in benchmark cases, drawn on the CPU, or of a shared file, ``NAME.npz``."""
    base = graphs.Name.of(name).base
    if base in graphs.SIZES:
        return Graph.from_edge_index(graphs.draw_named(name, "cpu"), graphs.num_nodes(graphs.SIZES[base]))
    with np.load(shared_file(name.removesuffix(".npz")), allow_pickle=False) as arrays:
        num_nodes = len(arrays["batch" if "batch" in arrays else "y"])
        return Graph.from_edge_index(torch.from_numpy(arrays["edge_index"]), num_nodes)


def lines(name: str, methods: list[str], cache_mb: float = CACHE_MB) -> list[list[str]]:
    """The columns for each method; ``given`` is the order as it is."""
    graph, found = graph_of(name), []
    sizes = [max(int(share * graph.num_src), 1) for share in SHARES]
    sizes += [int(cache_mb * 2**20) // size for size in ROW_BYTES]
    for method in methods:
        moved, spent = graph, ""
        if method != "given":
            start = time.process_time()
            order = order_vertices(graph, method)
            spent = f"{time.process_time() - start:.2f}"
            moved = Graph.from_edge_index(Permutation(order).renumber(graph.to_edge_index()), graph.num_src)
        seen = locality(moved, sizes)
        found.append([name, method, spent, f"{seen.mean_gap:,.0f}", *(f"{share:.0%}" for share in seen.hit_shares)])
    return found


def main(
    graph: Annotated[str, typer.Option(help="Names as in cases, and NAME.npz of the data folder, comma-separated.")],
    method: Annotated[str, typer.Option(help=f"given, or some of {', '.join(ORDERS)}.")] = "given,rcm,community",
    cache_mb: Annotated[float, typer.Option(help="Cache of the columns by bytes of a row.")] = CACHE_MB,
    markdown: Annotated[bool, typer.Option(help="A table for docs/reordering.md.")] = False,
) -> None:
    """Mean gap between the ends of edges, and the share of gathers that a cache should have, by order of vertices."""
    torch.set_num_threads(1)
    methods = method.split(",")
    unknown = [one for one in methods if one not in ("given", *ORDERS)]
    if unknown:
        raise typer.BadParameter(f"Expected methods out of given, {', '.join(ORDERS)} (got {', '.join(unknown)})")
    table = Table(*COLUMNS)
    if markdown:
        print("| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * 2 + " --: |" * (len(COLUMNS) - 2), flush=True)
    for name in graph.split(","):
        try:
            found = lines(name, methods, cache_mb)
        except CaseSkipped as reason:
            print(f"skipped {name}: {reason}", flush=True)
            continue
        for line in found:
            table.add_row(*line)
            if markdown:
                print("| " + " | ".join(line) + " |", flush=True)
    if not markdown:
        Console(width=150).print(table)


if __name__ == "__main__":
    typer.run(main)
