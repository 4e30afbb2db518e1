"""Sharded equals whole: every fused layer on parts of a graph, in float64, by processes that talk through gloo."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import sharded
import sharded_captured
import sharded_known
import sharded_rows
import torch
from layers import MORE, MORE_PAIRS, PAIRS, SQUARE
from ranks import ranks
from test_kernels import GPU, INTERPRETER, poisoned  # noqa: F401

import pyg_fullgraph as pfg
from oracle import random_case
from pyg_fullgraph.distributed import DistributedModel
from pyg_fullgraph.distributed.graph import ShardedOrder
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.nn import GCNConv, GraphConv, SAGEConv

ROOT = Path(__file__).parents[1]
# What sharded graphs refuse, and why.
REFUSED = {"han": "averages over all nodes", "hgt": "puts several edge types into one edge_index",
           "gat_pair_loops": "self-loops", "gatv2_pair_loops": "self-loops", "gat_pair_edge": "self-loops"}
PLAIN = {f"rgat_{mode}_within_{mod}" for mode in ("add", "mul") for mod in (None, "additive", "scaled", "f-additive",
                                                                          "f-scaled")}
ON_NODES = [layer.name for layer in (*SQUARE, *MORE) if layer.name not in {*REFUSED, *PLAIN}]
ON_PAIRS = [layer.name for layer in (*PAIRS, *MORE_PAIRS) if layer.name not in REFUSED]
#: Of seven parts: one per reducer, stage structure and kind of edge data.
FEW = ["gcn_weight", "gcn_reversed_weight", "sage", "sage_max", "sage_std", "sage_mul", "gat_edge", "gatv2",
       "gat_fill_max", "edge_conv", "cheb_weight", "transformer_edge", "rgcn", "fast_rgcn_bases", "pna", "gen_softmax",
       "appnp"]
BOTH = [("halo", False), ("broadcast", True)]
EACH = [*BOTH, ("feature_split", False)]


#: Of other numbers of parts than two every third layer, each time others, and the rest apart.
SOME = [(1, 0, 3), (2, 0, 1), (3, 1, 3), (4, 2, 3)]
REST = [pytest.param(size, (first + k) % 3, 3, marks=pytest.mark.slow(40)) for size, first, step in SOME if step > 1
        for k in (1, 2)]


@pytest.mark.parametrize("size, first, step", [*SOME, *REST])
def test_layers_equal_the_whole(size, first, step):
    ranks(size).run(sharded.check_layers, ON_NODES[first::step], "hub", *EACH)
    ranks(size).run(sharded.check_layers, ON_PAIRS[first::step], "bipartite", *EACH)


@pytest.mark.parametrize("size", [2, 3])
def test_layers_equal_the_whole_by_the_other_way(size):
    other = [("halo", True), ("broadcast", False), ("feature_split", True)]
    ranks(size).run(sharded.check_layers, FEW, "isolated", *other)
    ranks(size).run(sharded.check_layers, FEW, "self_loops", *other)
    ranks(size).run(sharded.check_layers, ON_PAIRS[::2], "bipartite_wide", *other)


@pytest.mark.parametrize("size", [2, 3])
def test_layers_on_large_graphs_equal_the_whole(size):
    """Rows ascend by other endpoints there, which parts number in another order than the whole."""
    ranks(size).run(sharded.check_large, FEW, "hub", *EACH)
    ranks(size).run(sharded.check_large, ON_PAIRS[::4], "bipartite", *EACH)


@pytest.mark.interpreter
def test_layers_equal_the_whole_by_kernels():
    ranks(2).run(sharded.check_layers, ["gcn_weight", "gat_edge", "sage_max", "edge_conv"], "self_loops", *BOTH)
    ranks(3).run(sharded.check_layers, ["gatv2", "transformer"], "isolated", *BOTH)
    ranks(2).run(sharded.check_scaled, ["gcn", "sage"], "hub", *EACH)


@pytest.mark.parametrize("way", ["halo", "broadcast", "feature_split"])
@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_one_process_runs_what_it_prepared(device, way, only_kernels, monkeypatch):
    """On all edges, as on a plain graph; sweeps that have data of edges, or read degrees, are run as those of parts."""
    case = random_case(90, 90, 700)
    edges, weight = case.edge_index.to(device), torch.rand(700, device=device)
    parts, run_sweep = [], ShardedOrder.run_sweep
    monkeypatch.setattr(ShardedOrder, "run_sweep", lambda *args: parts.append(args[1]) or run_sweep(*args))
    graph, x = pfg.shard(Graph.from_edge_index(edges, 90), way), torch.randn(90, 8, device=device)
    assert torch.equal(graph.src_ids, torch.arange(90, device=device))
    own_weight = weight[graph.edge_ids]
    for layer, more, left in (GCNConv(8, 8), (), 0), (SAGEConv(8, 8), (), 1), (GraphConv(8, 8), (weight,), 2):
        model, counts, found = DistributedModel(layer.to(device)), [], []
        for on, given in ((edges, more), *[(graph, (own_weight,) if more else ())] * 4):
            parts.clear()
            own = x.clone().requires_grad_()  # which nobody takes for constant
            out = model(own, on, *given)
            found.append([out.detach(), *torch.autograd.grad(out.square().sum(), [own, *layer.parameters()])])
            counts.append(len(parts))
        for made in found[1:]:
            torch.testing.assert_close(made, found[0])
        assert counts == [0, 2, left, left, left]


@pytest.mark.multi_gpu
@pytest.mark.parametrize("layer, graph, ways", [
    ("gcn_weight", "isolated", EACH), ("sage_std", "isolated", EACH), ("gat_edge", "isolated", EACH),
    ("sage_max", "hub", BOTH)])  # with a part without vertices
def test_layers_equal_the_whole_by_nccl(layer, graph, ways):
    """From graphs on a CPU, which go to the GPU of each process."""
    ranks(2, "nccl").run(sharded.check_layers, [layer], graph, *ways)


@pytest.mark.multi_gpu
def test_products_between_kernels_by_nccl():
    """`halo` takes spans of all edges, `broadcast` holds the products in kernels."""
    ranks(2, "nccl").run(sharded.check_spans, ["edge_conv", "point_transformer_nn"], "hub", *BOTH)


@pytest.mark.multi_gpu
def test_rows_multiplied_before_they_are_sent_by_nccl():
    ranks(2, "nccl").run(sharded.check_scaled, ["gcn", "sage"], "hub", *EACH)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("way", ["broadcast", "halo", "feature_split"])
def test_training_equals_the_whole_by_nccl(way):
    ranks(2, "nccl").run(sharded.check_training, "gat", way)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("way", ["broadcast", "halo", "feature_split"])
def test_captured_steps_of_several_ranks(way):
    ranks(2, "nccl").run(sharded_captured.check_captured, way)


def test_seven_parts():
    ranks(7).run(sharded.check_layers, FEW, "prime", *BOTH)
    ranks(7).run(sharded.check_layers, FEW[::2], "isolated", ("broadcast", False))
    ranks(7).run(sharded.check_layers, FEW[3::4], "prime", ("feature_split", True))


def test_training_equals_the_whole():
    for size in (1, 2, 3):
        ranks(size).run(sharded.check_training, "gcn", "halo")
        ranks(size).run(sharded.check_training, "gat", "broadcast")
    for size in (2, 3):
        ranks(size).run(sharded.check_training, "gat", "feature_split")
    ranks(3).run(sharded.check_training, "gcn", "feature_split")


@pytest.mark.parametrize("size", [1, 2])
def test_what_layers_add_to_sums(size):
    ranks(size).run(sharded.check_added, "halo", "broadcast", "feature_split")


@pytest.mark.parametrize("whole", [False, True], ids=["phases", "forwards"])
@pytest.mark.parametrize("size, way", [(1, "halo"), (2, "halo"), (2, "broadcast"), (3, "feature_split")])
def test_calls_on_parts_are_known(size, way, whole):
    """But for those with data of which ranks ask each other whether it is that of edges."""
    asked = ["gine", "nn"]
    for found in ranks(size).run(sharded_known.check_known, way,
                                 ["gcn", "sage", "gat", "gatv2", "edge_conv", "res_gated", *asked], whole):
        for name, hits in found.items():
            assert hits and all(hit == (size == 1 or name not in asked) for hit in hits), name


@pytest.mark.parametrize("way", ["halo", "broadcast"])
def test_ranks_know_a_call_alike(way):
    first, second = ranks(2).run(sharded_known.check_alike, way)
    assert first == second and any(first)


@pytest.mark.parametrize("way", ["halo", "broadcast"])
def test_bytes_per_edge(way):
    """Two numbers of four bytes per edge and direction; as many for the graph with self-loops, and nothing for SAGE."""
    for at_first, sage, gcn, with_loops in ranks(2).run(sharded.check_bytes, way):
        assert 7 < at_first <= sage < 8.5 and gcn < 17 and with_loops < 8.5, (at_first, sage, gcn, with_loops)


def test_tables_read_by_the_target():
    ranks(2).run(sharded_rows.check_tables)


def test_sweeps_split_over_features():
    ranks(3).run(sharded.check_split)
    names = ["gat-weights", "gat-dropout", "many-outputs", "several", "joined", "one-sided", "bare-edges", "integers"]
    ranks(3).run(sharded.check_programs, names, "feature_split")


def test_dropout_of_edge_values():
    ranks(3).run(sharded_rows.check_dropout)


def test_dropout_with_a_graph_in_data():
    ranks(2).run(sharded_rows.check_dropout_in_data)


def test_gradients_of_several_backwards():
    ranks(3).run(sharded.check_accumulation)


def test_copies_and_states():
    ranks(2).run(sharded.check_copies)


def test_gradients_of_results_and_parameters_outside_of_forward():
    ranks(2).run(sharded.check_gradients_elsewhere)


@pytest.mark.parametrize("case", ["hub", "bipartite", "isolated"])
def test_parts_from_their_own_edges(case):
    ranks(3).run(sharded.check_edges, case)


def test_the_planner_takes_the_cheaper_way():
    ranks(3).run(sharded.check_planner)


def test_whole_tensors():
    ranks(3).run(sharded.check_take_and_join, "prime")
    ranks(3).run(sharded.check_take_and_join, "bipartite")


@pytest.mark.parametrize("check", [
    "check_refused_options", "check_refused_operations", "check_refused_layers", "check_mismatches"])
def test_what_is_refused(check):
    ranks(2).run(getattr(sharded, check))


def test_modules_over_all_rows_are_refused():
    ranks(2).run(sharded_rows.check_refused_modules)


def torchrun(size, *arguments):
    """What a program printed, and whether it came to its end, in ``size`` processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    return done.stdout + done.stderr, done.returncode == 0


def train(size, out, *options):
    """The metrics of a job of the command line."""
    job = ["--dataset", "generated:nodes=200,degree=5", "--model", "gat", "--dropout", "0.3", "--dtype", "float64",
           "--device", "cpu", "--out"]
    text, is_done = torchrun(size, "-m", "pyg_fullgraph", "train", *job, str(out), *options)
    assert is_done, text[-4000:]
    return json.loads((out / "metrics.json").read_text())


def test_loops_with_and_without_a_number_of_nodes():
    ranks(2).run(sharded_rows.check_loops)


def test_batch_norm_of_one_row_is_refused():
    ranks(2).run(sharded_rows.check_single_row)


def test_batch_norm_in_a_checkpoint_is_refused():
    ranks(2).run(sharded_rows.check_checkpoint)


def test_training_with_masks_that_select_nothing_on_some_ranks():
    ranks(3).run(sharded_rows.check_masks)


def test_the_command_under_torchrun(tmp_path):
    """The same curve on any number of processes, also continued on another number, whose parts of the small graph that
    the command warms up on have no row of some masks.
    """
    alone = train(1, tmp_path / "one", "--epochs", "6")
    both = train(2, tmp_path / "two", "--epochs", "3", "--timeline", str(tmp_path / "timeline"))
    assert (alone["num_processes"], both["num_processes"]) == (1, 2)
    assert both["seeds"][0]["timeline"].startswith("convs.0: softmax_sum")
    trace = json.loads((tmp_path / "timeline" / "timeline.json").read_text())["traceEvents"]
    assert {row["pid"] for row in trace} == {0, 1} and (tmp_path / "timeline" / "timeline.png").stat().st_size > 0
    rest = train(4, tmp_path / "two", "--epochs", "6", "--resume")
    for name in ("losses", "val_losses", "val_accuracies", "test_accuracy"):
        assert rest["seeds"][0][name] == pytest.approx(alone["seeds"][0][name], rel=1e-9)


def test_comparing_with_pyg_needs_one_process(tmp_path):
    text, is_done = torchrun(2, "-m", "pyg_fullgraph", "train", "--compare", "pyg", "--device", "cpu", "--out",
                             str(tmp_path))
    assert not is_done and "Expected 'compare' to be left out with several processes" in text


def test_the_example():
    """It learns, and the same on one process as on two."""
    found = [torchrun(size, str(ROOT / "examples" / "distributed" / "train.py")) for size in (1, 2)]
    assert all(is_done for _, is_done in found), found
    losses = [float(re.search(r"loss (\S+),", text)[1]) for text, _ in found]
    assert losses[0] == pytest.approx(losses[1], abs=2e-4) and losses[0] < 0.7
    assert "ShardedGraph(rank=0 of 2" in found[1][0]


def test_nothing_is_left_of_a_rank_that_hangs(tmp_path):
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    text, is_done = torchrun(2, str(script), str(tmp_path / "pid"))
    assert not is_done and "RankError: Expected every rank to take part (got no answer from rank 1" in text
    assert "never" not in text
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


HANGS = """
import os, sys, time, torch, pyg_fullgraph as pfg
from pyg_fullgraph.distributed import under_torchrun
with under_torchrun("cpu", timeout=20) as group:
    graph = pfg.shard(torch.arange(20).view(2, 10) % 7)
    if group.rank == 1:
        open(sys.argv[1], "w").write(str(os.getpid()))
        time.sleep(1000)
    pfg.nn.GCNConv(3, 3)(torch.zeros(graph.num_dst, 3), graph)
    print("never")
"""
