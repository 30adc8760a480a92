"""A schedule that is off: what moved it, predicted from how often the loop may have called it.

Each hypothesis says how many calls the scheduler has had at every update and when the loop ends.
The experiment's own scheduler, moved as often, must then give every hyperparameter that was seen.
Calls that were seen only settle what several hypotheses reproduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from equivtest.causes import Cause
from equivtest.compare.each import after_each
from equivtest.compare.planned import scheduler_calls
from equivtest.compare.verdict import Finding
from equivtest.diagnose.diagnosis import Covers, Diagnosis, exactly
from equivtest.diagnose.evidence import Evidence
from equivtest.diagnose.expected import (
    Hyperparameters,
    Timeline,
    alike,
    by_name,
    close,
    follows_its_groups,
    named_in,
    optimizers_of,
)
from equivtest.diagnose.horizon import stretched
from equivtest.diagnose.moves import Counted, Moves, hypotheses
from equivtest.observe.trace import Event, Trace


def schedule(evidence: Evidence) -> Iterator[Diagnosis]:
    """What moves a schedule whose values are not those that are due."""
    findings = evidence.found(Cause.HYPERPARAMETERS)
    no_optimizer = any(finding.tensor is None for finding in findings)
    if not (findings and evidence.updates) or no_optimizer or evidence.experiment.scheduler is None:
        return
    counts, all_seen = _counts(evidence), _seen(evidence)
    expected = optimizers_of(evidence)
    held = [frozenset(by_name(expected.hyperparameters(o))) for o in expected.optimizers]
    timeline = Timeline(expected)
    timeline.after(max(counts.due))
    for names in held:  # each optimizer may have a schedule of its own
        own = [finding for finding in findings if finding.tensor in names]
        if own:
            yield from _diagnosed(evidence, own, timeline, counts, all_seen.of(names))


def _diagnosed(
    evidence: Evidence,
    findings: Sequence[Finding],
    timeline: Timeline,
    counts: Counted,
    seen: _Seen,
) -> Iterator[Diagnosis]:
    if _reproduces(timeline, counts.due, seen):
        return
    called = _called(evidence.traces[0], len(evidence.updates))
    several = len(evidence.traces[0].groups_after) > 1  # whose calls these are is not known
    fitting = [
        m
        for m in hypotheses(counts)
        if _reproduces(timeline, m.at, seen) and (several or not _off(timeline, m.at, seen, called))
    ]
    if fitting:
        yield from _named(evidence, findings, timeline, counts, seen, fitting)
    elif several or not _off(timeline, counts.due, seen, called):
        yield from _horizon(evidence, findings, counts, seen)


# -- what was seen


@dataclass(frozen=True)
class _Seen:
    """Hyperparameters at each judged update, and when the loop ended (None if not comparable)."""

    at: tuple[Hyperparameters, ...]
    end: Hyperparameters | None

    def of(self, names: frozenset[str]) -> _Seen:
        """Of these parameters."""
        at = tuple(_only(held, names) for held in self.at)
        return _Seen(at, None if self.end is None else _only(self.end, names))

    def each(self) -> Iterator[tuple[int, Hyperparameters]]:
        yield from enumerate(self.at)
        if self.end is not None:
            yield len(self.at), self.end


def _only(held: Hyperparameters, names: frozenset[str]) -> Hyperparameters:
    return {name: values for name, values in held.items() if name in names}


def _seen(evidence: Evidence) -> _Seen:
    trace, n = evidence.traces[0], len(evidence.updates)
    complete = len(trace.updates) == len(evidence.case.groups) == n and trace.groups_after
    after = {k: v for groups in trace.groups_after for k, v in by_name(groups).items()}
    at = tuple(named_in(update.optimizers) for update in trace.updates[:n])
    # Values that are set at the top of an update are not those that are due when the loop ends.
    set_by_hand = not _calls(trace) and n > 1 and alike(after, at[-1]) and not alike(at[-1], at[0])
    return _Seen(at, after if complete and not set_by_hand else None)


def _counts(evidence: Evidence) -> Counted:
    trace, n = evidence.traces[0], len(evidence.updates)
    unit, groups = evidence.experiment.scheduler_unit, [one.used for one in evidence.updates]
    return Counted(
        microbatches=tuple(len(update.microbatches) for update in trace.updates[:n]),
        applied=tuple(update.applied for update in trace.updates[:n]),
        due=tuple(scheduler_calls(unit, trace, groups, u) for u in range(n + 1)),
        unit=unit,
        D=len(evidence.traces),
        by_group=after_each(evidence.case, evidence.traces) and bool(_calls(trace)),
        A=evidence.case.plan.A,
    )


def _reproduces(timeline: Timeline, at: Sequence[int], seen: _Seen) -> bool:
    """The schedule after so many calls is what was seen, in every key that it moves."""
    wanted = [(timeline.after(at[u]), found) for u, found in seen.each()]
    keys = timeline.moving()
    return bool(keys) and all(w is not None and alike(f, w, keys) for w, f in wanted)


def _off(timeline: Timeline, at: Sequence[int], seen: _Seen, called: Sequence[int]) -> int:
    """How many of the calls that were seen are not those of a hypothesis; 0 where none was seen."""
    if not called[-1] or not timeline.events:
        return 0
    return sum(abs(timeline.events * at[u] - called[u]) for u, _ in seen.each())


def _calls(trace: Trace) -> list[Event]:
    return [event for event in trace.events if event.kind == "scheduler"]


def _called(trace: Trace, n: int) -> list[int]:
    """Calls of schedulers that were seen before each of ``n`` updates, and in all."""
    seen = _calls(trace)
    before = [
        sum(c.update < u or (c.update == u and not c.attempted) for c in seen) for u in range(n)
    ]
    return [*before, len(seen)]


# -- what is said


def _named(
    evidence: Evidence,
    findings: Sequence[Finding],
    timeline: Timeline,
    counts: Counted,
    seen: _Seen,
    fitting: Sequence[Moves],
) -> Iterator[Diagnosis]:
    called = _called(evidence.traces[0], len(evidence.updates))
    off = [(len(m.causes), _off(timeline, m.at, seen, called)) for m in fitting]
    best = fitting[off.index(min(off))]
    ties = [m for m, rank in zip(fitting, off, strict=True) if rank == min(off)]
    others = tuple(dict.fromkeys(c for m in ties for c in m.causes if c not in best.causes))

    def whose(u: int) -> str:
        return f"the schedule's after {best.at[u]} calls and not after {counts.due[u]}"

    u, text = _values_text(timeline, counts.due, seen, whose, best.what)
    text += _positions(_calls(evidence.traces[0]))
    covers = _covers(evidence, findings, timeline, best.at, seen)
    for cause in best.causes:
        yield Diagnosis(cause, text, covers, update=u, alternatives=others)


def _horizon(
    evidence: Evidence, findings: Sequence[Finding], counts: Counted, seen: _Seen
) -> Iterator[Diagnosis]:
    """A schedule that is called when it is due, and whose horizon is counted in microbatches."""
    A = evidence.case.plan.A
    expected = optimizers_of(evidence)
    if A == 1 or not stretched(expected, A):
        return
    timeline = Timeline(expected)
    if not _reproduces(timeline, counts.due, seen):
        return
    usual = Timeline(optimizers_of(evidence))
    usual.after(max(counts.due))
    what = f"its horizon is A={A} times as long, as if it counted microbatches"

    def whose(u: int) -> str:
        return f"the schedule's after {counts.due[u]}/{A} calls"

    u, text = _values_text(usual, counts.due, seen, whose, what)
    covers = _covers(evidence, findings, timeline, counts.due, seen)
    yield Diagnosis(Cause.MICRO_VS_UPDATE, text, covers, update=u)


def _covers(
    evidence: Evidence,
    findings: Sequence[Finding],
    timeline: Timeline,
    at: Sequence[int],
    seen: _Seen,
) -> tuple[Covers, ...]:
    """The hyperparameters, where nothing else in them is off, and the updates that follow them."""
    whole = [(timeline.after(at[u]), found) for u, found in seen.each()]
    if not all(wanted is not None and alike(found, wanted) for wanted, found in whole):
        return ()
    expected, names = optimizers_of(evidence), frozenset(seen.at[0])
    own = {
        one.u
        for one in evidence.updates
        for optimizer in one.seen[0].optimizers
        if optimizer.names == names
        and optimizer.applied
        and follows_its_groups(expected, one.seen[0], optimizer)
    }
    moved = [f for f in evidence.found(Cause.PARAMETERS) if f.update in own and f.tensor in names]
    return exactly([*findings, *moved])


def _values_text(
    timeline: Timeline, due: Sequence[int], seen: _Seen, whose: Callable[[int], str], what: str
) -> tuple[int, str]:
    """The first value that is off, and in which update."""
    n, keys = len(seen.at), sorted(timeline.moving())
    for u, found in seen.each():
        wanted = timeline.after(due[u]) or {}
        for name, values in found.items():
            for key in keys:
                value, right = values.get(key), wanted.get(name, {}).get(key)
                if not close(value, right):
                    when = f"at update {u}" if u < n else "when the loop ends"
                    return min(u, n - 1), (
                        f"{key}={_number(value)} {when}, where {_number(right)} is due, is "
                        f"{whose(u)}: {what}"
                    )
    return 0, what


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _positions(seen: Sequence[Event]) -> str:
    """Calls between microbatches, in a clause."""
    between = [c for c in seen if 0 < c.begun and not c.attempted]
    if not between:
        return ""
    u = between[0].update
    several = sum(c.update == u for c in between)
    return f" ({several} calls were seen in update {u} before its update was attempted)"
