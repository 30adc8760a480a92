"""Beside the plan or not: counters, examples, precision, hyperparameters. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from equivtest.arms.case import Case
from equivtest.compare.cause import Cause
from equivtest.compare.verdict import Finding
from equivtest.observe.trace import Trace
from equivtest.plan import GroupLayout


def counters(case: Case, trace: Trace) -> Iterator[Finding]:
    """Microbatches per group and attempted updates against the plan's."""
    rank = trace.rank
    if len(trace.updates) != len(case.groups):
        yield Finding(
            Cause.COUNTERS,
            f"rank {rank} attempted {len(trace.updates)} updates: the plan has {len(case.groups)}",
            rank=rank,
        )
    for u, (update, group) in enumerate(zip(trace.updates, case.groups, strict=False)):
        planned = len(group.ids[rank])
        if len(update.microbatches) != planned:
            yield Finding(
                Cause.COUNTERS,
                f"update {u} of rank {rank} follows {len(update.microbatches)} microbatches: the "
                f"plan has {planned}",
                update=u,
                rank=rank,
            )
    if trace.left_over:
        yield Finding(
            Cause.COUNTERS,
            f"{trace.left_over} microbatches of rank {rank} ran after its last update: no update "
            "uses them",
            rank=rank,
        )


def examples(case: Case, trace: Trace) -> Iterator[Finding]:
    """The examples that each forward received against those dealt to it, where they are known.

    The order of microbatches inside a replica's group is the loop's own business.
    """
    for u, (update, group) in enumerate(zip(trace.updates, case.groups, strict=False)):
        dealt = [ids for ids in group.ids[trace.rank] if ids]
        received = [m.ids for m in update.microbatches if m.ids is not None]
        foreign = sorted(set(_flat(received)) - set(_flat(dealt)))
        missing = sorted(set(_flat(dealt)) - set(_flat(received)))
        complete = len(received) == len(dealt) == len([m for m in update.microbatches if m.ids])
        twice = sorted({i for i in _flat(received) if _flat(received).count(i) > 1})
        problem = ""
        if foreign:
            problem = f"examples {_some(foreign)} are not dealt to it"
        elif twice:
            problem = f"examples {_some(twice)} came twice"
        elif missing and complete:
            problem = f"examples {_some(missing)} never came"
        if problem:
            yield Finding(
                Cause.EXAMPLES,
                f"in update {u} of rank {trace.rank}, {problem}",
                update=u,
                rank=trace.rank,
            )


def precision_applied(
    case: Case, trace: Trace, seen_in_replay: frozenset[str]
) -> Iterator[Finding]:
    """The low dtype that the replay's forward used is among those that the candidate's did."""
    if case.precision.autocast is None:
        return
    low = str(case.precision.autocast)
    for u, update in enumerate(trace.updates):
        seen = sorted({dtype for m in update.microbatches for dtype in m.dtypes})
        if low in seen_in_replay and update.microbatches and low not in seen:
            yield Finding(
                Cause.NOT_APPLIED,
                f"the forwards of update {u} of rank {trace.rank} saved "
                f"{', '.join(seen) or 'nothing'}; under {case.precision.name} they save "
                f"{', '.join(sorted(seen_in_replay))}",
                update=u,
                rank=trace.rank,
            )
            return


def scheduler_calls(unit: str, trace: Trace, groups: Sequence[GroupLayout], u: int) -> int:
    """Calls that a scheduler in ``unit`` has had when update ``u`` is attempted."""
    if unit == "microbatch":
        return sum(len(g.ids[0]) for g in groups[: u + 1])
    if unit == "attempted":
        return u
    return sum(update.applied for update in trace.updates[:u])


def _flat(ids: Sequence[Sequence[int]]) -> list[int]:
    return [i for microbatch in ids for i in microbatch]


def _some(ids: Sequence[int]) -> str:
    shown = ", ".join(map(str, ids[:8]))
    return shown if len(ids) <= 8 else f"{shown} and {len(ids) - 8} more"
