"""What ``tests.aot`` says of kernels, from a process in which Triton does not interpret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def report(folder: Path, *arguments: str) -> dict[str, Any]:
    """Kernel -> what is known of it; ``folder`` holds the caches of the process."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder / "triton"), "PFG_CACHE_DIR": str(folder)}
    done = subprocess.run([sys.executable, "-W", "ignore", "-m", "tests.aot", *arguments],
                          cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found
