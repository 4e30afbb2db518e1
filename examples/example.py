"""What the examples share: a command line, a training loop, and two kinds of data.

Each example is a model written with ordinary ``message()`` methods; see the script's own text for what it computes.
``python examples/ggnn.py --epochs 50`` trains it; ``--help`` lists the options.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from torch_geometric.data import Data

from pyg_fullgraph import debug
from pyg_fullgraph.data import generate, load_dataset


class NodeClassifier(nn.Module):
    """Graph layers one after the other, then a linear map to the classes.

    Args: layers: called as ``layer(x, edge_index, *edge_data)``. width: of the last one. num_classes: C.
        edge_data: names of the per-edge tensors in the data that every layer takes.
    """

    def __init__(self, layers: Sequence[nn.Module], width: int, num_classes: int, edge_data: Sequence[str] = ()):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.classify = nn.Linear(width, num_classes)
        self.edge_data = tuple(edge_data)

    def forward(self, data: Data) -> Tensor:
        x = data.x
        for layer in self.layers:
            x = layer(x, data.edge_index, *(data[name] for name in self.edge_data))
        return self.classify(x)


def node_data(size: int, seed: int, dataset: str = "generated") -> Data:
    """A graph whose nodes are to be classified: generated with ``size`` nodes, or a dataset by name or path."""
    found = generate(nodes=size, degree=10, seed=seed, signal=0.4) if dataset == "generated" else load_dataset(dataset)
    return Data(x=found.x, edge_index=found.edge_index, y=found.y, train_mask=found.train_mask,
                test_mask=found.test_mask, num_classes=found.num_classes)


@dataclass(frozen=True)
class Result:
    """Loss of every epoch, accuracy on the test part, and the counts of fused and plain edge phases."""

    losses: list[float]
    accuracy: float
    fused: int
    plain: int
    seconds: float


@dataclass(frozen=True)
class Example:
    """One model and its task.

    Attributes:
        make_data: ``make_data(size, seed)`` gives ``x, edge_index, y, train_mask, test_mask`` and what the model reads.
        make_model: Makes the model for such data; the model maps the data to one row of scores per entry of ``y``.
        size: Number of nodes or of point clouds by default.
        lr: Learning rate of Adam by default.
    """

    make_data: Callable[[int, int], Data]
    make_model: Callable[[Data], nn.Module]
    size: int = 2000
    lr: float = 0.01

    def train(self, epochs: int, size: int | None = None, lr: float | None = None, seed: int = 0,
              device: str = "cpu", dtype: torch.dtype = torch.float32, report: Callable[[str], None] = print) -> Result:
        """Train on the whole graph; says how it goes every tenth of the epochs.

        Raises:
            RuntimeError: an edge phase ran as plain PyG.
        """
        data = self.make_data(self.size if size is None else size, seed)
        data = data.apply(lambda t: t.to(device, dtype if t.is_floating_point() else t.dtype))
        torch.manual_seed(seed)
        model = self.make_model(data).to(device, dtype)
        optimizer = torch.optim.Adam(model.parameters(), lr=self.lr if lr is None else lr)
        debug.reset()
        losses, start = [], time.perf_counter()
        for epoch in range(epochs):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data)[data.train_mask], data.y[data.train_mask])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if epoch % max(1, epochs // 10) == 0 or epoch == epochs - 1:
                report(f"epoch {epoch + 1:4d}  loss {losses[-1]:.4f}")
        with torch.no_grad():
            predicted = model(data).argmax(-1)
        accuracy = (predicted == data.y)[data.test_mask].float().mean().item()
        counts = debug.counters()
        return Result(losses, accuracy, counts["fused"], counts["plain"], time.perf_counter() - start)

    def main(
        self,
        epochs: Annotated[int, typer.Option(help="Passes over the whole data.")] = 50,
        size: Annotated[int | None, typer.Option(help="Number of nodes or of point clouds.")] = None,
        lr: Annotated[float | None, typer.Option(help="Learning rate of Adam.")] = None,
        seed: Annotated[int, typer.Option(help="Of data and weights.")] = 0,
        device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda" if torch.cuda.is_available() else "cpu",
    ) -> None:
        result = self.train(epochs, size, lr, seed, device, report=typer.echo)
        typer.echo(f"test accuracy {result.accuracy:.3f}, {result.seconds:.1f} s; "
                   f"edge phases: {result.fused} fused, {result.plain} plain")
        if result.plain:
            raise RuntimeError(f"Expected every edge phase to run fused (got {debug.plain_reasons()})")

    def run(self) -> None:
        """The command line of a script."""
        typer.run(self.main)
