"""From traces to a verdict: every update beside its reference arms, then one status.

Runs in the process of the reference arms, so that only the verdict travels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from equivtest.arms.bench import Bench
from equivtest.arms.case import Case
from equivtest.arms.computing import computing
from equivtest.arms.reference import Reference
from equivtest.calling import blaming
from equivtest.compare import planned
from equivtest.compare.alike import alike
from equivtest.compare.apart import decided_apart
from equivtest.compare.card import card_of, event_rows, microbatch_rows, planned_card
from equivtest.compare.clip import clip_of
from equivtest.compare.continuity import agreement, continuity
from equivtest.compare.normalised import PLANNED, normalisation
from equivtest.compare.parameters import ParameterJudge
from equivtest.compare.skips import never_applied
from equivtest.compare.tables import TensorRow
from equivtest.compare.telling import telling
from equivtest.compare.used import audit, examples, order_notes, told_apart, without
from equivtest.compare.verdict import Failure, Finding, Status, Verdict, status_of
from equivtest.diagnose import naming
from equivtest.diagnose.diagnosis import Diagnosis
from equivtest.diagnose.evidence import Evidence, UpdateEvidence
from equivtest.diagnose.logs import other_losses
from equivtest.diagnose.naming import diagnosed, named
from equivtest.experiment import Experiment
from equivtest.isolate.explained import Explained, remainder, source_rows
from equivtest.judging.update import Judged
from equivtest.judging.updates import UpdatesJudge
from equivtest.observe.trace import Tensors, Trace
from equivtest.pool import Seat


def judge(seat: Seat, experiment: Experiment, case: Case, traces: Sequence[Trace]) -> Verdict:
    """Compare the candidate's traces with the reference arms; ``not-run`` where torch refused.

    Raises:
        ExperimentError: the experiment is not one: counts that disagree with the loss, a factory
            that builds another model on each call, a loss that is NaN before any update.
    """
    refusal = traces[0].refusal
    if refusal is not None:
        card = planned_card(experiment, case)
        return Verdict(Status.NOT_RUN, card, failure=Failure(text=refusal))
    with computing(case), blaming("loss", Bench.losses):
        reference = Reference(seat.cache, experiment, case, seat.note)
        return _verdict(reference, experiment, case, alike(traces))


def _verdict(
    reference: Reference, experiment: Experiment, case: Case, traces: Sequence[Trace]
) -> Verdict:
    traces = told_apart(case, traces)
    findings = list(_beside_the_plan(case, traces, reference.initial().parameters))
    judge = UpdatesJudge(reference, case, traces, clip_of(experiment, case.device))
    parameters = ParameterJudge(reference, experiment, judge.case, traces[0])
    updates: list[Judged] = []
    for u in range(_comparable(case, traces)):
        judged = judge.judge(u, source_rows(_explained(updates)), parameters.decay)
        updates.append(judged)
        findings += [*judged.findings, *parameters.judge(u, judged.seen[0], judged.oracle)]
    findings += examples(case, traces, judge.as_planned)
    findings += parameters.finish()
    agreed, ranks = agreement(_as_judged(traces, updates))
    findings += agreed
    dtypes = frozenset(dtype for judged in updates for dtype in judged.dtypes)
    for trace in traces:
        findings += planned.precision_applied(judge.case, trace, dtypes)
    evidence = Evidence(
        experiment,
        case,
        without(traces, judge.as_planned) if judge.as_planned else traces,
        [_evidence(reference, case, judge.case, judged) for judged in updates],
        findings,
    )
    diagnoses = diagnosed(evidence, [one for judged in updates for one in judged.diagnoses])
    explained = _explained(updates)
    rows = tuple(parameters.measured(row) for judged in updates for row in judged.rows)
    told = telling(named(findings, diagnoses))
    weight_seen = next((j.smallest_weight_seen for j in updates if j.smallest_weight_seen), None)
    notes = [note for judged in updates for note in judged.notes] + parameters.notes
    notes += [*_notes(case, traces, judge.as_planned, diagnoses), *other_losses(evidence)]
    return Verdict(
        status=_status(told, rows),
        card=card_of(experiment, case, traces, rows, weight_seen, _divided_by(evidence)),
        findings=told,
        notes=tuple(dict.fromkeys(notes)),
        rows=rows,
        updates=tuple(judged.row for judged in updates),
        source_rows=source_rows(explained),
        remainder=remainder(explained),
        weight_rows=tuple(row for judged in updates for row in judged.weights),
        example_weight_rows=tuple(row for judged in updates for row in judged.example_weights),
        ranks=ranks,
        events=event_rows(traces),
        examples=audit(case, traces),
        microbatches=microbatch_rows(traces, [judged.counts for judged in updates]),
    )


def _notes(
    case: Case,
    traces: Sequence[Trace],
    as_planned: Collection[int],
    diagnoses: Sequence[Diagnosis],
) -> Iterator[str]:
    """Those on the case as a whole."""
    for trace in traces:
        yield from planned.unobserved(trace)
    if not any(one.cause.partition(".")[0] in ("data", "window") for one in diagnoses):
        yield from order_notes(case, traces, as_planned)
    yield from never_applied(traces[0])
    yield from naming.notes(diagnoses)


def _comparable(case: Case, traces: Sequence[Trace]) -> int:
    """Updates that the plan and every rank have, as long as ranks decide alike on them."""
    apart = decided_apart(case, traces)
    both = min([len(case.groups), *(len(trace.updates) for trace in traces)])
    return both if apart is None else min(both, apart.judged)


def _evidence(reference: Reference, case: Case, as_used: Case, judged: Judged) -> UpdateEvidence:
    u = judged.row.update
    used = as_used.groups[u]
    counts = reference.counts(used)
    return UpdateEvidence(
        u,
        case.groups[u],
        used,
        judged.seen,
        counts,
        judged.rows,
        judged.weighed,
        # Of a loop with a loss of its own that of the plan: its gradient is judged by that too.
        judged.planned_loss if judged.row.loss is None else judged.row.loss,
    )


def _divided_by(evidence: Evidence) -> str:
    first = next(iter(evidence.updates), None)
    return PLANNED if first is None else normalisation(first.seen, first.counts)


def _explained(updates: Sequence[Judged]) -> list[Explained]:
    both = [one for judged in updates for one in (judged.explained, judged.skipped)]
    return [one for one in both if one is not None]


def _beside_the_plan(case: Case, traces: Sequence[Trace], initial: Tensors) -> Iterator[Finding]:
    for trace in traces:
        yield from continuity(trace, initial)
        yield from planned.counters(case, trace)


def _as_judged(traces: Sequence[Trace], updates: Sequence[Judged]) -> list[Trace]:
    """The traces with the gradients that were judged; updates beyond the plan's as they are."""
    return [
        replace(
            trace,
            updates=(*(judged.seen[r] for judged in updates), *trace.updates[len(updates) :]),
        )
        for r, trace in enumerate(traces)
    ]


def _status(findings: Sequence[Finding], rows: Sequence[TensorRow]) -> Status:
    found = status_of(findings)
    if found is not None:
        return found
    if not any(row.state in ("equal", "rounding") for row in rows):
        return Status.INCONCLUSIVE
    return Status.EQUIVALENT
