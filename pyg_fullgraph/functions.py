"""Functions as torch sees them: ``torch.autograd.Function`` in each call of a layer, and what compilers leave alone."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C._functorch import TransformType, peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import Function, forward_ad
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _get_current_function_mode_stack, _pop_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "PLAIN", "LayerMode", "apart", "applying", "default_devices", "drop_modes", "has_autocast",
    "has_modes_of_others", "has_tangent", "has_transforms", "hooks_of_saved", "is_exported", "is_of_transform",
    "is_recorded", "is_wrapped", "lasting", "num_dispatch_modes", "num_function_modes", "tensors_in", "unrecorded",
    "unseen"]

#: Types of tensors that are torch's own.
PLAIN = (torch.Tensor, torch.nn.Parameter)
#: Whether a tensor is one of a transform of ``torch.func``.
is_of_transform: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
#: Whether a tensor is many gradients, as ``is_grads_batched`` makes them.
_is_batched: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
#: Whether a transform of ``torch.func`` is at work.
has_transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active
#: Whether autocast is on for CPUs or GPUs of any maker but Apple's; in half of the time that it takes for one type.
has_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
#: A context for what is done with plain tensors only: neither modes nor subclasses see torch's functions in it.
unseen = torch._C.DisableTorchFunction
#: Modes that record operations, or run them without numbers.
_TRACERS = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY,
            torch._C._TorchDispatchModeKey.FUNCTIONAL)
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch
#: How many dispatch modes are at work.
num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
#: How many modes of torch's functions are at work.
num_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
#: The innermost hooks of what is saved for backward, as a checkpoint has them, of ``True``; None if there are none.
hooks_of_saved: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
# Asked in each call of a layer.
_is_tracing = torch._C._is_tracing
_has = torch._C._dispatch_tls_is_dispatch_key_included


def has_tangent(tensor: torch.Tensor | None) -> bool:
    """Whether ``tensor`` carries a tangent of forward mode."""
    return forward_ad._current_level >= 0 and tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None


def is_wrapped(gradient: torch.Tensor | None) -> bool:
    """Whether ``gradient`` is more than the numbers that a kernel would read: many, as ``is_grads_batched`` and
    ``torch.vmap`` make them, of another transform, or with a tangent.
    """
    return gradient is not None and (_is_batched(gradient) or is_of_transform(gradient) or has_tangent(gradient))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in arguments of a function, in lists and the like of any class, too."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        yield from tensors_in([*value.values()])


def is_recorded() -> bool:
    """Whether operations of this thread are recorded, or run without numbers: by ``torch.export``, ``torch.jit.trace``,
    ``make_fx``, ``functionalize``, or under a ``FakeTensorMode``; not by ``torch.compile``.
    """
    return _is_tracing() or (num_dispatch_modes() > 0 and any(map(torch._C._get_dispatch_mode, _TRACERS))) or \
        _has(_PRE_DISPATCH) or (has_transforms() and peek_interpreter_stack().key() == TransformType.Functionalize)


def has_modes_of_others() -> bool:
    """Whether a mode of torch's functions is at work that is somebody's, and not ours or a device's."""
    return num_function_modes() > 0 and not all(
        type(mode).__module__.startswith(("pyg_fullgraph.", "torch.utils._device"))
        for mode in _get_current_function_mode_stack())


def default_devices() -> tuple[torch.device, ...]:
    """Where tensors are made if nobody says where, the last of these; none if that is nobody's choice."""
    return () if num_function_modes() == 0 else tuple(
        mode.device for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext))


class LayerMode(TorchFunctionMode):
    """A mode around the forward of a layer. It takes itself off the stack of modes and nothing else: an interrupt may
    have left others there, for :func:`drop_modes`, or have taken this one off.
    """

    def __exit__(self, *error: Any) -> None:
        if _get_current_function_mode() is self:
            super().__exit__(*error)


def drop_modes(num_below: int) -> None:
    """Take modes around forwards off the stack that were left there, above ``num_below`` modes."""
    while num_function_modes() > num_below and isinstance(_get_current_function_mode(), LayerMode):
        _pop_mode()


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """A context in which operations on plain tensors are run as ever, whatever tracers and transforms are at work."""
    if not (is_recorded() or has_transforms()):
        yield
        return
    state, set_state = torch._C._get_tracing_state(), torch._C._set_tracing_state  # type: ignore[attr-defined]
    set_state(None)
    try:
        with _disable_current_modes(), temporarily_clear_interpreter_stack():
            yield
    finally:
        set_state(state)


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """A context for what is made of plain tensors and outlives a call: :func:`unrecorded`, not of inference, not of
    autograd, and seen by no mode of dispatch. Checkpoints that choose what to save count what runs in forward, and what
    is remembered does not run again.
    """
    hidden = _disable_current_modes() if num_dispatch_modes() > 0 else contextlib.nullcontext()
    with unrecorded(), hidden, torch.inference_mode(False), torch.no_grad():
        yield


@torch.compiler.assume_constant_result
def is_exported() -> bool:
    """Whether ``torch.export`` is at work; asked when code is compiled, as what dynamo makes of torch's own function is
    another thing in each version.
    """
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
    alone = torch.compiler.disable(function, reason=reason)

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        if is_compiling():
            return exported(*args) if exported is not None and is_exported() else alone(*args)
        return function(*args)

    return run
