"""``python -m benchmarks.dense``: float32 products of tall matrices with small ones, by our kernels and by torch.

Each shape has three products: the result of a linear map, the gradient of its features and that of its weight. Ours are
run as the library runs them and by Triton's kernels (see :mod:`triton_kernels.dense`); torch's are cuBLAS with and
without TF32. Errors are against float64, relative to the largest right number: of results and gradients of features in
8192 rows, of gradients of weights in all. ``memory_share`` is what reading and writing every number once would take at
the speed of a copy.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor

from benchmarks import measure
from benchmarks.run import is_out_of_memory, results_file, write_row
from benchmarks.table import render_dense
from triton_kernels import dense
from triton_kernels.dense import Tile

#: Rows, and widths before and after a linear map.
SHAPES = "169343x256x256,169343x256x768,2449029x256x256,169343x128x128,232965x602x512"
PRODUCTS = ("forward", "grad_x", "grad_weight")
#: Of launches of Triton's kernels; None for the kernels that the library takes.
TILES: dict[str, tuple[Tile | None, ...]] = {"product": (None, Tile(64, 128, 32, 4)),
                                             "gradient": (None, Tile(128, 128, 32, 8))}
#: Rows at each end that results are compared in.
CHECKED_ROWS = 4096


@dataclass(frozen=True)
class Inputs:
    """``x [M, K]``, ``weight [N, K]`` and ``g [M, N]`` of one shape."""

    x: Tensor
    weight: Tensor
    g: Tensor

    @classmethod
    def draw(cls, rows: int, num_in: int, num_out: int, device: str) -> Inputs:
        generator = torch.Generator(device).manual_seed(0)
        x, weight, g = (torch.randn(shape, device=device, generator=generator)
                        for shape in ((rows, num_in), (num_out, num_in), (rows, num_out)))
        return cls(x, weight / num_in**0.5, g)

    def ours(self, product: str, tile: Tile | None) -> Tensor:
        if product == "forward":
            return dense.product(self.x, self.weight, tile=tile)
        if product == "grad_x":
            return dense.product(self.g, self.weight.t(), tile=tile)
        return dense.weight_gradient(self.g, self.x, False, tile)[0]

    def torchs(self, product: str, precision: str = "ieee") -> Tensor:
        before = torch.backends.cuda.matmul.fp32_precision
        torch.backends.cuda.matmul.fp32_precision = precision
        try:
            a, b = {"forward": (self.x, self.weight.t()), "grad_x": (self.g, self.weight),
                    "grad_weight": (self.g.t(), self.x)}[product]
            return a @ b
        finally:
            torch.backends.cuda.matmul.fp32_precision = before

    def ends(self) -> Inputs:
        return Inputs(_ends(self.x).double(), self.weight.double(), _ends(self.g).double())

    def exact(self, product: str) -> Tensor:
        """The product in float64, of rows at the ends where there are rows."""
        if product == "grad_weight":
            parts = zip(self.g.split(1 << 18), self.x.split(1 << 18), strict=True)
            return torch.stack([g.double().t() @ x.double() for g, x in parts]).sum(0)
        return self.ends().torchs(product)


def _ends(x: Tensor) -> Tensor:
    return x if len(x) <= 2 * CHECKED_ROWS else torch.cat([x[:CHECKED_ROWS], x[-CHECKED_ROWS:]])


def providers(inputs: Inputs, product: str) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Name and call of everything that is timed for one product."""
    for name, precision in (("cublas", "ieee"), ("cublas_tf32", "tf32")):
        yield name, lambda p=precision: inputs.torchs(product, p)
    for tile in TILES["gradient" if product == "grad_weight" else "product"]:
        name = "ours" if tile is None else \
            f"triton {tile.block_m}x{tile.block_n}x{tile.block_k} {tile.num_warps} warps {tile.num_stages} stages"
        yield name, lambda t=tile: inputs.ours(product, t)


def time_shape(rows: int, num_in: int, num_out: int, device: str, copy_gbs: float,
               budget_s: float) -> Iterator[dict[str, Any]]:
    """One row per product and provider."""
    inputs = Inputs.draw(rows, num_in, num_out, device)
    flops = 2 * rows * num_in * num_out
    floor_ms = 4 * (rows * (num_in + num_out) + num_in * num_out) / copy_gbs / 1e6
    for product in PRODUCTS:
        exact = inputs.exact(product)
        for provider, call in providers(inputs, product):
            row = {"case": f"dense-{product}-{rows}x{num_in}x{num_out}", "provider": provider, "kind": "dense",
                   "dtype": "float32", "num_nodes": rows, "num_in": num_in, "width": num_out}
            try:
                row["first_ms"] = round(measure.first_call_ms(call, device), 3)
                made = call()
                made = made if product == "grad_weight" else _ends(made)
                error = (made.double() - exact).abs().max() / exact.abs().max()
                row["check"] = {"against": "float64", "error": float(error)}
                times = measure.time_steps({provider: call}, device, budget_s, most=50)[provider]
                row.update(measure.percentiles(times), repeats=len(times))
                row["tflops"] = round(flops / row["p50_ms"] / 1e9, 1)
                row["memory_share"] = round(floor_ms / row["p50_ms"], 4)
            except Exception as failure:  # the others still come
                is_memory = is_out_of_memory(failure)
                row["error"] = "out of memory" if is_memory else f"{type(failure).__name__}: {str(failure)[:200]}"
            yield row


def main(
    shapes: Annotated[str, typer.Option(help="Rows x width before x width after, comma-separated.")] = SHAPES,
    also: Annotated[Path | None, typer.Option(help="A second file to append rows to.")] = None,
    save: Annotated[bool, typer.Option(help="Append rows to benchmarks/results.")] = True,
    budget_s: Annotated[float, typer.Option(help="Seconds of timing per product and provider.")] = 0.05,
    deadline_s: Annotated[float, typer.Option(help="Start no shape after this many seconds.")] = float("inf"),
    device: Annotated[str, typer.Option(help="cuda; cpu under Triton's interpreter, which says nothing of times.")]
    = "cuda",
) -> None:
    """Time products."""
    if device == "cuda":
        from benchmarks.ceilings import copy_gbs

        speed = copy_gbs()
    else:
        speed = float("nan")
    where, start, rows = measure.environment(device), time.perf_counter(), []
    for shape in shapes.split(","):
        if time.perf_counter() - start > deadline_s:
            print(f"not started, {deadline_s:.0f} s are over: {shape}", flush=True)
            continue
        num_rows, num_in, num_out = map(int, shape.split("x"))
        for row in time_shape(num_rows, num_in, num_out, device, speed, budget_s):
            row = {**row, **where}
            write_row(row, *([results_file(row)] if save else []), *([also] if also else []))
            rows.append(row)
    Console(width=150, file=sys.stdout).print(render_dense(rows))
    print(json.dumps({"seconds": round(time.perf_counter() - start, 1), "rows": len(rows)}), flush=True)
    if any("error" in row for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
