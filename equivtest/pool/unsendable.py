"""What in an object cannot be sent to another process, and where in it that is."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from equivtest.arguments import a
from equivtest.pool.codec import encode

_DEEPEST = 12


def where_unsendable(name: str, value: Any) -> str | None:
    """``name``'s innermost part that cannot be sent, in a sentence; None if all can.

    ``data[0].handle (a TextIOWrapper) cannot be sent to another process: ...``. A function's
    captured variables and the globals that it uses are parts of it as well.
    """
    why = _refused(value)
    if why is None:
        return None
    path = name
    for _ in range(_DEEPEST):
        inner = next(
            ((p, part, told) for p, part in _parts(value) if (told := _refused(part)) is not None),
            None,
        )
        if inner is None:
            break
        step, value, why = inner
        path += step
    return f"{path} ({a(value)}) cannot be sent to another process: {why}"


def _refused(value: Any) -> str | None:
    try:
        encode(value)
    except Exception as error:
        return str(error).partition("\n")[0] or type(error).__name__
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What ``value`` is made of, with how each part is reached."""
    if isinstance(value, types.FunctionType):
        yield from _captured(value)
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
        yield ".__func__", value.__func__
    elif isinstance(value, partial):
        yield ".func", value.func
        yield from ((f".args[{k}]", one) for k, one in enumerate(value.args))
        yield from ((f"'s argument {k!r}", one) for k, one in value.keywords.items())
    elif isinstance(value, Mapping):
        yield from ((f"[{k!r}]", one) for k, one in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{k}]", one) for k, one in enumerate(value))
    if not isinstance(value, (types.FunctionType, types.MethodType, types.ModuleType)):
        yield from ((f".{k}", one) for k, one in getattr(value, "__dict__", {}).items())


def _captured(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            yield f"'s variable {name!r}", cell.cell_contents
        except ValueError:  # not yet assigned
            continue
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            yield f"'s global {name!r}", function.__globals__[name]
    yield from ((f"'s default {k}", one) for k, one in enumerate(function.__defaults__ or ()))


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)
