"""Where the code of a loop stands, and at which of its lines something happens."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import CodeType, FrameType
from typing import Any

_DEEPEST = 100
"""Layers that are taken off: what wraps itself has no end."""


def plain_function(function: Callable[..., Any]) -> Any:
    """What a partial, a decorator that tells what it wraps, or a method is made of."""
    plain: Any = function
    for _ in range(_DEEPEST):
        inner = plain.func if isinstance(plain, partial) else getattr(plain, "__func__", plain)
        inner = getattr(inner, "__wrapped__", inner)
        if inner is plain:
            break
        plain = inner
    return plain


def code_of(function: Callable[..., Any]) -> CodeType | None:
    """The code that runs when ``function`` is called; None of what is not written in Python."""
    plain = plain_function(function)
    if not hasattr(plain, "__code__") and callable(plain):
        plain = plain_function(type(plain).__call__)
    code = getattr(plain, "__code__", None)
    return code if isinstance(code, CodeType) else None


def file_of(function: Callable[..., Any] | None) -> str:
    """Name of the file that ``function`` was compiled from; empty where there is none."""
    code = None if function is None else code_of(function)
    return "" if code is None else code.co_filename


def lines_in(file: str) -> tuple[int, ...]:
    """The lines of ``file`` that are running in this thread, those of the innermost call first."""
    found: list[int] = []
    frame: FrameType | None = sys._getframe(1) if file else None
    while frame is not None:
        if frame.f_code.co_filename == file:
            found.append(frame.f_lineno)
        frame = frame.f_back
    return tuple(found)
