"""Beside the plan or not: counters, examples, precision; and what a schedule was due. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from equivtest.arms.case import Case
from equivtest.causes import Cause
from equivtest.compare.verdict import Finding
from equivtest.observe.trace import MicrobatchTrace, Trace, UpdateTrace
from equivtest.plan import GroupLayout

UNSEEN = " (one is seen when a torch.optim.Optimizer runs that holds the model's parameters)"


def counters(case: Case, trace: Trace) -> Iterator[Finding]:
    """Microbatches per group and attempted updates against the plan's."""
    rank = trace.rank
    if len(trace.updates) != len(case.groups):
        how = "" if trace.updates else UNSEEN
        yield Finding(
            Cause.COUNTERS,
            f"rank {rank} attempted {len(trace.updates)} updates{how}: the plan has "
            f"{len(case.groups)}",
            rank=rank,
        )
    for u, (update, group) in enumerate(zip(trace.updates, case.groups, strict=False)):
        planned = len(group.ids[rank])
        if update.observed and len(update.microbatches) != planned:
            yield Finding(
                Cause.COUNTERS,
                f"update {u} of rank {rank} follows {len(update.microbatches)} microbatches: the "
                f"plan has {planned}{_of_the_same(update, group.ids[rank])}",
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


def _of_the_same(update: UpdateTrace, dealt: Sequence[tuple[int, ...]]) -> str:
    """A clause for a loop that cuts the plan's examples in its own way."""
    received = [i for m in update.microbatches for i in m.ids or ()]
    same = sorted(received) == sorted(i for ids in dealt for i in ids)
    return ", of the same examples: give the plan the m and A that the loop runs" if same else ""


def examples(case: Case, trace: Trace) -> Iterator[Finding]:
    """The examples that each forward received against those dealt to it, where they are known.

    The order of microbatches inside a replica's group is the loop's own business. Behind an update
    that follows none it is not known which group a forward belongs to.
    """
    for u, (update, group) in enumerate(zip(trace.updates, case.groups, strict=False)):
        if update.observed and not update.microbatches and any(group.ids[trace.rank]):
            return
        dealt = [ids for ids in group.ids[trace.rank] if ids]
        received = [m.ids for m in update.microbatches if m.ids is not None]
        times = Counter(i for ids in received for i in ids)
        wanted = {i for ids in dealt for i in ids}
        foreign = sorted(times.keys() - wanted)
        missing = sorted(wanted - times.keys())
        complete = len(received) == len(dealt) == len([m for m in update.microbatches if m.ids])
        twice = sorted(i for i, n in times.items() if n > 1)
        problem = ""
        if foreign:
            problem = (
                f"examples {some(foreign)} are not dealt to it{_dealt_to(case, u, foreign[0])}"
            )
        elif twice:
            problem = f"examples {some(twice)} came twice"
        elif missing and complete:
            problem = f"examples {some(missing)} never came"
        if problem:
            yield Finding(
                Cause.EXAMPLES,
                f"in update {u} of rank {trace.rank}, {problem}",
                update=u,
                rank=trace.rank,
            )


def _dealt_to(case: Case, u: int, example: int) -> str:
    """Where an example belongs, in update ``u`` if it does there, in a clause."""
    for v in sorted(range(len(case.groups)), key=lambda v: v != u):
        for r, replica in enumerate(case.groups[v].ids):
            if any(example in ids for ids in replica):
                return f" ({example} is dealt to rank {r} in update {v})"
    return ""


def unobserved(trace: Trace) -> Iterator[str]:
    """A note on updates whose forwards were not seen, and so not counted."""
    odd = [u for u, update in enumerate(trace.updates) if not update.observed]
    if odd:
        yield (
            f"no forward of update {some(odd)} of rank {trace.rank} was observed, though "
            "gradients came (module.forward(...) in place of module(...) passes hooks by): "
            "microbatches, examples and dtypes are unknown there and not judged"
        )


def precision_applied(
    case: Case, trace: Trace, seen_in_replay: frozenset[str]
) -> Iterator[Finding]:
    """The low dtype that the replay's forwards used is among those of each of the candidate's."""
    if case.precision.autocast is None or str(case.precision.autocast) not in seen_in_replay:
        return
    low = str(case.precision.autocast)
    for u, (update, group) in enumerate(zip(trace.updates, case.groups, strict=False)):
        without = _without(low, update, group.ids[trace.rank].count(()))
        if without:
            seen = sorted({dtype for m in without for dtype in m.dtypes})
            yield Finding(
                Cause.NOT_APPLIED,
                f"{len(without)} of {len(update.microbatches)} forwards of update {u} of rank "
                f"{trace.rank} saved {', '.join(seen)}; under {case.precision.name} they save "
                f"{', '.join(sorted(seen_in_replay))}",
                update=u,
                rank=trace.rank,
            )
            return


def _without(low: str, update: UpdateTrace, empty: int) -> list[MicrobatchTrace]:
    """Microbatches seen without ``low``; of the unknown ones ``empty`` may hold no example."""
    without = [m for m in update.microbatches if m.dtypes and low not in m.dtypes]
    known = [m for m in without if m.ids]
    unknown = [m for m in without if m.ids is None]
    return known + unknown[empty:]


def scheduler_calls(unit: str, trace: Trace, groups: Sequence[GroupLayout], u: int) -> int:
    """Calls that a scheduler in ``unit`` has had when update ``u`` is attempted.

    With ``u`` the number of updates: when the loop ends.
    """
    if unit == "microbatch":
        return sum(len(g.ids[0]) for g in groups[: u + 1])
    if unit == "attempted":
        return u
    return sum(update.applied for update in trace.updates[:u])


def some(ids: Sequence[int]) -> str:
    """The first of them, for a sentence."""
    shown = ", ".join(map(str, ids[:8]))
    return shown if len(ids) <= 8 else f"{shown} and {len(ids) - 8} more"
