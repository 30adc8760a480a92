"""What the sources of updates were found to be, one by one and added over a case. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from equivtest.compare.tables import SourceRow
from equivtest.compare.verdict import Finding
from equivtest.distance import ratio


@dataclass(frozen=True, kw_only=True)
class Explained:
    """What the sources of one update were found to be.

    Attributes:
        update: its number.
        squared: the squared distance of split and large batch as one vector, relative to the large
            batch's gradient.
        rows: the sources with their shares; ``remainder`` is the share that is left.
        diverges: with nothing isolated some tensor is beyond tolerance.
        within: isolated together they bring every tensor within tolerance.
        left: by tensor, the distance over its scale with all of them isolated; ``tolerances``
            beside it.
        null: by tensor, whether it is zero in exact arithmetic and so not judged.
        findings, notes: what to say of it.
        reruns: pairs of arms that were run.
    """

    update: int
    squared: float
    rows: tuple[SourceRow, ...] = ()
    remainder: float = 0.0
    diverges: bool
    within: bool
    left: tuple[float, ...] = ()
    tolerances: tuple[float, ...] = ()
    null: tuple[bool, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    reruns: int


def source_rows(explained: Sequence[Explained]) -> tuple[SourceRow, ...]:
    """The sources of the updates that were attributed, with their shares over all of them."""
    whole = sum(one.squared for one in explained if one.rows)
    merged: dict[str, SourceRow] = {}
    for one in explained:
        for row in one.rows:
            share = ratio(row.share * one.squared, whole)
            known = merged.get(row.source, replace(row, share=0.0))
            merged[row.source] = replace(
                known, share=known.share + share, claimed=known.claimed or row.claimed
            )
    return tuple(merged.values())


def remainder(explained: Sequence[Explained]) -> float | None:
    """The share that is left with all sources isolated, over all of the attributed updates."""
    attributed = [one for one in explained if one.rows]
    whole = sum(one.squared for one in attributed)
    left = sum(one.remainder * one.squared for one in attributed)
    return ratio(left, whole) if attributed else None
