"""Imports point one way: a module imports only what stands above it in LAYERS."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# In the order data passes through. A package listed by its name alone is one layer: its modules may import each other.
LAYERS = (
    "triton_kernels.device",
    "triton_kernels.skeletons",
    "triton_kernels.segment",
    "triton_kernels.reference",
    "triton_kernels.disk",
    "triton_kernels.launch",
    "triton_kernels.pieces",
    "triton_kernels.columns",
    "triton_kernels.activation",
    "triton_kernels.padding",
    "triton_kernels.dense_hopper",
    "triton_kernels.dense",
    "triton_kernels.dots",
    "triton_kernels.row_products",
    "triton_kernels.tune",
    "triton_kernels",
    "pyg_fullgraph._version",
    "pyg_fullgraph.errors",
    "pyg_fullgraph.bytecode",
    "pyg_fullgraph.containers",
    "pyg_fullgraph.functions",
    "pyg_fullgraph.checkpoint",
    "pyg_fullgraph.columns",
    "pyg_fullgraph.activation",
    "pyg_fullgraph.padding",
    "pyg_fullgraph.row_products",
    "pyg_fullgraph.dense",
    "pyg_fullgraph.memo",
    "pyg_fullgraph.edge_order",
    "pyg_fullgraph.graph",
    "pyg_fullgraph.communities",
    "pyg_fullgraph.order",
    "pyg_fullgraph.locality",
    "pyg_fullgraph.part_order",
    "pyg_fullgraph.partition",
    "pyg_fullgraph.transforms",
    "pyg_fullgraph.saga.ir",
    "pyg_fullgraph.saga.axes",
    "pyg_fullgraph.saga.features",
    "pyg_fullgraph.saga.interpret",
    "pyg_fullgraph.saga.refusal",
    "pyg_fullgraph.saga.forms",
    "pyg_fullgraph.saga.rules",
    "pyg_fullgraph.saga.aten",
    "pyg_fullgraph.saga.recorder",
    "pyg_fullgraph.saga.idioms",
    "pyg_fullgraph.saga.writes",
    "pyg_fullgraph.saga.trace",
    "pyg_fullgraph.saga.adjoint",
    "pyg_fullgraph.saga.stored",
    "pyg_fullgraph.saga.plans",
    "pyg_fullgraph.saga.packing",
    "pyg_fullgraph.saga.scaling",
    "pyg_fullgraph.saga.finishing",
    "pyg_fullgraph.saga.unrolled",
    "pyg_fullgraph.saga.recompute",
    "pyg_fullgraph.saga.canonical",
    "pyg_fullgraph.saga.rewrites",
    "pyg_fullgraph.saga.passes",
    "pyg_fullgraph.saga.tiles",
    "pyg_fullgraph.saga.idle",
    "pyg_fullgraph.saga.emit",
    "pyg_fullgraph.saga.reducers",
    "pyg_fullgraph.saga.in_flight",
    "pyg_fullgraph.saga.stores",
    "pyg_fullgraph.saga.kernel_source",
    "pyg_fullgraph.saga.codegen",
    "pyg_fullgraph.saga.rows",
    "pyg_fullgraph.saga",
    "pyg_fullgraph.events",
    "pyg_fullgraph.recipe",
    "pyg_fullgraph.chunks",
    "pyg_fullgraph.launches",
    "pyg_fullgraph.pipelines",
    "pyg_fullgraph.selection",
    "pyg_fullgraph.execution",
    "pyg_fullgraph.dots",
    "pyg_fullgraph.reuse",
    "pyg_fullgraph.ahead",
    "pyg_fullgraph.phases",
    "pyg_fullgraph.operators",
    "pyg_fullgraph.autograd",
    "pyg_fullgraph.debug",
    "pyg_fullgraph.optimizers",
    "pyg_fullgraph.replay",
    "pyg_fullgraph.nn",
    "pyg_fullgraph.distributed",
    "pyg_fullgraph.model",
    "pyg_fullgraph.formula",
    "pyg_fullgraph.estimate",
    "pyg_fullgraph.picture",
    "pyg_fullgraph.program_report",
    "pyg_fullgraph.description",
    "pyg_fullgraph.explanation",
    "pyg_fullgraph.coverage_page",
    "pyg_fullgraph.data",
    "pyg_fullgraph.config",
    "pyg_fullgraph.classifier",
    "pyg_fullgraph.report",
    "pyg_fullgraph.training",
    "pyg_fullgraph.cli",
    "pyg_fullgraph.__main__",
    "pyg_fullgraph",
)


def modules() -> dict[str, Path]:
    found = {}
    for package in ("triton_kernels", "pyg_fullgraph"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def layer_of(module: str) -> int | None:
    """Index in LAYERS of the longest entry the module is or lies in; the two roots stand for their __init__ only."""
    if module in LAYERS:
        return LAYERS.index(module)
    inside = [entry for entry in LAYERS if "." in entry and module.startswith(entry + ".")]
    return LAYERS.index(max(inside, key=len)) if inside else None


def imports(source: str, module: str, is_package: bool, known: set[str]) -> list[tuple[int, str]]:
    """(line, module) of every import in `source`, those inside functions too; names are resolved to `known` modules."""
    found = []
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{origin}.{alias.name}"
                found.append((node.lineno, name if name in known else origin))
    return found


def wrong_arrows(source: str, module: str, is_package: bool, known: set[str]) -> list[str]:
    own_layer = layer_of(module)
    wrong = []
    for line, target in imports(source, module, is_package, known):
        if target.split(".")[0] not in ("triton_kernels", "pyg_fullgraph") or target == module:
            continue
        if target == "triton_kernels" and not module.startswith("triton_kernels"):
            continue
        layer = layer_of(target)
        same_package = layer == own_layer and layer is not None and target != module
        if layer is None or own_layer is None or (layer >= own_layer and not same_package):
            wrong.append(f"{module}:{line} imports {target}")
    return wrong


def imports_of(module: str) -> list[tuple[int, str]]:
    path = MODULES[module]
    return imports(path.read_text(), module, path.name == "__init__.py", set(MODULES))


@pytest.mark.parametrize("module", MODULES)
def test_arrows_point_up(module):
    assert layer_of(module) is not None, f"{module} has no place in LAYERS; give it one"
    path = MODULES[module]
    assert wrong_arrows(path.read_text(), module, path.name == "__init__.py", set(MODULES)) == []


@pytest.mark.parametrize(
    "source, module, wrong",
    [
        ("from pyg_fullgraph.nn import GCNConv", "pyg_fullgraph.graph", True),
        ("def f():\n    import pyg_fullgraph.model", "pyg_fullgraph.saga.ir", True),
        ("from pyg_fullgraph.saga import passes", "pyg_fullgraph.saga.ir", True),
        ("from . import passes", "pyg_fullgraph.saga.ir", True),
        ("from ..autograd import run", "pyg_fullgraph.saga.passes", True),
        ("import pyg_fullgraph", "pyg_fullgraph.nn.lazy", True),
        ("from pyg_fullgraph import errors", "triton_kernels.segment", True),
        ("from pyg_fullgraph.saga import ir", "pyg_fullgraph.saga.passes", False),
        ("from . import ir", "pyg_fullgraph.saga.passes", False),
        ("from pyg_fullgraph.nn.lazy import EdgeExpr", "pyg_fullgraph.nn.preparation", False),
        ("from triton_kernels import segment", "pyg_fullgraph.graph", False),
        ("import torch", "pyg_fullgraph.graph", False),
    ],
)
def test_the_check_sees_wrong_arrows(source, module, wrong):
    known = {"pyg_fullgraph.saga.ir", "pyg_fullgraph.saga.passes", "pyg_fullgraph.errors", "triton_kernels.segment"}
    assert bool(wrong_arrows(source, module, False, known)) == wrong


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("triton_kernels")])
def test_kernels_import_torch_triton_and_the_standard_library_only(module):
    roots = {target.split(".")[0] for _, target in imports_of(module)}
    assert roots - sys.stdlib_module_names <= {"torch", "triton", "triton_kernels"}
    assert not [target for _, target in imports_of(module) if target.startswith("torch.distributed")]


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("pyg_fullgraph.saga")])
def test_the_compiler_knows_neither_pyg_nor_process_groups(module):
    allowed = module == "pyg_fullgraph.saga.trace"
    foreign = [t for _, t in imports_of(module) if t.startswith(("torch_geometric", "torch.distributed"))]
    assert not foreign or allowed


def run_python(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    command = f"import sys; sys.path[:0] = {[str(p) for p in path]!r}; {code}"
    # Without PYTHONPATH, which may name a checkout.
    return subprocess.run([sys.executable, "-E", "-c", command], capture_output=True, text=True, check=False, cwd="/")


def test_kernels_load_without_pyg():
    names = ", ".join(m for m in MODULES if m.startswith("triton_kernels"))
    loaded = "[m for m in sys.modules if m.split('.')[0] in ('torch_geometric', 'pyg_fullgraph')]"
    done = run_python(f"import {names}; print({loaded})", ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_another_package_of_our_name_is_refused(tmp_path):
    foreign = tmp_path / "triton_kernels" / "__init__.py"
    foreign.parent.mkdir()
    foreign.write_text("from pathlib import Path\n")
    done = run_python("import pyg_fullgraph", tmp_path, ROOT)
    assert done.returncode != 0
    assert "PackageConflictError: Expected package 'triton_kernels' to be the one installed with pyg-fullgraph; " in (
        done.stderr
    )
    assert str(foreign) in done.stderr


def test_a_namespace_package_of_our_name_is_refused(tmp_path):
    """A folder without __init__.py, as an interrupted uninstall leaves."""
    (tmp_path / "triton_kernels").mkdir()
    (tmp_path / "pyg_fullgraph").symlink_to(ROOT / "pyg_fullgraph")
    code = (
        f"sys.path[:] = [p for p in sys.path if p != {str(ROOT)!r}]; "
        "sys.meta_path[:] = [f for f in sys.meta_path if '__editable__' not in repr(f)]; import pyg_fullgraph"
    )
    done = run_python(code, tmp_path)
    assert done.returncode != 0
    assert "PackageConflictError" in done.stderr
    assert str(tmp_path / "triton_kernels") in done.stderr


def test_two_packages_in_one_folder_are_refused(tmp_path):
    folder = tmp_path / "triton_kernels"
    folder.mkdir()
    (folder / "__init__.py").write_text((ROOT / "triton_kernels" / "__init__.py").read_text())
    (folder / "matmul.py").write_text("")
    done = run_python("import triton_kernels", tmp_path)
    assert done.returncode != 0
    assert str(folder / "matmul.py") in done.stderr


def map_of_readme() -> dict[str, int]:
    """Each module -> the row of README's map that names it, in its first column or, of a package or a few, in words."""
    text = (ROOT / "README.md").read_text().partition("\n## Map\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split(" | ", 1) for line in text.splitlines() if line.startswith("| `")]
    found: dict[str, int] = {}
    for number, (first, words) in enumerate(rows):
        names = re.findall(r"`([\w/.]+)`", first)
        package = names[0].rpartition("/")[0].replace("/", ".")
        listed = [name.rpartition("/")[2].removesuffix(".py") for name in names]
        for name in (n for n in (*listed, *re.findall(r"`(\w+)`", words)) if n):
            if f"{package}.{name}" in MODULES:
                found.setdefault(f"{package}.{name}", number)
    return found


def test_readmes_map_names_every_module_in_order():
    rows = map_of_readme()
    inits = {m for m, path in MODULES.items() if path.stem.startswith("_")}
    parts = {m for m in MODULES if m.startswith("pyg_fullgraph.saga.rules.")}
    assert sorted(MODULES.keys() - rows.keys() - inits - parts) == []
    down = [(module, target) for module, row in rows.items() for _, target in imports_of(module)
            if rows.get(target, row) > row]
    assert down == []
