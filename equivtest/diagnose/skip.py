"""``skip.rank_local_decision``: each rank decides by itself whether an update is skipped.

Which findings follow from it: replicas hold other parameters from there on, and where a rank asks
for no update at all, its later updates have other numbers than those of the other ranks. Where no
rank asks for one, that is told, and has no name of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from equivtest.causes import Cause
from equivtest.compare.apart import Apart, Decision, decided_apart
from equivtest.compare.continuity import all_same
from equivtest.compare.verdict import Finding
from equivtest.diagnose.diagnosis import Diagnosis, exactly
from equivtest.diagnose.evidence import Evidence
from equivtest.distance import finite
from equivtest.observe.trace import Trace


def rank_local_decision(evidence: Evidence) -> Iterator[Diagnosis]:
    """Ranks of which some apply an update and others do not."""
    apart = decided_apart(evidence.case, evidence.traces)
    if apart is None:
        return
    covers = exactly(list(_follow(evidence, apart)))
    if apart.alike:
        text = (
            f"no rank asked for an update after the microbatches of group {apart.u}: where its "
            "gradient overflows and the loop skips by hand, let a GradScaler decide, which is "
            f"seen; updates from {apart.u} on were not judged"
        )
        yield Diagnosis(Cause.SKIP, text, covers, update=apart.u)
    else:
        rank = apart.decisions.index(next(d for d in apart.decisions if d != Decision.APPLIED))
        yield Diagnosis(Cause.RANK_LOCAL_DECISION, str(apart), covers, update=apart.u, rank=rank)


def _follow(evidence: Evidence, apart: Apart) -> Iterator[Finding]:
    """Findings that replicas leave that decided apart."""
    left_out = Decision.LEFT_OUT in apart.decisions
    by_finiteness = not left_out and _by_finiteness(evidence.traces, apart)
    agreed = left_out or by_finiteness or _same_gradients(evidence.traces, apart.u)
    for f in evidence.findings:
        later = f.update is None or f.update > apart.u
        here = f.update == apart.u
        if (
            f.cause == Cause.RANK_LOCAL_DECISION
            or (f.cause == Cause.RANKS and (later or (here and agreed)))
            or (f.cause == Cause.NONFINITE and here and by_finiteness)
            or (f.cause == Cause.COUNTERS and f.tensor is None and left_out and (later or here))
            or (f.cause == Cause.EXAMPLES and left_out and (later or here))
        ):
            yield f


def _by_finiteness(traces: Sequence[Trace], apart: Apart) -> bool:
    """Those and only those whose own gradient is not finite skipped the update."""
    return all(
        (decision is Decision.APPLIED) == _finite(trace, apart.u)
        for trace, decision in zip(traces, apart.decisions, strict=True)
    )


def _finite(trace: Trace, u: int) -> bool:
    return all(finite(list(trace.updates[u].gradient.values())))


def _same_gradients(traces: Sequence[Trace], u: int) -> bool:
    first = traces[0].updates[u].gradient
    return all(all_same(first, trace.updates[u].gradient) for trace in traces[1:])
