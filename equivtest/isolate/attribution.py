"""Shares of a squared distance by source (Shapley), and the fewest sources that explain it. Pure.

With ``d2(S)`` the squared distance that is left when the sources ``S`` are isolated, a source's
share is the part of ``d2()`` that its isolation takes away, averaged over the orders in which the
sources can be isolated: ``sum_S |S|! (k-|S|-1)! / k! (d2(S) - d2(S + i)) / d2()`` over the sets
``S`` without ``i`` (L. S. Shapley, A value for n-person games, 1953). Shares and what is left with
all of them isolated add up to 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

MOST = 6
"""Sources that are attributed at once: 64 sets."""


@dataclass(frozen=True)
class Attribution:
    """What each source has of a squared distance.

    Attributes:
        shares: by source; negative where isolating it moves the arms apart.
        remainder: the share that is left with all of them isolated.
        claimed: the fewest sources that together bring it within tolerance (of several such sets
            the one that leaves least); empty where even all of them do not.
        within: all of them together do.
    """

    shares: dict[str, float]
    remainder: float
    claimed: tuple[str, ...]
    within: bool


def attribute(
    sources: Sequence[str],
    squared: Callable[[frozenset[str]], float],
    within: Callable[[frozenset[str]], bool],
) -> Attribution:
    """Attribute a squared distance to ``sources``, at most ``MOST`` of them.

    Args:
        squared: what is left of it with a set of sources isolated.
        within: what is left is within tolerance on every tensor.
    """
    whole = squared(frozenset())
    shares = {s: _ratio(_shapley(s, sources, squared), whole) for s in sources}
    everything = frozenset(sources)
    return Attribution(
        shares=shares,
        remainder=_ratio(squared(everything), whole),
        claimed=_fewest(sources, squared, within),
        within=within(everything),
    )


def _shapley(
    source: str, sources: Sequence[str], squared: Callable[[frozenset[str]], float]
) -> float:
    others = [s for s in sources if s != source]
    k = len(sources)
    total = 0.0
    for chosen in _subsets(others):
        n = len(chosen)
        weight = math.factorial(n) * math.factorial(k - n - 1) / math.factorial(k)
        total += weight * (squared(chosen) - squared(chosen | {source}))
    return total


def _fewest(
    sources: Sequence[str],
    squared: Callable[[frozenset[str]], float],
    within: Callable[[frozenset[str]], bool],
) -> tuple[str, ...]:
    for size in range(len(sources) + 1):
        enough = [s for s in map(frozenset, combinations(sources, size)) if within(s)]
        if enough:
            best = min(enough, key=squared)
            return tuple(s for s in sources if s in best)
    return ()


def _subsets(sources: Sequence[str]) -> Iterator[frozenset[str]]:
    for size in range(len(sources) + 1):
        yield from map(frozenset, combinations(sources, size))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
