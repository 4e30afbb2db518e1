"""Files of a training run: checkpoints that load without executing code, written whole or not at all."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from pyg_fullgraph.errors import CheckpointError, UnwritableFolderError


def checkpoint_path(folder: str | os.PathLike, provider: str, seed: int) -> Path:
    """Where a run keeps its checkpoint."""
    return Path(folder) / f"checkpoint-{provider}-seed{seed}.pt"


def load_checkpoint(path: str | os.PathLike, device: str = "cpu") -> dict[str, Any]:
    """Reads a checkpoint; nothing in the file is executed.

    Returns: dict with `model` and `optimizer` (state dicts), `rng`, `epoch`, `history`, `job`.
    Raises: CheckpointError if it is missing, unreadable, truncated, or no checkpoint of this program.
    """
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(path, "to exist", "no such file") from error
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(path, "to be complete and readable", reason) from error
    keys = {"job", "epoch", "history", "model", "optimizer", "rng"}
    if not isinstance(state, dict) or not keys <= state.keys():
        raise CheckpointError(path, f"to hold {', '.join(sorted(keys))}", "another kind of file")
    return state


def write_atomically(path: Path, write: Callable[[Any], object]) -> None:
    """Calls `write` on a temporary binary file next to `path`, then renames it: readers see the old or the new file.

    Raises: UnwritableFolderError.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise UnwritableFolderError(path.parent, error.strerror or error) from error
    finally:
        temporary.unlink(missing_ok=True)


def prepare_folder(folder: str | os.PathLike, names: Iterable[str] = ()) -> Path:
    """Makes the output folder and tries to write to it, so that a run does not fail at its end.

    Args:
        folder: where files will be.
        names: those files, which may be there already.

    Raises: UnwritableFolderError.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
        for name in names:
            if (path / name).is_dir():
                raise IsADirectoryError(f"a folder of the name {name}")
    except OSError as error:
        raise UnwritableFolderError(folder, error.strerror or error) from error
    return path
