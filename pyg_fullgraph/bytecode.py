"""What the code of a Python function names, by its bytecode."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator

__all__ = ["code_names", "codes_in", "global_names", "imported_names", "is_raise", "stored_names", "string_constants"]

_OF_ATTRIBUTES = ("LOAD_ATTR", "STORE_ATTR", "DELETE_ATTR", "LOAD_METHOD", "LOAD_SUPER", "IMPORT_")
_STORES = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_NAME", "DELETE_NAME", "STORE_ATTR", "DELETE_ATTR")
_SETS_BY_NAME = frozenset({"setattr", "delattr", "__setattr__", "__delattr__", "__dict__", "vars", "globals", "exec"})
#: Instructions that a wide argument or Python's own caches put between others.
_BETWEEN = ("CACHE", "EXTENDED_ARG")


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """``code`` and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


def code_names(code: types.CodeType) -> frozenset[str]:
    """Names of globals and attributes in a function and in the functions inside it."""
    return frozenset(name for one in codes_in(code) for name in one.co_names)


def string_constants(code: types.CodeType) -> frozenset[str]:
    """Strings in a function, and in the functions inside it, that may be names."""
    return frozenset(c for one in codes_in(code) for c in one.co_consts if isinstance(c, str) and c.isidentifier())


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> frozenset[str]:
    """Those of globals alone: an attribute may well be named as a global that nobody reads."""
    return frozenset(i.argval for one in codes_in(code) for i in dis.get_instructions(one)
                     if i.opcode in dis.hasname and not i.opname.startswith(_OF_ATTRIBUTES))


@functools.lru_cache(maxsize=4096)
def stored_names(code: types.CodeType) -> frozenset[str]:
    """Names of globals and attributes that a function, or one inside it, sets or deletes: all that it names where it
    may do so by their names.
    """
    if not _SETS_BY_NAME.isdisjoint(code_names(code)):
        return code_names(code)
    return frozenset(i.argval for one in codes_in(code) for i in dis.get_instructions(one) if i.opname in _STORES)


@functools.lru_cache(maxsize=4096)
def imported_names(code: types.CodeType) -> frozenset[str]:
    """Modules that a function, or one inside it, imports when it runs; after a dot those that it names from its own."""
    found = set()
    for one in codes_in(code):
        steps = [i for i in dis.get_instructions(one) if i.opname not in _BETWEEN]
        for level, step in zip(steps, steps[2:], strict=False):  # in between are the names that it takes from there
            if step.opname == "IMPORT_NAME":
                found.add(step.argval if level.argval == 0 else f".{step.argval}")
    return frozenset(found)


def is_raise(trace: types.TracebackType) -> bool:
    """Whether the innermost frame of a traceback is at a ``raise`` of its own."""
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    return any(i.offset == trace.tb_lasti and i.opname.startswith("RAISE") for i in dis.get_instructions(code))
