"""The source of a loop as its record keeps it."""

from __future__ import annotations

import functools
import importlib.util
import linecache
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from equivtest.compare.tables import EventRow
from equivtest.report.listing import Listing, listings

Writer = Callable[[str], ModuleType]


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Writer]:
    """A module of the given text, imported from a file below ``tmp_path / "root"``."""
    made = []

    def write(text: str) -> ModuleType:
        name = f"listed_{tmp_path.name}_{len(made)}".replace("-", "_")
        path = tmp_path / "root" / "cases" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        made.append(name)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    yield write
    for name in made:
        del sys.modules[name]
    linecache.clearcache()


def of(loop: Callable[..., Any] | None, root: Path, *lines: int) -> tuple[Listing, ...]:
    return listings(loop, [EventRow(0, 0, 0, "forward", lines=(line,)) for line in lines], root)


def starts(loop: Callable[..., Any] | None, root: Path, *lines: int) -> list[tuple[int, int]]:
    return [(one.first, len(one.lines)) for one in of(loop, root, *lines)]


HELPED = """\
def helper(rank):
    return rank


@staticmethod
def unused(rank):
    pass


def loop(rank):
    def inner():
        return helper(rank)

    return inner()


VALUE = 3
"""


def test_the_loop_and_the_helpers_that_something_came_from(written: Writer, tmp_path: Path) -> None:
    loop = written(HELPED).loop
    (only,) = of(loop, tmp_path)
    assert (only.first, only.lines[0], only.lines[-1]) == (
        10,
        "def loop(rank):",
        "    return inner()",
    )
    assert starts(loop, tmp_path, 2, 12, 12) == [(1, 2), (10, 5)]
    assert starts(loop, tmp_path, 17, 400) == [(10, 5)]  # of no function


def test_a_file_is_named_from_the_root_or_by_its_name_alone(
    written: Writer, tmp_path: Path
) -> None:
    module = written(HELPED)
    name = Path(str(module.__file__)).name
    assert of(module.loop, tmp_path)[0].file == f"root/cases/{name}"
    assert of(module.loop, tmp_path / "elsewhere")[0].file == name


WAYS = """\
import functools


def wraps(function):
    @functools.wraps(function)
    def wrapper(*a):
        return function(*a)
    return wrapper


@wraps
@wraps
def decorated(rank):
    pass


class Loops:
    def method(self, rank):
        pass

    @classmethod
    def of_class(cls, rank):
        pass

    @staticmethod
    def static(rank):
        pass

    def __call__(self, rank):
        pass


partial = functools.partial(functools.partial(decorated, 1), 2)
wrapped_partial = wraps(functools.partial(decorated, 1))


async def coroutine(rank):
    pass


def makes():
    return lambda rank: rank


anonymous = lambda rank: rank
"""


@pytest.mark.parametrize(
    ("loop", "first"),
    [
        (lambda m: m.decorated, 11),
        (lambda m: m.partial, 11),
        (lambda m: m.wrapped_partial, 11),
        (lambda m: m.Loops().method, 18),
        (lambda m: m.Loops.method, 18),
        (lambda m: m.Loops.of_class, 21),
        (lambda m: m.Loops().static, 25),
        (lambda m: m.Loops(), 29),
        (lambda m: functools.partial(m.Loops()), 29),
        (lambda m: m.coroutine, 37),
    ],
)
def test_every_kind_of_callable_has_its_function(
    loop: Callable[[ModuleType], Callable[..., Any]], first: int, written: Writer, tmp_path: Path
) -> None:
    assert [one.first for one in of(loop(written(WAYS)), tmp_path)] == [first]


def test_what_has_no_function_has_no_listing(written: Writer, tmp_path: Path) -> None:
    module = written(WAYS)
    assert of(None, tmp_path) == ()
    assert of(print, tmp_path) == ()
    assert of(module.Loops, tmp_path) == ()
    assert of(module.anonymous, tmp_path) == ()


def test_code_of_no_file_has_no_listing(tmp_path: Path) -> None:
    for name in ("<string>", "<stdin>", str(tmp_path / "gone.py"), ""):
        space: dict[str, Any] = {}
        exec(compile("def loop(rank):\n    pass\n", name, "exec"), space)
        assert of(space["loop"], tmp_path, 1) == ()


def test_of_a_file_edited_since_nothing_is_shown(written: Writer, tmp_path: Path) -> None:
    module = written(HELPED)
    path = Path(str(module.__file__))
    path.write_text("import os\n" + HELPED)
    assert of(module.loop, tmp_path, 2, 12) == ()
    linecache.clearcache()
    path.write_text(HELPED.replace("def loop(", "def another("))
    assert of(module.loop, tmp_path, 2, 12) == ()


@pytest.mark.parametrize(
    "text",
    [
        "def loop(rank:\n    pass\n",  # of another Python
        "\0",
        "",
        "x = " + "-" * 100_000 + "1\n",
        "x = " + "(" * 150 + "1" + ")" * 150 + "\n" + "y = " + "f(" * 90 + ")" * 90 + "\n",
    ],
)
def test_a_file_that_cannot_be_read_is_no_listing_and_no_error(
    text: str, written: Writer, tmp_path: Path
) -> None:
    module = written(HELPED)
    Path(str(module.__file__)).write_text(text)
    assert of(module.loop, tmp_path, 2) == ()


def test_warnings_of_the_parser_stay_with_the_import(written: Writer, tmp_path: Path) -> None:
    module = written(HELPED)
    text = HELPED.replace("VALUE = 3", 'VALUE = "\\d"')
    Path(str(module.__file__)).write_text(text)
    assert starts(module.loop, tmp_path) == [(10, 5)]


def test_long_functions_are_cut_and_end_in_an_ellipsis(written: Writer, tmp_path: Path) -> None:
    for lines, kept in ((160, 160), (161, 161)):
        text = "def loop(rank):\n" + "    pass\n" * (lines - 1)
        (made,) = of(written(text).loop, tmp_path)
        assert len(made.lines) == kept
        assert made.lines[-1] == ("    pass" if lines == 160 else "…")


def test_four_functions_are_kept_the_loop_among_them(written: Writer, tmp_path: Path) -> None:
    helpers = "".join(f"def helper{k}(rank):\n    pass\n" for k in range(9))
    loop = written(f"{helpers}def loop(rank):\n    pass\n").loop
    assert starts(loop, tmp_path, *range(1, 19)) == [(1, 2), (3, 2), (5, 2), (19, 2)]


def test_line_ends_of_other_systems_are_left_out(written: Writer, tmp_path: Path) -> None:
    module = written("def loop(rank):\r\n    é = 1\r\n")
    assert of(module.loop, tmp_path)[0].lines == ("def loop(rank):", "    é = 1")


def test_a_lambda_shows_no_function_that_is_only_around_it(written: Writer, tmp_path: Path) -> None:
    module = written(WAYS)
    assert of(module.makes(), tmp_path) == ()
    assert of(module.anonymous, tmp_path) == ()


def test_lines_of_a_file_that_was_edited_below_the_first_are_not_shown(
    written: Writer, tmp_path: Path
) -> None:
    module = written("def loop(rank):\n    first = 1\n    return first\n")
    assert of(module.loop, tmp_path)[0].lines[1] == "    first = 1"
    path = Path(str(module.__file__))
    path.write_text("def loop(rank):\n    # a line more\n    first = 1\n    return first\n")
    linecache.checkcache(str(path))
    assert of(module.loop, tmp_path) == ()
