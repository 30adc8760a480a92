"""``opt.counter_frozen``: the optimizer's state never counts although its updates are applied."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from equivtest.causes import Cause
from equivtest.compare.continuity import count_of, same_values
from equivtest.compare.implementation import far, moved_alike
from equivtest.compare.optimizer import ExpectedOptimizers
from equivtest.compare.verdict import About, Finding
from equivtest.diagnose.diagnosis import Diagnosis, exactly
from equivtest.diagnose.evidence import Evidence
from equivtest.diagnose.expected import optimizers_of, took_groups
from equivtest.observe.trace import COUNTER, OptimizerState, OptimizerTrace, Trace, UpdateTrace

UNCORRECTED = 1e9
"""Updates after which no bias is left to correct: an optimizer that never corrects updates so."""


@dataclass(frozen=True)
class _Frozen:
    """Names of the parameters whose counter of one optimizer stands, and where."""

    names: frozenset[str]
    at: float


def counter_frozen(evidence: Evidence) -> Iterator[Diagnosis]:
    """Counters that are the same after every applied update."""
    if not evidence.found(Cause.COUNTERS, Cause.STATE):
        return
    trace, n = evidence.traces[0], len(evidence.updates)
    for optimizer in trace.updates[0].optimizers if n else ():
        frozen = _frozen(trace, optimizer.names, n)
        if frozen is None:
            continue
        covered = list(_covered(evidence, frozen))
        if not covered:
            continue
        u = min(f.update for f in covered if f.update is not None)
        text = (
            f"{optimizer.kind.__name__}'s counter of {len(frozen.names)} of "
            f"{len(optimizer.names)} parameters stands at {frozen.at:g} after each of "
            f"{_applied(trace, optimizer.names, n)} applied updates, and their other state moves on"
        )
        yield Diagnosis(
            Cause.COUNTER_FROZEN, text, exactly(covered), update=u, tensor=min(frozen.names)
        )


def _frozen(trace: Trace, names: frozenset[str], n: int) -> _Frozen | None:
    """Of the parameters with a gradient in every applied update, those whose counter stands."""
    seen = [o for update in trace.updates[:n] for o in update.optimizers if o.names == names]
    applied = [o for o in seen if o.applied]
    after = {
        name: {count_of(o.state_after.get(name, {})) for o in applied}
        for name in names
        if all(update.clipped.get(name) is not None for update in trace.updates[:n])
    }
    standing = {name: held.pop() for name, held in after.items() if len(held) == 1}
    # At 1 only the second update tells.
    least = {0.0: 1, 1.0: 2}
    found = {
        name: at
        for name, at in standing.items()
        if at is not None and len(applied) >= least.get(at, len(applied) + 1)
    }
    if not found or not _keeps_the_rest(seen, found):
        return None
    at = min(found.values())
    return _Frozen(frozenset(name for name, stands in found.items() if stands == at), at)


def _keeps_the_rest(seen: Sequence[OptimizerTrace], names: Mapping[str, float]) -> bool:
    """State but the counter goes on from update to update: the optimizer was not built again."""
    for before, after in itertools.pairwise(seen):
        for name in names:
            held = _rest(before.state_after, name)
            found = _rest(after.state_before, name)
            if not all(same_values(value, found.get(key)) for key, value in held.items()):
                return False
    return True


def _rest(state: OptimizerState, name: str) -> Mapping[str, Any]:
    return {key: value for key, value in state.get(name, {}).items() if key != COUNTER}


def _applied(trace: Trace, names: frozenset[str], n: int) -> int:
    return sum(
        o.applied for update in trace.updates[:n] for o in update.optimizers if o.names == names
    )


# -- what it accounts for


def _covered(evidence: Evidence, frozen: _Frozen) -> Iterator[Finding]:
    """Findings on these counters, and on parameters that an update with such a counter gives."""
    expected: ExpectedOptimizers | None = None
    for finding in evidence.found(Cause.COUNTERS, Cause.STATE, Cause.PARAMETERS):
        if finding.tensor not in frozen.names:
            continue
        if finding.cause == Cause.PARAMETERS:
            expected = expected or optimizers_of(evidence)
            if _gives(evidence, expected, finding.update):
                yield finding
        elif finding.cause == Cause.COUNTERS or finding.about == About.COUNTER:
            yield finding


def _gives(evidence: Evidence, expected: ExpectedOptimizers, u: int | None) -> bool:
    """The experiment's optimizer with a counter that stands gives the parameters of update ``u``.

    It corrects the bias of the first update each time, or none at all.
    """
    update = next(one.seen[0] for one in evidence.updates if one.u == u)
    return all(
        any(_close(expected, update, _counting(seen, count)) for count in (0.0, UNCORRECTED))
        for seen in update.optimizers
        if seen.applied
    )


def _counting(seen: OptimizerTrace, count: float) -> OptimizerTrace:
    """The same with this counter before the update, and zeros where there was no state yet."""

    def counted(key: str, value: Any, *, begun: bool) -> Any:
        if not isinstance(value, Tensor):
            return type(value)(count) if key == COUNTER else value
        if key == COUNTER:
            return torch.full_like(value, count)
        return value if begun else torch.zeros_like(value)

    state = {
        name: {
            key: counted(key, value, begun=bool(seen.state_before.get(name)))
            for key, value in (seen.state_before.get(name) or held).items()
        }
        for name, held in seen.state_after.items()
    }
    return replace(seen, state_before=state)


def _close(expected: ExpectedOptimizers, update: UpdateTrace, seen: OptimizerTrace) -> bool:
    optimizer = expected.matching(seen)
    # A schedule may be off as well: that is another finding's, and the update ran with it.
    if optimizer is None or not took_groups(expected, optimizer, seen):
        return False
    try:
        wanted, _ = expected.updated(optimizer, update.before, update.clipped, seen)
    except Exception:  # it may refuse what another class takes
        return False
    held = seen.names, update.after, wanted, update.before
    return moved_alike(*held) and not far(*held)
