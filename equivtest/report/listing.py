"""The source of a loop as its record keeps it: the functions that something came from."""

from __future__ import annotations

import ast
import linecache
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import Any

from equivtest.compare.tables import EventRow
from equivtest.source import code_of

_LONGEST = 160
"""Lines of a function that are kept: what a page can show beside its fault."""

_MOST = 4
"""Functions that are kept: the loop, and helpers in its file."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Listing:
    """One function of the loop's file.

    Attributes:
        file: relative to the root of the tests, or its name where it is outside.
        first: number of its first line.
        lines: its text, without line ends; ends with an ellipsis where it was cut.
    """

    file: str
    first: int
    lines: tuple[str, ...]


def listings(
    loop: Callable[..., Any] | None, events: Iterable[EventRow], root: Path
) -> tuple[Listing, ...]:
    """The loop and the functions of its file that events came from, in the order of the file.

    Empty for equivtest's own recipe, and where no source can be read.
    """
    code = None if loop is None else code_of(loop)
    if code is None:
        return ()
    lines = linecache.getlines(code.co_filename)
    text = "".join(lines)
    functions = _functions(text)
    if (code.co_name, code.co_firstlineno) not in functions or not _same_lines(code, text):
        return ()  # a lambda, or a file that was edited since: its lines are others
    seen = {line for event in events for line in event.lines}
    spans = _spans(list(functions.values()), [code.co_firstlineno, *sorted(seen)])
    file = _shown(Path(code.co_filename), root)
    return tuple(
        Listing(file, first, _cut(lines[first - 1 : last])) for first, last in sorted(spans)
    )


@lru_cache(maxsize=16)
def _functions(text: str) -> dict[tuple[str, int], tuple[int, int]]:
    """By name and first line the span of every function, the shortest first."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its import said what there is to say
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    made = {(n.name, _span(n)[0]): _span(n) for n in ast.walk(tree) if isinstance(n, _Function)}
    return dict(sorted(made.items(), key=lambda one: _length(one[1])))


@lru_cache(maxsize=64)
def _same_lines(code: CodeType, text: str) -> bool:
    """Whether the text has this code at the same lines; what pytest rewrites keeps its lines."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = [compile(text, code.co_filename, "exec", dont_inherit=True)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    while made:
        one = made.pop()
        if (one.co_name, one.co_firstlineno) == (code.co_name, code.co_firstlineno):
            return _numbers(one) == _numbers(code)
        made += [inner for inner in one.co_consts if isinstance(inner, CodeType)]
    return False


def _numbers(code: CodeType) -> set[int]:
    own = {line for *_, line in code.co_lines() if line}
    inner = [_numbers(const) for const in code.co_consts if isinstance(const, CodeType)]
    return own.union(*inner)


def _spans(functions: Sequence[tuple[int, int]], wanted: Iterable[int]) -> list[tuple[int, int]]:
    """First and last lines of the innermost functions around ``wanted``, the shortest first."""
    found: dict[tuple[int, int], None] = {}
    for line in wanted:
        around = next((span for span in functions if span[0] <= line <= span[1]), None)
        if around is not None and not any(f <= line <= last for f, last in found):
            found[around] = None
    return list(found)[:_MOST]


def _span(function: _Function) -> tuple[int, int]:
    decorators = [d.lineno for d in function.decorator_list]
    return min([function.lineno, *decorators]), function.end_lineno or function.lineno


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]


def _cut(lines: Sequence[str]) -> tuple[str, ...]:
    kept = tuple(line.rstrip("\r\n") for line in lines[:_LONGEST])
    return kept if len(lines) <= _LONGEST else (*kept, "…")


def _shown(path: Path, root: Path) -> str:
    """Nothing of where the project lies on this machine."""
    try:
        return path.resolve().relative_to(root.resolve()).as_posix()
    except (ValueError, OSError):
        return path.name
