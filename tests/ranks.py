"""Processes that run functions of the tests together, as ranks of one group; started once per number and backend.

`ranks(4).run(function, *args)` calls `function(rank, size, *args)` in each of four processes and gives the results in
rank order; an exception in any of them fails the test with its traceback.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import queue
import tempfile
import traceback
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

#: What all processes need, imported once; `layers_written` has PyG write the code of every layer's class.
PRELOADED = ["torch", "torch_geometric.nn", "pyg_fullgraph.nn", "pyg_fullgraph.training", "layers_written"]
#: Seconds that one call may take before the ranks are given up.
TIMEOUT_S = 900


def _serve(rank: int, size: int, backend: str, store: str, calls: Any, results: Any) -> None:
    try:
        _join(rank, size, backend, store)
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        return
    while True:
        call = calls.get()
        if call is None:
            break
        function, args = call
        try:
            results.put((rank, function(rank, size, *args), None))
        except BaseException:
            results.put((rank, None, traceback.format_exc()))


def _join(rank: int, size: int, backend: str, store: str) -> None:
    torch.set_num_threads(1)
    gc.freeze()
    gpu = torch.device("cuda", rank) if backend == "nccl" else None
    if gpu is not None:
        torch.cuda.set_device(gpu)
    if size > 1:
        dist.init_process_group(backend, store=dist.FileStore(store, size), rank=rank, world_size=size, device_id=gpu)


class Ranks:
    def __init__(self, size: int, backend: str = "gloo") -> None:
        # A process that was forked cannot use a GPU if its parent has looked for one, as imports may.
        context = mp.get_context("spawn" if backend == "nccl" else "forkserver")
        if backend != "nccl":
            context.set_forkserver_preload(PRELOADED)
        self.size = size
        self.folder = tempfile.TemporaryDirectory()
        self.calls = [context.Queue() for _ in range(size)]
        self.results = context.Queue()
        store = os.path.join(self.folder.name, "store")
        self.processes = [
            context.Process(target=_serve, args=(k, size, backend, store, self.calls[k], self.results), daemon=True)
            for k in range(size)]
        for process in self.processes:
            process.start()
        atexit.register(self.stop)

    def run(self, function: Any, *args: Any) -> list[Any]:
        ForkingPickler.dumps((function, args))  # a queue's own thread would lose what cannot be sent
        for calls in self.calls:
            calls.put((function, args))
        found: dict[int, Any] = {}
        waited = 0
        while len(found) < self.size:
            missing = sorted(set(range(self.size)) - set(found))
            try:
                rank, value, error = self.results.get(timeout=5)
                waited = 0
            except queue.Empty:
                waited += 5
                dead = [k for k in missing if not self.processes[k].is_alive()]
                if not dead and waited < (120 if found else TIMEOUT_S):
                    continue
                error = f"ranks {dead} died" if dead else f"ranks {missing} did not answer: they wait for others"
            if error is not None:
                self.stop()
                raise AssertionError(error)
            found[rank] = value
        return [found[k] for k in range(self.size)]

    def stop(self) -> None:
        ranks.cache_clear()
        for process in self.processes:
            process.kill()


@functools.cache
def ranks(size: int, backend: str = "gloo") -> Ranks:
    """The processes for ``size`` ranks, started on first use and kept; anew after one of them failed."""
    return Ranks(size, backend)
