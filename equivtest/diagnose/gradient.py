"""Causes of a gradient that is not the plan's: from its weights, and from what led to them.

What is in a gradient is the product of three things: the root factors that microbatches went into
their backward with, the path that ``.grad`` took to the update, and what neither shows. Where each
has a name the findings of the tensors that they give are accounted for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from equivtest.causes import Cause
from equivtest.compare.verdict import Finding
from equivtest.diagnose import route
from equivtest.diagnose.diagnosis import Diagnosis, exactly
from equivtest.diagnose.evidence import Evidence, UpdateEvidence
from equivtest.diagnose.normalisation import Named, normalisation
from equivtest.diagnose.roots import Roots
from equivtest.diagnose.weighing import Weighed


def gradient(evidence: Evidence) -> Iterator[Diagnosis]:
    """Causes of the updates whose gradient is not the plan's."""
    weighed = [(one, one.weighed) for one in evidence.updates if one.weighed is not None]
    if all(held.overflowed for _, held in weighed):
        return  # nothing tells what the loop makes of its factors afterwards
    told = {one.u: route.told(one, held) for one, held in weighed}
    losses = {one.u: _losses(held, told[one.u].factor_left) for one, held in weighed}
    known = {u: loss for u, loss in losses.items() if loss is not None}
    wrong = any(not loss.right for loss in known.values())
    named = normalisation(evidence, known) if wrong else None
    for one, held in weighed:
        loss, path = known.get(one.u), told[one.u]
        if loss is None or (named is None and not loss.right):
            continue
        causes = list(path.causes)
        if named is not None and not loss.right:
            causes += [_of_loss(cause, named, one.u, held.common_values) for cause in named.causes]
        covers = exactly(_accounted(evidence, one, held, path))
        yield from (replace(cause, covers=covers, update=one.u) for cause in causes)


def _losses(weighed: Weighed, factor: float) -> Roots | None:
    """Weights that are the loss's own doing: root factors, times what has no place on the path."""
    if weighed.roots is None or not (weighed.explained or weighed.overflowed):
        return None
    found = {key: w * factor for key, w in weighed.roots.found.items()}
    return replace(weighed.roots, found=found)


def _of_loss(cause: Cause, named: Named, u: int, common_values: bool) -> Diagnosis:
    """A cause of the loss; where its value is all replicas', a collective lost the gradient."""
    if cause is Cause.MISSING_WORLD_SIZE and common_values:
        text = (
            f"in update {u} every microbatch counts 1/D of what the plan gives it, and each "
            "backward started from the loss of all replicas: the collective that added them up "
            "has no gradient"
        )
        return Diagnosis(Cause.NON_AUTOGRAD_REDUCE, text, update=u)
    return Diagnosis(cause, named.text, update=u, alternatives=named.alternatives)


def _accounted(
    evidence: Evidence, one: UpdateEvidence, weighed: Weighed, told: route.Told
) -> list[Finding]:
    """The gradients that are explained; where they differ by rank, what follows from that."""
    found = [
        f
        for f in evidence.found(Cause.GRADIENT)
        if f.update == one.u and (f.tensor is None or f.tensor in weighed.explained)
    ]
    if weighed.overflowed:
        found += [f for f in evidence.found("", Cause.SCALER_SKIP) if f.update == one.u]
    if told.by_rank:
        found += [f for f in evidence.findings if _follows(f, one.u)]
    if any(diagnosis.cause is Cause.SCALE_DIFFERS for diagnosis in told.causes):
        scalers = (f for f in evidence.found(Cause.RANKS) if f.tensor is None)
        found += [f for f in scalers if f.update is not None and f.update >= one.u]
    return found


def _follows(finding: Finding, u: int) -> bool:
    """Once replicas hold other gradients they hold other parameters from there on."""
    later = finding.update is not None and finding.update >= u
    return later and finding.cause == Cause.RANKS and finding.tensor is not None
