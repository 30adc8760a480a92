"""Costs: what is right in value and takes more communication or memory than it has to."""

from __future__ import annotations

from collections.abc import Iterator

from equivtest.causes import Cause
from equivtest.diagnose.diagnosis import Diagnosis
from equivtest.diagnose.evidence import Evidence
from equivtest.observe.trace import UpdateTrace


def costs(evidence: Evidence) -> Iterator[Diagnosis]:
    """Reductions that a group could do without."""
    yield from _extra(evidence)


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
    return sum(m.reduces for m in seen.microbatches)


def _reductions_by_hand(seen: UpdateTrace) -> int:
    """The most times that one parameter's gradient was reduced by a collective."""
    times: dict[str, int] = {}
    for collective in seen.collectives:
        if collective.name.startswith(("all_reduce", "reduce")) and collective.phase == "after":
            for name in collective.parameters:
                times[name] = times.get(name, 0) + 1
    return max(times.values(), default=0)
