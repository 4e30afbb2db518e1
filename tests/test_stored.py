"""Adjoints on disk: read as they were written, by any process, and never where they do not hold."""

import json
import os
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_random_programs import Programs
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from oracle import program_of
from programs import CASES
from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.saga import ir, stored
from pyg_fullgraph.saga.adjoint import adjoint
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Node, Output
from pyg_fullgraph.saga.passes import split
from pyg_fullgraph.saga.stored import adjoint_of

ROOT = Path(__file__).parents[1]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PFG_CACHE_DIR", str(tmp_path))
    return tmp_path / "adjoints"


@pytest.fixture
def derived(monkeypatch):
    """The programs that were derived, in order."""
    seen = []

    def derive(outputs):
        seen.append(outputs)
        return adjoint(outputs)

    monkeypatch.setattr(stored, "adjoint", derive)
    return seen


def core(name="gat"):
    return split(program_of(name)).stages[0].core


def digests(found):
    grads = [(n.digest, g and g.digest) for n, g in found.grads.items()]
    return grads, [(name, a.digest, b.digest) for name, (a, b) in found.saved.items()]


# --- programs as plain data -------------------------------------------------------------------------------------


def check_round_trip(roots):
    text = json.dumps(stored.to_plain(roots))
    assert all(a is b for a, b in zip(stored.from_plain(json.loads(text)), roots, strict=True))
    known, Node._interned = Node._interned, weakref.WeakValueDictionary()
    try:  # as in a process that has none of the nodes
        fresh = stored.from_plain(json.loads(text))
    finally:
        Node._interned = known
    assert not set(fresh) & set(roots)
    assert [n.digest for n in fresh] == [n.digest for n in roots]
    assert [(n.shape, n.domain, n.is_integer) for n in fresh] == [(n.shape, n.domain, n.is_integer) for n in roots]


@pytest.mark.parametrize("name", CASES)
def test_programs_and_their_adjoints_are_read_as_they_were_written(name):
    found = adjoint(core(name).outputs)
    check_round_trip([o.value for o in program_of(name).outputs])
    check_round_trip([g for g in found.grads.values() if g is not None])


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_programs_are_read_as_they_were_written(data):
    check_round_trip([o.value for o in Programs(data).program().outputs])


@pytest.mark.parametrize("value", [0.1, -0.0, 1e300, 5e-324, float("inf"), float("nan")])
def test_numbers_lose_nothing(value):
    check_round_trip([ir.const(value, (2, 1))])


def test_roots_may_repeat_and_contain_each_other():
    x = ir.input("x", Domain.SRC, (2, 3))
    check_round_trip([ir.permute(x, (1, 0)), x, ir.permute(x, (1, 0))])


# --- what is kept -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_the_second_process_derives_nothing(folder, derived, name):
    first = adjoint_of(core(name))
    second = adjoint_of(core(name))
    assert len(derived) == 1
    assert first == second == adjoint(core(name).outputs)
    assert list(second.grads) == list(first.grads)
    assert list(second.saved) == list(first.saved)
    assert len(list(folder.iterdir())) == 1


def test_programs_have_files_of_their_own(folder, derived):
    x = ir.input("x", Domain.SRC, (3,))
    programs = [EdgeProgram((Output(kind, value, name),)) for kind in ("sum", "max")
                for value in (ir.pointwise("exp", x), ir.pointwise("sin", x)) for name in ("out", "other")]
    found = [digests(adjoint_of(p)) for p in programs]
    assert found == [digests(adjoint(p.outputs)) for p in programs]
    assert len(list(folder.iterdir())) == len(derived) == len(programs)


def damaged(path):
    whole = path.read_bytes()
    yield b""
    yield whole[:len(whole) // 2]
    yield whole[:-1]
    yield whole + b" "
    yield b"\xff\xfe" + whole
    yield whole.replace(b'"sum"', b'"max"')
    yield b"{}"


def test_damaged_files_are_derived_and_written_again(folder, derived):
    right = adjoint_of(core())
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    for k, text in enumerate(damaged(path)):
        assert text != whole
        path.write_bytes(text)
        assert adjoint_of(core()) == right
        assert len(derived) == k + 2
        assert path.read_bytes() == whole


def test_the_file_of_another_program_is_not_used(folder):
    adjoint_of(core("gat"))
    (other,) = folder.iterdir()
    adjoint_of(core("gcn"))
    (path,) = set(folder.iterdir()) - {other}
    path.write_bytes(other.read_bytes())
    assert adjoint_of(core("gcn")) == adjoint(core("gcn").outputs)


def test_a_folder_in_place_of_the_file(folder, derived):
    adjoint_of(core())
    (path,) = folder.iterdir()
    path.unlink()
    path.mkdir()
    assert adjoint_of(core()) == adjoint(core().outputs)
    assert len(derived) == 2
    assert list(folder.iterdir()) == [path]


def test_a_cache_folder_that_cannot_be_made(tmp_path, monkeypatch, derived):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PFG_CACHE_DIR", str(tmp_path / "file"))
    assert adjoint_of(core()) == adjoint_of(core())
    assert len(derived) == 2


def test_a_full_disk(folder, derived, monkeypatch):
    def replace(*paths):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", replace)
    assert adjoint_of(core()) == adjoint_of(core())
    assert len(derived) == 2
    assert list(folder.iterdir()) == []


def test_a_user_without_a_home(monkeypatch, derived):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("PFG_CACHE_DIR")
    monkeypatch.setattr(Path, "home", home)
    assert adjoint_of(core()) == adjoint(core().outputs)


def test_refusals_are_not_kept(folder, monkeypatch):
    def refuse(outputs):
        raise NotFusable(["no"])

    monkeypatch.setattr(stored, "adjoint", refuse)
    with pytest.raises(NotFusable):
        adjoint_of(core())
    assert not folder.exists()


# --- what it depends on -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("owner, name, value", [
    (torch, "__version__", "9.9"), (torch.version, "git_version", "abc"), (sys, "version", "9"),
    (stored.sympy, "__version__", "9"), (torch, "get_default_dtype", lambda: torch.float64),
    (torch, "are_deterministic_algorithms_enabled", lambda: True), (stored, "_sources", lambda: "others")])
def test_other_surroundings_have_other_files(folder, derived, monkeypatch, owner, name, value):
    adjoint_of(core())
    monkeypatch.setattr(owner, name, value)
    adjoint_of(core())
    assert len(derived) == len(list(folder.iterdir())) == 2


def test_the_hash_of_the_sources_covers_the_compiler(monkeypatch):
    names = {Path(path).relative_to(ROOT / "pyg_fullgraph" / "saga").as_posix() for path, *_ in stored._STAMPS}
    assert {"adjoint.py", "ir.py", "aten.py", "axes.py", "interpret.py", "forms.py", "rules/rows.py"} <= names
    before = stored._sources()
    monkeypatch.setattr(stored, "_STAMPS", stored._STAMPS[1:])
    assert stored._sources.__wrapped__() != before


@pytest.mark.parametrize("edit", [lambda s: [("new.py", 0, 0), *s], lambda s: s[1:], lambda s: []])
def test_sources_that_were_edited_after_they_were_imported(folder, derived, monkeypatch, edit):
    """What would be derived is not what the files say, so nothing is kept and nothing is read."""
    adjoint_of(core())
    stamps = stored._stamps()
    monkeypatch.setattr(stored, "_stamps", lambda: edit(stamps))
    for _ in range(2):
        assert adjoint_of(core()) == adjoint(core().outputs)
    assert len(derived) == 3
    assert len(list(folder.iterdir())) == 1


class Doubled(TorchDispatchMode):
    """Makes every product something else."""

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return out + out if function.overloadpacket is torch.ops.aten.mul else out


@pytest.mark.parametrize("ambient", [
    lambda: torch.autocast("cpu", torch.bfloat16), torch.inference_mode, torch.no_grad, Doubled,
    lambda: saved_tensors_hooks(lambda t: t.to(torch.bfloat16), lambda t: t.float() * 2),
    lambda: torch.device("meta"), lambda: torch.autograd.set_detect_anomaly(True)],
    ids=["autocast", "inference", "no-grad", "dispatch", "hooks", "device", "anomaly"])
@pytest.mark.parametrize("name", ["gat", "edge-mlp"])
def test_the_callers_modes_have_no_part_in_it(folder, derived, name, ambient):
    with ambient():
        found = adjoint_of(core(name))
    assert found == adjoint(core(name).outputs)
    assert len(derived) == 1


# --- processes --------------------------------------------------------------------------------------------------


FIRST_STEP = """
import json, sys, threading, torch
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.nn import GATConv, GCNConv, SAGEConv
from pyg_fullgraph.saga import stored
derived = []
derive = stored.adjoint
stored.adjoint = lambda outputs: derived.append(outputs) or derive(outputs)
graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 2, 3], [1, 2, 3, 0, 3]]), 4)
before = set(sys.modules)
grads = []
for make in (lambda: GCNConv(3, 2), lambda: GATConv(3, 2, heads=2), lambda: SAGEConv(3, 2, aggr="max")):
    torch.manual_seed(0)
    conv, x = make(), torch.randn(4, 3, requires_grad=True)
    (conv(x, graph) ** 2).sum().backward()
    grads += [x.grad.tolist(), *(p.grad.tolist() for p in conv.parameters())]
print(json.dumps({"grads": grads, "derived": len(derived), "modules": sorted(set(sys.modules) - before)}))
"""


def start(cache):
    return subprocess.Popen([sys.executable, "-W", "ignore", "-c", FIRST_STEP], cwd=ROOT, text=True,
                            env={**os.environ, "PFG_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"},
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def result(process):
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    return json.loads(out)


def test_processes_that_start_at_once_share_the_folder(tmp_path):
    at_once = [result(p) for p in [start(tmp_path) for _ in range(3)]]
    files = {p: p.read_bytes() for p in (tmp_path / "adjoints").iterdir()}
    later = result(start(tmp_path))
    assert {p.suffix for p in files} == {".json"}
    # Whoever is late finds what the others have put there.
    assert len(files) == 3 <= sum(r["derived"] for r in at_once)
    assert max(r["derived"] for r in at_once) <= 3
    assert later["derived"] == 0
    assert all(r["grads"] == later["grads"] for r in at_once)
    assert files == {p: p.read_bytes() for p in (tmp_path / "adjoints").iterdir()}
    # A first use waits for neither of these.
    assert not [m for m in later["modules"] if m.startswith(("networkx", "torch.export._trace"))]


def test_threads_that_read_and_write_at_once(folder):
    """Each sees a whole file or none, while others replace it all the time."""
    programs = [core(name) for name in ("gcn", "gat", "sage-max")]
    right = {p.digest: adjoint(p.outputs) for p in programs}
    go = threading.Barrier(4)

    def work(seed):
        go.wait()
        for k in range(30):
            program = programs[(k + seed) % len(programs)]
            place = stored._place(program)
            assert place is not None
            stored._write(*place, right[program.digest])
            assert stored._read(*place) == right[program.digest]

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(work, range(4))) == [None] * 4
    assert len(list(folder.iterdir())) == 3
