"""A gradient as it would be: the microbatches' own, weighed as was observed, and one thing beside.

Root factors and the path of ``.grad`` were observed. What else may be in it is an ``Extra``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from equivtest.arms.replay import Replay
from equivtest.compare.arms import UpdateArms
from equivtest.compare.gradient import AgainstReplay
from equivtest.diagnose.path import Held, Place, paths
from equivtest.diagnose.roots import Roots
from equivtest.distance import MaybeTensors, accumulate, added, distance, ratio
from equivtest.observe.trace import UpdateTrace


@dataclass(frozen=True)
class Extra:
    """What a gradient holds beside what was observed.

    Attributes:
        factor: on everything.
        cleared: microbatches before this one count nothing.
        own: each replica holds its own microbatches only, D times.
        decay: what was added up so far is multiplied by this after each backward.
        earlier: the gradient that the update before left in ``.grad`` is in it, times this.
    """

    factor: float = 1.0
    cleared: int = 0
    own: bool = False
    decay: float = 1.0
    earlier: float = 0.0


NOTHING = Extra()


@dataclass(frozen=True)
class Prediction:
    """Gradients of one update, for any extra.

    Attributes:
        seen: the update by rank, with the gradient that is judged.
        given: that gradient by rank, in the order of ``arms.names``.
        replay: with each microbatch's contribution kept, by term.
        roots: root factors over the expected ones.
        a: comparison A of the gradient, by tensor.
    """

    arms: UpdateArms
    seen: Sequence[UpdateTrace]
    given: Sequence[MaybeTensors]
    replay: Replay
    roots: Roots
    a: Sequence[AgainstReplay]

    def gradient(self, extra: Extra, rank: int, t: int) -> Tensor | None:
        """Of tensor ``t`` on a rank, in float64 (complex128); None where nothing is in it."""
        total: list[Tensor | None] = [None]
        for key, part, root in self._parts:
            accumulate(total, [part[t]], root * self._way(extra, rank, t, key) * extra.factor)
        if extra.earlier:
            accumulate(total, [self.earlier(rank, t)], extra.earlier)
        return total[0]

    def earlier(self, rank: int, t: int) -> Tensor | None:
        """What the update before left in ``.grad`` of tensor ``t``, in float64."""
        previous = self.arms.traces[rank].updates[self.arms.u - 1]
        return added([previous.clipped.get(self.arms.names[t])])[0]

    def holds(self, extra: Extra, t: int) -> bool:
        """The gradient of tensor ``t`` is what is predicted, on every rank."""
        for rank, gradient in enumerate(self.given):
            given = gradient[t]
            if rank and given is self.given[0][t] and not extra.own and not self._by_rank(t):
                continue
            predicted = self.gradient(extra, rank, t)
            if (predicted is None) != (given is None):
                return False
            far = ratio(distance(given, predicted), self.replay.scale[t])
            if not far <= self._allowed(extra, t):
                return False
        return True

    @cached_property
    def _paths(self) -> dict[str, list[Held] | None]:
        return paths(self.seen, self.arms.names)

    def _path(self, t: int) -> list[Held] | None:
        return self._paths[self.arms.names[t]]

    def _by_rank(self, t: int) -> bool:
        held = self._path(t)
        return held is not None and any(one != held[0] for one in held[1:])

    @cached_property
    def _parts(self) -> list[tuple[Place, MaybeTensors, float]]:
        """Contributions by replica and microbatch, each with its root factor over the expected one.

        Of a loss of several terms the whole, as one backward has it, where all have one factor:
        below float32 the terms' own do not add up to it.
        """
        by_microbatch: dict[Place, list[tuple[Place, MaybeTensors, float]]] = {}
        for (r, k, term), part in self.replay.by_term.items():
            root = self.roots.found.get((r, k, term), 1.0)
            by_microbatch.setdefault((r, k), []).append(((r, k), part, root))
        found: list[tuple[Place, MaybeTensors, float]] = []
        for key, several in by_microbatch.items():
            factors = [root for *_, root in several]
            spread = 4 * self.replay.factor_u * max(map(abs, factors))
            together = max(factors) - min(factors) <= spread
            found += [(key, self.replay.parts[key], factors[0])] if together else several
        return found

    def _way(self, extra: Extra, rank: int, t: int, key: Place) -> float:
        """How much of a microbatch is left in tensor ``t`` on a rank, whatever its root factor."""
        r, k = key
        held = self._path(t)
        left = 1.0 if held is None or self.roots.read == "weights" else held[rank].get(key, 0.0)
        if extra.own:
            left = float(len(self.seen)) if r == rank else 0.0
        if k < extra.cleared:
            left = 0.0
        if extra.decay != 1.0:
            left *= extra.decay ** (len(self.seen[r].microbatches) - k)
        return left

    def _allowed(self, extra: Extra, t: int) -> float:
        """A's tolerance, for the largest weight; with what root factors are unsure of."""
        largest = max((abs(w) for w in self.roots.found.values()), default=1.0)
        held = self._path(t)
        if held is not None:
            largest *= max((abs(w) for one in held for w in one.values()), default=1.0)
        largest = max(1.0, largest * abs(extra.factor) * (len(self.seen) if extra.own else 1))
        sure = self.roots.read == "factors" and self.replay.shared
        tolerance = max(self.a[t].tolerance, 4 * self.replay.factor_u)
        tolerance += 0.0 if sure else self.roots.tolerance
        return tolerance * (largest + abs(extra.earlier))
