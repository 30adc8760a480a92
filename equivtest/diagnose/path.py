"""What each rank's ``.grad`` holds when a group ends, as its operations leave it. Pure.

A microbatch's weight is 1 where the reduced gradient holds of it what the plan asks for. Its own
backward adds D of it on its replica, for the wrapper's average divides by D; root factors are not
looked at here (``roots``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from equivtest.observe.trace import GradientOperation, UpdateTrace

Place = tuple[int, int]
"""Replica and microbatch."""

Held = Mapping[Place, float]
"""Weights of the microbatches that one rank's ``.grad`` holds."""

JOINT = ("reduce", "collective")
"""Operations that all ranks do together."""

ADDING = ("backward", *JOINT)
"""Operations that bring something into ``.grad``."""


def paths(seen: Sequence[UpdateTrace], names: Sequence[str]) -> dict[str, list[Held] | None]:
    """By parameter, the weights that each rank holds.

    None where ranks do not go together, or no rank's operations were seen.

    Args:
        seen: the update by rank.
    """
    if not any(update.operations for update in seen):
        return dict.fromkeys(names)
    known: dict[tuple[tuple[GradientOperation, ...], ...], list[Held] | None] = {}
    found = {}
    for name in names:
        own = tuple(tuple(concerning(name, update.operations)) for update in seen)
        if own not in known:
            known[own] = _held(seen, own)
        found[name] = known[own]
    return found


def concerning(name: str, operations: Sequence[GradientOperation]) -> Iterator[GradientOperation]:
    """What happens to one parameter's gradient before the update's clip."""
    for one in until_last_backward(operations):
        if one.parameters is None or name in one.parameters:
            yield one


def until_last_backward(
    operations: Sequence[GradientOperation],
) -> Sequence[GradientOperation]:
    """What comes before the update's clip: an unscale after it, but no clip and no zeroing."""
    last = max((i for i, one in enumerate(operations) if one.kind in ADDING), default=-1)
    unscales = [one for one in operations[last + 1 :] if one.kind == "unscale"]
    return [*operations[: last + 1], *unscales]


def in_turn(
    operations: Sequence[Sequence[GradientOperation]],
) -> list[tuple[int | None, GradientOperation]] | None:
    """Operations of all ranks in an order in which they may happen, each with its rank.

    Those that all ranks do together come once, without a rank. None where ranks do not go together:
    one waits for another that has ended, or for another kind.

    Args:
        operations: of each rank, in its own order.
    """
    order: list[tuple[int | None, GradientOperation]] = []
    reached = [0] * len(operations)
    while True:
        for rank, own in enumerate(operations):
            while reached[rank] < len(own) and own[reached[rank]].kind not in JOINT:
                order.append((rank, own[reached[rank]]))
                reached[rank] += 1
        joint = [own[at] for at, own in zip(reached, operations, strict=True) if at < len(own)]
        if not joint:
            return order
        if len(joint) < len(operations) or len({one.kind for one in joint}) > 1:
            return None
        order.append((None, joint[0]))
        reached = [at + 1 for at in reached]


def _held(
    seen: Sequence[UpdateTrace], operations: Sequence[Sequence[GradientOperation]]
) -> list[Held] | None:
    order = in_turn(operations)
    if order is None:
        return None
    held: list[dict[Place, float]] = [{} for _ in seen]
    for rank, one in order:
        if rank is None:
            share = 1.0 / len(seen) if one.kind == "reduce" else 1.0
            held = [_added_up(held, share) for _ in seen]
        else:
            _alone(rank, one, seen, held[rank])
    for update, own, mine in zip(seen, operations, held, strict=True):
        if update.scale is not None and not any(one.kind == "unscale" for one in own):
            _multiply(mine, 1.0 / update.scale)
    return list(held)


def _added_up(held: Sequence[Held], share: float) -> dict[Place, float]:
    total: dict[Place, float] = {}
    for mine in held:
        for key, weight in mine.items():
            total[key] = total.get(key, 0.0) + weight * share
    return total


def _alone(
    rank: int, one: GradientOperation, seen: Sequence[UpdateTrace], held: dict[Place, float]
) -> None:
    """Do in place what a rank does by itself."""
    if one.kind == "backward":
        microbatches = seen[rank].microbatches
        for k in one.microbatches:
            scale = microbatches[k].scale if k < len(microbatches) else None
            held[rank, k] = held.get((rank, k), 0.0) + len(seen) * (scale or 1.0)
    elif one.kind == "zero":
        held.clear()
    else:
        _multiply(held, one.factor)


def _multiply(held: dict[Place, float], factor: float) -> None:
    for key in held:
        held[key] *= factor
