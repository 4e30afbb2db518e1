"""Markers, devices and data that all tests share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pyg_fullgraph import debug

# Two cores are shared by everything that runs here; small graphs gain nothing from threads.
torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        elsewhere = [item for item in items if item.get_closest_marker("interpreter")]
        config.hook.pytest_deselected(items=elsewhere)
        items[:] = [item for item in items if item not in elsewhere]
    # So that no process is left with a long one when the others are done.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    num_devices = torch.cuda.device_count()
    for item in items:
        wanted = 2 if item.get_closest_marker("multi_gpu") else 1 if item.get_closest_marker("gpu") else 0
        if num_devices < wanted:
            item.add_marker(pytest.mark.skip(reason=f"needs {wanted} CUDA device(s), found {num_devices}"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device a test runs on; the CUDA case carries the marker `gpu`."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def counters() -> None:
    """Fused and plain calls are counted from the start of each test."""
    debug.reset()


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
