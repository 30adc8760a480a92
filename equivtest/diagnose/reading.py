"""The order in which a loop read its examples: rounds of microbatches, and passes over the data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from equivtest.observe.trace import Trace

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Round:
    """Microbatch ``k`` of update ``update`` on all replicas: their ids by rank."""

    update: int
    k: int
    ids: tuple[Ids, ...]

    @property
    def flat(self) -> Ids:
        return tuple(i for own in self.ids for i in own)


@dataclass(frozen=True)
class Pass:
    """Rounds between two returns to what was read before.

    Attributes:
        ended: the loop came back to an example of it, or it has them all.
    """

    rounds: tuple[Round, ...]
    ended: bool

    @property
    def times(self) -> Counter[int]:
        """How often each example came."""
        return Counter(i for one in self.rounds for i in one.flat)

    @property
    def updates(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(one.update for one in self.rounds))

    def sequence(self, rank: int) -> Ids:
        """What one replica read, in order."""
        return tuple(i for one in self.rounds for i in one.ids[rank])


def rounds(traces: Sequence[Trace]) -> list[Round] | None:
    """All rounds of attempted updates, in order; None where an example is unknown."""
    made = []
    for u, updates in enumerate(zip(*(trace.updates for trace in traces), strict=False)):
        replicas = [update.microbatches for update in updates]
        if len({len(replica) for replica in replicas}) != 1:
            return None
        for k, microbatches in enumerate(zip(*replicas, strict=True)):
            ids = [m.ids for m in microbatches]
            if any(own is None for own in ids):
                return None
            made.append(Round(u, k, tuple(own or () for own in ids)))
    return made


def passes(read: Sequence[Round], n: int) -> list[Pass]:
    """Cut where all ``n`` examples came, or before one comes back while others are left."""
    made: list[Pass] = []
    held: list[Round] = []
    seen: set[int] = set()
    for one in read:
        back, every = bool(seen & set(one.flat)), len(seen | set(one.flat)) == n
        if held and back and not every:
            made.append(Pass(tuple(held), ended=True))
            held, seen = [], set()
        held.append(one)
        seen |= set(one.flat)
        if len(seen) == n:
            made.append(Pass(tuple(held), ended=True))
            held, seen = [], set()
    return [*made, Pass(tuple(held), ended=False)] if held else made


def lengths(read: Sequence[Round]) -> list[int]:
    """Rounds of each update."""
    counted = Counter(one.update for one in read)
    return [counted[u] for u in range(max(counted, default=-1) + 1)]


def cut_as(read: Sequence[Round], A: int, per_pass: int) -> bool:
    """Updates follow ``A`` rounds each, but for what is left after ``per_pass`` rounds."""
    full, left = divmod(per_pass, A)
    patterns = [[A] * full + [left] if left else [A] * full, [A] * full]
    found = lengths(read)
    return any(
        p and all(length == p[u % len(p)] for u, length in enumerate(found)) for p in patterns
    )
