"""The pytest plugin: puts our layers in the place of PyG's before a test module is imported, and watches their calls.

Loaded by ``python -m tests.pyg_suite``; with ``--plain`` it only writes the outcomes of unmodified PyG.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg_nn
import torch_geometric.nn.conv as pyg_conv

#: Node id -> why its outcome says nothing about our layers.
EXCLUDED = {
    "test/nn/models/test_basic_gnn.py::test_packaging":
        "torch.package refuses every module that the test does not name as extern, and it names PyG's only",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--plain", action="store_true", help="leave PyG's classes in their places")
    parser.addoption("--suite-report", type=Path, required=True, help="where the outcomes go, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Outcomes(config.getoption("--suite-report")), "pyg_suite_outcomes")
    if not config.getoption("--plain"):
        config.pluginmanager.register(Replaced(), "pyg_suite_replaced")


class Outcomes:
    """Collects what became of each test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.outcomes: dict[str, str] = {}
        self.details: dict[str, str] = {}
        self.facts: dict[str, Any] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = report.outcome
        if report.failed:
            self.details[report.nodeid] = report.longreprtext

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.outcomes[report.nodeid] = "failed"
            self.details[report.nodeid] = report.longreprtext

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        replaced = session.config.pluginmanager.get_plugin("pyg_suite_replaced")
        facts = {} if replaced is None else replaced.facts()
        self.path.write_text(json.dumps({"outcomes": self.outcomes, "details": self.details, **facts}, indent=1))


class Replaced:
    """Our classes in place, calls repeated, fused and plain edge phases counted."""

    def __init__(self) -> None:
        import pyg_fullgraph.nn as fused_nn
        from pyg_fullgraph import debug
        from pyg_suite import repeat

        self.repeater = repeat.Repeater()
        self.repeater.on_repeat = self._uncounted
        self.calls: Counter[tuple[str, str]] = Counter()
        self.rounded: list[str] = []
        self._stack = contextlib.ExitStack()
        self.events = self._stack.enter_context(debug.recording())
        self._names = [n for n in fused_nn.__all__ if hasattr(pyg_nn, n)]
        for name in self._names:
            theirs, ours = getattr(pyg_nn, name), getattr(fused_nn, name)
            if name != "MessagePassing":
                _replace(name, theirs, ours)
        self._base = pyg_nn.MessagePassing
        for package in (pyg_nn, pyg_conv):
            package.MessagePassing = fused_nn.MessagePassing
        _initialize_all_of_rgat()
        _watch(self.repeater)

    def pytest_collection_finish(self) -> None:
        # Test modules have their base class; PyG itself asks for its own by this name while it runs.
        for package in (pyg_nn, pyg_conv):
            package.MessagePassing = self._base

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self.repeater.mismatches.clear()
        state = torch.get_rng_state()
        try:
            result = yield
        except AssertionError:
            # Most tests ask two ways of calling a layer for one result within 1e-8 or so. Ours are two programs.
            if self.repeater.mismatches or not _passes_in_float64(item, state):
                raise
            self.rounded.append(item.nodeid)
            result = None
        finally:
            for event in self.events:
                what = "fused" if event.program is not None else f"plain: {'; '.join(event.reasons)}"
                self.calls[f"{type(event.layer).__name__}.{event.method}", what] += 1
            self.events.clear()
        if self.repeater.mismatches:
            raise AssertionError("not what PyG's class does:\n  " + "\n  ".join(self.repeater.mismatches))
        return result

    @contextlib.contextmanager
    def _uncounted(self) -> Iterator[None]:
        mark = len(self.events)
        yield
        del self.events[mark:]

    def facts(self) -> dict[str, Any]:
        layers: dict[str, dict[str, int]] = {}
        for (layer, what), count in sorted(self.calls.items()):
            layers.setdefault(layer, {})[what] = count
        return {"replaced": self._names, "layers": layers, "repeated": dict(sorted(self.repeater.counts.items())),
                "rounded": self.rounded}


def _passes_in_float64(item: pytest.Item, state: torch.Tensor) -> bool:
    """Whether a test that failed passes with the same random numbers in float64."""
    torch.set_rng_state(state)
    torch.set_default_dtype(torch.float64)
    try:
        item.runtest()
    except Exception:
        return False
    finally:
        torch.set_default_dtype(torch.float32)
    return True


def _initialize_all_of_rgat() -> None:
    """PyG's ``RGATConv`` drops the tensor made for ``l2``, so that its tests compute with whatever was in memory."""
    initialize = pyg_nn.RGATConv.reset_parameters

    def reset_parameters(self: Any) -> None:
        initialize(self)
        torch.nn.init.constant_(self.l2, 1 / self.out_channels)

    pyg_nn.RGATConv.reset_parameters = reset_parameters


def _replace(name: str, theirs: type, ours: type) -> None:
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("torch_geometric") and vars(module).get(name) is theirs:
            setattr(module, name, ours)


def _watch(repeater: Any) -> None:
    """Pass calls of fused layers, and of their propagate and edge_updater where a test calls those, to ``repeater``."""
    from pyg_fullgraph.nn.propagation import FusedMixin
    from pyg_suite import repeat

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        return torch.nn.Module.__call__(module, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return super(FusedMixin, self).__call__(*args, **kwargs)
        return repeater.call(self, forward, args, kwargs, super(FusedMixin, self).__call__)

    def of(method: str) -> Any:
        inner = getattr(FusedMixin, f"_fullgraph_{method}")

        def repeated(module: Any, edge_index: Any, size: Any = None, **kwargs: Any) -> Any:
            return getattr(module, method)(edge_index, size=size, **kwargs)

        repeated.__name__ = method

        @torch.compiler.disable
        def watched(self: Any, edge_index: Any, size: Any, kwargs: Any) -> Any:
            def original(edge_index: Any, size: Any = None, **kwargs: Any) -> Any:
                return inner(self, edge_index, size, kwargs)

            return repeater.call(self, repeated, (edge_index, size), kwargs, original)

        return watched

    def made(cls: type, **options: Any) -> None:
        super(FusedMixin, cls).__init_subclass__(**options)
        repeat.remember(cls)

    FusedMixin.__init_subclass__ = classmethod(made)
    FusedMixin.__call__ = call
    for method in ("propagate", "edge_updater"):
        setattr(FusedMixin, f"_fullgraph_{method}", of(method))
