"""Functions as torch sees them: ``torch.autograd.Function`` in each call of a layer, and what compilers leave alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C._functorch import TransformType, peek_interpreter_stack
from torch.autograd import Function
from torch.compiler import is_compiling

__all__ = ["apart", "applying", "has_transforms", "is_exported", "is_of_transform", "is_traced"]

#: Whether a tensor is one of a transform of ``torch.func``.
is_of_transform: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
#: Whether a transform of ``torch.func`` is at work.
has_transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active
#: Modes that record operations, or run them without numbers.
_TRACERS = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY,
            torch._C._TorchDispatchModeKey.FUNCTIONAL)
# Asked several times in each call of a layer.
_is_tracing, _num_modes = torch._C._is_tracing, torch._C._len_torch_dispatch_stack


def is_traced() -> bool:
    """Whether operations are recorded, or run without numbers: by ``torch.compile``, ``torch.export``,
    ``torch.jit.trace``, ``make_fx``, ``functionalize``, or under a ``FakeTensorMode``.
    """
    return is_compiling() or _is_tracing() or (_num_modes() > 0 and any(map(torch._C._get_dispatch_mode, _TRACERS))) \
        or (has_transforms() and peek_interpreter_stack().key() == TransformType.Functionalize)


@torch.compiler.assume_constant_result
def is_exported() -> bool:
    """Whether ``torch.export`` is at work; torch's own function is true in everything that some versions compile."""
    return torch.compiler.is_exporting()


def applying(function: type[Function]) -> Callable[..., Any]:
    """``function.apply`` in three quarters of the time: torch looks at each argument for a transform of ``torch.func``
    that has ended, and at the function for what such transforms need. Where one is at work it is asked as ever.
    """
    apply: Any = super(Function, function).apply  # type: ignore[misc]

    def run(*args: Any) -> Any:
        return function.apply(*args) if has_transforms() else apply(*args)

    return run


def apart(function: Callable[..., Any], reason: str | None = None,
          exported: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """``function``, which no compiler looks into, for this reason; where none is at work it costs next to nothing.

    Args:
        function: takes arguments by position.
        reason: what a compiler says.
        exported: what ``torch.export`` sees in its place.
    """
    unseen = torch.compiler.disable(function, reason=reason)

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        if is_compiling():
            return exported(*args) if exported is not None and is_exported() else unseen(*args)
        return function(*args)

    return run
