"""Which lines of the loop do what its causes speak of."""

from __future__ import annotations

import io
import textwrap
import tokenize
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from equivtest.compare.tables import EventRow
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
    "differs.gradient": ("backward",),
    "differs.ranks": ("backward", "collective"),
    "differs": ("update attempted", "scheduler"),
}
"""Kinds of events that a cause speaks of: by its name, or by the family before its dot."""

NAMES: Mapping[str, frozenset[str]] = {
    "sync": frozenset({"no_sync", "require_backward_grad_sync", "set_requires_gradient_sync"}),
    "mode": frozenset({"eval", "train"}),
    "rng": frozenset({"seed", "manual_seed", "manual_seed_all"}),
}
"""Names in a line of such a cause's doing, where no event tells of it."""

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
    hot = _named(listings, causes) or _done(listings, verdict.events, causes)
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
    told = [one for one in found if one.hot]
    return tuple(told or found)


def _named(listings: Sequence[Listing], causes: Sequence[str]) -> set[int]:
    """Lines with a name of what the first cause is about."""
    names = NAMES.get(causes[0].partition(".")[0]) if causes else None
    if not names:
        return set()
    return {
        listing.first + token.start[0] - 1
        for listing in listings
        for token in _tokens(listing)
        if token.type == tokenize.NAME and token.string in names
    }


def _tokens(listing: Listing) -> list[tokenize.TokenInfo]:
    """None of a listing that was cut where nothing ends."""
    text = textwrap.dedent("\n".join(listing.lines)) + "\n"
    try:
        return list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (SyntaxError, tokenize.TokenError):
        return []


def _done(
    listings: Sequence[Listing], events: Sequence[EventRow], causes: Sequence[str]
) -> set[int]:
    """Lines from which the events came that the causes speak of.

    Of the lines that an event came through it is that of the loop's main function, or else the
    innermost: a wrapper that only calls the loop, or the model's caller in a loss, did not do it.
    """
    kinds = concerned(causes, {event.kind for event in events if event.lines})
    main = _main(listings, events)
    return {
        next((line for line in event.lines if line in main), event.lines[0])
        for event in events
        if event.lines and event.kind in kinds
    }


def _main(listings: Sequence[Listing], events: Sequence[EventRow]) -> range:
    """Lines of the function in which most kinds of events happen, the last one of several."""
    spans = [range(one.first, one.first + len(one.lines)) for one in listings]

    def kinds(span: range) -> int:
        return len({event.kind for event in events if event.lines and event.lines[0] in span})

    return max(reversed(spans), key=kinds, default=range(0))


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
