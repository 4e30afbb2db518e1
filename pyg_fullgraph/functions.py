"""Functions as torch sees them: ``torch.autograd.Function`` in each call of a layer, and what compilers leave alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function

__all__ = ["apart", "applying", "has_transforms", "is_of_transform"]

#: Whether a tensor is one of a transform of ``torch.func``.
is_of_transform: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
#: Whether a transform of ``torch.func`` is at work.
has_transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active


def applying(function: type[Function]) -> Callable[..., Any]:
    """``function.apply`` in three quarters of the time: torch looks at each argument for a transform of ``torch.func``
    that has ended, and at the function for what such transforms need. Where one is at work it is asked as ever.
    """
    apply: Any = super(Function, function).apply  # type: ignore[misc]

    def run(*args: Any) -> Any:
        return function.apply(*args) if has_transforms() else apply(*args)

    return run


def apart(function: Callable[..., Any], reason: str | None = None) -> Callable[..., Any]:
    """``function``, which no compiler looks into, for this reason; where none is at work it costs next to nothing."""
    unseen, is_compiling = torch.compiler.disable(function, reason=reason), torch.compiler.is_compiling

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        return unseen(*args) if is_compiling() else function(*args)

    return run
