"""Code of forwards written in PyG with some of their expressions as calls of ours."""

from __future__ import annotations

import ast
import inspect
import sys
import types
from collections.abc import Iterable, Iterator

__all__ = ["Rewriter", "rewritten"]


class Rewriter(ast.NodeTransformer):
    """Puts calls in the place of expressions; a subclass has the methods that do.

    Attributes:
        has_found: Whether there was one.
    """

    has_found = False

    def call(self, name: str, args: list[ast.expr], like: ast.expr) -> ast.expr:
        """``name(*args)`` in the place of ``like``."""
        self.has_found = True
        function = ast.copy_location(ast.Name(name, ast.Load()), like)
        return ast.copy_location(ast.Call(function, args, []), like)


def rewritten(function: types.FunctionType, rewriter: Rewriter, *more: Rewriter) -> types.CodeType | None:
    """The code of a ``forward`` written in PyG as ``rewriter`` and then ``more`` leave it, None if it has nothing that
    the first one looks for.

    None as well where its source cannot be read, or is not that of the code.
    """
    code = function.__code__
    is_pygs = function.__name__ == "forward" and (function.__module__ or "").startswith("torch_geometric.")
    if not is_pygs or code.co_freevars:
        return None
    try:
        # The whole file: what a name stands for there decides how it is called.
        tree = ast.parse(inspect.getsource(sys.modules[function.__module__]))
        if not _is_same(_compiled(tree, code), code):
            return None
    except (KeyError, OSError, StopIteration, SyntaxError, TypeError):
        return None
    for one in (rewriter, *more):
        tree = one.visit(tree)
    return _compiled(tree, code) if rewriter.has_found else None


def _compiled(tree: ast.Module, like: types.CodeType) -> types.CodeType:
    """The code in ``tree`` that has the name and the place of ``like``."""
    whole = compile(tree, like.co_filename, "exec", dont_inherit=True)
    return next(c for c in _inside([whole]) if (c.co_name, c.co_firstlineno) == (like.co_name, like.co_firstlineno))


def _inside(codes: Iterable[types.CodeType]) -> Iterator[types.CodeType]:
    for code in codes:
        yield code
        yield from _inside([c for c in code.co_consts if isinstance(c, types.CodeType)])


def _is_same(a: types.CodeType, b: types.CodeType) -> bool:
    """Whether two codes do the same; where they are from is left out."""
    pairs = list(zip(a.co_consts, b.co_consts, strict=False))
    parts = [(x, y) for x, y in pairs if isinstance(x, types.CodeType) and isinstance(y, types.CodeType)]
    return (a.co_code, a.co_names, a.co_varnames, len(a.co_consts)) == \
        (b.co_code, b.co_names, b.co_varnames, len(b.co_consts)) and all(_is_same(*p) for p in parts) and \
        all(p in parts or p[0] == p[1] for p in pairs)
