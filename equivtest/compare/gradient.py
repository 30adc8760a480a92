"""One update's gradient under the three comparisons: tensor by tensor, and what they decide."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from equivtest.arms.oracle import PERMUTATIONS, Cut, Whole
from equivtest.arms.replay import Replay
from equivtest.compare import noise
from equivtest.compare.tables import TensorRow
from equivtest.compare.tolerance import (
    FORWARD_UNITS,
    floors,
    oracle_tolerance,
    replay_tolerance,
    split_tolerance,
)
from equivtest.compare.weights import Weights
from equivtest.distance import MaybeTensors, dense, distance, farthest, norm, norms, ratio
from equivtest.plan import Plan
from equivtest.precision import Precision


@dataclass(frozen=True)
class AgainstReplay:
    """Comparison A of one tensor: the worst rank's distance over the scale.

    ``missing``: there is a gradient on one side only; ``skipped``: it overflowed, as it had to.
    """

    distance: float
    tolerance: float
    rank: int
    missing: bool = False
    skipped: bool = False

    @property
    def within(self) -> bool:
        """Nothing to object: within tolerance, or skipped and so not judged."""
        return self.skipped or self.distance <= self.tolerance


def against_replay(
    gradients: Sequence[MaybeTensors], replay: Replay, plan: Plan
) -> list[AgainstReplay]:
    """Comparison A: each rank's gradient with the replay's expected one, by tensor.

    Args:
        gradients: by rank, in the order of the bench's names.
    """
    return [_one_against_replay(gradients, replay, plan, t) for t in range(len(replay.expected))]


def _one_against_replay(
    gradients: Sequence[MaybeTensors], replay: Replay, plan: Plan, t: int
) -> AgainstReplay:
    expected = replay.expected[t]
    worst, rank = -1.0, 0
    for r, gradient in enumerate(gradients):
        candidate = gradient[t]
        if r > 0 and candidate is not None and candidate is gradients[0][t]:
            continue
        if (candidate is None) != (expected is None):
            # None is not zero: it keeps weight decay and optimizer state from being applied.
            return AgainstReplay(math.inf, 0.0, r, missing=True)
        found = ratio(distance(candidate, expected), replay.scale[t])
        if not found <= worst:  # nor where the plan's own is not finite, and the ratio no number
            worst, rank = (found, r) if found < math.inf else (math.inf, r)
    held = gradients[rank][t]
    dtype, elements = (torch.float64, 0) if held is None else (held.dtype, held.numel())
    return AgainstReplay(worst, replay_tolerance(plan, dtype, elements, replay.scale[t]), rank)


@dataclass(frozen=True)
class AgainstOracle:
    """Comparisons B and C of one group, by tensor.

    Attributes:
        split: B, the float64 replay's distance from the oracle; ``split_tolerances`` beside it.
        floor: noise floor in the case's precision; ``oracle_tolerances`` from it.
        oracle: C, the worst rank's distance from the oracle.
        null: gradients that are zero in exact arithmetic: C judges their size, B does not judge.
        blind: even a zeroed gradient would pass C; ``capped``: the floor is above the precision's
            cap. C does not judge either.
        scale: ``S_t``.
        drew: the forward draws random numbers, which no split can share.
        coupled: examples see each other.
        repeatable: the oracle run twice gives the same bits.
        loss_ratio: the float64 replay's loss over the oracle's.
    """

    split: list[float]
    split_tolerances: list[float]
    floor: list[float]
    oracle: list[float]
    oracle_tolerances: list[float]
    null: list[bool]
    blind: list[bool]
    scale: list[float]
    capped: list[bool]
    drew: bool
    coupled: bool
    repeatable: bool
    loss_ratio: float

    @property
    def split_failures(self) -> list[int]:
        """Tensors on which the split is not right; null ones are not judged."""
        if not self.repeatable:
            return list(range(len(self.split)))
        return [
            t
            for t, (d, tolerance) in enumerate(zip(self.split, self.split_tolerances, strict=True))
            if d > tolerance and not self.null[t]
        ]

    def judged(self, t: int) -> bool:
        """C has something to say about tensor ``t``."""
        return not (self.capped[t] or (self.blind[t] and not self.null[t]))

    def written_into(self, row: TensorRow, t: int) -> TensorRow:
        """``row`` with what B and C say of tensor ``t``."""
        return replace(
            row,
            split_distance=self.split[t],
            split_tolerance=self.split_tolerances[t],
            oracle_distance=self.oracle[t],
            oracle_tolerance=self.oracle_tolerances[t],
            noise_floor=self.floor[t],
            scale=self.scale[t],
            null=self.null[t],
            blind=self.blind[t] or self.capped[t],
        )

    def fails(self, t: int) -> bool:
        """C rejects tensor ``t``."""
        return self.oracle[t] > self.oracle_tolerances[t]


def against_oracle(
    gradients: Sequence[MaybeTensors],
    replay: Replay,
    cut: Cut,
    oracle: Whole,
    large: Whole,
    precision: Precision,
    full_floor: bool,
) -> AgainstOracle:
    """Comparisons B and C.

    Args:
        cut: the plan's microbatches in float64.
        full_floor: run the permutations and splits that the noise floor is made of; needed only
            where A does not acquit. Without them the floor is that of the large batch and replay.
    """
    # Where every part's gradient is exactly 0 the whole's may be rounding, of the others' size.
    largest = max(oracle.scale, default=0.0)
    truth, scale = oracle.gradients, [s or largest for s in oracle.scale]
    split = noise.relative(cut.gradients, truth, scale)
    suspects = [t for t, d in enumerate(split) if d > split_tolerance(0.0)]
    away, moved = farthest(gradients, truth), noise.relative(large.gradients, truth, scale)
    far = [t for t, s in enumerate(scale) if max(ratio(away[t], s), moved[t]) > precision.cap]
    repeatable = oracle.repeatable
    null = noise.null(oracle, sorted({*suspects, *far}) if repeatable else ())
    split_floor = (
        noise.split_floor(oracle) if any(not null[t] for t in suspects) else [0.0] * len(split)
    )
    tolerances = [split_tolerance(f) for f in split_floor]
    right = repeatable and all(null[t] or split[t] <= tolerances[t] for t in suspects)

    runs: list[MaybeTensors] = []
    if full_floor:
        runs += [large.permuted(k) for k in range(PERMUTATIONS)]
        runs += [] if oracle.coupled else [large.split(1), large.split(4)]
    if right:
        runs.append(replay.expected)
    sizes = [0 if g is None else g.numel() for g in truth]
    floor = floors([moved, *(noise.relative(run, truth, scale) for run in runs)], sizes)
    oracle_distance, oracle_tolerances = [], []
    for t in range(len(truth)):
        if null[t]:
            oracle_distance.append(max(norm(gradient[t]) for gradient in gradients))
            size_of_noise = max(norm(run[t]) for run in (large.gradients, *runs))
            oracle_tolerances.append(precision.kappa * size_of_noise)
        else:
            oracle_distance.append(ratio(away[t], scale[t]))
            oracle_tolerances.append(oracle_tolerance(precision, floor[t]))
    return AgainstOracle(
        split=split,
        split_tolerances=tolerances,
        floor=floor,
        oracle=oracle_distance,
        oracle_tolerances=oracle_tolerances,
        null=null,
        blind=[
            not null[t] and ratio(size, scale[t]) <= 2 * oracle_tolerances[t]
            for t, size in enumerate(norms(truth))
        ],
        scale=scale,
        capped=[f > precision.cap for f in floor],
        drew=oracle.drew,
        coupled=oracle.coupled,
        repeatable=repeatable,
        loss_ratio=ratio(cut.loss, oracle.loss) if oracle.loss > 0 else 1.0,
    )


def decides(
    a: Sequence[AgainstReplay],
    replay: Replay,
    c: AgainstOracle | None,
    weights: Weights | None,
    precision: Precision,
) -> list[str]:
    """What becomes of each tensor: ``equal``, ``differs``, ``rounding`` or ``not judged``.

    Within A a tensor is equal. Beyond it, where candidate and replay share the forward's bits, only
    the order of a sum may separate them and A has spoken; that most tensors are within A shows as
    well that they do. Where they do not share them, it is a fault if weights by microbatch explain
    the gradient and differ from the plan's, or if C fails (which says nothing where the split
    itself is not right: B), or A by what C allows where the forwards are alike but for rounding.
    Where the oracle does not repeat, nothing is judged but what is missing.
    """
    beyond = [t for t, one in enumerate(a) if not one.within]
    compared = [one for one in a if not one.skipped]
    # A gradient that is nothing but rounding moves with any bit that the forwards do not share.
    unsure = [t for t in beyond if c is not None and c.null[t] and not replay.shared]
    real = [t for t in beyond if t not in unsure]
    shared = replay.shared or (
        bool(compared)
        and not (replay.alike or replay.parted)
        and median(one.distance / (one.tolerance or 1.0) for one in compared) <= 1.0
    )
    weighed = weights is not None and (
        (bool(weights.differ()) and all(weights.residual[t] <= a[t].tolerance for t in real))
        or (not shared and weights.explain(FORWARD_UNITS * precision.u))
    )
    states = ["not judged" if one.skipped else "equal" for one in a]
    for t in beyond:
        if c is not None and not c.repeatable and not a[t].missing:
            states[t] = "not judged"
        elif a[t].missing or (t in real and (shared or weighed)):
            states[t] = "differs"
        elif replay.alike and c is not None and c.judged(t):
            states[t] = "differs" if a[t].distance > c.oracle_tolerances[t] else "rounding"
        elif c is None or not c.judged(t) or c.split_failures:
            states[t] = "not judged"
        else:
            states[t] = "differs" if c.fails(t) else "rounding"
    return states


def smallest_weight_seen(
    a: Sequence[AgainstReplay], replay: Replay, acquitted_by: AgainstOracle | None = None
) -> float | None:
    """The smallest error of one microbatch's weight that is seen, whichever microbatch has it.

    An error ``e`` on microbatch k moves tensor t by ``e |g_k,t|``, seen beyond ``tolerance_t``
    times the scale; the microbatch that shows least decides. None if no microbatch has a gradient.

    Args:
        acquitted_by: C, where A is beyond and C says that it is rounding: the loop then shares no
            bits with the replay, and only what C allows tells.
    """
    if acquitted_by is None:
        allowed = [one.tolerance * scale for one, scale in zip(a, replay.scale, strict=True)]
    else:
        c = acquitted_by
        allowed = [
            tolerance * scale if c.judged(t) else math.inf
            for t, (tolerance, scale) in enumerate(zip(c.oracle_tolerances, c.scale, strict=True))
        ]
    errors = [
        min(
            (most / norm for most, norm in zip(allowed, added, strict=True) if norm > 0),
            default=None,
        )
        for added in replay.added.values()
    ]
    return max((e for e in errors if e is not None and math.isfinite(e)), default=None)


def vanished(gradients: Sequence[MaybeTensors], truth: MaybeTensors, t: int) -> bool:
    """The gradient is all zeros where the oracle's is not: nothing was compared."""
    wanted = truth[t]
    if wanted is None or not bool(torch.count_nonzero(wanted)):
        return False
    held = [gradient[t] for gradient in gradients]
    return all(g is not None and not bool(torch.count_nonzero(dense(g))) for g in held)
