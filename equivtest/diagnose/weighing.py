"""What an update's gradient is made of: microbatches by weight, an earlier group, a scalar.

The weights that a loop's own operations and root factors predict are tried first, then what they
would be with one thing more that nothing observed says (a scalar, gradients cleared, an earlier
group's left in). Free weights are fitted where neither holds (``compare.weights``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from equivtest.arms.replay import Replay
from equivtest.compare.arms import UpdateArms
from equivtest.compare.gradient import AgainstReplay
from equivtest.compare.weights import Weights
from equivtest.diagnose.path import Held, paths
from equivtest.diagnose.roots import Roots, Term, common_values, roots
from equivtest.distance import MaybeTensors, accumulate, dense, distance, finite, norm, ratio
from equivtest.observe.trace import UpdateTrace

UNLIKE = 1e-9
"""Least squared sine of the angle between two gradients of which multiples are told apart."""


MANY = 8
"""Elements of tensors that one number fits by no accident."""


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

    @property
    def nothing(self) -> bool:
        return self == Extra()


@dataclass(frozen=True)
class Weighed:
    """One update whose gradient is not the plan's.

    Attributes:
        u: the update.
        roots: root factors over the expected ones; None where they could not be read.
        extra: what is in the gradient beside what was observed.
        partly: what is beside it in some parameters only, by their names.
        explained: parameters whose gradient these give within tolerance.
        left: those beyond tolerance that they do not give.
        overflowed: the gradient is not finite, and only its root factors could be read.
        common_values: each backward started from the loss of all replicas' microbatches.
    """

    u: int
    roots: Roots | None = None
    extra: Extra = field(default_factory=Extra)
    partly: Mapping[str, Extra] = field(default_factory=dict)
    explained: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()
    overflowed: bool = False
    common_values: bool = False


def overflowed(arms: UpdateArms, seen: Sequence[UpdateTrace]) -> Weighed | None:
    """An update whose gradient is not finite: a factor on the loss may be why. None if none is."""
    read = roots(seen, arms.replay, arms.counts, arms.case.precision)
    if read is None or read.read != "factors" or read.right:
        return None
    return Weighed(arms.u, read, overflowed=True)


def weighed(
    arms: UpdateArms,
    seen: Sequence[UpdateTrace],
    gradients: Sequence[MaybeTensors],
    a: Sequence[AgainstReplay],
    weights: Weights | None,
) -> Weighed:
    """Weigh an update that comparison A does not acquit.

    Args:
        seen: by rank, with the gradient that is judged.
        gradients: by rank, in the order of ``arms.names``.
    """
    beyond = frozenset(n for n, one in zip(arms.names, a, strict=True) if not one.within)
    kept = arms.replayed(keep=True)
    if not kept.by_term or not all(all(finite(part)) for part in kept.by_term.values()):
        return Weighed(arms.u, left=beyond)
    return _Weighing(arms, seen, gradients, a, kept, weights).weigh()


def _dot(a: Tensor, b: Tensor) -> float:
    return float((a.conj() * b).sum().real)


@dataclass
class _Weighing:
    arms: UpdateArms
    seen: Sequence[UpdateTrace]
    gradients: Sequence[MaybeTensors]
    a: Sequence[AgainstReplay]
    replay: Replay
    weights: Weights | None

    def weigh(self) -> Weighed:
        precision = self.arms.case.precision
        read = roots(self.seen, self.replay, self.arms.counts, precision)
        read = read or self._from_weights()
        if read is None:
            return Weighed(self.arms.u, left=frozenset(self._names(self.beyond)))
        every = [t for t, scale in enumerate(self.replay.scale) if 0 < scale < math.inf]
        extra, fine = self._best(read, self._extras(read, every), every)
        rest = [t for t in every if t not in fine]
        partly: dict[str, Extra] = {}
        if fine and rest:
            # What one extra gives of some tensors may be nothing of the loop's as a whole.
            plain = [t for t in every if self._holds(read, Extra(), t)]
            if plain:
                extra, fine, rest = Extra(), plain, [t for t in every if t not in plain]
            other, more = self._best(read, self._extras(read, rest), rest)
            # Another number on some tensors only tells nothing.
            if other.own or (other.earlier and self._sure(other.earlier, more)):
                partly = dict.fromkeys(self._names(more), other)
                fine = [*fine, *more]
        return Weighed(
            self.arms.u,
            read,
            extra,
            partly,
            explained=frozenset(self._names(fine)),
            left=frozenset(self._names(t for t in self.beyond if t not in fine)),
            common_values=common_values(self.seen, self.replay, self.arms.counts, precision),
        )

    def _sure(self, earlier: float, tensors: Sequence[int]) -> bool:
        """It is no accident that what was left over gives these tensors, of few elements perhaps.

        Once, or D times where replicas' sums are added; the loss scale is out of it already.
        """
        elements = sum(
            g.numel() for g in (self.replay.expected[t] for t in tensors) if g is not None
        )
        scale = self.seen[0].scale or 1.0
        plain = [float(n) / s for n in (1, len(self.seen)) for s in (1.0, scale)]
        return elements >= MANY or any(math.isclose(earlier, p, rel_tol=1e-3) for p in plain)

    def _best(
        self, read: Roots, extras: Sequence[Extra], tensors: Sequence[int]
    ) -> tuple[Extra, list[int]]:
        """The extra that gives most of these tensors, the first of equals; and which it gives."""
        best: tuple[Extra, list[int]] = Extra(), []
        for extra in extras:
            fine = [t for t in tensors if self._holds(read, extra, t)]
            if len(fine) > len(best[1]):
                best = (extra, fine)
            if len(fine) == len(tensors):
                break
        return best

    @cached_property
    def beyond(self) -> list[int]:
        return [t for t, one in enumerate(self.a) if not one.within]

    def _names(self, tensors: object) -> list[str]:
        return [self.arms.names[t] for t in tensors]  # type: ignore[attr-defined]

    @cached_property
    def _paths(self) -> dict[str, list[Held] | None]:
        return paths(self.seen, self.arms.names)

    def _from_weights(self) -> Roots | None:
        """Root factors as the fitted weights tell them, where they tell and all ranks agree."""
        weights = self.weights
        if weights is None or not weights.determined:
            return None
        found: dict[Term, float] = {}
        for r, k, term in self.replay.by_term:
            if (r, k) in weights.found:
                found[r, k, term] = weights.found[r, k]
        spread = max(4 * sigma for sigma in weights.sigma.values())
        return Roots(found, spread, "weights") if found and spread < 0.25 else None

    # -- hypotheses

    def _extras(self, read: Roots, every: Sequence[int]) -> list[Extra]:
        """From nothing to what is rarer; each a single thing, then with an earlier group's."""
        D, A = len(self.seen), max(len(u.microbatches) for u in self.seen)
        factors = [float(D), 1.0 / D, 1.0 / D**2, float(A), 1.0 / A]
        scale = self.seen[0].scale
        if scale is not None and scale != 1.0:
            factors += [1.0 / scale, scale]
        plain = [Extra(), *(Extra(factor=f) for f in dict.fromkeys(factors) if f != 1.0)]
        measured = self._measured(read, every)
        if measured is not None and all(not math.isclose(measured, e.factor) for e in plain):
            plain.append(Extra(factor=measured))
        plain += [Extra(cleared=k) for k in range(A - 1, 0, -1)]
        if D > 1:
            plain += [Extra(own=True)]
            plain += [Extra(cleared=k, own=True) for k in range(A - 1, 0, -1)]
        plain += self._decaying(read)
        return plain + self._with_earlier(read, every)

    def _decaying(self, read: Roots) -> list[Extra]:
        """One factor on every loss that is taken out after each backward, of all there is."""
        factors = list(read.found.values())
        first = factors[0] if factors else 1.0
        alike = all(math.isclose(f, first, rel_tol=read.tolerance) for f in factors)
        return [Extra(decay=1.0 / first)] if alike and first > 1.0 + read.tolerance else []

    def _measured(self, read: Roots, every: Sequence[int]) -> float | None:
        """The factor that is nearest on the largest tensor."""
        t = max(every, key=lambda t: self.replay.scale[t], default=None)
        if t is None:
            return None
        predicted = self._predicted(read, Extra(), 0, t)
        given = self.gradients[0][t]
        if predicted is None or given is None or predicted.shape != given.shape:
            return None
        size = float((predicted.abs() ** 2).sum())
        along = float((predicted.conj() * dense(given).to(predicted.dtype)).sum().real)
        return along / size if size > 0 and along else None

    def _with_earlier(self, read: Roots, every: Sequence[int]) -> list[Extra]:
        """An earlier group's gradient times what fits it best on the tensor that holds most of it.

        Beside the plan's as it is, and beside the plan's times what fits that best.
        """
        if self.arms.u == 0 or not every:
            return []
        t = max(every, key=lambda t: norm(self._earlier(0, t)))
        earlier, given = self._earlier(0, t), self.gradients[0][t]
        predicted = self._predicted(read, Extra(), 0, t)
        if earlier is None or predicted is None or given is None or not norm(earlier):
            return []
        target = dense(given).to(predicted.dtype)
        alone = _dot(earlier, target - predicted) / _dot(earlier, earlier)
        gram = [[_dot(a, b) for b in (predicted, earlier)] for a in (predicted, earlier)]
        moment = [_dot(predicted, target), _dot(earlier, target)]
        determinant = gram[0][0] * gram[1][1] - gram[0][1] * gram[1][0]
        found = [Extra(earlier=alone)]
        if determinant > UNLIKE * gram[0][0] * gram[1][1]:
            factor = (moment[0] * gram[1][1] - moment[1] * gram[0][1]) / determinant
            times = (moment[1] * gram[0][0] - moment[0] * gram[1][0]) / determinant
            found.append(Extra(factor=factor, earlier=times))
        return found

    def _earlier(self, rank: int, t: int):  # type: ignore[no-untyped-def]
        previous = self.arms.traces[rank].updates[self.arms.u - 1]
        held = previous.clipped.get(self.arms.names[t])
        total = [None]
        accumulate(total, [held])  # type: ignore[arg-type]
        return total[0]

    # -- prediction

    def _holds(self, read: Roots, extra: Extra, t: int) -> bool:
        """The gradient of tensor ``t`` is what is predicted, on every rank."""
        for rank, gradient in enumerate(self.gradients):
            given = gradient[t]
            if rank and given is self.gradients[0][t] and not extra.own and not self._by_rank(t):
                continue
            predicted = self._predicted(read, extra, rank, t)
            if (predicted is None) != (given is None):
                return False
            far = ratio(distance(given, predicted), self.replay.scale[t])
            if not far <= self._allowed(read, extra, t):
                return False
        return True

    def _by_rank(self, t: int) -> bool:
        held = self._paths[self.arms.names[t]]
        return held is not None and any(one != held[0] for one in held[1:])

    def _allowed(self, read: Roots, extra: Extra, t: int) -> float:
        """A's tolerance, for the largest weight; with what root factors are unsure of."""
        largest = max((abs(w) for w in read.found.values()), default=1.0)
        held = self._paths[self.arms.names[t]]
        if held is not None:
            largest *= max((abs(w) for one in held for w in one.values()), default=1.0)
        largest = max(1.0, largest * abs(extra.factor) * (len(self.seen) if extra.own else 1))
        unsure = read.tolerance if read.read != "factors" or not self.replay.shared else 0.0
        tolerance = max(self.a[t].tolerance, 4 * self.replay.factor_u)
        return (tolerance + unsure) * (largest + abs(extra.earlier))

    def _parts(self, read: Roots) -> Iterator[tuple[tuple[int, int], MaybeTensors, float]]:
        """Contributions by replica and microbatch, each with its root factor over the expected one.

        Of a loss of several terms the whole, as one backward has it, where all have one factor:
        below float32 the terms' own do not add up to it.
        """
        by_microbatch: dict[tuple[int, int], list[tuple[float, MaybeTensors]]] = {}
        for (r, k, term), part in self.replay.by_term.items():
            root = read.found.get((r, k, term), 1.0)
            by_microbatch.setdefault((r, k), []).append((root, part))
        for at, several in by_microbatch.items():
            factors = [root for root, _ in several]
            spread = 4 * self.replay.factor_u * max(map(abs, factors))
            if max(factors) - min(factors) <= spread:
                yield at, self.replay.parts[at], factors[0]
            else:
                yield from ((at, part, root) for root, part in several)

    def _predicted(self, read: Roots, extra: Extra, rank: int, t: int):  # type: ignore[no-untyped-def]
        held = self._paths[self.arms.names[t]]
        total = [None]
        D = len(self.seen)
        for (r, k), part, root in self._parts(read):
            path = 1.0 if held is None or read.read == "weights" else held[rank].get((r, k), 0.0)
            if extra.own:
                path = float(D) if r == rank else 0.0
            if k < extra.cleared:
                path = 0.0
            if extra.decay != 1.0:
                path *= extra.decay ** (len(self.seen[r].microbatches) - k)
            accumulate(total, [part[t]], root * path * extra.factor)  # type: ignore[arg-type]
        if extra.earlier:
            accumulate(total, [self._earlier(rank, t)], extra.earlier)  # type: ignore[arg-type]
        return total[0]
