"""Costs: what is right in value and takes more communication or memory than it has to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from equivtest.causes import Cause
from equivtest.diagnose.diagnosis import Diagnosis
from equivtest.diagnose.evidence import Evidence
from equivtest.observe.trace import Trace, UpdateTrace

FEW = 3
"""Microbatches from which on graphs that stay alive are told from the one that a loop's own
variable holds until the next takes its name."""


def costs(evidence: Evidence) -> Iterator[Diagnosis]:
    """Reductions, backwards and graphs that a group could do without."""
    yield from _extra(evidence)
    deferred = list(_deferred(evidence))
    yield from deferred
    yield from _kept(evidence.traces[0], deferred=bool(deferred))


def _extra(evidence: Evidence) -> Iterator[Diagnosis]:
    """More than one reduction of a gradient in an update."""
    if evidence.case.plan.D == 1:
        return
    for one in evidence.updates:
        seen = one.seen[0]
        by_wrapper, by_hand = _wrapper_reductions(seen), _reductions_by_hand(seen)
        most = max(by_wrapper, by_hand)
        if most > 1:
            who = "the wrapper" if by_wrapper >= by_hand else "the loop"
            yield Diagnosis(
                Cause.EXTRA,
                f"{who} reduced {most} times in update {one.u}, and once is enough for its "
                f"{len(seen.microbatches)} microbatches",
                update=one.u,
            )
            return


def _wrapper_reductions(seen: UpdateTrace) -> int:
    return sum(o.kind == "reduce" and not o.attempted for o in seen.operations)


def _reductions_by_hand(seen: UpdateTrace) -> int:
    """The most times that one parameter's gradient was reduced by a collective."""
    times: dict[str, int] = {}
    for collective in seen.collectives:
        if collective.name.startswith(("all_reduce", "reduce")) and collective.phase == "after":
            for name in collective.parameters:
                times[name] = times.get(name, 0) + 1
    return max(times.values(), default=0)


def _deferred(evidence: Evidence) -> Iterator[Diagnosis]:
    """One backward for several microbatches."""
    for one in evidence.updates:
        seen = one.seen[0]
        reached = [len(o.microbatches) for o in seen.operations if o.kind == "backward"]
        if max(reached, default=0) > 1:
            peak = max(m.peak_bytes for m in seen.microbatches)
            yield Diagnosis(
                Cause.DEFERRED_BACKWARD,
                f"one backward of update {one.u} reached {max(reached)} microbatches, whose graphs "
                f"were held until then: {peak:,} bytes at the most",
                update=one.u,
            )
            return


def _kept(trace: Trace, *, deferred: bool) -> Iterator[Diagnosis]:
    """The graphs of all earlier microbatches, of the run or of the group, are still alive.

    Args:
        deferred: those of a group are held for its backward: only whole groups before it count.
    """
    groups = [u.microbatches[:1] if deferred else u.microbatches for u in trace.updates]
    size = max((len(u.microbatches) for u in trace.updates), default=1) if deferred else 1
    alive = [[m.held_graphs // size for m in group] for group in groups]
    throughout = all_alive([n for group in alive for n in group])
    if not (throughout or (alive and all(map(all_alive, alive)))):
        return
    most = max((m for group in groups for m in group), key=lambda m: m.held_graphs)
    yield Diagnosis(
        Cause.KEPT_GRAPH,
        f"the graphs of earlier microbatches stay alive on rank {trace.rank}, one more with each "
        f"of them{'' if throughout else ' in a group'}: {most.held_graphs} in the end, with "
        f"{most.held_nodes} saved tensors of {most.held_bytes:,} bytes",
    )


def all_alive(graphs: Sequence[int]) -> bool:
    """Each microbatch finds the graphs of all before it, and there are enough of them."""
    return len(graphs) >= FEW and all(n >= k for k, n in enumerate(graphs))
