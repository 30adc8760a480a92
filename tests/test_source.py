"""Where the code of a loop stands."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from equivtest.source import code_of, file_of, lines_in, plain_function


def loop(rank: Any) -> Any:
    return rank


def deco(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*given: Any) -> Any:
        return function(*given)

    return wrapper


class Loops:
    def method(self, rank: Any) -> Any:
        return rank

    @classmethod
    def of_class(cls, rank: Any) -> Any:
        return rank

    @deco
    def __call__(self, rank: Any) -> Any:
        return rank


CALL = vars(Loops)["__call__"].__wrapped__


@pytest.mark.parametrize(
    ("function", "plain"),
    [
        (loop, loop),
        (deco(loop), loop),
        (deco(deco(loop)), loop),
        (functools.partial(loop, 1), loop),
        (functools.partial(functools.partial(deco(loop), 1), 2), loop),
        (deco(functools.partial(deco(loop), 1)), loop),
        (Loops().method, Loops.method),
        (Loops.of_class, Loops.of_class.__func__),
        (functools.partial(Loops().method, 1), Loops.method),
        (Loops(), CALL),
        (functools.partial(Loops()), CALL),
        (functools.lru_cache(loop), loop),
    ],
)
def test_the_code_is_of_the_function_that_was_written(
    function: Callable[..., Any], plain: Callable[..., Any]
) -> None:
    assert code_of(function) is plain.__code__
    assert file_of(function) == __file__
    assert plain_function(function) in (plain, function, getattr(function, "func", None))


@pytest.mark.parametrize("function", [print, len, Loops, "".join, functools.partial(print)])
def test_what_is_not_written_in_python_has_no_code(function: Callable[..., Any]) -> None:
    assert code_of(function) is None
    assert file_of(function) == ""


def test_no_loop_has_no_file() -> None:
    assert file_of(None) == ""


def test_what_wraps_itself_has_an_end() -> None:
    def own(rank: Any) -> Any:
        return rank

    own.__wrapped__ = own  # type: ignore[attr-defined]
    assert code_of(own) is own.__code__

    def one(rank: Any) -> Any:
        return rank

    def other(rank: Any) -> Any:
        return rank

    one.__wrapped__, other.__wrapped__ = other, one  # type: ignore[attr-defined]
    assert code_of(one) in (one.__code__, other.__code__)


def test_code_made_from_a_string_has_the_name_it_was_given() -> None:
    space: dict[str, Any] = {}
    exec(compile("def made(rank): pass", "<cell 3>", "exec"), space)
    assert file_of(space["made"]) == "<cell 3>"


def test_the_line_is_of_the_innermost_call_in_the_file() -> None:
    text = "def outer(tell):\n    return inner(tell)\n\n\ndef inner(tell):\n    return tell()\n"
    space: dict[str, Any] = {}
    exec(compile(text, "a-file.py", "exec"), space)
    assert space["outer"](lambda: lines_in("a-file.py")) == (6, 2)
    # a call from there into another file and back out of it
    assert space["outer"](lambda: [lines_in("a-file.py") for _ in range(1)]) == [(6, 2)]
    assert space["outer"](lambda: lines_in("another.py")) == ()


def test_outside_of_the_file_and_of_none_there_is_no_line() -> None:
    assert lines_in("a-file.py") == ()
    assert lines_in("") == ()
