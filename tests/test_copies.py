"""Rows of other ranks by copies: the same as by collectives."""

import pytest
import sharded_copies
from ranks import ranks

EACH = [("halo", False), ("broadcast", True), ("feature_split", False)]
#: One per structure of sweeps and kind of edge data.
FEW = ["gcn_weight", "sage_max", "gat_edge", "gatv2", "edge_conv", "pna"]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_exchanges(size):
    ranks(size).run(sharded_copies.check_exchanges, "cpu")


@pytest.mark.parametrize("size, case", [(2, "hub"), (3, "isolated"), (4, "prime")])
def test_layers_equal_the_whole(size, case):
    ranks(size).run(sharded_copies.check_layers, FEW, case, *EACH)
    ranks(size).run(sharded_copies.check_layers, FEW[::2], case, *[(way, not uneven) for way, uneven in EACH])


def test_where_copies_are_not_possible():
    ranks(3).run(sharded_copies.check_elsewhere)


@pytest.mark.multi_gpu
def test_exchanges_by_copy_engines():
    ranks(2, "nccl").run(sharded_copies.check_exchanges, "cuda")


@pytest.mark.multi_gpu
@pytest.mark.parametrize("layer", ["gcn_weight", "gat_edge"])
def test_layers_equal_the_whole_by_copy_engines(layer):
    ranks(2, "nccl").run(sharded_copies.check_layers_by_engines, [layer], "isolated", *EACH)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("way", ["broadcast", "halo", "feature_split"])
def test_captured_steps(way):
    ranks(2, "nccl").run(sharded_copies.check_captured, way)
