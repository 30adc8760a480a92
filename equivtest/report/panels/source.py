"""The loop's own source beside its fault: at which lines it does what the causes speak of."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from equivtest.compare.verdict import Verdict
from equivtest.report.listing import Listing

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

INSTEAD = ("update attempted", "backward")
"""Where a loop lacks what its cause speaks of (a clip, a schedule), what it would stand beside."""

SIGNS: Mapping[str, str] = {
    "forward": "F",
    "backward": "B",
    "collective": "R",
    "broadcast": "R",
    "unscale": "U",
    "clip": "C",
    "update attempted": "◇",
    "scheduler": "S",
    "zero_grad": "Z",
    "average": "A",
}
"""What is written beside a line; other kinds come with one of these."""

MEANINGS = (
    "F forward, B backward, R reduce, U unscale, C clip, ◇ update, S scheduler, Z zero_grad, "
    "A average of weights"
)


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
    def where(self) -> str:
        """The file with the first line that a cause speaks of, or its first line."""
        hot = [line.number for line in self.lines if line.hot]
        return f"{self.file}:{hot[0] if hot else self.lines[0].number}"


def sources(listings: Sequence[Listing], verdict: Verdict) -> tuple[Source, ...]:
    """The listings with what happened at their lines, those that a cause speaks of first."""
    at: dict[int, dict[str, None]] = {}
    for event in verdict.events:
        if event.line is not None:
            at.setdefault(event.line, {})[event.kind] = None
    kinds = concerned([*verdict.causes, *verdict.noted], {k for line in at.values() for k in line})
    found = [
        Source(
            listing.file,
            tuple(
                _line(listing.first + i, text, at.get(listing.first + i, {}), kinds)
                for i, text in enumerate(listing.lines)
            ),
        )
        for listing in listings
        if listing.lines
    ]
    return tuple(sorted(found, key=lambda one: not any(line.hot for line in one.lines)))


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


def _line(number: int, text: str, kinds: Mapping[str, None], wanted: Collection[str]) -> Line:
    signs = "".join(sign for sign in dict.fromkeys(SIGNS.values()) if sign in _signs(kinds))
    return Line(number, text, signs, any(kind in wanted for kind in kinds))


def _signs(kinds: Mapping[str, None]) -> set[str]:
    return {SIGNS[kind] for kind in kinds if kind in SIGNS}
