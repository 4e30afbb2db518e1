"""Markers, devices and data that all tests share."""

import functools
import gc
import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from torch_geometric.nn import SAGEConv, SimpleConv

from pyg_fullgraph import chunks, columns, debug, selection
from pyg_fullgraph.nn import tape
from pyg_fullgraph.saga.kernel_source import KernelSource
from triton_kernels import columns as column_kernels

# The same examples in every run: a change fails for what it does. New ones are for HYPOTHESIS_PROFILE=thorough and
# `tests/property_run.py`.
#: How fast a busy machine draws says nothing of what is drawn.
hypothesis.settings.register_profile("same", derandomize=True,
                                     suppress_health_check=[hypothesis.HealthCheck.too_slow])
if os.environ.get("HYPOTHESIS_PROFILE") != "thorough":
    hypothesis.settings.load_profile("same")

# Two cores are shared by everything that runs here; small graphs gain nothing from threads.
torch.set_num_threads(1)


if os.environ.get("TRITON_INTERPRET") == "1":
    import triton.language as tl
    from triton.runtime import interpreter

    _call = interpreter.InterpretedFunction.__call__
    _prepared: set[str] = set()

    def call_inside_kernel(self: interpreter.InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        """A device function. Triton would put its functions in the place of triton.language's in each call; that lasts
        from the first of a module on: a fifth of the time.
        """
        if self.fn.__module__ in _prepared:
            return self.rewrite()(*args, **kwargs)
        _prepared.add(self.fn.__module__)
        return _call(self, *args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call_inside_kernel  # type: ignore[method-assign]
    # Each sum of integers is computed again in 64 bits and compared, which a GPU does not do: a quarter of the time.
    interpreter.interpreter_builder.options.__dict__["sanitize_overflow"] = False
    # Each call makes a table of all types: a fifth.
    _scalar_dtype = functools.cache(interpreter._get_np_dtype)

    def numpy_dtype(kind: tl.dtype) -> np.dtype:
        scalar = kind.element_ty if isinstance(kind, tl.block_type) else kind
        return np.dtype(np.uint64) if isinstance(scalar, tl.pointer_type) else _scalar_dtype(scalar)

    interpreter._get_np_dtype = numpy_dtype


@pytest.hookimpl(trylast=True)  # after `-m` and `-k`, which may take away what is put between the longest
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        elsewhere = [item for item in items if item.get_closest_marker("interpreter")]
        config.hook.pytest_deselected(items=elsewhere)
        items[:] = [item for item in items if item not in elsewhere]
    elif "PFG_INTERPRETED_PART" in os.environ:  # k/n: one of n processes
        k, n = map(int, os.environ["PFG_INTERPRETED_PART"].split("/"))
        interpreted = [item for item in items if item.get_closest_marker("interpreter")]
        elsewhere = [item for j, item in enumerate(interpreted) if j % n != k]
        config.hook.pytest_deselected(items=elsewhere)
        items[:] = [item for item in items if item not in set(elsewhere)]
    # The longest first, so that no process is left with one when the others are done. A process has two tests at a
    # time, so that each of these comes with a short one.
    slow = sorted((item for item in items if item.get_closest_marker("slow")), key=lambda item: -_seconds(item))
    fast = [item for item in items if not item.get_closest_marker("slow")]
    items[:] = [*itertools.chain.from_iterable(zip(slow, fast, strict=False)), *slow[len(fast):], *fast[len(slow):]]
    num_devices = torch.cuda.device_count()
    for item in items:
        wanted = 2 if item.get_closest_marker("multi_gpu") else 1 if item.get_closest_marker("gpu") else 0
        if num_devices < wanted:
            item.add_marker(pytest.mark.skip(reason=f"needs {wanted} CUDA device(s), found {num_devices}"))


def pytest_collection_finish() -> None:
    """Nothing looks at what imports made, again and again, for garbage: a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # Triton's bindings call what is left at the end a leak


def _seconds(item: pytest.Item) -> float:
    """About how long a slow test takes."""
    return float(next(iter(item.get_closest_marker("slow").args), 10))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device a test runs on; the CUDA case carries the marker `gpu`."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def counters() -> None:
    """Fused and plain calls are counted from the start of each test."""
    debug.reset()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a test draws without a seed of its own is the same in every run, whichever tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def random_names() -> None:
    """PyG names the module of each ``Sequential`` by a random number, and takes one of that name if there is one, as
    after a test that set the seed.
    """
    random.seed()


@pytest.fixture
def hits(monkeypatch: pytest.MonkeyPatch) -> list[torch.nn.Module]:
    """Layers whose forwards were made of the steps of earlier ones."""
    seen: list[torch.nn.Module] = []
    take = tape.Tape.run

    def noted(self, layer, args, kwargs):
        out = take(self, layer, args, kwargs)
        seen.append(layer)
        return out

    monkeypatch.setattr(tape.Tape, "run", noted)
    return seen


@pytest.fixture(scope="session", autouse=True)
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder of their own: tests replace parts of the compiler, and what it then makes is for nobody else."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PFG_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of the public graphs as .npz: `PFG_DATA`, or ../shared/data beside the checkout; skips without one."""
    root = Path(__file__).resolve().parents[1]
    folder = Path(os.environ.get("PFG_DATA") or root.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no data folder at {folder}; set PFG_DATA")
    return folder


@pytest.fixture(scope="session", autouse=True)
def fused_first() -> None:
    """PyG writes the `propagate` of a class for its first layer, and without the branch for sparse matrices if that one
    has an aggregation they do not know: layers made after it have no such branch either, whatever theirs.
    """
    SAGEConv(1, 1)
    SimpleConv()


@pytest.fixture
def only_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sweep falls back to chunks, but what is meant to: matrix products in float64."""
    run_in_chunks = chunks.run_tiles  # which all sweeps in chunks are

    def refuse(sweep: Any, rows: Any, tiles: Any, like: torch.Tensor, *args: Any) -> Any:
        is_wide = like.dtype == torch.float64 and isinstance(selection.kernel_of(sweep, 4), KernelSource)
        assert is_wide, f"{sweep} ran in chunks: {selection.kernel_of(sweep)}"
        return run_in_chunks(sweep, rows, tiles, like, *args)

    monkeypatch.setattr(chunks, "run_tiles", refuse)


@pytest.fixture
def column_sums(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of matrices whose rows a kernel of its own summed up; small ones are taken as well."""
    seen, plain = [], column_kernels.column_sum
    monkeypatch.setattr(columns, "MIN_NUMBERS", 1)
    monkeypatch.setattr(columns, "MIN_COLUMNS", 1)

    def column_sum(x: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(x.shape))
        return plain(x)

    monkeypatch.setattr(column_kernels, "column_sum", column_sum)
    return seen
