"""Which lines of the loop do what its causes speak of."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from equivtest.compare.verdict import Verdict
from equivtest.report.listing import Listing
from equivtest.report.panels.events import KINDS

CONCERNED: Mapping[str, tuple[str, ...]] = {
    "norm.miscounted": ("forward", "backward"),
    "norm": ("backward",),
    "accum.stale_carryover": ("zero_grad",),
    "accum.only_last": ("zero_grad",),
    "accum": ("zero_grad", "backward"),
    "window": ("update attempted", "zero_grad"),
    "sync": ("backward", "collective"),
    "hook": ("collective", "backward"),
    "clip": ("clip", "unscale"),
    "amp": ("unscale", "scaler update"),
    "prec.not_applied": ("forward",),
    "prec": ("backward", "collective"),
    "sched": ("scheduler",),
    "count": ("scheduler",),
    "skip": ("update attempted", "update skipped"),
    "opt": ("update attempted",),
    "state.ema_per_microbatch": ("average",),
    "state.ema_before_update": ("average",),
    "state": ("update attempted",),
    "data": ("forward",),
    "rng": ("forward",),
    "mode": ("forward",),
    "loss": ("forward",),
    "mem": ("forward", "backward"),
    "differs.clip": ("clip",),
    "differs.loss": ("forward",),
    "differs.examples": ("forward",),
    "differs.buffers": ("forward",),
    "differs.gradient": ("backward", "zero_grad", "collective"),
    "differs.ranks": ("backward", "collective"),
    "differs": ("update attempted", "scheduler"),
}
"""Kinds of events that a cause speaks of: by its name, or by the family before its dot."""

WORDS: Mapping[str, str] = {
    "sync": r"no_sync|require_backward_grad_sync|set_requires_gradient_sync",
    "mode": r"\.(eval|train)\(",
    "rng": r"seed",
}
"""What a line of such a cause's doing says, where no event tells of it."""

INSTEAD = ("update attempted", "backward")
"""Where a loop lacks what its cause speaks of (a clip, a schedule), what it would stand beside."""


@dataclass(frozen=True)
class Line:
    """One line; ``signs`` are the events that came from it, ``hot`` if a cause speaks of one."""

    number: int
    text: str
    signs: str
    hot: bool


@dataclass(frozen=True)
class Source:
    """One function."""

    file: str
    lines: tuple[Line, ...]

    @property
    def key(self) -> str:
        """What the signs of its lines mean."""
        shown = {letter for line in self.lines for letter in line.signs}
        return ", ".join(f"{k.letter} {k.name}" for k in KINDS.values() if k.letter in shown)

    @property
    def hot(self) -> tuple[Line, ...]:
        """The lines that a cause speaks of."""
        return tuple(line for line in self.lines if line.hot)

    @property
    def where(self) -> str:
        """The file with the first line that a cause speaks of, or its first line."""
        return f"{self.file}:{(self.hot or self.lines)[0].number}"


def pointed(listings: Sequence[Listing], verdict: Verdict) -> Source | None:
    """The function with the first lines that the first cause speaks of; None where there are none.

    Causes that follow are often consequences.
    """
    found = sources(listings, verdict, verdict.causes[:1])
    return next((one for one in found if one.hot), None)


def sources(
    listings: Sequence[Listing], verdict: Verdict, causes: Sequence[str] | None = None
) -> tuple[Source, ...]:
    """The listings with what happened at their lines: those with a line that a cause speaks of.

    All of them where none has one.

    Args:
        causes: all of the verdict's and those that its notes name, if left out.
    """
    at: dict[int, dict[str, None]] = {}
    for event in verdict.events:
        for line in event.lines:
            at.setdefault(line, {})[event.kind] = None
    causes = [*verdict.causes, *verdict.noted] if causes is None else causes
    hot = _said(listings, causes) or _done(at, causes)
    found = [
        Source(
            listing.file,
            tuple(
                Line(number, text, _signs(at.get(number, {})), number in hot)
                for number, text in enumerate(listing.lines, listing.first)
            ),
        )
        for listing in listings
        if listing.lines
    ]
    told = [one for one in found if any(line.hot for line in one.lines)]
    return tuple(told or found)


def _said(listings: Sequence[Listing], causes: Sequence[str]) -> set[int]:
    """Lines that name what the first cause is about."""
    words = WORDS.get(causes[0].partition(".")[0]) if causes else None
    return {
        number
        for listing in listings
        for number, text in enumerate(listing.lines, listing.first)
        if words and re.search(words, text)
    }


def _done(at: Mapping[int, Mapping[str, None]], causes: Sequence[str]) -> set[int]:
    """Lines from which the events came that the causes speak of."""
    kinds = concerned(causes, {kind for happened in at.values() for kind in happened})
    return {number for number, happened in at.items() if kinds & happened.keys()}


def concerned(causes: Sequence[str], seen: Collection[str]) -> frozenset[str]:
    """Kinds of events that the causes speak of, among those that were seen."""
    wanted: set[str] = set()
    for cause in causes:
        if cause.startswith("source."):
            continue
        kinds = CONCERNED.get(cause, CONCERNED.get(cause.partition(".")[0], ()))
        if not kinds:
            continue
        there = [kind for kind in kinds if kind in seen]
        wanted.update(there or [kind for kind in INSTEAD if kind in seen][:1])
    return frozenset(wanted)


def _signs(happened: Mapping[str, None]) -> str:
    return "".join(kind.letter for name, kind in KINDS.items() if name in happened)
