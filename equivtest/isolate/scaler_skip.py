"""``source.scaler_skip``: an overflow in one arm, where the scaler skips the update. Pure.

An arm skips an update where its scaled gradient is not finite. Two arms of which one skips are
apart by the whole update, a relative squared distance of 1 for each tensor of the optimizer. Impose
the decision of one on the other and nothing is left: both stay where they were, or both move.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from equivtest.arms.extremes import Extremes
from equivtest.arms.replay import Replay
from equivtest.compare.cause import Cause
from equivtest.compare.continuity import all_same
from equivtest.compare.skips import moved
from equivtest.compare.verdict import Finding, SourceRow
from equivtest.isolate.isolating import Explained
from equivtest.isolate.overflow import (
    Overflow,
    entered,
    first_microbatch,
    in_a_sum,
    in_microbatch,
    largest_of,
)
from equivtest.observe.trace import OptimizerTrace, ParamGroups, Trace, UpdateTrace
from equivtest.precision import Precision

NEAR = 16.0
"""How far below the largest number the large batch's gradient may be and still be run to see
whether it overflows. Only sums over examples are larger in it than in a microbatch, and they are
its gradient, but for a parameter that is used several times and whose parts cancel."""


class Attempt(StrEnum):
    """When an update overflows, in the life of the loss scale."""

    FIRST = "first attempt"
    GROWTH = "later growth"
    HELD = "a scale that held before"


@dataclass(frozen=True)
class Skip:
    """An update that overflows in an arm, for one optimizer.

    Attributes:
        update: its number.
        optimizer: as the candidate's first rank saw it.
        overflow: of the split, or of the large batch where that alone overflows.
        split, large: the arm skips.
        D: replicas, where the large batch would skip too if its loss had the factor ``D`` that the
            loop's has; 1 elsewhere.
        attempt: when it came.
    """

    update: int
    optimizer: OptimizerTrace
    overflow: Overflow
    split: bool
    large: bool
    D: int
    attempt: Attempt

    def squared_distance(self, *, imposed: bool) -> float:
        """Between the arms' updates, relative to their size, added over tensors.

        Args:
            imposed: the decision of one arm is imposed on the other.
        """
        return 0.0 if imposed or self.split == self.large else float(len(self.optimizer.names))


@dataclass(frozen=True)
class Arms:
    """The arms of one update, run as far as is asked for.

    Attributes:
        names: of the gradients, by position.
        large: by position, whether the large batch's gradient is finite with this factor on its
            loss.
        microbatch: what a replica's microbatch reaches; ``whole``, what the large batch does.
    """

    names: Sequence[str]
    precision: Precision
    D: int
    replay: Replay
    large: Callable[[float], Sequence[bool]]
    microbatch: Callable[[int, int], Extremes]
    whole: Callable[[], Extremes]

    def large_overflows(self, own: Collection[str], factor: float = 1.0) -> bool:
        """The large batch's gradient of a parameter of ``own`` is not finite."""
        return any(
            name in own and not right
            for name, right in zip(self.names, self.large(factor), strict=True)
        )

    def overflow(self, own: Collection[str]) -> Overflow:
        """Where the split overflows."""
        place = first_microbatch(self.replay, self.names, own)
        if place is None:
            return in_a_sum(self.replay, self.names, own)
        return in_microbatch(place, self.microbatch(*place[:2]), own, self.precision)

    def near(self, own: Collection[str], scale: float) -> bool:
        """The large batch may overflow: the gradient that it adds up is near the largest number."""
        limit = largest_of(self.precision.autocast or self.precision.parameters)
        return any(
            name in own
            and g is not None
            and g.numel() > 0
            and float(g.abs().max()) * scale * NEAR > limit
            for name, g in zip(self.names, self.replay.expected, strict=True)
        )


def skipped(arms: Arms, history: Sequence[UpdateTrace], optimizer: OptimizerTrace) -> Skip:
    """The last update of ``history``, which overflows in the split, beside the large batch."""
    own = optimizer.names
    large = arms.large_overflows(own)
    decides = not large and arms.D > 1 and arms.large_overflows(own, arms.D)
    return Skip(
        update=len(history) - 1,
        optimizer=optimizer,
        overflow=arms.overflow(own),
        split=True,
        large=large,
        D=arms.D if decides else 1,
        attempt=attempt(history, own),
    )


def applied(arms: Arms, history: Sequence[UpdateTrace], optimizer: OptimizerTrace) -> Skip | None:
    """The last update of ``history``, which the split applies, where the large batch overflows."""
    own = optimizer.names
    scale = history[-1].scale
    if scale is None or not arms.near(own, scale) or not arms.large_overflows(own):
        return None
    return Skip(
        update=len(history) - 1,
        optimizer=optimizer,
        overflow=entered(arms.whole(), own, arms.precision),
        split=False,
        large=True,
        D=1,
        attempt=attempt(history, own),
    )


def explained(skips: Sequence[Skip], isolate: str) -> Explained | None:
    """What tells the arms of an update apart, where a skip does.

    Args:
        isolate: what the case isolates; nothing is with ``never``.
    """
    apart = [skip for skip in skips if skip.squared_distance(imposed=False) > 0]
    if not apart or isolate == "never":
        return None
    where = "; ".join(str(skip.overflow) for skip in apart)
    return Explained(
        update=apart[0].update,
        squared=sum(skip.squared_distance(imposed=False) for skip in apart),
        rows=(SourceRow(str(Cause.SCALER_SKIP), 1.0, where, claimed=True),),
        remainder=0.0,
        within=True,
        left=(),
        tolerances=(),
        findings=(),
        notes=(),
        reruns=len(apart),
    )


def told(
    skips: Sequence[Skip], trace: Trace, unit: str | None, isolate: str
) -> tuple[list[Finding], list[str]]:
    """Findings on the skips of one arm alone, and notes on those of both."""
    findings, notes = [], []
    for skip in skips:
        text = explain(skip, trace, unit)
        if skip.split == skip.large:
            notes.append(text)
            continue
        findings.append(
            Finding(
                "" if isolate == "never" else str(Cause.SCALER_SKIP),
                text,
                update=skip.update,
                rank=skip.overflow.rank,
                tensor=skip.overflow.tensor,
                distance=1.0,
                tolerance=0.0,
            )
        )
    return findings, notes


def attempt(history: Sequence[UpdateTrace], own: Collection[str]) -> Attempt:
    """When the last update of ``history`` overflows, from the scales of those applied before."""
    held = [
        update.scale or 1.0
        for update in history[:-1]
        if any(o.applied and o.names == own for o in update.optimizers)
    ]
    if not held:
        return Attempt.FIRST
    return Attempt.GROWTH if max(held) < (history[-1].scale or 1.0) else Attempt.HELD


# -- in words


def explain(skip: Skip, trace: Trace, unit: str | None) -> str:
    """The skip in words: which arm, what overflowed where and when, and what it did.

    Args:
        trace: of the rank that saw ``skip.optimizer``.
        unit: in which the experiment's schedule counts; None where it has none.
    """
    arms = {
        (True, True): "was skipped, and the large batch skips it as well",
        (True, False): "was skipped, and the large batch applies it",
        (False, True): "was applied, and the large batch skips it",
    }[skip.split, skip.large]
    parts = [str(skip.overflow), _when(skip, trace)]
    if skip.D > 1:
        parts.append(
            f"what decides is the factor D={skip.D} on the loop's loss, which the wrapper's "
            "average takes out again: with it the large batch overflows as well"
        )
    if skip.split:
        parts.append(_consequences(skip, trace, unit))
    kind = skip.optimizer.kind.__name__
    return f"update {skip.update} of {kind} {arms}: {'; '.join(parts)}"


def _when(skip: Skip, trace: Trace) -> str:
    update = trace.updates[skip.update]
    scale = f"loss scale {update.scale or 1:g}"
    if update.scale_after is not None:
        scale += f", then {update.scale_after:g}"
    grown = [v for v, one in enumerate(trace.updates[: skip.update]) if _grew(one)]
    why = {
        Attempt.FIRST: "no update was applied before, the scale starts too high",
        Attempt.GROWTH: f"it had grown after update {grown[-1]}" if grown else "it was raised",
        Attempt.HELD: "these examples, or the parameters by now, give larger numbers",
    }[skip.attempt]
    return f"{scale} ({skip.attempt}: {why})"


def _grew(update: UpdateTrace) -> bool:
    return None not in (update.scale, update.scale_after) and update.scale_after > update.scale  # type: ignore[operator]


def _consequences(skip: Skip, trace: Trace, unit: str | None) -> str:
    """What a skipped update left, and what it moved all the same."""
    update, own = trace.updates[skip.update], skip.optimizer.names
    parameters, state = moved(update, skip.optimizer)
    touched = {"parameters": bool(parameters), "optimizer state and its counters": bool(state)}
    if skip.update and update.averages:
        before = trace.updates[skip.update - 1].averages
        touched["averages"] = not all_same(dict(before), dict(update.averages))
    parts = [
        f"{', '.join(what for what, did in touched.items() if did is which)} {verb}"
        for which, verb in ((False, "stayed"), (True, "moved"))
        if which in touched.values()
    ]
    first, then = _rate(skip.optimizer.groups), _rate(_groups_after(skip.update, own, trace))
    if unit is not None and None not in (first, then):
        counts = "microbatches" if unit == "microbatch" else f"updates {unit}"
        went = f"stayed at {first:g}" if first == then else f"went from {first:g} to {then:g}"
        parts.append(f"the learning rate, by {counts}, {went}")
    return ", ".join(parts) + ", and its gradient is not judged"


def _groups_after(u: int, own: Collection[str], trace: Trace) -> ParamGroups:
    """Of the optimizer that holds ``own``, at the next update or when the loop has ended."""
    for update in trace.updates[u + 1 :]:
        for optimizer in update.optimizers:
            if optimizer.names == own:
                return optimizer.groups
    for groups in trace.groups_after:
        if {name for names, _ in groups for name in names} == own:
            return groups
    return ()


def _rate(groups: ParamGroups) -> float | None:
    rate = groups[0][1].get("lr") if groups else None
    return None if rate is None else float(rate)
