"""Sharded equals whole: every fused layer on parts of a graph, in float64, by processes that talk through gloo."""

import pytest
import sharded
from layers import MORE, MORE_PAIRS, PAIRS, SQUARE
from ranks import ranks

WAYS = ("halo", "broadcast")
# What sharded graphs refuse, and why.
REFUSED = {"han": "averages over all nodes", "hgt": "puts several edge types into one edge_index",
           "gat_pair_loops": "self-loops", "gatv2_pair_loops": "self-loops", "gat_pair_edge": "self-loops"}
PLAIN = {f"rgat_{mode}_within_{mod}" for mode in ("add", "mul") for mod in (None, "additive", "scaled", "f-additive",
                                                                          "f-scaled")}
ON_NODES = [layer.name for layer in (*SQUARE, *MORE) if layer.name not in {*REFUSED, *PLAIN}]
ON_PAIRS = [layer.name for layer in (*PAIRS, *MORE_PAIRS) if layer.name not in REFUSED]
#: Of seven parts: one per reducer, stage structure and kind of edge data.
FEW = ["gcn_weight", "gcn_reversed_weight", "sage", "sage_max", "sage_std", "sage_mul", "gat_edge", "gatv2", "gat_fill_max",
       "edge_conv", "cheb_weight", "transformer_edge", "rgcn", "fast_rgcn_bases", "pna", "gen_softmax", "appnp"]
BOTH = [("halo", False), ("broadcast", True)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_layers_equal_the_whole(size):
    ranks(size).run(sharded.check_layers, ON_NODES, "hub", *BOTH)
    ranks(size).run(sharded.check_layers, ON_PAIRS, "bipartite", *BOTH)


@pytest.mark.parametrize("size", [2, 3])
def test_layers_equal_the_whole_by_the_other_way(size):
    other = [("halo", True), ("broadcast", False)]
    ranks(size).run(sharded.check_layers, ON_NODES[::3], "isolated", *other)
    ranks(size).run(sharded.check_layers, FEW, "self_loops", *other)
    ranks(size).run(sharded.check_layers, ON_PAIRS, "bipartite_wide", *other)


def test_seven_parts():
    ranks(7).run(sharded.check_layers, FEW, "prime", *BOTH)
    ranks(7).run(sharded.check_layers, FEW, "isolated", ("broadcast", False))
