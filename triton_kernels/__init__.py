"""Kernels for full-graph message passing: tensors in, tensors out.

Imports torch, triton and the standard library only. A package of triton-lang has the same name; `OWNER` tells them
apart, and a folder into which both were installed is refused here.
"""

from pathlib import Path

OWNER = "pyg-fullgraph"


def _check_folder(folder: Path) -> None:
    """Raise ImportError if files of triton-lang's package lie among ours (both installed into one folder)."""
    # Modules that only the other package has; ours must never take these names.
    foreign = [name for name in ("matmul.py", "matmul_ogs.py", "topk.py", "swiglu.py") if (folder / name).exists()]
    if foreign:
        raise ImportError(
            f"Expected {folder} to hold the 'triton_kernels' of {OWNER} only; triton-lang's package of the same name "
            f"was installed into it (got {folder / foreign[0]})"
        )


_check_folder(Path(__file__).parent)
