"""``opt.update_per_microbatch``: an update is attempted after every microbatch."""

from __future__ import annotations

from collections.abc import Iterator

from equivtest.causes import Cause
from equivtest.compare.each import after_each
from equivtest.diagnose.diagnosis import Diagnosis, exactly
from equivtest.diagnose.evidence import Evidence


def update_per_microbatch(evidence: Evidence) -> Iterator[Diagnosis]:
    """Attempts are A times the plan's, each with one microbatch.

    Each of these updates is judged on its microbatch, so what is found of it has other reasons.
    """
    case = evidence.case
    if not after_each(case, evidence.traces):
        return
    counts = [f for f in evidence.found(Cause.COUNTERS) if f.tensor is None]
    n = len(evidence.traces[0].updates)
    text = (
        f"{n} updates were attempted, each after a single microbatch: the plan has "
        f"{len(case.groups)}, each after {case.plan.A}"
    )
    covered = [*counts, *evidence.found(Cause.EXAMPLES)]
    yield Diagnosis(Cause.UPDATE_PER_MICROBATCH, text, exactly(covered))
