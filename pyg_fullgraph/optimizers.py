"""Optimizers in recorded steps: nothing on the host that a replay would not repeat, and kernels that fill the GPU."""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from pyg_fullgraph.errors import CaptureError
from pyg_fullgraph.functions import PLAIN

__all__ = ["Optimizers"]


class Optimizers:
    """The optimizers that a step uses, found when they take a step, made fit to be recorded before they do.

    Learning rates stay the numbers that schedulers set; while an optimizer runs they are tensors, which replays read.
    """

    def __init__(self) -> None:
        self._known: list[Optimizer] = []
        #: Per optimizer and group the tensor and the number that is in it.
        self._rates: dict[tuple[int, int], tuple[Tensor, float]] = {}
        #: What groups said before their optimizer runs: optimizer, group, option and value.
        self._given: list[tuple[Optimizer, dict[str, Any], str, Any]] = []
        # A compiled `optimizer.step` calls them, and looks whether they are the ones that it was compiled with.
        self._hooks = torch.compiler.disable(self._before), torch.compiler.disable(self._after)

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Around a step."""
        before, after = self._hooks
        hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
        try:
            with _updates_in_pieces():
                yield
        finally:
            for hook in hooks:
                hook.remove()
            self._restore(self._known)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore([optimizer])  # of a step that failed
        if not any(optimizer is known for known in self._known):
            self._known.append(optimizer)
        for k, group in enumerate(optimizer.param_groups):
            if not group["params"] or not all(p.is_cuda for p in group["params"]):
                continue
            if "capturable" in group:
                _make_capturable(optimizer, group)
            has_closure = len(args) > 1 or "closure" in kwargs
            if _may_be_fused(optimizer, group, has_closure):
                # As the user left it afterwards.
                if not group.get("fused"):
                    self._set(optimizer, group, "fused", True)
            elif "capturable" not in group:  # a changed rate is recorded anew
                self._rates.pop((id(optimizer), k), None)
                continue
            rate = group["lr"]
            if isinstance(rate, Tensor) and rate.is_cuda:
                self._rates.pop((id(optimizer), k), None)
                continue
            self._set(optimizer, group, "lr", self._rate(optimizer, k, float(rate), group))

    def _set(self, optimizer: Optimizer, group: dict[str, Any], option: str, value: Any) -> None:
        self._given.append((optimizer, group, option, group.get(option)))
        group[option] = value

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore([optimizer])

    def _restore(self, optimizers: Sequence[Optimizer]) -> None:
        """Let the groups of ``optimizers`` say what they said before."""
        for optimizer, group, option, value in self._given:
            if any(optimizer is one for one in optimizers):
                group[option] = value
        self._given = [given for given in self._given if not any(given[0] is one for one in optimizers)]

    def _rate(self, optimizer: Optimizer, k: int, value: float, group: dict[str, Any]) -> Tensor:
        known = self._rates.get((id(optimizer), k))
        if known is None:
            first = group["params"][0]
            # Fused optimizers read a float32.
            is_wide = first.dtype == torch.float64 and not group.get("fused")
            known = torch.full((), value, dtype=torch.float64 if is_wide else torch.float32, device=first.device), value
        elif known[1] != value:
            known = known[0].fill_(value), value
        self._rates[id(optimizer), k] = known
        return known[0]

    def write_rates(self) -> None:
        """Bring the tensors that replays read up to date."""
        for optimizer in self._known:
            for k, group in enumerate(optimizer.param_groups):
                known = self._rates.get((id(optimizer), k))
                if known is not None and not (isinstance(group["lr"], Tensor) and group["lr"].is_cuda):
                    self._rate(optimizer, k, float(group["lr"]), group)

    def rates(self) -> list[Any]:
        """Learning rates as they are set: numbers, and for tensors which."""
        return [id(rate) if isinstance(rate, Tensor) else rate for optimizer in self._known
                for group in optimizer.param_groups for rate in [group.get("lr")]]

    def parameters(self) -> list[Tensor]:
        return [p for optimizer in self._known for group in optimizer.param_groups for p in group["params"]]

    def versions(self) -> list[int]:
        """How often each parameter was written to."""
        return [p._version for p in self.parameters()]

    def grads(self) -> list[Tensor | None]:
        return [p.grad for p in self.parameters()]

    def tensors(self) -> list[Any]:
        """Everything that steps of the optimizers read and write."""
        found = [*self.parameters(), *self.grads(), *(tensor for tensor, _ in self._rates.values())]
        for optimizer in self._known:
            found += [value for state in optimizer.state.values() for value in state.values()]
            found += [v for group in optimizer.param_groups for v in group.values() if isinstance(v, Tensor)]
        return found

    def fingerprint(self) -> list[Any]:
        """What is fixed in a recording: options except for learning rates that are read, parameters and state."""
        made: list[Any] = []
        for optimizer in self._known:
            for k, group in enumerate(optimizer.param_groups):
                is_read = (id(optimizer), k) in self._rates
                made.append({name: id(v) if isinstance(v, Tensor) else v for name, v in group.items()
                             if name != "params" and not (name == "lr" and is_read)})
                for p in group["params"]:
                    state = optimizer.state.get(p, {})
                    made.append((id(p), p.data_ptr(), p.requires_grad, *map(id, state.values())))
        return made

    def check(self) -> None:
        """Refuse optimizers that count or decide on the host, which a replay would not repeat.

        Raises:
            CaptureError: names the optimizer.
        """
        for optimizer in self._known:
            name = type(optimizer).__name__
            if any(not p.is_cuda for group in optimizer.param_groups for p in group["params"]):
                raise CaptureError("parameters to be on a CUDA device", f"some of {name} elsewhere")
            for state in optimizer.state.values():
                for key, value in state.items():
                    if isinstance(value, (int, float)) or (isinstance(value, Tensor) and not value.is_cuda):
                        raise CaptureError(
                            "the state of the optimizer to be on the GPU, as that of torch.optim.SGD and of those with "
                            "the option 'capturable' (Adam, AdamW, ...)", f"{name}, which has '{key}' on the host")


def _may_be_fused(optimizer: Optimizer, group: dict[str, Any], has_closure: bool = False) -> bool:
    """Whether torch's fused updates may take the step, which read their rate from a tensor.

    A compiled step is the compiler's, which makes its own kernels and would not look into these. SGD reads its rate on
    the host otherwise. A closure computes gradients later on.
    """
    if group.get("fused"):
        return True
    is_free = group.get("fused") is None and group.get("foreach") is None and not group.get("differentiable")
    kind = type(optimizer)
    if not is_free or (kind is not torch.optim.SGD and (kind not in _FUSED_ADAMS or _is_compiled())):
        return False
    states = [optimizer.state.get(p, {}) for p in group["params"]]
    return all(p.dtype in (torch.float32, torch.bfloat16, torch.float16) for p in group["params"]) and all(
        state["step"].dtype == torch.float32 for state in states if "step" in state) and not any(
        isinstance(beta, Tensor) for beta in group.get("betas", ())) and len(
        {state.get("momentum_buffer") is None for p, state in zip(group["params"], states, strict=True)
         if p.grad is not None or (has_closure and p.requires_grad)}) < 2  # of which fused updates expect all or none


_FUSED_ADAMS = torch.optim.Adam, torch.optim.AdamW


def _is_compiled() -> bool:
    """Whether a function that is compiled called what asks, a function that is disabled for compilers."""
    from torch._dynamo import eval_frame  # takes seconds, and is there once something was disabled

    disabled = [c for c in eval_frame.DisableContext.__call__.__code__.co_consts if isinstance(c, types.CodeType)]
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == eval_frame.__file__ and frame.f_code not in disabled:
            return True
        frame = frame.f_back
    return False


def _make_capturable(optimizer: Optimizer, group: dict[str, Any]) -> None:
    group["capturable"] = True
    # The steps before the recording are no mistake.
    optimizer._warned_capturable_if_run_uncaptured = True
    for p in group["params"]:
        state = optimizer.state.get(p, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and not value.is_cuda:
                state[key] = value.to(p.device)


# --- updates of all parameters at once --------------------------------------------------------------------------

#: Torch's functions, by name. A block of threads takes 65,536 numbers of one tensor, 45 us on an H200; one launch takes
#: 36 tensors of four kinds, 30 of five.
_UPDATES = "_fused_adam_", "_fused_adamw_", "_fused_sgd_"
#: How many numbers a piece of a tensor has at least, and about how many pieces there are in all.
_MIN_PIECE, _NUM_PIECES = 4096, 24
_whole: dict[str, Callable[..., Any]] = {}
_num_around, _lock = 0, threading.Lock()


@contextmanager
def _updates_in_pieces() -> Iterator[None]:
    """Within it, also in other threads, torch's fused updates take large tensors in pieces, to the same bits."""
    global _num_around
    with _lock:
        if _num_around == 0:
            for name in _UPDATES:
                _whole[name] = getattr(torch, name)
                setattr(torch, name, _in_pieces(_whole[name]))
        _num_around += 1
    try:
        yield
    finally:
        with _lock:
            _num_around -= 1
            if _num_around == 0:
                for name, update in _whole.items():
                    setattr(torch, name, update)


def _in_pieces(update: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(update)
    def run(*kinds: list[Tensor], **options: Any) -> Any:
        return update(*_cut(kinds), **options)

    return run


def _cut(kinds: tuple[list[Tensor], ...]) -> tuple[list[Tensor], ...]:
    """Parameters, and gradients, moments and counts of steps in the same order, with large tensors in pieces."""
    parameters = kinds[0] if kinds else []
    if any(tensor is None for tensors in kinds for tensor in tensors):  # which torch names
        return kinds
    size = max(_MIN_PIECE, -(-sum(p.numel() for p in parameters) // _NUM_PIECES))
    size += -size % 1024  # pieces are where wide loads are
    made: tuple[list[Tensor], ...] = tuple([] for _ in kinds)
    for k, parameter in enumerate(parameters):
        alike = [ts[k] for ts in kinds if ts and ts[k].shape == parameter.shape]
        is_cut = parameter.numel() > size and all(type(t) in PLAIN and t.is_contiguous() for t in alike)
        for pieces, tensors in zip(made, kinds, strict=True):
            if not tensors:
                continue
            tensor = tensors[k]
            if not is_cut:
                pieces.append(tensor)
            elif tensor.shape == parameter.shape:
                pieces += tensor.view(-1).split(size)
            else:  # the count, which all read
                pieces += [tensor] * -(-parameter.numel() // size)
    return made
