"""The cache folder: files under the hash of what they were made from, which any process may read, write or delete.

``PFG_CACHE_DIR``, default ``~/.cache/pyg_fullgraph``. Nothing in it has to be kept: what is missing is made again.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_dir() -> Path:
    """The cache folder, which need not exist yet.

    Raises:
        RuntimeError: A user without a home.
    """
    chosen = os.environ.get("PFG_CACHE_DIR")
    return Path(chosen) if chosen else Path.home() / ".cache" / "pyg_fullgraph"


def write(path: Path, text: str) -> None:
    """Put ``text`` where other processes see all of it or nothing.

    Raises:
        OSError: The folder cannot be made or written to; nothing is left behind then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
