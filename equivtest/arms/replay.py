"""The replay arm: the plan's microbatches in the plan's order, one process, no wrapper.

It shares the bits of every microbatch's gradient with the candidate: the same dtype, the same
operations, the root factor that the loop used, the random numbers that its forward drew, the modes
(train or eval) that its modules were in. What the
factor should have been is put right afterwards, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from equivtest.arms.bench import Bench, Factor, Pass
from equivtest.arms.broadcasts import Broadcasts
from equivtest.arms.modes import switched
from equivtest.arms.summing import Apart, Sums, reductions_of
from equivtest.batches import Counts, denominator
from equivtest.distance import MaybeTensors, accumulate, norms
from equivtest.observe.trace import MicrobatchTrace, Tensors
from equivtest.plan import GroupLayout
from equivtest.precision import unit_roundoff

Around = Callable[[Sequence[int]], AbstractContextManager[Any]]
"""What to enter around the forward and backward of these examples."""


def nothing(_: Sequence[int]) -> AbstractContextManager[Any]:
    """Nothing around a forward and backward."""
    return nullcontext()


FACTOR_UNITS = 4.0
"""Roundoffs of the loss's dtype that a root factor may be off: a division by a count, a product
with D, one with a loss scale and one more."""


HALF = (torch.bfloat16, torch.float16)
"""Dtypes of a loss in which the nearest number to a right factor is a wrong weight to float32: 1/3
is 0.3340 in bfloat16. No loop can do better, so such a factor is not put right."""


HALF_UNITS = 2.0
"""Roundoffs of such a factor: a product and a division."""


@dataclass(frozen=True)
class Start:
    """Where a replay starts: rank 0's parameters, and each replica's buffers.

    ``buffers`` are those before the first broadcast of the group. ``between`` are the parameters at
    each microbatch, where a loop moves them during accumulation; ``own`` are each replica's, where
    they have drifted apart.
    """

    parameters: Tensors
    buffers: tuple[Tensors, ...]
    between: tuple[Tensors, ...] = ()
    own: tuple[Tensors, ...] = ()

    @property
    def shared(self) -> Start:
        """The same for all replicas and microbatches: what a loop moves is no matter of others."""
        return replace(self, between=(), own=())


@dataclass
class Replay:
    """What the replay found.

    Attributes:
        expected: the gradient that the plan asks for, in float64.
        reduced: the gradient as the loop's own arithmetic gives it, in the case's dtype: added up
            in order on each replica, averaged over them, unscaled.
        exact: ``reduced`` is what torch computes to the bit: how the loop reduced is known.
        weighed: the root factors were the expected ones, but for their rounding.
        scale: by tensor, the sum over microbatches of the norms of what was added; ``added`` are
            those norms by replica and microbatch.
        apart: the sum taken otherwise, where asked for.
        parts: each microbatch's contribution to ``expected`` by replica and microbatch, where kept;
            ``corrections``, by what its gradient was multiplied for it (that of a first term).
            ``by_term`` the same apart for each term of its loss.
        factor_u: unit roundoff of the losses that root factors were observed of, the largest.
        totals, counts, terms: of the losses made, by replica and microbatch.
        dtypes: floating dtypes that autograd saved in the forwards, where they were watched.
        shared: the forwards and root factors were the candidate's, bit for bit, and no loss went
            backward in parts; where a factor was 0, the plan's is in its place.
        parted: a loss went backward in parts, or by ``torch.autograd.grad``: no bits are shared,
            however near the two are.
        alike: the forwards were the candidate's but for their rounding, never bit for bit: those of
            all replicas in one (``synchronised``).
        overflowing: first replica whose own sum is not finite in the case's dtype, where the loss
            is scaled.
        buffers: predicted, by replica, after the last forward.
        loss, loss_sum: the normalised loss, and the sum of its microbatches' magnitudes.
    """

    expected: list[Tensor | None]
    reduced: list[Tensor | None]
    scale: list[float]
    exact: bool = False
    weighed: bool = True
    apart: Apart | None = None
    added: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    parts: dict[tuple[int, int], list[Tensor | None]] = field(default_factory=dict)
    corrections: dict[tuple[int, int], float] = field(default_factory=dict)
    by_term: dict[tuple[int, int, str], list[Tensor | None]] = field(default_factory=dict)
    factor_u: float = 2.0**-53
    totals: dict[tuple[int, int], tuple[float, ...]] = field(default_factory=dict)
    counts: dict[tuple[int, int], tuple[float, ...]] = field(default_factory=dict)
    terms: dict[tuple[int, int], tuple[str | None, ...]] = field(default_factory=dict)
    dtypes: frozenset[str] = frozenset()
    shared: bool = True
    parted: bool = False
    alike: bool = False
    overflowing: int | None = None
    buffers: tuple[Tensors, ...] = ()
    loss: float = 0.0
    loss_sum: float = 0.0


def replay(
    bench: Bench,
    batches: Callable[[Sequence[int]], Any],
    group: GroupLayout,
    counts: Counts,
    start: Start,
    seen: Sequence[Sequence[MicrobatchTrace]] | None = None,
    loss_scale: float = 1.0,
    keep: bool = False,
    around: Around = nothing,
    apart: bool = False,
) -> Replay:
    """Run the group's microbatches.

    Args:
        seen: the candidate's microbatches by replica, whose factors, random numbers, modes and
            broadcasts are taken; without them the factors are the expected ones.
        loss_scale: what a scaler multiplied the loss by.
        keep: keep each microbatch's contribution.
        around: entered around each microbatch.
        apart: take the sum in other ways as well.
    """
    return _Replaying(
        bench, batches, group, counts, start, seen, loss_scale, keep, around, apart
    ).run()


class _Replaying:
    def __init__(
        self,
        bench: Bench,
        batches: Callable[[Sequence[int]], Any],
        group: GroupLayout,
        counts: Counts,
        start: Start,
        seen: Sequence[Sequence[MicrobatchTrace]] | None,
        loss_scale: float,
        keep: bool,
        around: Around,
        apart: bool,
    ) -> None:
        self.bench, self.batches, self.group, self.around = bench, batches, group, around
        self.counts, self.loss_scale, self.keep, self.apart = counts, loss_scale, keep, apart
        self.D = len(group.ids)
        self.seen = seen if seen is not None and _matches(seen, group) else None
        self.buffers = [dict(b) for b in start.buffers]
        self.broadcasts = Broadcasts(bench)
        dtypes = (None, torch.float32, torch.float64) if apart else (None,)
        self.sums = [Sums(bench.module, bench.names, self.D, least) for least in dtypes]
        self.reductions = reductions_of(self.seen, bench.names)
        self.out = Replay(
            expected=[None] * len(bench.names),
            reduced=[],
            scale=[0.0] * len(bench.names),
            shared=self.seen is not None,
            exact=self.reductions is not None,
        )
        self.between, self.own = start.between, start.own
        bench.load(start.parameters)

    def run(self) -> Replay:
        for k in range(len(self.group.ids[0])):
            if self.between:
                self.bench.load(self.between[k])
            for r in range(self.D):
                self._microbatch(r, k)
            self._reduce(k)
        self.out.reduced = self._unscaled(self.sums[0].average())
        if self.apart:
            self.out.apart = self._apart()
        self.out.buffers = tuple(self.buffers)
        return self.out

    def _microbatch(self, r: int, k: int) -> None:
        if self.own:
            self.bench.load(self.own[r])
        seen = self.seen[r][k] if self.seen is not None else None
        buffers = self.buffers[r]
        factors = _Factors(seen, self.counts, self.D, self.loss_scale)
        run = self._run(r, k, factors, seen, buffers)
        share: list[Tensor | None] = [None] * len(self.out.expected)
        parts = self._backwards(r, k, run, factors, seen, buffers)
        if buffers:
            self.buffers[r] = self.bench.buffers()
        if len(parts) > 1:
            for index, part in parts:
                accumulate(share, part, factors.correction_of(index))
        else:
            accumulate(share, run.gradients, factors.correction)
            for term, correction in factors.uneven():
                alone = self._run(r, k, factors.only(term), seen, buffers)
                accumulate(share, alone.gradients, correction)
        self._add(r, k, run, share, [part for _, part in parts])
        self.out.corrections[r, k] = factors.correction
        if self.keep:
            self._keep_terms(r, k, run, share, factors, seen, buffers)
        self.out.factor_u = max(self.out.factor_u, factors.u)
        self.out.weighed &= factors.right
        # Of a loss in parts each rounds, and where they parted was not seen; nor are gradients that
        # torch.autograd.grad gave.
        self.out.parted |= seen is not None and not 0 < seen.backwards <= max(len(seen.totals), 1)
        self.out.shared &= seen is not None and factors.observed and run.totals == seen.totals
        self.out.shared &= not self.out.parted

    def _backwards(
        self,
        r: int,
        k: int,
        run: Pass,
        factors: _Factors,
        seen: MicrobatchTrace | None,
        buffers: Tensors,
    ) -> list[tuple[int, MaybeTensors]]:
        """Gradients by backward, with the loss that it was of: one for all, or one for each loss.

        Where every loss had a backward of its own what they share is gone through once for each,
        which rounds otherwise than once for their sum.
        """
        losses = factors.losses
        if seen is None or len(losses) < 2 or seen.backwards != len(losses):
            return [(0, run.gradients)]
        alone = [self._run(r, k, factors.only(loss), seen, buffers) for loss in losses]
        return [(loss, one.gradients) for loss, one in zip(losses, alone, strict=True)]

    def _keep_terms(
        self,
        r: int,
        k: int,
        run: Pass,
        share: list[Tensor | None],
        factors: _Factors,
        seen: MicrobatchTrace | None,
        buffers: Tensors,
    ) -> None:
        """Each term's own contribution; that of a single one is the microbatch's."""
        named = [(index, term) for index, term in enumerate(run.terms) if term is not None]
        for index, term in named:
            own = share
            if len(named) > 1:
                alone = self._run(r, k, factors.only(index), seen, buffers)
                own = [None] * len(share)
                accumulate(own, alone.gradients, factors.correction_of(index))
            self.out.by_term[r, k, term] = own

    def _run(
        self, r: int, k: int, factors: Factor, seen: MicrobatchTrace | None, buffers: Tensors
    ) -> Pass:
        if buffers:
            self.bench.load_buffers(buffers)
        if seen is not None and seen.rng is not None:
            seen.rng.restore()
        ids = self.group.ids[r][k]
        modes = switched(self.bench.module, () if seen is None else seen.switched)
        with self._reached_by(r, seen), self.around(ids), modes:
            return self.bench.run(self.batches(ids), factors)

    def _reached_by(self, r: int, seen: MicrobatchTrace | None) -> AbstractContextManager[None]:
        if self.D == 1 or not self.buffers[r]:
            return nullcontext()
        return self.broadcasts.reaching(r, () if seen is None else seen.broadcasts)

    def _add(
        self,
        r: int,
        k: int,
        run: Pass,
        share: list[Tensor | None],
        backwards: Sequence[MaybeTensors],
    ) -> None:
        out = self.out
        for sums in self.sums:
            for gradients in backwards:
                sums.add(r, gradients)
        accumulate(out.expected, share)
        added = norms(share)
        out.added[r, k] = added
        out.scale = [s + n for s, n in zip(out.scale, added, strict=True)]
        if self.keep:
            out.parts[r, k] = share
        out.totals[r, k], out.counts[r, k] = run.totals, run.counts
        out.terms[r, k] = run.terms
        out.dtypes |= run.dtypes
        loss = run.weighed(self.counts)
        out.loss += loss
        out.loss_sum += abs(loss)

    def _reduce(self, k: int) -> None:
        """What the loop's wrapper does after microbatch ``k``, where that is known."""
        last = k == len(self.group.ids[0]) - 1
        reductions = self.reductions[k] if self.reductions is not None else None
        # A sum that overflows is one replica's own until an average makes it everyone's.
        if self.loss_scale != 1.0 and self.out.overflowing is None and (last or reductions):
            self.out.overflowing = self.sums[0].overflowing()
        if reductions is not None:
            for sums in self.sums:
                sums.reduce(reductions)

    def _apart(self) -> Apart:
        own, single, double = self.sums
        return Apart(
            exact=self._unscaled(double.average()),
            float32=self._unscaled(single.average()),
            accumulated=self._unscaled(own.exact_average()),
        )

    def _unscaled(self, gradients: MaybeTensors) -> list[Tensor | None]:
        if self.loss_scale == 1.0:
            return list(gradients)
        return [None if g is None else g * (1.0 / self.loss_scale) for g in gradients]


class _Factors:
    """Root factors of one microbatch, and the number that makes its gradient the expected one.

    The wrapper averages over D replicas, so a total's expected factor is ``D / count``, times the
    loss scale; a microbatch's share of the reduced gradient is then ``gradient / D / scale``.
    """

    def __init__(
        self, seen: MicrobatchTrace | None, counts: Counts, D: int, loss_scale: float
    ) -> None:
        self._seen, self._counts, self._D, self._scale = seen, counts, D, loss_scale
        self.observed = seen is not None
        self.right = True
        self._made: list[tuple[int, float, torch.dtype]] = []

    def __call__(self, k: int, term: str | None, dtype: torch.dtype) -> float | None:
        if term is None:
            return None
        wanted = self._D / denominator(self._counts, term) * self._scale
        factor = meant = wanted
        if self._seen is not None:
            given = self._seen.factors[k] if k < len(self._seen.factors) else None
            if given is None:
                self.observed = False
            elif given == 0.0:  # left out: nothing to put right, and the plan has its gradient
                self.right = False
            else:
                factor = meant = given
                off = abs(min(factor, torch.finfo(dtype).max) - min(wanted, torch.finfo(dtype).max))
                units = off / (unit_roundoff(dtype) * abs(wanted))
                self.right &= units <= FACTOR_UNITS
                if dtype in HALF and units <= HALF_UNITS:
                    meant = wanted
        # A factor that overflowed is no weight to put right: the gradient overflows with it.
        if math.isfinite(factor):
            self._made.append((k, 1.0 / self._counts[term] / meant, dtype))
        return factor

    @property
    def correction(self) -> float:
        """Times the microbatch's gradient: its share of the gradient that the plan asks for."""
        return self._made[0][1] if self._made else 1.0

    @property
    def u(self) -> float:
        """Unit roundoff of the losses, the largest."""
        return max((unit_roundoff(dtype) for _, _, dtype in self._made), default=2.0**-53)

    @property
    def losses(self) -> list[int]:
        """Places of the losses that have a factor."""
        return [k for k, _, _ in self._made]

    def correction_of(self, loss: int) -> float:
        """``correction`` for one of the losses."""
        return next((correction for k, correction, _ in self._made if k == loss), 1.0)

    def uneven(self) -> list[tuple[int, float]]:
        """Losses whose term the loop weighed otherwise than the first, beyond a factor's rounding.

        Each with what its own gradient must be multiplied by and added for, to put it right.
        """
        first = self.correction
        return [
            (k, correction - first)
            for k, correction, dtype in self._made[1:]
            if abs(correction - first) > 2 * unit_roundoff(dtype) * abs(first)
        ]

    def only(self, loss: int) -> Factor:
        """The same factors for one loss, and none for the others."""
        alone = _Factors(self._seen, self._counts, self._D, self._scale)
        return lambda k, term, dtype: alone(k, term, dtype) if k == loss else None


def _matches(seen: Sequence[Sequence[MicrobatchTrace]], group: GroupLayout) -> bool:
    return [len(replica) for replica in seen] == [len(replica) for replica in group.ids]
