"""The Python of README and docs runs; what docs/layers.md says to fuse does, and what it says to be refused is."""

import re
from pathlib import Path

import pytest
import torch
import torch_geometric.nn as pyg_nn

import pyg_fullgraph as pfg
from pyg_fullgraph.nn import coverage

ROOT = Path(__file__).resolve().parents[1]
NUM_NODES, NUM_EDGES = 40, 200

pytestmark = pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning")


def blocks(path: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / path).read_text(), re.MULTILINE | re.DOTALL)


def surroundings(width: int) -> dict:
    generator = torch.Generator().manual_seed(0)
    return {
        "__name__": __name__, "n": NUM_NODES, "x": torch.randn(NUM_NODES, width, generator=generator),
        "edge_index": torch.randint(NUM_NODES, (2, NUM_EDGES), generator=generator),
        "edge_type": torch.randint(3, (NUM_EDGES,), generator=generator),
        "y": torch.randint(4, (NUM_NODES,), generator=generator), "train_mask": torch.arange(NUM_NODES) < 20,
    }


class Model(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.conv2 = pyg_nn.GATConv(width, 8), pyg_nn.GCNConv(8, 4)

    def forward(self, x, edge_index):
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


@pytest.mark.parametrize("path, width", [("docs/layers.md", 16), ("README.md", 128)])
def test_snippets_run(path, width, capsys):
    pfg.debug.reset()
    space = surroundings(width)
    space["model"] = Model(width)
    for number, text in enumerate(blocks(path)):
        exec(compile(text, f"{path}-{number}", "exec"), space)
    assert capsys.readouterr().out


def prose(path: Path) -> str:
    """A page without what it shows as code in lines of their own."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """What headings of a page are called in links, as GitHub does."""
    headings = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")], ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*\]\([^`\n]*`", "", prose(path))):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        assert file.exists(), f"{path.name} links to {target}"
        assert not anchor or anchor in anchors(file), f"{path.name} links to {target}"


def test_the_number_of_layers():
    for path in ("README.md", "CHANGELOG.md"):
        assert f"{len(coverage.FUSED)} layers of" in (ROOT / path).read_text()


def message(body):
    """A layer whose message is ``body``."""
    body.__name__ = "message"

    class Base(pfg.nn.MessagePassing):
        def __init__(self):
            super().__init__(aggr="sum")
            self.norm = torch.nn.BatchNorm1d(16)
            self.seen = []

        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

    return type("Mine", (Base,), {"message": body, "__module__": __name__})()


def collect(self, x_j):
    self.seen.append(x_j)
    return x_j


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


OUTSIDE = torch.randn(16)

# What docs/layers.md says is refused -> what it says to do instead.
REFUSED = {
    "mean over all edges": lambda self, x_j: x_j - x_j.mean(dim=0),
    "batch norm": lambda self, x_j: self.norm(x_j),
    "sort": lambda self, x_j: torch.sort(x_j, dim=1)[0],
    "topk": lambda self, x_j: torch.topk(x_j, 16, dim=1)[0],
    "branch": lambda self, x_j: x_j if x_j.sum() > 0 else -x_j,
    "number of edges": lambda self, x_j: x_j / x_j.size(0),
    "random": lambda self, x_j: x_j + torch.randn_like(x_j),
    "outside": lambda self, x_j: x_j * OUTSIDE,
    "item": lambda self, x_j: x_j * x_j[0, 0].item(),
    "function": lambda self, x_j: Twice.apply(x_j),
    "fft": lambda self, x_j: torch.fft.fft(x_j).real,
    "write": lambda self, x_j: x_j.mul_(2),
    "list": collect,
    "index": lambda self, x_j, index: x_j * index[:, None],
}
FUSED = {
    "layer norm": lambda self, x_j: torch.nn.functional.layer_norm(x_j, (16,)),
    "where": lambda self, x_j: torch.where(x_j[:, :1] > 0, x_j, 0.0),
    "dropout": lambda self, x_j: torch.nn.functional.dropout(x_j, 0.5),
    "write": lambda self, x_j: x_j.clone().mul_(2),
    "detach": lambda self, x_j: x_j.detach() * x_j,
    "cumsum of features": lambda self, x_j: x_j.cumsum(dim=1),
    "softmax of features": lambda self, x_j: torch.softmax(x_j, dim=-1),
    "gelu": lambda self, x_j: torch.nn.functional.gelu(x_j.flip(1)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_said_to_be_refused_is(name):
    space, layer = surroundings(16), message(REFUSED[name])
    pfg.debug.reset()
    layer(space["x"], space["edge_index"])
    assert pfg.debug.counters() == {"fused": 0, "plain": 1}
    assert pfg.debug.plain_reasons()["Mine.propagate"]


@pytest.mark.parametrize("name", FUSED)
def test_what_is_said_to_fuse_does(name):
    space, layer = surroundings(16), message(FUSED[name])
    with pfg.debug.strict():
        layer(space["x"], space["edge_index"])
