"""Fused full-graph training of graph neural networks for PyTorch Geometric."""

import importlib
from typing import Any

import triton_kernels
from pyg_fullgraph._version import __version__
from pyg_fullgraph.errors import PackageConflictError

if getattr(triton_kernels, "OWNER", None) != "pyg-fullgraph":
    raise PackageConflictError(getattr(triton_kernels, "__file__", None) or str(list(triton_kernels.__path__)))

from pyg_fullgraph.graph import Graph
from triton_kernels.tune import tune_kernels

__all__ = ["ActivationDropout", "CapturedStep", "DistributedModel", "Graph", "ShardedGraph", "__version__",
           "activation_dropout", "capture", "convert", "debug", "explain", "nn", "reuse_constants", "revert", "shard",
           "timeline", "transforms", "tune_kernels", "use_tensor_cores"]

# Loaded on first use: they bring the compiler and all of torch_geometric.nn, which a graph alone does not need.
_MODULE_OF = {"ActivationDropout": "activation", "activation_dropout": "activation", "CapturedStep": "replay",
              "capture": "replay", "convert": "model", "explain": "explanation", "revert": "model", "debug": "",
              "nn": "", "reuse_constants": "reuse", "DistributedModel": "distributed", "ShardedGraph": "distributed",
              "shard": "distributed", "timeline": "distributed", "transforms": "", "use_tensor_cores": "dense"}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULE_OF[name] or name}")
    return getattr(module, name) if _MODULE_OF[name] else module


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
