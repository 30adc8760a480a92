"""The final sheet of a case, and its events and microbatches as rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from equivtest.arms.case import Case
from equivtest.compare.normalised import PLANNED
from equivtest.compare.tables import EventRow, MicrobatchRow, TensorRow
from equivtest.compare.verdict import Card
from equivtest.experiment import Experiment
from equivtest.observe.trace import Trace
from equivtest.plan import Plan


def planned_card(experiment: Experiment, case: Case) -> Card:
    """What is known of a case before it has run."""
    partial = [g for g in case.groups if g.partial]
    return replace(
        uncut_card(experiment, case.plan, case.precision.name, case.device),
        backend=case.seating.backend,
        cap=case.precision.cap,
        last_group_examples=tuple(i for g in partial for i in g.flat),
        dropped_examples=tuple(i for g in case.groups for i in g.dropped),
    )


def uncut_card(experiment: Experiment, plan: Plan, precision: str, device: str) -> Card:
    """What is known before the examples are dealt, which may turn out not to be possible."""
    return Card(
        plan=str(plan),
        m="+".join(map(str, plan.sizes)) if isinstance(plan.m, tuple) else str(plan.m),
        A=plan.A,
        D=plan.D,
        processes=plan.processes,
        examples=plan.examples,
        dp_group=tuple(range(plan.D)),
        precision=precision,
        device=device,
        backend="",
        optimizer="",
        normalisation=PLANNED,
        last_group=experiment.last_group or "none left",
        last_group_examples=(),
        dropped_examples=(),
        scheduler_unit=experiment.scheduler_unit if experiment.scheduler else "",
    )


def card_of(
    experiment: Experiment,
    case: Case,
    traces: Sequence[Trace],
    rows: Sequence[TensorRow],
    smallest_weight_seen: float | None,
    observed: str = PLANNED,
) -> Card:
    """The sheet of a case that has run; counts are those that were observed, over all ranks.

    Args:
        observed: what the loop divides by, in words.
    """
    card = planned_card(experiment, case)
    first = traces[0].updates
    peaks = [max((m.peak_bytes for m in u.microbatches), default=0) for u in first]
    received = [m.ids for t in traces for u in t.updates for m in u.microbatches]
    counted = [sum(m.counts) for t in traces for u in t.updates for m in u.microbatches]
    known = [ids for ids in received if ids is not None]
    return replace(
        card,
        optimizer=", ".join(sorted({o.kind.__name__ for u in first for o in u.optimizers})),
        microbatches=sum(len(u.microbatches) for t in traces for u in t.updates),
        updates_attempted=len(first),
        updates_applied=sum(u.applied for u in first),
        examples_seen=sum(map(len, known)) if known else None,
        supervised=sum(counted) if any(counted) else None,
        first_peak_bytes=peaks[0] if peaks else None,
        later_peak_bytes=max(peaks[1:], default=None),
        null_tensors=_names(row for row in rows if row.null),
        blind_tensors=_names(row for row in rows if row.blind),
        not_judged=_names(row for row in rows if row.state == "not judged"),
        smallest_weight_seen=smallest_weight_seen,
        normalisation=observed,
    )


def event_rows(traces: Sequence[Trace]) -> tuple[EventRow, ...]:
    """The events of all ranks, rank after rank."""
    first_s = min((event.at_s for trace in traces for event in trace.events), default=0.0)
    return tuple(
        EventRow(
            trace.rank,
            event.update,
            event.microbatch,
            event.kind,
            event.detail,
            round(event.at_s - first_s, 6),
            event.lines,
        )
        for trace in traces
        for event in trace.events
    )


def microbatch_rows(
    traces: Sequence[Trace], counted: Sequence[Mapping[tuple[int, int], float]] = ()
) -> tuple[MicrobatchRow, ...]:
    """The microbatches of all ranks, rank after rank.

    Args:
        counted: by update, what the experiment's loss counts in each replica's microbatch: for
            those whose loss is the loop's own.
    """

    def supervised(u: int, rank: int, k: int, counts: Sequence[float]) -> float | None:
        if counts:
            return sum(counts)
        return counted[u].get((rank, k)) if u < len(counted) else None

    return tuple(
        MicrobatchRow(
            u, trace.rank, k, supervised(u, trace.rank, k, m.counts), m.peak_bytes, m.held_bytes
        )
        for trace in traces
        for u, update in enumerate(trace.updates)
        for k, m in enumerate(update.microbatches)
    )


def _names(rows: Iterable[TensorRow]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(row.tensor for row in rows))
