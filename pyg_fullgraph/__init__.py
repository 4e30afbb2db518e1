"""Fused full-graph training of graph neural networks for PyTorch Geometric."""

import triton_kernels
from pyg_fullgraph._version import __version__
from pyg_fullgraph.errors import PackageConflictError

if getattr(triton_kernels, "OWNER", None) != "pyg-fullgraph":
    raise PackageConflictError(getattr(triton_kernels, "__file__", None) or str(list(triton_kernels.__path__)))

from pyg_fullgraph.graph import Graph

__all__ = ["Graph", "__version__"]
