"""A page as it is drawn: every number in its drawings."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser

import verdicts

from equivtest.compare.verdict import Verdict
from equivtest.report.page import render_page
from equivtest.report.run import Run

_PLACES = {"x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "d", "viewbox", "points"}
_LENGTHS = {"width", "height", "r"}
_WORDS = re.compile(r"nan|inf|none", re.IGNORECASE)


class Drawings(HTMLParser):
    """Attributes of the drawings that hold numbers: element, name, value."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.depth = 0
        self.found: list[tuple[str, str, str]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.depth += tag == "svg"
        if self.depth:
            numbers = [(n, v or "") for n, v in attrs if n in _PLACES | _LENGTHS]
            self.found += [(tag, name, value) for name, value in numbers]

    def handle_endtag(self, tag: str) -> None:
        self.depth -= tag == "svg"


def drawing_of(*found: Verdict) -> Drawings:
    """The page of the verdicts, each a case."""
    made = [verdicts.record(one, id=f"case-{k}") for k, one in enumerate(found)]
    return Drawings(render_page(Run(tuple(made))))


def assert_drawable(page: Drawings) -> None:
    """Every number is one, and no length is negative."""
    assert page.found
    for tag, name, value in page.found:
        assert not _WORDS.search(value), (tag, name, value)
        numbers = [float(n) for n in re.findall(r"-?\d+\.?\d*(?:e[+-]?\d+)?", value)]
        assert all(map(math.isfinite, numbers)), (tag, name, value)
        assert name not in _LENGTHS or min(numbers, default=0) >= 0, (tag, name, value)
        if name not in ("d", "viewbox", "points"):
            assert re.fullmatch(r"-?\d+\.?\d*%?", value), (tag, name, value)
