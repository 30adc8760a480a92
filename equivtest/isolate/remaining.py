"""What is left between split and large batch of an update, with any of its sources isolated."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from equivtest.arms.oracle import NULL
from equivtest.compare import noise
from equivtest.compare.tolerance import split_tolerance
from equivtest.distance import MaybeTensors, added, minus, norms, ratio
from equivtest.isolate.isolation import Isolation
from equivtest.isolate.scene import Scene
from equivtest.isolate.sums import LoopSums


@dataclass(frozen=True)
class _Pair:
    """Split and large batch with some sources of the forward isolated in them, by tensor.

    Attributes:
        left: their distance over its scale.
        allowed: for it.
        apart: split minus large batch, where the loop's sums add to it.
    """

    left: Sequence[float]
    allowed: Sequence[float]
    apart: MaybeTensors


class Remaining:
    """The distances by set of isolated sources, each pair of arms run once and when asked for.

    Args:
        null: by tensor, whether it is zero in exact arithmetic and so not judged.
        tolerances: comparison B's, by tensor.
        sums: sources behind the forward, where the loop's own sums are beyond comparison A.
    """

    def __init__(
        self,
        scene: Scene,
        null: Sequence[bool],
        tolerances: Sequence[float],
        sums: LoopSums | None,
    ) -> None:
        self.scene, self.sums, self.isolations = scene, sums, list[Isolation]()
        self.judged = [t for t, is_null in enumerate(null) if not is_null]
        self._tolerances = tolerances
        self._pairs: dict[frozenset[str], _Pair] = {}
        self._left: dict[frozenset[str], Sequence[float]] = {}

    def isolate(self, more: Iterable[Isolation]) -> None:
        """Know these as well; more of a source that was isolated without it changes distances."""
        before, more = self.found, list(more)
        self.isolations += more
        if any(isolation.cause in before for isolation in more):
            self._pairs.clear()
            self._left.clear()

    @property
    def found(self) -> frozenset[str]:
        """The sources of the forward."""
        return frozenset(str(isolation.cause) for isolation in self.isolations)

    def left(self, isolated: frozenset[str]) -> Sequence[float]:
        """Distance over scale by tensor, with what the sums that are not isolated add to it."""
        pair = self._pair(isolated)
        if self.sums is None or not self.sums.besides(isolated):
            return pair.left
        if isolated not in self._left:
            besides = [source.error for source in self.sums.besides(isolated)]
            apart = norms(added(pair.apart, *besides))
            self._left[isolated] = list(map(ratio, apart, self.scene.scale))
        return self._left[isolated]

    def allowed(self, isolated: frozenset[str]) -> Sequence[float]:
        """For ``left``, but for the sums: B's tolerance, or that of noise where it is larger."""
        return self._pair(isolated).allowed

    def squared(self, isolated: frozenset[str]) -> float:
        """Of the gradient as one vector, relative to the large batch's; null tensors left out.

        Not each tensor over its scale: that depends on which sources are there.
        """
        left, scale = self.left(isolated), self.scene.scale
        return ratio(sum((left[t] * scale[t]) ** 2 for t in self.judged if left[t]), self._whole)

    def within(self, isolated: frozenset[str]) -> bool:
        """Every tensor is within its tolerance, and what the sums add within comparison A's."""
        sums = self.sums is None or self.sums.within(isolated)
        return sums and self.split_within(isolated)

    def split_within(self, isolated: frozenset[str]) -> bool:
        """The same of the split alone."""
        return not self._beyond(self._pair(isolated))

    @cached_property
    def _whole(self) -> float:
        size, scale = norms(self.scene.oracle.gradients), self.scene.scale
        return sum(size[t] ** 2 for t in self.judged) or sum(scale[t] ** 2 for t in self.judged)

    def _pair(self, isolated: frozenset[str]) -> _Pair:
        forward = isolated & self.found
        if forward not in self._pairs:
            self._pairs[forward] = self._run(forward)
        return self._pairs[forward]

    def _run(self, forward: Collection[str]) -> _Pair:
        chosen = [isolation for isolation in self.isolations if isolation.cause in forward]
        split, whole = self.scene.pair(chosen)
        scale = self.scene.scale
        left = noise.relative(split.gradients, whole.gradients, scale)
        apart = () if self.sums is None else minus(split.gradients, whole.gradients)
        pair = _Pair(left, self._tolerances, apart)
        if not (chosen and self._may_be_noise(pair)):
            return pair
        # Statistics of a few examples magnify rounding as those of a whole group do not.
        floors = map(split_tolerance, noise.nudged(whole, scale))
        return _Pair(left, list(map(max, self._tolerances, floors)), apart)

    def _beyond(self, pair: _Pair) -> bool:
        return any(not pair.left[t] <= pair.allowed[t] for t in self.judged)

    def _may_be_noise(self, pair: _Pair) -> bool:
        """Beyond B's tolerance somewhere, and nowhere beyond the largest that noise may give it."""
        return self._beyond(pair) and all(
            pair.left[t] <= split_tolerance(NULL) for t in self.judged
        )
