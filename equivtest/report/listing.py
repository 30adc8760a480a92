"""The source of a loop as its record keeps it: the functions that something came from."""

from __future__ import annotations

import ast
import linecache
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
        file: relative to the root of the tests, or its name and folder where it is outside.
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
    seen = {line for event in events for line in event.lines}
    functions = _functions(lines)
    if not _unchanged(code, functions):
        return ()
    spans = _spans(list(functions), [code.co_firstlineno, *sorted(seen)])
    file = _shown(Path(code.co_filename), root)
    return tuple(
        Listing(file, first, _cut(lines[first - 1 : last])) for first, last in sorted(spans)
    )


def _functions(lines: Sequence[str]) -> dict[tuple[int, int], str]:
    """First and last line of every function with its name, the shortest first."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its import said what there is to say
            tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    made = [(_span(n), n.name) for n in ast.walk(tree) if isinstance(n, _Function)]
    return dict(sorted(made, key=lambda one: _length(one[0])))


def _unchanged(code: CodeType, functions: Mapping[tuple[int, int], str]) -> bool:
    """Whether the code may be of this text: of a file edited since, lines are others."""
    named = not code.co_name.startswith("<")
    first = [name for (start, _), name in functions.items() if start == code.co_firstlineno]
    return not named or code.co_name in first


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
        return "/".join(path.parts[-2:])
