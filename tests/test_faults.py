"""A rank that fails, dies or hangs ends the others, with an error that names it, and nothing is left running."""

import os
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ranks import PRELOADED

import pyg_fullgraph as pfg
from pyg_fullgraph import errors, training
from pyg_fullgraph.config import TrainConfig
from pyg_fullgraph.data import generate
from pyg_fullgraph.distributed import faults, under_torchrun

#: Seconds after which ranks give up, and that they give each other to say so; busy machines are slow.
TIMEOUT_S, ANSWER_S = 15.0, 10.0
SIZE = 3


def serve(rank, store, fault, culprit, results):
    """A rank under torchrun whose store is a file; puts the error that ends it."""
    torch.set_num_threads(1)
    faults.ANSWER_S = ANSWER_S
    start = dist.init_process_group
    os.environ["TORCHELASTIC_RUN_ID"] = "test"
    dist.init_process_group = lambda backend, timeout, device_id: start(
        backend, store=dist.FileStore(store, SIZE), rank=rank, world_size=SIZE, timeout=timeout)
    try:
        with under_torchrun("cpu", TIMEOUT_S):
            FAULTS[fault](rank == culprit)
    except Exception as error:
        results.put((rank, type(error).__name__, str(error)))


def steps(fail):
    """Steps of a layer, which the culprit leaves in the middle."""
    torch.manual_seed(0)
    graph = pfg.shard(torch.randint(90, (2, 400)), "broadcast")
    model = pfg.DistributedModel(pfg.nn.GCNConv(4, 3))
    for step in range(3):
        if step == 1:
            fail()
        model(torch.zeros(graph.num_dst, 4), graph).sum().backward()


def train_without_memory(is_culprit):
    step = training._Run._step

    def failing(run):
        if is_culprit and len(run.history.losses) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(run)

    training._Run._step = failing
    training.train(TrainConfig.preset(model="gcn", epochs=5, device="cpu"), generate(nodes=60, degree=4, features=4))


FAULTS = {
    "hangs": lambda is_culprit: steps(lambda: is_culprit and time.sleep(1000)),
    "dies": lambda is_culprit: steps(lambda: is_culprit and os._exit(7)),
    "memory": train_without_memory,
}


@pytest.mark.parametrize("fault, culprit", [("hangs", 1), ("dies", 0), ("memory", 2)])
def test_the_rank_is_named(fault, culprit, tmp_path):
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    results = context.Queue()
    processes = [context.Process(target=serve, args=(k, str(tmp_path / "store"), fault, culprit, results), daemon=True)
                 for k in range(SIZE)]
    for process in processes:
        process.start()
    try:
        expected = SIZE if fault == "memory" else SIZE - 1
        found = {rank: (kind, message) for rank, kind, message in (results.get(timeout=120) for _ in range(expected))}
        for rank, process in enumerate(processes):
            if rank != culprit:
                process.join(timeout=60)
                assert process.exitcode == 0
        assert processes[culprit].is_alive() == (fault == "hangs")
    finally:
        for process in processes:
            process.kill()
    if fault == "memory":
        kind, message = found.pop(culprit)
        assert kind == "OutOfMemoryError" and "Out of memory on cpu of rank 2. Try: a smaller --hidden" in message
        assert "more processes" in message
    named = {"memory": "got rank 2 failed: OutOfMemoryError: Out of memory on cpu of rank 2. Try: a smaller --hidden",
             "hangs": "got no answer from rank 1, which hangs or has ended)",
             "dies": "got no answer from rank 0, which hangs or has ended)"}
    for kind, message in found.values():
        assert kind == "RankError" and named[fault] in message


@pytest.mark.parametrize("timeout", [0, float("nan"), float("inf"), 1e15])
def test_timeout_is_positive(monkeypatch, timeout):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    with pytest.raises(errors.InputError, match="Expected 'timeout' to be a positive number of seconds"), \
            under_torchrun("cpu", timeout):
        pass
