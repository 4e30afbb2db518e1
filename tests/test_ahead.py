"""Kernels compiled ahead of a first step: a step without data launches what the step launches, and disturbs nothing.

Tests marked `interpreter` compare launches: `TRITON_INTERPRET=1 python -m pytest -m interpreter tests/test_ahead.py`.
"""

import contextlib
import logging
import os
import threading
import types
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import triton
from layers import MORE_LAYERS, PAIRS, SQUARE, assert_same, run, twins
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend

from oracle import random_case
from pyg_fullgraph import ahead, autograd, debug, events, execution
from pyg_fullgraph.graph import Graph
from triton_kernels import launch, segment, tune

LAYERS = {layer.name: layer for layer in (*SQUARE, *PAIRS, *MORE_LAYERS)}
NAMES = ("gcn", "gcn_weight", "gcn_max", "sage", "sage_max", "sage_pair", "gin", "gat", "gat_edge", "gat_pair_edge",
         "gat_mean", "gatv2", "gatv2_edge", "gatv2_pair", "edge_conv", "edge_conv_mean", "edge_conv_linear", "gmm",
         "gmm_separate")
CASE, PAIR = random_case(61, 61, 701), random_case(53, 47, 701)


def layer_and_graph(name, device="cpu"):
    layer = LAYERS[name]
    case = PAIR if layer.is_pair else CASE
    return layer, case, Graph.from_edge_index(case.edge_index.to(device), case.size)
