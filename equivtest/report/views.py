"""A record as the page shows it: every figure already a text, every list already in order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from equivtest.compare import figures
from equivtest.compare.prose import (
    headline,
    margin_text,
    places,
    reason,
    unnamed_first,
    what_happened,
    what_to_change,
)
from equivtest.compare.sensitivity import details, sentence
from equivtest.compare.sheet import sheet
from equivtest.compare.tables import TensorRow
from equivtest.compare.verdict import Status, Verdict
from equivtest.report.detail import Detail
from equivtest.report.grouping import evidence, sentence_case
from equivtest.report.history import Point
from equivtest.report.panels.audit import Audit, audit
from equivtest.report.panels.depth import Depth, depth
from equivtest.report.panels.events import Events, events
from equivtest.report.panels.memory import Memory, memory
from equivtest.report.panels.progress import Progress, progress
from equivtest.report.panels.trend import Trend, trend
from equivtest.report.panels.weights import Mosaic, mosaics
from equivtest.report.pasted import pasted
from equivtest.report.pointing import Source, pointed, sources
from equivtest.report.ranking import fails
from equivtest.report.record import Record, digest
from equivtest.report.summary import case_name, expectation_text

_FEW_TENSORS = 5
"""Of a case that passes, or is shown in brief."""

_LONG_TROUBLE, _SHORT_TROUBLE = 30_000, 2_000
"""Characters of a traceback that a case in full has, and one in brief; its record has all."""


@dataclass(frozen=True)
class TensorView:
    """A row of the tensors table; ``comparisons`` are distance, tolerance, margin for A, B, C.

    A fourth is the parameter after the update, where it was compared.
    """

    update: int
    tensor: str
    what: str
    state: str
    floor: str
    comparisons: tuple[tuple[str, str, str, bool], ...]
    bar: tuple[float, bool] | None


@dataclass(frozen=True)
class FindingView:
    """What was found, and the prose of its cause where that is not said already."""

    cause: str
    text: str
    where: str
    judged: str
    happened: str
    change: str


@dataclass(frozen=True)
class Figures:
    """What is drawn of a case that is shown in full."""

    mosaics: tuple[Mosaic, ...] = ()
    depth: Depth | None = None
    events: Events | None = None
    audit: Audit | None = None
    progress: Progress | None = None
    memory: Memory | None = None
    listings: tuple[Source, ...] = ()
    pasted: str = ""


@dataclass(frozen=True)
class CaseView:
    """One case."""

    anchor: str
    record: Record
    name: str
    failing: bool
    margin: str
    headline: str
    expected: str
    findings: tuple[FindingView, ...]
    trouble: str
    card: tuple[tuple[str, str], ...]
    updates: tuple[tuple[str, ...], ...]
    tensors: tuple[TensorView, ...]
    with_parameters: bool
    with_isolated: bool
    with_exact: bool
    tensors_left_out: int
    tensors_of: str
    shares: tuple[tuple[str, str, float, str], ...]
    sensitivity: tuple[tuple[str, str], ...]
    trend: Trend | None
    figures: Figures


def case_view(
    record: Record, detail: Detail = Detail.FULL, history: Sequence[Point] = ()
) -> CaseView:
    """What the page says about one case.

    Args:
        history: its margins by run, where several runs are shown.
    """
    verdict, full = record.verdict, detail is Detail.FULL
    rows = sorted(
        verdict.rows, key=lambda row: (-figures.orderly(row.margin), row.update, row.tensor)
    )
    shown = rows if full and fails(record) else rows[:_FEW_TENSORS]
    with_parameters = any(row.parameter_distance is not None for row in shown)
    return CaseView(
        anchor=anchor(record),
        record=record,
        name=case_name(record),
        failing=fails(record),
        margin=margin_text(verdict) if verdict.rows else "",
        headline=sentence_case(figures.shortened(headline(verdict))),
        expected=expectation_text(record).strip(),
        findings=tuple(_findings(verdict)),
        trouble=figures.shortened(_trouble(verdict), _LONG_TROUBLE if full else _SHORT_TROUBLE),
        card=tuple(sheet(verdict)),
        updates=tuple(_updates(verdict)) if full else (),
        tensors=tuple(_tensor(row, with_parameters) for row in shown),
        with_parameters=with_parameters,
        with_isolated=any(row.isolated_distance is not None for row in shown),
        with_exact=any(row.exact_distance is not None for row in shown),
        tensors_left_out=len(rows) - len(shown),
        tensors_of=_tensors_of(verdict),
        shares=tuple(_shares(verdict)),
        sensitivity=tuple(sensitivity_lines(verdict)),
        trend=trend(history),
        figures=_figures(record) if full else Figures(),
    )


@dataclass(frozen=True)
class WorstView:
    """The case of the first screen: the first failure, or the one nearest to its tolerance."""

    record: Record
    failing: bool
    name: str
    headline: str
    evidence: str
    change: str
    mosaic: Mosaic | None
    source: Source | None


def worst_view(record: Record) -> WorstView:
    """What the first screen says of it; figures only where it fails."""
    verdict, failing = record.verdict, fails(record)
    drawn = mosaics(verdict) if failing else ()
    off = (m for m in drawn if any(cell.kind for row in m.rows for cell in row.cells))
    return WorstView(
        record=record,
        failing=failing,
        name=case_name(record),
        headline=sentence_case(figures.shortened(headline(verdict))),
        evidence=figures.shortened(evidence(record)),
        change=what_to_change(verdict.cause) if failing else "",
        mosaic=next(off, None),
        source=pointed(record.listings, verdict) if failing else None,
    )


def _figures(record: Record) -> Figures:
    verdict = record.verdict
    return Figures(
        mosaics=mosaics(verdict),
        depth=depth(verdict),
        events=events(verdict),
        audit=audit(verdict),
        progress=progress(verdict),
        memory=memory(verdict),
        listings=sources(record.listings, verdict),
        pasted=pasted(record),
    )


def anchor(record: Record) -> str:
    """The case's fragment in the page's address: the same in every run."""
    return anchor_of(record.id)


def anchor_of(record_id: str) -> str:
    """The same, of a record's id."""
    return f"case-{digest(record_id)}"


def _findings(verdict: Verdict) -> Iterable[FindingView]:
    told: set[str] = set()
    advice = verdict.status is not Status.UNEXPLAINED  # sources beside it are not what is wrong
    for finding in unnamed_first(verdict):
        new = finding.cause not in told
        told.add(finding.cause)
        judged = ""
        if finding.distance is not None and finding.tolerance is not None:
            judged = (
                f"distance {figures.distance(finding.distance)}, "
                f"allowed {figures.distance(finding.tolerance)}"
            )
        yield FindingView(
            cause=finding.cause,
            text=finding.text,
            where=", ".join(part for part in places(finding) if part not in finding.text),
            judged=judged,
            happened=what_happened(finding.cause) if new else "",
            change=what_to_change(finding.cause) if new and advice else "",
        )


def _shares(verdict: Verdict) -> Iterable[tuple[str, str, float, str]]:
    """Source, share, length of its bar in per cent and where it enters; what none explains last."""
    for row in sorted(verdict.source_rows, key=lambda row: -row.share):
        where = row.where if row.claimed else "; ".join(filter(None, (row.where, "not needed")))
        yield row.source, figures.share(row.share, 2), _part(row.share), where
    if verdict.remainder is not None:
        left = verdict.remainder
        told = f"{figures.distance(left)} of it"
        yield "left by all of them", figures.share(left, 2), _part(left), told


def _part(share: float) -> float:
    return round(100 * min(max(share, 0.0), 1.0), 1)


def sensitivity_lines(verdict: Verdict) -> Iterable[tuple[str, str]]:
    """The sentence, without a label, and what lies behind it; nothing where it was not asked."""
    if verdict.sensitivity is not None:
        yield "", f"{sentence(verdict.sensitivity)}."
        yield from details(verdict.sensitivity)


def _trouble(verdict: Verdict) -> str:
    """Text of an error, whole: the message and the traceback or stacks."""
    if verdict.status is not Status.ERROR or verdict.failure is None:
        return ""
    return reason(verdict)


def _updates(verdict: Verdict) -> Iterable[tuple[str, ...]]:
    for row in verdict.updates:
        yield (
            str(row.update),
            str(row.epoch),
            figures.quantity(row.examples),
            figures.quantity(row.supervised),
            "applied" if row.applied else "skipped",
            figures.quantity(row.loss),
            figures.quantity(row.oracle_loss),
            figures.quantity(row.lr),
            figures.quantity(row.loss_scale),
            figures.quantity(row.grad_norm),
            "yes" if row.clipped else "no",
            "yes" if row.replay_bits_equal else "no",
        )


def _tensor(row: TensorRow, with_parameters: bool) -> TensorView:
    comparisons = [
        _replay(row),
        _split(row),
        (row.oracle_distance, row.oracle_tolerance, row.oracle_margin),
    ]
    if with_parameters:
        distance, tolerance = row.parameter_distance, row.parameter_tolerance
        margin = distance / tolerance if distance is not None and tolerance else None
        comparisons.append((distance, tolerance, margin))
    kinds = [word for word, is_so in (("null", row.null), ("blind", row.blind)) if is_so]
    return TensorView(
        update=row.update,
        tensor=row.tensor,
        what=f"{' × '.join(map(str, row.shape)) or 'scalar'} {row.dtype.removeprefix('torch.')}",
        state=", ".join([row.state, *kinds]),
        floor=figures.ABSENT if row.null else figures.distance(row.noise_floor),
        comparisons=tuple(
            (
                figures.distance(d),
                figures.distance(t),
                figures.margin(m),
                m is not None and not m <= 1,
            )
            for d, t, m in comparisons
        ),
        bar=_bar(row.margin),
    )


def _replay(row: TensorRow) -> tuple[float | None, float | None, float | None]:
    """Comparison A, with the loop's addends added exactly where it is right but for its sums."""
    if row.exact_distance is not None:
        return row.exact_distance, row.replay_tolerance, row.loop_margin
    return row.replay_distance, row.replay_tolerance, row.replay_margin


def _split(row: TensorRow) -> tuple[float | None, float | None, float | None]:
    """Comparison B, with the sources isolated where they explain it."""
    if row.isolated_distance is not None:
        return row.isolated_distance, row.isolated_tolerance, row.isolated_margin
    return row.split_distance, row.split_tolerance, row.split_margin


def _bar(margin: float) -> tuple[float, bool] | None:
    """Length of the margin's bar from 10⁻³ to 10⁶, a tenth a decade; and whether it is beyond 1."""
    if math.isnan(margin):
        return 100.0, True
    if margin <= 0:
        return None
    length = (math.log10(min(max(margin, 1e-3), 1e6)) + 3) / 9 * 100
    return round(max(length, 1.0), 1), margin > 1


def _tensors_of(verdict: Verdict) -> str:
    tensors = figures.several(len({row.tensor for row in verdict.rows}), "tensor")
    updates = figures.several(len({row.update for row in verdict.rows}), "update")
    beyond = sum(not row.margin <= 1 for row in verdict.rows)
    return f"{tensors} in {updates}; {beyond:,} of {len(verdict.rows):,} rows beyond tolerance"
