"""Memory by microbatch: the peak, and what is still held of earlier ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from equivtest.compare import figures
from equivtest.compare.tables import MicrobatchRow
from equivtest.compare.verdict import Verdict

HEIGHT = 44.0
"""Pixels of the highest peak."""

_BAR, _GAP = 14.0, 2.0
"""Pixels of a bar and between two."""

_LABEL, _APART = 62.0, 14.0
"""Pixels that an update has at least, for its label, and between two updates."""

_MOST = 48
"""Microbatches of a replica that are drawn; of more the first ones."""

_GROWS = 1.05
"""Peaks that differ by less are one height to the eye."""


@dataclass(frozen=True)
class Bar:
    """One microbatch, with what it held of earlier ones; places in pixels from the top."""

    x: float
    width: float
    top: float
    height: float
    held_top: float
    held: float
    text: str


@dataclass(frozen=True)
class Group:
    """The microbatches of one update; ``x`` is where its label begins."""

    label: str
    x: float
    width: float
    peak: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Row:
    """One replica, or several with the same memory."""

    name: str
    width: float
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class Memory:
    """The figure: ``of`` says what the bytes are."""

    title: str
    of: str
    height: float
    rows: tuple[Row, ...]


def memory(verdict: Verdict) -> Memory | None:
    """The figure of a case; None where nothing was measured."""
    rows = verdict.microbatches
    highest = max((row.peak_bytes for row in rows), default=0)
    if highest <= 0:
        return None
    alike: dict[tuple[tuple[int, int, int], ...], list[int]] = {}
    by_replica = groupby(sorted(rows, key=_place), key=lambda row: row.replica)
    every = {replica: list(own) for replica, own in by_replica}
    drawn = {replica: own[:_MOST] for replica, own in every.items()}
    cut = max(map(len, every.values())) > _MOST
    for replica, own in drawn.items():
        same = tuple((row.update, row.peak_bytes, row.held_bytes) for row in own)
        alike.setdefault(same, []).append(replica)
    on_gpu = verdict.card.device == "cuda"
    return Memory(
        title=title(rows),
        of=("allocated on the GPU" if on_gpu else "held by the autograd graph")
        + (f", of the first {_MOST} microbatches of a replica" if cut else ""),
        height=HEIGHT,
        rows=tuple(
            _row(figures.replica_names(same), drawn[same[0]], highest) for same in alike.values()
        ),
    )


def title(rows: Sequence[MicrobatchRow]) -> str:
    """Flat, or how it grows: within the first update, or in later ones."""
    first_update = min(row.update for row in rows)
    first = max(row.peak_bytes for row in rows if row.update == first_update)
    later = max((row.peak_bytes for row in rows if row.update != first_update), default=None)
    held = max(row.held_bytes for row in rows)
    parts = []
    if later is None:
        parts.append(f"{figures.size(first)} in the one update")
    elif later > _GROWS * first:
        parts.append(f"{figures.size(first)} in the first update, {figures.size(later)} later")
    elif first > _GROWS * later:
        parts.append(f"{figures.size(first)} in the first update, only {figures.size(later)} later")
    else:
        parts.append(f"{figures.size(first)}, in later updates the same")
    kept = f"up to {figures.size(held)} kept of earlier microbatches" if held else "nothing kept"
    return ", ".join([*parts, kept])


def _place(row: MicrobatchRow) -> tuple[int, int, int]:
    return row.replica, row.update, row.microbatch


def _row(name: str, rows: Sequence[MicrobatchRow], highest: int) -> Row:
    x, groups = 0.0, []
    for update, own in groupby(rows, key=lambda row: row.update):
        bars = []
        for row in own:
            bars.append(_bar(row, x, highest))
            x += _BAR + _GAP
        width = max(x - bars[0].x - _GAP, _LABEL)
        peak = max(r.peak_bytes for r in rows if r.update == update)
        groups.append(Group(f"update {update}", bars[0].x, width, figures.size(peak), tuple(bars)))
        x = bars[0].x + width + _APART
    return Row(name, round(x - _APART, 1), tuple(groups))


def _bar(row: MicrobatchRow, x: float, highest: int) -> Bar:
    held = f", {figures.size(row.held_bytes)} kept of earlier ones" if row.held_bytes else ""
    height = round(HEIGHT * row.peak_bytes / highest, 1)
    kept = round(HEIGHT * min(row.held_bytes, row.peak_bytes) / highest, 1)
    return Bar(
        x=round(x, 1),
        width=_BAR,
        top=round(HEIGHT - height, 1),
        height=height,
        held_top=round(HEIGHT - kept, 1),
        held=kept,
        text=f"microbatch {row.microbatch}: {figures.size(row.peak_bytes)}{held}",
    )
