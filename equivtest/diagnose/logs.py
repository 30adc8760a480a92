"""What the loop reports as its loss (``Rank.report``) against the loss that its update has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from equivtest.causes import Cause
from equivtest.diagnose.diagnosis import Diagnosis
from equivtest.diagnose.evidence import Evidence, UpdateEvidence

NEAR = 1e-4
"""How near a reported loss must be, relatively; ``UNITS`` roundoffs of the case where that is more:
a loop may add up its log in any dtype and order."""

UNITS = 8.0


@dataclass(frozen=True)
class Reported:
    """A reported loss that is not the update's.

    Attributes:
        factor: found over expected.
        names: what that number is in the plan (``A``, ``1/D``), empty where it is none.
    """

    u: int
    rank: int
    found: float
    expected: float
    names: tuple[str, ...]

    @property
    def factor(self) -> float:
        return self.found / self.expected


def loss_factor(evidence: Evidence) -> Iterator[Diagnosis]:
    """A factor of the plan between what is reported and what is so; in every update the same."""
    found = list(_reported(evidence))
    shared = set(found[0].names).intersection(*(one.names for one in found)) if found else set()
    if not shared:
        return
    first = found[0]
    names = " or ".join(name for name in first.names if name in shared)
    yield Diagnosis(
        Cause.LOSS_FACTOR,
        f"rank {first.rank} reports a loss of {first.found:.6g} for update {first.u}, and that of "
        f"the update is {first.expected:.6g}: {first.factor:.4g} = {names} times it",
        update=first.u,
        rank=first.rank,
    )


def other_losses(evidence: Evidence) -> Iterator[str]:
    """A note where what is reported is another number."""
    if any(True for _ in loss_factor(evidence)):
        return
    for one in _reported(evidence):
        own = _own(evidence.updates[one.u], one.rank) if one.u < len(evidence.updates) else None
        said = (
            ": that of its own microbatches alone"
            if own is not None and _alike(evidence, one.found, own)
            else f", {one.factor:.4g} times that"
        )
        yield (
            f"rank {one.rank} reports a loss of {one.found:.6g} for update {one.u}, and the "
            f"update's is {one.expected:.6g}{said}"
        )
        return


def _reported(evidence: Evidence) -> Iterator[Reported]:
    """By update and rank, where the gradient is right: another loss belongs to another gradient."""
    wrong = {finding.update for finding in evidence.found(Cause.GRADIENT, Cause.NONFINITE)}
    for one in evidence.updates:
        if not one.loss or one.u in wrong:
            continue
        for rank, seen in enumerate(one.seen):
            if not seen.reported or _right(evidence, seen.reported, one.loss):
                continue
            found = seen.reported[-1]
            if math.isfinite(found):
                names = _names(evidence, one, found / one.loss)
                yield Reported(one.u, rank, found, one.loss, names)


def _right(evidence: Evidence, reported: tuple[float, ...], loss: float) -> bool:
    """The last one, or what several make together, is the update's."""
    total = math.fsum(reported)
    tried = (reported[-1], total, total / len(reported))
    return any(_alike(evidence, value, loss) for value in tried)


def _alike(evidence: Evidence, a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=max(NEAR, UNITS * evidence.case.precision.u))


def _names(evidence: Evidence, one: UpdateEvidence, factor: float) -> tuple[str, ...]:
    """What of the plan the factor is, a factor of 1 left out."""
    A, D = len(one.seen[0].microbatches), len(one.seen)
    N = sum(n for replica in one.counts for terms in replica for n in terms.values())
    numbers = {"A": A, "D": D, "A D": A * D, "the supervised elements": N}
    scale = one.seen[0].scale
    if scale:
        numbers["the loss scale"] = scale
    both = {**numbers, **{f"1/({name})": 1.0 / n for name, n in numbers.items() if n}}
    told = [name for name, n in both.items() if n != 1 and _alike(evidence, factor, n)]
    return tuple(name.replace("(A)", "A").replace("(D)", "D") for name in told)


def _own(one: UpdateEvidence, rank: int) -> float | None:
    """Mean loss over the rank's own supervised elements, where the loss has one term."""
    counts: list[Mapping[str, float]] = list(one.counts[rank])
    if any(len(terms) != 1 for terms in counts):
        return None
    count = sum(n for terms in counts for n in terms.values())
    total = sum(sum(m.totals) for m in one.seen[rank].microbatches)
    return total / count if count else None
