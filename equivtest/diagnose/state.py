"""An average of the weights that is off: how often it moved, and before or after the update.

Each hypothesis is a number of calls on the weights before the update and after it. From the average
that the update found they must give the one that it left, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from equivtest.arms.build import build
from equivtest.causes import Cause
from equivtest.compare.average import ExpectedAverage
from equivtest.compare.continuity import all_same
from equivtest.compare.verdict import About
from equivtest.diagnose.diagnosis import Diagnosis, exactly
from equivtest.diagnose.evidence import Evidence
from equivtest.observe.trace import Tensors, UpdateTrace


@dataclass(frozen=True)
class Called:
    """A hypothesis on the calls in an update.

    Attributes:
        calls: before and after the update, of its number of microbatches.
        least: microbatches that some update must have for it to be this.
    """

    cause: Cause
    calls: Callable[[int], tuple[int, int]]
    what: str
    least: int = 1


HYPOTHESES = (
    Called(Cause.EMA_NEVER, lambda _: (0, 0), "it did not move"),
    Called(Cause.EMA_BEFORE_UPDATE, lambda _: (1, 0), "it moved before the update"),
    *(
        Called(Cause.EMA_PER_MICROBATCH, calls, "it moved once per microbatch", least=2)
        for calls in (lambda A: (A - 1, 1), lambda A: (A, 0), lambda A: (0, A))
    ),
)


def average(evidence: Evidence) -> Iterator[Diagnosis]:
    """What moves an average that is not the one that is due."""
    findings = [f for f in evidence.found(Cause.STATE) if f.about == About.AVERAGE]
    if not findings:
        return
    beside = {f.update for f in findings if f.update is not None}
    updates = evidence.traces[0].updates[: len(evidence.updates)]
    for moves in HYPOTHESES:
        u = max(sorted(beside), key=lambda u: len(updates[u].microbatches))
        most = len(updates[u].microbatches)
        if most >= moves.least and _reproduces(evidence, moves, updates, beside):
            before, after = moves.calls(most)
            text = (
                f"after update {u} the average of weights is bit for bit what {before} calls "
                f"before the update and {after} after it give, and one after it is due: "
                f"{moves.what}"
            )
            if not before + after and any(e.kind == "average" for e in evidence.traces[0].events):
                text += "; update_parameters() was called on another object than rank.average"
            yield Diagnosis(
                moves.cause,
                text,
                exactly(findings),
                update=u,
                # So many calls after each update may come for any reason.
                alternatives=(Cause.STATE,) if not before and after == most > 1 else (),
            )
            return


def _reproduces(
    evidence: Evidence, moves: Called, updates: Sequence[UpdateTrace], beside: set[int]
) -> bool:
    """Every average is what these calls make of the one before, of applied updates at least."""
    case = evidence.case
    module = build(evidence.experiment, case.precision.parameters, case.device)
    expected = ExpectedAverage(evidence.experiment, module)
    start: Tensors | None = None
    for u, update in enumerate(updates):
        if u in beside or update.applied:
            calls = moves.calls(len(update.microbatches))
            if not all_same(expected.moved(start, update, *calls), update.averages):
                return False
        start = update.averages
    return True
