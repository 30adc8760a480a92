"""What each rank's ``.grad`` holds when a group ends, as its operations leave it: bookkeeping.

A microbatch's weight is 1 where the reduced gradient holds of it what the plan asks for. Its own
backward adds D of it on its replica, for the wrapper's average divides by D; root factors are not
looked at here (``roots``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from equivtest.observe.trace import GradientOperation, UpdateTrace

Key = tuple[int, int]
"""Replica and microbatch."""

Held = Mapping[Key, float]

JOINT = ("reduce", "collective")
"""Operations that all ranks do together."""


def paths(seen: Sequence[UpdateTrace], names: Sequence[str]) -> dict[str, list[Held] | None]:
    """By parameter, the weights that each rank holds; None where ranks do not go together.

    Args:
        seen: the update by rank.
    """
    if not any(update.operations for update in seen):
        return dict.fromkeys(names)
    known: dict[tuple[tuple[GradientOperation, ...], ...], list[Held] | None] = {}
    found = {}
    for name in names:
        own = tuple(tuple(_of(name, update.operations)) for update in seen)
        if own not in known:
            known[own] = _run(seen, own)
        found[name] = known[own]
    return found


def _of(name: str, operations: Sequence[GradientOperation]) -> Iterator[GradientOperation]:
    for one in until_last_backward(operations):
        if one.parameters is None or name in one.parameters:
            yield one


def until_last_backward(
    operations: Sequence[GradientOperation],
) -> Sequence[GradientOperation]:
    """What comes before the update's clip: an unscale after it, but no clip and no zeroing."""
    last = max(
        (i for i, one in enumerate(operations) if one.kind in ("backward", *JOINT)), default=-1
    )
    after = operations[last + 1 :]
    unscales = [one for one in after if one.kind == "unscale"]
    return [*operations[: last + 1], *unscales]


def _run(
    seen: Sequence[UpdateTrace], operations: Sequence[Sequence[GradientOperation]]
) -> list[Held] | None:
    D = len(seen)
    held: list[dict[Key, float]] = [{} for _ in seen]
    position = [0] * D
    while True:
        joint: list[GradientOperation] = []
        for r, own in enumerate(operations):
            position[r] = _until_joint(r, D, seen[r], own, position[r], held[r])
            if position[r] < len(own):
                joint.append(own[position[r]])
        if not joint:
            break
        if len(joint) < D or len({one.kind for one in joint}) > 1:
            return None
        share = 1.0 / D if joint[0].kind == "reduce" else 1.0
        total: dict[Key, float] = {}
        for mine in held:
            for key, weight in mine.items():
                total[key] = total.get(key, 0.0) + weight * share
        held = [dict(total) for _ in seen]
        position = [at + 1 for at in position]
    for r, update in enumerate(seen):
        if update.scale is not None and not any(one.kind == "unscale" for one in operations[r]):
            _multiply(held[r], 1.0 / update.scale)
    return list(held)


def _until_joint(
    r: int,
    D: int,
    update: UpdateTrace,
    operations: Sequence[GradientOperation],
    at: int,
    held: dict[Key, float],
) -> int:
    """Do what rank ``r`` does alone, from ``at`` on; where it waits for the others."""
    while at < len(operations) and operations[at].kind not in JOINT:
        one = operations[at]
        if one.kind == "backward":
            for k in one.microbatches:
                scale = update.microbatches[k].scale if k < len(update.microbatches) else None
                held[r, k] = held.get((r, k), 0.0) + D * (scale or 1.0)
        elif one.kind == "zero":
            held.clear()
        else:
            _multiply(held, one.factor)
        at += 1
    return at


def _multiply(held: dict[Key, float], factor: float) -> None:
    for key in held:
        held[key] *= factor
