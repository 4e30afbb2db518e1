"""Random layers on random graphs: whatever a user writes in message(), our base class computes what PyG's does.

``HYPOTHESIS_PROFILE=thorough`` runs fifty times as many examples.
"""

from __future__ import annotations

import os
import warnings

import pytest
import torch
import torch_geometric.nn as pyg_nn
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st
from random_layers import Text, Writer, answer, compile_layer, make_inputs
from torch.utils._pytree import tree_map_only

import pyg_fullgraph.nn as fused_nn
import zoo
from oracle import error
from pyg_fullgraph import debug

SCALE = 50 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 1
GRAPHS = [case for case in zoo.ALL if case.name not in ("hub", "prime")]
LIMIT = 1e-9
#: The same where torch multiplies by a sixth that is rounded to float32, in float64 as well: its hardswish on a GPU.
LIMIT_OF_A_SIXTH = 1e-7


def moved(inputs, device):
    return tree_map_only(torch.Tensor, lambda t: t.detach().to(device).requires_grad_(t.requires_grad), inputs)


def compare_layer(case, data, note=note, device="cpu"):
    """One random layer on PyG's base and on ours, in float64: results and every gradient."""
    text = Writer(data, case.is_square).write()
    note(f"{text}\non {case}")
    inputs = moved(make_inputs(text, case, data.draw(st.integers(0, 3))), device)
    want = answer(compile_layer(text, pyg_nn.MessagePassing).to(device), inputs)
    assume(all(torch.isfinite(t).all() for t in want.values()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", debug.PlainPathWarning)
        got = answer(compile_layer(text, fused_nn.MessagePassing).to(device), inputs)
    assert list(got) == list(want)
    assert [t.dtype for t in got.values()] == [t.dtype for t in want.values()]
    limit = LIMIT_OF_A_SIXTH if device == "cuda" and "hardswish" in str(text) else LIMIT
    wrong = {n: e for n, t in want.items() if not (e := error(got[n], t)) <= limit}
    assert not wrong, wrong


@settings(max_examples=100 * SCALE, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=st.sampled_from(GRAPHS), data=st.data())
def test_a_random_layer_means_what_it_means_in_pyg(case, data):
    compare_layer(case, data)


@pytest.mark.gpu
@settings(max_examples=10 * SCALE, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=st.sampled_from(GRAPHS), data=st.data())
def test_a_random_layer_on_a_gpu(case, data):
    compare_layer(case, data, device="cuda")


# --- found by the above -----------------------------------------------------------------------------------------

FOUND = {
    # Its derivative writes in place.
    "selu": Text(1, 2, "'max'", ["v0 = F.selu(x_j)"], result="v0"),
    # The gradient of a table that integer data points into.
    "matrix-of-the-type": Text(1, 3, "'mean'", ["v0 = torch.bmm(x_j.unsqueeze(1), self.p0[t]).squeeze(1)"], result="v0",
                               parameters={"p0": (3, 3, 2)}),
    # Without eps it takes that of the dtype.
    "eps-of-the-dtype": Text(1, 3, "'sum'", ["v0 = F.rms_norm(x_j, (3,))"], result="v0"),
    # torch 2.11 tells a wrong shape of the norm of one feature.
    "norm-of-one-feature": Text(2, 1, "'min'", ["v0 = torch.linalg.vector_norm(z_i * self.p0[k_j], dim=-1)"],
                                result="v0", keeps="v0", parameters={"p0": (3, 2, 1)}),
    # On a GPU torch's own is not float64; ours is.
    "hardswish": Text(1, 3, "'add'", ["v0 = torch.where((k_i > 0).view(-1, 1), x_j, x_j * 0.3)",
                                      "v1 = F.hardswish(v0.sub(v0, alpha=0.5) * 2.1)"], result="v1"),
}


@pytest.mark.parametrize("name", FOUND)
def test_found(name, device):
    """Everywhere what PyG computes on a CPU."""
    inputs = make_inputs(FOUND[name], zoo.duplicates(), 0)
    want = answer(compile_layer(FOUND[name], pyg_nn.MessagePassing), inputs)
    got = answer(compile_layer(FOUND[name], fused_nn.MessagePassing).to(device), moved(inputs, device))
    assert {n: e for n, t in want.items() if not (e := error(got[n].cpu(), t)) <= LIMIT} == {}
