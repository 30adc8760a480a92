"""What the loss is divided by, from the weights that microbatches went into their backward with.

A reading must give the weights of every update whose gradient is not the plan's, and 1 in every
update whose gradient is: the fewest causes that do are named, others that do as well are listed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from equivtest.causes import Cause
from equivtest.compare import figures
from equivtest.diagnose.evidence import Evidence, UpdateEvidence
from equivtest.diagnose.forms import SCALARS, Reading, Setting, readings
from equivtest.diagnose.roots import Roots, Term

PASSED = 1e-3
"""What a reading may be off from 1 in an update that is the plan's: far above what comparison A
lets pass, far below what any reading says where it says something."""


VARYING = 4.0
"""Tolerances of a weight by which those of several causes must differ, to be told from one."""

MEANS = frozenset({Cause.LOCAL_DENOMINATOR_DP, Cause.MEAN_OF_MEANS_BOTH, Cause.MEAN_OF_MEANS_ACCUM})
"""Means of means: over examples, where every example counts alike, it is those that are unequal."""


@dataclass(frozen=True)
class Named:
    """What the weights of a case are read as.

    Attributes:
        causes: together they give the weights.
        alternatives: other sets of as few causes that give them too.
        text: the evidence.
    """

    causes: tuple[Cause, ...]
    alternatives: tuple[Cause, ...]
    text: str


def normalisation(evidence: Evidence, weights: Mapping[int, Roots]) -> Named | None:
    """Read the weights of all updates at once; None where no reading gives them.

    Args:
        weights: by update that is not the plan's, each microbatch's weight in the loss; some are
            not 1.
    """
    off = {u: one for u, one in weights.items() if not one.right}
    terms = sorted({term for one in off.values() for _, _, term in one.found})
    passed = {one.u for one in evidence.updates if one.weighed is None and one.rows}
    fitting: list[Reading] | None = None
    for term in terms:
        settings = {one.u: _setting(evidence, one, term) for one in evidence.updates}
        every = readings(list(settings.values()))
        own = [
            r
            for r in every
            if _fits(r, term, settings, weights, passed) and _told_apart(r, settings, off)
        ]
        if fitting is None:
            fitting = own
        else:
            fitting = [r for r in fitting if any(r.causes == other.causes for other in own)]
    if not fitting:
        return None
    return _chosen(fitting, evidence, off)


def _told_apart(
    reading: Reading, settings: Mapping[int, Setting], off: Mapping[int, Roots]
) -> bool:
    """Several causes are told where the weights that they give are not one number.

    Any number is a product of others; ``SCALARS`` alone are two sizes that are known.
    """
    if len(reading.causes) < 2 or reading.causes == SCALARS:
        return True
    tolerance = max(one.tolerance for one in off.values())
    given = [
        reading.weight(setting, r, k)
        for setting in settings.values()
        for r, replica in enumerate(setting.supervised)
        for k, count in enumerate(replica)
        if count
    ]
    return max(given) - min(given) > VARYING * tolerance * max(map(abs, given))


def _fits(
    reading: Reading,
    term: str,
    settings: Mapping[int, Setting],
    weights: Mapping[int, Roots],
    passed: Collection[int],
) -> bool:
    """It gives every weight of this term, and 1 in the updates that passed."""
    for u, setting in settings.items():
        if u not in weights and u not in passed:
            continue
        tolerance = weights[u].tolerance if u in weights else PASSED
        for r, replica in enumerate(setting.supervised):
            for k, count in enumerate(replica):
                found = weights[u].found.get((r, k, term)) if u in weights else 1.0
                if not count or found is None:
                    continue
                weight = reading.weight(setting, r, k)
                if not abs(weight - found) <= tolerance * max(abs(weight), abs(found)):
                    return False
    return True


def _chosen(
    fitting: Sequence[Reading],
    evidence: Evidence,
    off: Mapping[int, Roots],
) -> Named:
    """The fewest causes; of several sets of as few the others are alternatives."""
    fewest = min(len(one.causes) for one in fitting)
    best = [one for one in fitting if len(one.causes) == fewest]
    first = best[0]
    # One of several causes may hold on a probe plan where the others do not: that settles nothing.
    others = [c for one in best[1:] for c in one.causes if c not in first.causes and fewest == 1]
    causes = tuple(sorted(first.causes))
    if first.causes & MEANS and _counts_are_examples(evidence):
        causes = tuple(Cause.MEAN_OF_MEANS_SAMPLES if c in MEANS else c for c in causes)
        others = [c for c in others if c not in MEANS]
    u, weights = next(iter(off.items()))
    return Named(
        causes,
        tuple(dict.fromkeys(others)),
        f"{_figures(u, weights.found)}: as a loop that {first.says} gives",
    )


def _figures(u: int, found: Mapping[Term, float]) -> str:
    """The weights in words: one number where they are alike."""
    values = list(found.values())
    if all(math.isclose(v, values[0], rel_tol=1e-3) for v in values):
        times = figures.weight(values[0])
        return f"in update {u} every microbatch counts {times} times what the plan gives it"
    (r, k, _), worst = max(found.items(), key=lambda item: abs(item[1] - 1.0))
    return (
        f"in update {u} microbatches count {min(values):.4g} to {max(values):.4g} times what the "
        f"plan gives them (microbatch {k} of replica {r} {worst:.4g} times)"
    )


def _counts_are_examples(evidence: Evidence) -> bool:
    """Each example has as many supervised elements as any other."""
    ratios = {
        round(sum(counts.values()) / len(ids), 9)
        for one in evidence.updates
        for replica, by in zip(one.used.ids, one.counts, strict=True)
        for ids, counts in zip(replica, by, strict=True)
        if ids
    }
    return len(ratios) == 1


def _setting(evidence: Evidence, one: UpdateEvidence, term: str) -> Setting:
    examples = [[len(ids) for ids in replica] for replica in one.used.ids]
    supervised = [[counts.get(term, 0.0) for counts in replica] for replica in one.counts]
    setting = Setting(supervised, examples, evidence.case.plan.A)
    return replace(setting, others=dict(_others(evidence, one, setting)))


def _others(
    evidence: Evidence, one: UpdateEvidence, setting: Setting
) -> Iterator[tuple[str, Sequence[Sequence[float]]]]:
    """Counts that people take for the supervised elements: examples, positions, both."""
    rows = setting.examples
    yield "examples", rows
    # Of one element each, in every term, one more is no shift but a half.
    if any(sum(terms.values()) != n * len(terms) for terms, n in _with_examples(one)):
        yield (
            "supervised elements and one more an example",
            [
                [n + m for n, m in zip(*both, strict=True)]
                for both in zip(setting.supervised, rows, strict=True)
            ],
        )
    yield from _positions(evidence, one)


def _with_examples(one: UpdateEvidence) -> Iterator[tuple[Mapping[str, float], int]]:
    """Counts by term of each microbatch, and its examples."""
    for replica, ids in zip(one.counts, one.used.ids, strict=True):
        yield from zip(replica, map(len, ids), strict=True)


def _positions(
    evidence: Evidence, one: UpdateEvidence
) -> Iterator[tuple[str, Sequence[Sequence[float]]]]:
    """Elements of each tensor in the batches."""
    try:
        batches = [[_tensors(evidence, ids) for ids in replica] for replica in one.used.ids]
    except Exception:
        return  # only words are lost: the reference arms collate the same and say what is wrong
    held = max((len(batch) for replica in batches for batch in replica), default=0)
    for index in range(held):
        given = [[_at(batch, index) for batch in replica] for replica in batches]
        sizes = [[float(t.numel()) for t in own] for own in given]
        yield f"all elements of tensor {index} of the batch, padding included", sizes
        if all(t.ndim == 2 and not t.is_floating_point() for own in given for t in own):  # tokens
            shifted = [[float(t.numel() - len(t)) for t in own] for own in given]
            yield f"all positions of tensor {index} of the batch, shifted by one", shifted


def _at(batch: Sequence[Tensor], index: int) -> Tensor:
    return batch[index] if index < len(batch) else torch.empty(0, 0, dtype=torch.long)


def _tensors(evidence: Evidence, ids: Sequence[int]) -> list[Tensor]:
    if not ids:
        return []
    collate = evidence.experiment.collate or default_collate
    batch = collate([evidence.experiment.data[i] for i in ids])
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
