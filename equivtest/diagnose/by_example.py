"""Contribution weights by example: what multiple of each example's gradient an update holds.

For a loss that separates over examples the plan's gradient is the sum of their own, each once.
Where no weights by microbatch give what a loop made of them, weights by example may: rows that were
left out of a batch, came twice, or were weighed by the loop. Fitted as those by microbatch
(``compare.weights``), from gradients of single examples in the case's precision.
"""

from __future__ import annotations

from dataclasses import dataclass

from equivtest.arms.oracle import Whole
from equivtest.compare import figures
from equivtest.compare.arms import UpdateArms
from equivtest.compare.weights import Weights, fit
from equivtest.distance import MaybeTensors, finite

MOST = 128
"""Examples up to which each is run alone: as many forwards, and as many gradients at once."""

ExampleWeight = tuple[int, int, float, float, float]
"""Update, example, expected, found, sigma."""


@dataclass(frozen=True)
class ByExample:
    """The weights of one update.

    Attributes:
        rows: a row an example.
        note: which examples count otherwise, in a sentence.
    """

    rows: tuple[ExampleWeight, ...]
    note: str


def by_example(arms: UpdateArms, gradient: MaybeTensors) -> ByExample | None:
    """Weights by example of rank 0's ``gradient``; None where they do not tell what it holds.

    They do not where examples see each other, a forward draws random numbers that count, there are
    more than ``MOST``, or hardly more elements than examples.
    """
    oracle, ids = arms.oracle, arms.group.flat
    if not 1 < len(ids) <= MOST or len(set(ids)) < len(ids) or oracle.coupled:
        return None
    weights = fitted(arms.large, gradient)
    if weights is None or not weights.tell() or not weights.differ():
        return None
    u, differ = arms.u, [ids[k] for _, k in weights.differ()]
    rows = tuple((u, ids[k], 1.0, w, weights.sigma[r, k]) for (r, k), w in weights.found.items())
    times = {i: figures.weight(figures.unrounded(weights.found[0, ids.index(i)])) for i in differ}
    if len(set(times.values())) == 1 and len(differ) == len(ids):
        note = f"update {u}: every example counts {times[differ[0]]} times in the gradient"
        return ByExample(rows, note)
    told = ", ".join(f"{i} ({times[i]})" for i in differ[:8])
    more = f" and {len(differ) - 8} more" if len(differ) > 8 else ""
    note = (
        f"update {u}: by example, {len(differ)} of {len(ids)} count other than once in the "
        f"gradient (example and weight: {told}{more}), and that is what the gradient holds"
    )
    return ByExample(rows, note)


def fitted(whole: Whole, gradient: MaybeTensors) -> Weights | None:
    """The gradient fitted by those of ``whole``'s single examples; None if one is not finite.

    Args:
        gradient: by tensor, in the order of the bench's names.

    Returns:
        Weights by (0, place of the example in ``whole.ids``); 1 is what the plan asks for.
    """
    parts = {(0, k): whole.example(i) for k, i in enumerate(whole.ids)}
    if not all(all(finite(part)) for part in parts.values()):
        return None
    return fit(parts, whole.gradients, gradient, whole.scale)
