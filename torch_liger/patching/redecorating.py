"""Decorated functions with another function inside.

The forwards of transformers stand below decorators, which check arguments and checkpoint layers.
A replacement for the innermost function goes below copies of them.
"""

import types
from typing import Any


def redecorated(function: Any, innermost: Any) -> Any:
    """`function` as if its decorators had been put on `innermost`."""
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        return innermost
    new_inner = redecorated(inner, innermost)
    closure = tuple(
        types.CellType(new_inner) if cell.cell_contents is inner else cell
        for cell in function.__closure__
    )
    copy = copied(function, function.__globals__, closure)
    copy.__wrapped__ = new_inner
    return copy


def copied(function: Any, names: dict[str, Any], closure: Any) -> Any:
    """A copy of a function with other globals or another closure."""
    copy = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, closure
    )
    copy.__dict__.update(function.__dict__)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    copy.__annotations__ = function.__annotations__
    copy.__doc__ = function.__doc__
    return copy
