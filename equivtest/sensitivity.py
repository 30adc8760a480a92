"""Sensitivity: the planted faults, run against a user's own experiment, plan and precision.

Each runs once, in the experiment as it is. None of them can fail the case: what cannot run says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from equivtest.causes import Cause, Kind
from equivtest.compare.prose import reason
from equivtest.compare.sensitivity import Outcome, PlantedRun, Sensitivity
from equivtest.compare.verdict import Status, Verdict
from equivtest.experiment import Experiment
from equivtest.faults import FAULTS, Planted
from equivtest.faults.setting import Setting
from equivtest.faults.weights import WeightError
from equivtest.plan import Plan

Run = Callable[..., Verdict]
"""``check`` of this experiment under its plan and precision, given ``loop`` and ``wrap``."""

LEAST_ERROR, LARGEST_ERROR = 2.0**-50, 1.0
FIRST_GUESS = 1e-3
FIRST_STRIDE = 4.0
CLOSE = 1.5
MOST_RUNS = 12

_UNJUDGED = (Status.ERROR, Status.NOT_RUN, Status.INCONCLUSIVE)


def measure(run: Run, experiment: Experiment, plan: Plan, precision: str) -> Sensitivity:
    """Which planted faults would be caught here, and how small an error of a weight."""
    right = run(loop=None, wrap=None)
    if right.status in (*_UNJUDGED, Status.FAULT):
        return Sensitivity(reason=f"equivtest's own recipe is {right.status} here: {_short(right)}")
    bench = Bench(run, right, Setting(experiment, plan, precision))
    runs = tuple(bench.planted(one) for one in FAULTS)
    replica, k = lightest(bench.setting)
    smallest, unseen = bisected(
        lambda error: bench.sees(WeightError(0, replica, k, error)),
        right.card.smallest_weight_seen or FIRST_GUESS,
    )
    weighed = f"update 0, replica {replica}, microbatch {k}"
    return Sensitivity(runs, smallest, unseen, weighed)


@dataclass(frozen=True)
class Bench:
    """Where planted faults run.

    Attributes:
        right: the verdict on equivtest's own recipe, which is what nothing planted looks like.
    """

    run: Run
    right: Verdict
    setting: Setting

    def planted(self, one: Planted) -> PlantedRun:
        """What becomes of one planted fault."""
        try:
            why_not = one.why_not(self.setting)
        except Exception as error:  # the user's own code, asked out of its usual surroundings
            why_not = f"asking where it shows raised {type(error).__name__}: {error}"
        if why_not:
            return PlantedRun(one.name, one.cause, Outcome.CANNOT_SHOW, why_not)
        planting = one.into(self.setting.experiment)
        try:
            verdict = self.run(loop=planting.loop, wrap=planting.wrap)
        except (ValueError, TypeError) as error:
            return PlantedRun(one.name, one.cause, Outcome.NOT_JUDGED, str(error))
        return PlantedRun(one.name, one.cause, *self._outcome(one, verdict))

    def _outcome(self, one: Planted, verdict: Verdict) -> tuple[Outcome, str]:
        new = self._new(verdict)
        if one.cause in new:
            return Outcome.NAMED, ""
        if one.status == Status.ERROR and verdict.status is Status.ERROR:
            return Outcome.CAUGHT, _short(verdict)
        if verdict.status in _UNJUDGED:
            return Outcome.NOT_JUDGED, f"{verdict.status}: {_short(verdict)}"
        if one.cause.kind.quiet or not self._differs(verdict):
            return Outcome.NOT_SEEN, ""
        return Outcome.CAUGHT, ", ".join(new) or str(verdict.status)

    def sees(self, loop: WeightError) -> bool:
        """The harness says of this loop what it does not say of the right one."""
        return self._differs(self.run(loop=loop, wrap=None))

    def _differs(self, verdict: Verdict) -> bool:
        fault = verdict.status in (Status.FAULT, Status.UNEXPLAINED)
        beside = [c for c in self._new(verdict) if c in verdict.causes]
        return bool(beside) or (fault and verdict.status is not self.right.status)

    def _new(self, verdict: Verdict) -> list[str]:
        """Causes that the right loop does not have, sources left out."""
        known = {*self.right.causes, *self.right.noted}
        told = map(Cause.named, dict.fromkeys((*verdict.causes, *verdict.noted)))
        return [c for c in told if c and c not in known and c.kind is not Kind.SOURCE]


def lightest(setting: Setting) -> tuple[int, int]:
    """Replica and number of the microbatch that counts least in update 0, if at all."""
    terms = len(setting.counted) // len(setting.groups)
    first = setting.counted[:terms]
    counts = {
        (r, k): sum(term.supervised[r][k] for term in first)
        for r, replica in enumerate(first[0].supervised)
        for k, _ in enumerate(replica)
    }
    return min((n, at) for at, n in counts.items() if n > 0)[1]


def bisected(
    seen: Callable[[float], bool], guess: float, most_runs: int = MOST_RUNS
) -> tuple[float | None, float | None]:
    """The smallest error that is seen and the largest that is not, each None where there is none.

    The two are less than a factor of ``CLOSE`` apart unless the runs are used up.

    Args:
        seen: whether an error of this size is seen: if one is, larger ones are.
        guess: where to begin.
        most_runs: calls of ``seen``.
    """
    smallest: float | None = None
    largest: float | None = None
    error: float | None = min(max(guess, LEAST_ERROR), LARGEST_ERROR)
    stride = FIRST_STRIDE
    while error is not None and most_runs > 0:
        most_runs -= 1
        if seen(error):
            smallest = error
        else:
            largest = error
        error, stride = _next(error, stride, smallest, largest), stride * FIRST_STRIDE
    return smallest, largest


def _next(
    error: float, stride: float, smallest: float | None, largest: float | None
) -> float | None:
    """Away from the first guess in growing strides, then between what was seen and what was not."""
    if smallest is None:
        return min(error * stride, LARGEST_ERROR) if error < LARGEST_ERROR else None
    if largest is None:
        return max(error / stride, LEAST_ERROR) if error > LEAST_ERROR else None
    return math.sqrt(smallest * largest) if smallest / largest >= CLOSE else None


def _short(verdict: Verdict) -> str:
    return reason(verdict).partition("\n")[0].rstrip(": ")
