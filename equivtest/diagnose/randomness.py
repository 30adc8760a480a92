"""Random numbers that forwards share though nothing asks them to.

Every replica starts with a seed of its own, and a generator moves with every number drawn from it.
Two forwards that draw from one generator in one state draw the same numbers: the loop has put it
there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from equivtest.causes import Cause
from equivtest.diagnose.diagnosis import Diagnosis
from equivtest.observe.trace import MicrobatchTrace

Replicas = Sequence[Sequence[MicrobatchTrace]]
"""Microbatches of one update by replica."""

LIBRARY = {"torch": "torch's", "cuda": "the GPU's", "numpy": "numpy's", "python": "Python's"}


def repeated(u: int, seen: Replicas, before: Replicas = ()) -> Iterator[Diagnosis]:
    """Random numbers drawn twice in update ``u``.

    Args:
        seen: of this update, whose forwards draw random numbers wherever they run.
        before: of the update before, where there is one.
    """
    for r, mine in enumerate(seen):
        for s, theirs in enumerate(seen[:r]):
            for k, one in enumerate(mine):
                for j, other in enumerate(theirs):
                    if _alike(one, other):
                        again = _within([mine], before[r : r + 1])
                        yield _across_replicas(u, (s, j), (r, k), _alike(one, other), again)
                        return
    found = _within(seen, before)
    if found is not None:
        yield _across_microbatches(u, *found)


def _within(
    seen: Replicas, before: Replicas
) -> tuple[str, tuple[MicrobatchTrace, MicrobatchTrace]] | None:
    """Two microbatches of one replica that drew the same, and where, in words."""
    for r, own in enumerate(seen):
        for k, one in enumerate(own):
            for j, other in enumerate(own[:k]):
                if _alike(one, other) and _other_examples(one, other):
                    return f"microbatches {j} and {k} of replica {r}", (one, other)
            for j, other in enumerate(before[r] if r < len(before) else ()):
                if _alike(one, other) and _other_examples(one, other):
                    where = f"microbatch {k} of replica {r} and microbatch {j} of the update before"
                    return where, (one, other)
    return None


def _alike(one: MicrobatchTrace, other: MicrobatchTrace) -> frozenset[str]:
    """Generators that both drew from, in one state."""
    if one.rng is None or other.rng is None or not one.drew & other.drew:
        return frozenset()
    return one.rng.same(other.rng) & one.drew & other.drew


def _other_examples(one: MicrobatchTrace, other: MicrobatchTrace) -> bool:
    """No repetition of a forward, which must draw the same."""
    return one.ids is not None and other.ids is not None and not set(one.ids) & set(other.ids)


def _across_replicas(
    u: int,
    first: tuple[int, int],
    second: tuple[int, int],
    generators: frozenset[str],
    again: object | None,
) -> Diagnosis:
    (s, j), (r, k) = first, second
    text = (
        f"microbatch {j} of replica {s} and microbatch {k} of replica {r} draw the same random "
        f"numbers in update {u}: {_state_of(generators)}. Every replica starts with a seed of its "
        "own, so the loop seeds them alike"
    )
    text += "" if again is None else "; one replica's microbatches draw the same as well"
    return Diagnosis(Cause.SAME_MASK_ACROSS_REPLICAS, text, update=u, rank=r)


def _across_microbatches(
    u: int, where: str, pair: tuple[MicrobatchTrace, MicrobatchTrace]
) -> Diagnosis:
    text = (
        f"{where} draw the same random numbers for other examples in update {u}: "
        f"{_state_of(_alike(*pair))}. A generator moves with every number, so the loop seeds it "
        "again"
    )
    return Diagnosis(Cause.SAME_MASK_ACROSS_MICROBATCHES, text, update=u)


def _state_of(generators: frozenset[str]) -> str:
    whose = " and ".join(LIBRARY[name] for name in sorted(generators))
    return f"{whose} generator is in the same state before both forwards"
