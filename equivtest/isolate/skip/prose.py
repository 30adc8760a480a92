"""A skip in words: which arm, what overflowed where and when, and what it did. Pure."""

from __future__ import annotations

from collections.abc import Collection

from equivtest.compare.continuity import all_same
from equivtest.compare.skips import moved
from equivtest.isolate.skip.skip import Attempt, Skip
from equivtest.observe.trace import ParamGroups, Trace, UpdateTrace


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
    parts = [str(skip.overflow)]
    if skip.D > 1:
        parts.append(
            f"what decides is the factor D={skip.D} on the loop's loss, which the wrapper's "
            "average takes out again: with it the large batch overflows as well"
        )
    parts.append(_when(skip, trace))
    if not skip.weighed:
        parts.append("the loop's factor on its losses is not the plan's, D over the group's count")
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
