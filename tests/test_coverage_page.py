"""docs/coverage.md is what its command makes, and says something of every layer."""

import re
from pathlib import Path

import pytest
import torch_geometric.nn as pyg_nn

from pyg_fullgraph import coverage_page
from pyg_fullgraph.nn.coverage import FUSED, PARTS, PLAIN

PAGE = Path(__file__).resolve().parents[1] / "docs" / "coverage.md"


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == coverage_page.page(), "run: python -m pyg_fullgraph coverage --write docs/coverage.md"


def test_every_conv_of_pyg_has_its_row():
    named = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(named) == sorted([*FUSED, *PARTS, *PLAIN])
    assert set(pyg_nn.conv.__all__) - {"MessagePassing"} <= set(named)


@pytest.mark.parametrize("name", ["GCNConv", "PNAConv", "RGCNConv"])
def test_examples_run_fused(name):
    report = coverage_page.report(name)
    assert [v.verdict for v in report.layers.values()] == ["fused"]
