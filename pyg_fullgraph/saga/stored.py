"""Adjoints kept on disk, so that a process derives only those that none before it has derived.

A file is named by the hash of all that a derivation reads: the program, the sources of this compiler, the versions of
what it runs on, and torch's global switches. It holds plain JSON. One that is missing, damaged or written by somebody
else for something else is not used, and a folder that cannot be written to stays as it is.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.adjoint import Adjoint, adjoint
from pyg_fullgraph.saga.aten import TRACING
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Node
from triton_kernels import disk

__all__ = ["adjoint_of", "from_plain", "to_plain"]


def adjoint_of(program: EdgeProgram) -> Adjoint:
    """The adjoint of an edge phase: what the cache folder has, or what is derived now and put there.

    Args:
        program: Its core, with no output of kind ``vertex``.

    Raises:
        NotFusable: What :func:`adjoint` refuses, which is not kept.
    """
    place = _place(program)
    found = place and _read(*place)
    if found is None:
        # In a thread of its own, where no mode, hook or autocast of the caller has a part in what is kept. The lock is
        # the caller's, who may be in a trace already.
        with TRACING, ThreadPoolExecutor(1) as thread:
            found = thread.submit(adjoint, program.outputs).result()
        if place is not None:
            _write(*place, found)
    return found


# --- what it depends on -----------------------------------------------------------------------------------------


def _stamps() -> list[tuple[str, int, int]]:
    """The sources of the compiler, and what changes when they do; empty where they are not files."""
    try:
        paths = sorted(Path(__file__).parent.rglob("*.py"))
        return [(str(p), (s := p.stat()).st_mtime_ns, s.st_size) for p in paths]
    except OSError:
        return []


_STAMPS = _stamps()


@cache
def _sources() -> str:
    text = hashlib.sha256()
    for path, _, size in _STAMPS:
        text.update(f"{Path(path).name} {size}\n".encode() + Path(path).read_bytes())
    return text.hexdigest()


def _place(program: EdgeProgram) -> tuple[Path, dict[str, str]] | None:
    """Where the adjoint of ``program`` is kept, and all that it depends on; None where that cannot be told.

    Sources that were edited since they were imported say nothing about the code that runs.
    """
    try:
        sources = _sources()
        if not _STAMPS or _stamps() != _STAMPS:
            return None
        key = {"program": program.digest, "sources": sources, "python": sys.version, "sympy": sympy.__version__,
               "torch": f"{torch.__version__} {torch.version.git_version}", "dtype": str(torch.get_default_dtype()),
               "deterministic": str(torch.are_deterministic_algorithms_enabled())}
        name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]
        return disk.cache_dir() / "adjoints" / f"{name}.json", key
    except (OSError, RuntimeError):  # sources that cannot be read, a user without a home
        return None


# --- files ------------------------------------------------------------------------------------------------------


def _read(path: Path, key: Mapping[str, str]) -> Adjoint | None:
    try:
        checksum, _, text = path.read_text(encoding="utf-8").partition("\n")
    except (OSError, UnicodeError):
        return None
    if checksum != _checksum(text):
        return None
    content = json.loads(text)
    return _adjoint(content["adjoint"]) if content["key"] == key else None


def _write(path: Path, key: Mapping[str, str], found: Adjoint) -> None:
    try:
        text = json.dumps({"key": key, "adjoint": _plain_adjoint(found)}, separators=(",", ":"))
        if _adjoint(json.loads(text)["adjoint"]) == found:
            disk.write(path, f"{_checksum(text)}\n{text}")
    except (OSError, TypeError):  # no room, or an attribute that JSON does not know
        return


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _plain_adjoint(found: Adjoint) -> dict[str, Any]:
    present = [g for g in found.grads.values() if g is not None]
    stand_ins = [n for pair in found.saved.values() for n in pair]
    return {"has_grad": [g is not None for g in found.grads.values()], "saved": list(found.saved),
            **to_plain([*found.grads, *present, *stand_ins])}


def _adjoint(plain: Mapping[str, Any]) -> Adjoint:
    nodes = iter(from_plain(plain))
    wrt = [next(nodes) for _ in plain["has_grad"]]
    grads = {n: next(nodes) if has_grad else None for n, has_grad in zip(wrt, plain["has_grad"], strict=True)}
    return Adjoint(grads, {name: (next(nodes), next(nodes)) for name in plain["saved"]})


def to_plain(roots: Sequence[Node]) -> dict[str, Any]:
    """``roots`` as lists, numbers and strings, which JSON holds without loss; :func:`from_plain` reads it."""
    places: dict[Node, int] = {}
    nodes = []
    for node in ir.walk(*roots):
        nodes.append([node.op, [places[a] for a in node.args], list(node.shape), int(node.domain), dict(node.attrs)])
        places[node] = len(places)
    return {"nodes": nodes, "roots": [places[r] for r in roots]}


def from_plain(plain: Mapping[str, Any]) -> tuple[Node, ...]:
    """The roots that :func:`to_plain` was given; a list among the attributes was a tuple."""
    nodes: list[Node] = []
    for op, args, shape, domain, attrs in plain["nodes"]:
        attrs = {k: tuple(v) if isinstance(v, list) else v for k, v in attrs.items()}
        nodes.append(Node(op, (nodes[a] for a in args), tuple(shape), Domain(domain), **attrs))
    return tuple(nodes[r] for r in plain["roots"])
