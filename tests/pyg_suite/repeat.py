"""Calls of a fused layer, made again on PyG's class: results, gradients and buffers have to be the same.

The test that makes the call does not notice: repetitions run on copies, and the random numbers drawn are given back.
"""

from __future__ import annotations

import contextlib
import copy
import math
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch_geometric.nn as pyg_nn
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch_geometric.inspector import Inspector
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import is_sparse

import pyg_fullgraph.nn as fused_nn
from pyg_fullgraph.nn.propagation import FusedMixin

#: Largest difference relative to the largest number of the right answer (to 1, where that is smaller).
TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float32: 2e-5, torch.float64: 1e-10}
#: What float32 may be off by where float64 agrees.
ROUNDING = 1e-3

PAIRS: dict[type, type] = {getattr(fused_nn, n): getattr(pyg_nn, n) for n in fused_nn.__all__ if hasattr(pyg_nn, n)}

_clean: dict[type, dict[str, Any]] = {}  # namespaces of classes as they were written
_plain: dict[type, type] = {}


def remember(cls: type) -> None:
    """Keep the namespace of a new class before the first instance changes it."""
    _clean[cls] = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}


def plain_class(cls: type) -> type:
    """PyG's class for a fused one; for a subclass written in a test, the same class over PyG's."""
    if cls in PAIRS:
        return PAIRS[cls]
    if not issubclass(cls, FusedMixin):
        return cls
    if "_fullgraph_base" in vars(cls):
        return vars(cls)["_fullgraph_base"]
    if cls not in _plain:
        space = dict(_clean[cls])
        bases = tuple(plain_class(b) for b in cls.__bases__ if b is not FusedMixin)
        twin = types.new_class(cls.__name__, bases, exec_body=lambda ns: ns.update(space))
        for name, value in space.items():
            if isinstance(value, types.FunctionType):
                setattr(twin, name, _bound_to(value, twin))
        twin.__name__ = f"{cls.__name__}Plain"  # PyG's generated modules are known by class name
        _plain[cls] = twin
    return _plain[cls]


def _bound_to(function: types.FunctionType, cls: type) -> types.FunctionType:
    """``function`` with ``super()`` meaning that of ``cls``."""
    names = function.__code__.co_freevars
    if "__class__" not in names:
        return function
    cells = tuple(types.CellType(cls) if n == "__class__" else c
                  for n, c in zip(names, function.__closure__ or (), strict=True))
    made = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__, made.__annotations__ = function.__kwdefaults__, function.__annotations__
    return made


def as_plain(module: nn.Module) -> nn.Module:
    """Turn ``module`` and what is in it into PyG's classes, in place."""
    for part in module.modules():
        if isinstance(part, FusedMixin):
            explain, layers = part._explain, part._decomposed_layers
            for method in ("propagate", "edge_updater"):
                vars(part).pop(method, None)
            part.__class__ = plain_class(type(part))
            part.inspector = inspector = Inspector(type(part))
            for name, left_out in (("message", None), ("aggregate", [0, "aggr"]), ("message_and_aggregate", [0]),
                                   ("update", [0]), ("edge_update", None)):
                inspector.inspect_signature(getattr(part, name), left_out)
            part._set_jittable_templates()
            part._explain, part._decomposed_layers = None, 1
            part.decomposed_layers, part.explain = layers, explain
    return module


# --- copies -----------------------------------------------------------------------------------------------------

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks",
          *(f"_{m}_forward_{k}" for m in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
            for k in ("pre_hooks", "hooks")))


def strip_hooks(module: nn.Module) -> bool:
    """Remove the hooks that a test registered; those of lazy parameters stay. Returns whether there were any."""
    found = False
    for part in module.modules():
        for name in _HOOKS:
            hooks = vars(part).get(name) or {}
            for key, hook in list(hooks.items()):
                if getattr(hook, "__self__", None) is not part:
                    found = True
                    del hooks[key]
    return found


def copy_module(module: nn.Module) -> nn.Module:
    """A deep copy that also takes tensors which are results: of a test's own graph, or kept by a layer."""
    memo: dict[int, Any] = {}
    for part in module.modules():
        for value in pytree.tree_leaves(list(vars(part).values())):
            if isinstance(value, Tensor) and (not value.is_leaf or value.layout != torch.strided):
                memo[id(value)] = value.detach().clone()
    return copy.deepcopy(module, memo)


def copy_arguments(arguments: Any, dtype: torch.dtype | None = None, with_gradients: bool = False,
                   noise: torch.Generator | None = None, long: bool = False) -> tuple[Any, list[Tensor]]:
    """Arguments with new floating tensors, equal ones staying one tensor, and those tensors.

    ``long`` turns int32 into int64: on CPUs torch's ``scatter_add`` has wrong gradients for int32 indices.
    """
    made: dict[int, Tensor] = {}

    def each(value: Any) -> Any:
        if dtype is not None and isinstance(value, (SparseTensor, Tensor)) and is_sparse(value):
            return value.to(dtype) if value.is_floating_point() else value
        if not isinstance(value, Tensor) or type(value) is not Tensor or value.layout != torch.strided:
            return value
        if long and value.dtype == torch.int32:
            return value.long()
        if not value.is_floating_point():
            return value
        if id(value) not in made:
            fresh = value.detach().clone()
            if noise is not None:
                fresh = fresh * (1 + 0.05 * torch.rand(fresh.shape, generator=noise)) \
                    + 1e-3 * torch.rand(fresh.shape, generator=noise)
            fresh = fresh.to(value.dtype if dtype is None else dtype)
            made[id(value)] = fresh.requires_grad_(with_gradients or value.requires_grad)
        return made[id(value)]

    return pytree.tree_map(each, arguments), list(made.values())


def flatten(result: Any) -> list[Any]:
    """The tensors of a result, dense, and the other leaves as they are."""
    out = []
    for value in pytree.tree_leaves(result):
        if isinstance(value, SparseTensor) or is_sparse(value):
            value = value.to_dense()
        out.append(value)
    return out


def distance(got: Any, want: Any) -> float:
    """Largest difference relative to the largest number of ``want``; infinite where the two are not comparable."""
    if not isinstance(want, Tensor) or not isinstance(got, Tensor):
        same = type(got) is type(want) and (isinstance(want, Tensor) or got is want or got == want)
        return 0.0 if same else float("inf")
    if got.shape != want.shape or (got.dtype != want.dtype and want.is_floating_point()):
        return float("inf")
    got, want = got.detach().double(), want.detach().double()
    same = (got == want) | (got.isnan() & want.isnan())
    difference = torch.where(same, 0.0, (got - want).abs())
    if want.numel() == 0:
        return 0.0
    scale = want[want.isfinite()].abs().max().clamp(min=1).item() if want.isfinite().any() else 1.0
    worst = difference.max().item() / scale
    return worst if worst == worst else float("inf")


# --- repetitions ------------------------------------------------------------------------------------------------


class Run:
    """One repetition: results, gradients of floating inputs and parameters, state afterwards; or what it raised."""

    def __init__(self, module: nn.Module, method: Callable[..., Any], arguments: Any, inputs: list[Tensor],
                 with_gradients: bool) -> None:
        self.values: dict[str, Any] = {}
        self.error: Exception | None = None
        self.has_gradients = False
        try:
            results = flatten(method(module, *arguments[0], **arguments[1]))
        except Exception as error:
            self.error = error
            return
        self.values.update({f"result {k}": v for k, v in enumerate(results)})
        self.values.update({f"state {k}": v.clone() for k, v in module.state_dict().items()
                            if isinstance(v, Tensor) and not nn.parameter.is_lazy(v)})
        if with_gradients:
            try:
                self._differentiate(module, results, inputs)
            except Exception as error:
                self.error = error

    def _differentiate(self, module: nn.Module, results: list[Any], inputs: list[Tensor]) -> None:
        outputs = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
        wrt = {f"gradient of input {k} {list(t.shape)}": t for k, t in enumerate(inputs)}
        wrt.update({f"gradient of {n}": p for n, p in module.named_parameters()
                    if p.requires_grad and not nn.parameter.is_lazy(p)})
        if not outputs or not wrt:
            return
        generator = torch.Generator().manual_seed(7)
        loss = sum((o * torch.randn(o.shape, generator=generator).to(o)).sum() for o in outputs)
        found = torch.autograd.grad(loss, list(wrt.values()), allow_unused=True)
        self.has_gradients = True
        self.values.update({n: torch.zeros_like(t) if g is None else g
                            for (n, t), g in zip(wrt.items(), found, strict=True)})


def differences(ours: Run, pygs: Run, limit: float | None = None) -> dict[str, float]:
    """What is further apart than allowed."""
    out = {}
    for name in {**pygs.values, **ours.values}:
        got, want = ours.values.get(name), pygs.values.get(name)
        allowed = limit if limit is not None else TOLERANCE.get(getattr(want, "dtype", None), 0.0)
        far = distance(got, want)
        if far > allowed:
            out[name] = far
    return out


def describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{type(value).__name__}{list(value.shape)}:{str(value.dtype)[6:]}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(describe(v) for v in value)})"
    return repr(value) if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__


class Repeater:
    """Makes calls again and notes what is different.

    Attributes:
        mismatches: one text per call that differs; the caller empties it.
        counts: how many calls were ``compared`` (and ``with gradients``), and why others were not.
        is_busy: inside a call or a repetition, where nothing is repeated.
    """

    def __init__(self) -> None:
        self.mismatches: list[str] = []
        self.counts: Counter[str] = Counter()
        self.is_busy = False
        self.on_repeat: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext

    def call(self, module: nn.Module, method: Callable[..., Any], args: tuple, kwargs: dict[str, Any],
             original: Callable[..., Any]) -> Any:
        """``original(*args, **kwargs)``, with ``method(copy, *args, **kwargs)`` repeated on copies of ``module``."""
        if self.is_busy:
            return original(*args, **kwargs)
        reason = _not_repeatable(args, kwargs)
        if reason is not None:
            self.counts[f"not repeated: {reason}"] += 1
            return original(*args, **kwargs)
        self.is_busy = True
        try:
            with self._aside():
                pristine = copy_module(module)
                had_hooks = strip_hooks(pristine)
                arguments = copy_arguments((args, kwargs))[0]
            before = torch.get_rng_state()
            error = None
            try:
                result = original(*args, **kwargs)
            except Exception as raised:
                error = raised
            with self._aside():
                actual = None if had_hooks else _actual(module, result if error is None else None, error)
                self._compare(module, pristine, method, arguments, actual, before)
            if error is not None:
                raise error
            return result
        finally:
            self.is_busy = False

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        state = torch.get_rng_state()
        with self.on_repeat():
            yield
        torch.set_rng_state(state)

    def _compare(self, module: nn.Module, pristine: nn.Module, method: Callable[..., Any], arguments: Any,
                 actual: Run | None, rng: Tensor) -> None:
        where = f"{module} ({type(module).__name__}.{method.__name__}) on {describe(arguments[0])}" + \
            "".join(f" {k}={describe(v)}" for k, v in arguments[1].items())

        def repeat(plain: bool, **options: Any) -> Run:
            torch.set_rng_state(rng)
            return _repeat(pristine, plain, method, arguments, **options)

        pygs = repeat(True)
        ours = actual if actual is not None else repeat(False)
        if ours.error is not None or pygs.error is not None:
            if (ours.error is None) != (pygs.error is None):
                self.mismatches.append(f"{where}\n    ours: {_raised(ours.error)}; PyG's: {_raised(pygs.error)}")
            else:
                self.counts["compared: both raise"] += 1
            return
        found = self._different(ours, pygs, repeat)
        if found and self._is_random(module, method, arguments):
            self.counts["compared in eval mode: random numbers in training mode"] += 1
            where += " in eval mode"
            pristine.eval()
            found = self._different(repeat(False), repeat(True), repeat)
        self.counts["compared"] += 1
        if found:
            self.mismatches.append(f"{where}\n    {', '.join(found)}")

    def _different(self, ours: Run, pygs: Run, repeat: Callable[..., Run]) -> list[str]:
        """What differs between two runs, and if nothing does, between two more with gradients."""
        found = differences(ours, pygs)
        if not found and not torch.is_inference_mode_enabled():
            with torch.enable_grad():
                ours, pygs = repeat(False, with_gradients=True), repeat(True, with_gradients=True)
                if pygs.error is not None:
                    self.counts["compared without gradients: PyG's class has none"] += 1
                    return []
                if ours.error is not None:
                    return [f"with gradients of all inputs: {_raised(ours.error)}"]
                found = differences(ours, pygs)
                self.counts["compared with gradients"] += pygs.has_gradients
        if found and (why := self._explained(repeat, found, pygs)):
            self.counts[f"compared: differences are {why}"] += 1
            return []
        return [f"{n} off by {v:.2g}" for n, v in found.items()]

    def _is_random(self, module: nn.Module, method: Callable[..., Any], arguments: Any) -> bool:
        """Whether PyG's class computes something else with other random numbers, beside those of lazy parameters."""
        warm = copy_module(module)
        strip_hooks(warm)
        with torch.enable_grad():
            torch.manual_seed(1)
            first = _repeat(warm, True, method, arguments, with_gradients=True)
            torch.manual_seed(2)
            return bool(differences(first, _repeat(warm, True, method, arguments, with_gradients=True)))

    def _explained(self, repeat: Callable[..., Run], found: dict[str, float], pygs: Run) -> str:
        """Why a difference is none: float32's rounding and range, or ties of a maximum; empty if it is one."""
        with_gradients = pygs.has_gradients
        options = dict(with_gradients=with_gradients)

        def agree(limit: float | None = None, **more: Any) -> bool:
            ours, pygs = (repeat(plain, **options, **more) for plain in (False, True))
            return ours.error is None and pygs.error is None and not differences(ours, pygs, limit)

        is_finite = math.isfinite(max(found.values())) and \
            all(v.isfinite().all() for v in pygs.values.values() if isinstance(v, Tensor))
        if (not is_finite or max(found.values()) < ROUNDING) and agree(dtype=torch.float64):
            return "rounding" if is_finite else "overflow of float32"
        if with_gradients and all(n.startswith("gradient") for n in found) and \
                agree(ROUNDING, noise=True) and agree(dtype=torch.float64, noise=True):
            return "ties"
        return ""


def _raised(error: Exception | None) -> str:
    if error is None:
        return "no error"
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _actual(module: nn.Module, result: Any, error: Exception | None) -> Run:
    def already(_: nn.Module) -> Any:
        if error is not None:
            raise error
        return result

    return Run(module, already, ((), {}), [], with_gradients=False)


def _repeat(pristine: nn.Module, plain: bool, method: Callable[..., Any], arguments: Any,
            dtype: torch.dtype | None = None, with_gradients: bool = False, noise: bool = False) -> Run:
    module = copy_module(pristine)
    if plain:
        as_plain(module)
    if dtype is not None:
        module.to(dtype)
    generator = torch.Generator().manual_seed(3) if noise else None
    copies, inputs = copy_arguments(arguments, dtype, with_gradients, generator, long=plain)
    return Run(module, method, copies, inputs, with_gradients)


def _not_repeatable(args: tuple, kwargs: dict[str, Any]) -> str | None:
    leaves = pytree.tree_leaves((args, kwargs))
    if torch.jit.is_tracing():
        return "torch.jit is tracing"
    if any(isinstance(v, torch.fx.Proxy) for v in leaves):
        return "torch.fx is tracing"
    tensors = [v for v in leaves if isinstance(v, Tensor)]
    if any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors):
        return "torch.func transform"
    if any(isinstance(t, torch._subclasses.FakeTensor) for t in tensors):
        return "fake tensors"
    return None
