"""What a loop divides its losses by, read from the factors that reached them. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from equivtest.batches import Counts
from equivtest.observe.trace import UpdateTrace

PLANNED = "the plan's: sum over supervised elements / their number in the group"

NEAR = 1e-2
"""How near a factor must be: a loss in half precision rounds it. Readings that are nearer to each
other than this are one."""


@dataclass(frozen=True)
class _Group:
    """One term's supervised elements, by replica and microbatch."""

    counts: Sequence[Sequence[float]]

    @property
    def whole(self) -> float:
        return sum(map(sum, self.counts))


_READINGS: tuple[tuple[str, Callable[[_Group, int, int], float]], ...] = (
    ("its sum x D / the group's count", lambda g, r, k: len(g.counts) / g.whole),
    ("its sum / the group's count", lambda g, r, k: 1 / g.whole),
    ("its sum / the replica's count", lambda g, r, k: 1 / sum(g.counts[r])),
    ("its sum / its own count", lambda g, r, k: 1 / g.counts[r][k]),
    ("its sum / its own count / A", lambda g, r, k: 1 / g.counts[r][k] / len(g.counts[r])),
    ("its sum, divided by nothing before backward", lambda g, r, k: 1.0),
)


def normalisation(seen: Sequence[UpdateTrace], counts: Sequence[Sequence[Counts]]) -> str:
    """By what each microbatch's loss went into its backward, in words.

    Args:
        seen: one update by rank.
        counts: supervised elements by replica and microbatch, by term.
    """
    factors = list(_factors(seen, counts))
    if not factors or any(factor is None for _, _, factor in factors):
        return f"not observed; {PLANNED}"
    (term,) = counts[0][0]
    group = _Group([[terms[term] for terms in replica] for replica in counts])
    for text, reading in _READINGS:
        if all(
            math.isclose(factor, reading(group, r, k), rel_tol=NEAR)
            for r, k, factor in factors
            if factor is not None
        ):
            return f"each microbatch's loss is {text} ({_number(group)})"
    known = [factor for _, _, factor in factors if factor]
    low, high = min(known), max(known)
    told = f"{low:.4g}" if math.isclose(low, high, rel_tol=NEAR) else f"{low:.4g} to {high:.4g}"
    return f"each microbatch's loss is its sum x {told} ({_number(group)})"


def _number(group: _Group) -> str:
    return f"the group's count is {group.whole:g} in the first update"


def _factors(
    seen: Sequence[UpdateTrace], counts: Sequence[Sequence[Counts]]
) -> Iterator[tuple[int, int, float | None]]:
    """Root factors without the loss scale; none where the losses have several terms."""
    if any(len(terms) != 1 for replica in counts for terms in replica):
        return
    for r, update in enumerate(seen):
        for k, microbatch in enumerate(update.microbatches[: len(counts[r])]):
            if not sum(counts[r][k].values()):
                continue
            factor = microbatch.factors[0] if len(microbatch.factors) == 1 else None
            scale = microbatch.scale or 1.0
            yield r, k, None if factor is None or not factor else factor / scale
