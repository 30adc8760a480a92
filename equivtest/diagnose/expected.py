"""What the experiment's optimizers and schedules would do, for predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from equivtest.arms.build import build
from equivtest.compare.continuity import same_values
from equivtest.compare.optimizer import NOT_JUDGED, ExpectedOptimizers
from equivtest.diagnose.evidence import Evidence
from equivtest.observe.patch import watched
from equivtest.observe.trace import OptimizerTrace, UpdateTrace, by_name

SAME = 1e-9
"""Relative difference up to which a number of a schedule is the predicted one. A schedule may be
written in another way, which rounds in the last bits (1e-16); values of neighbouring calls are
apart by more than this in any schedule of less than a hundred million calls."""

Hyperparameters = Mapping[str, Mapping[str, Any]]
"""Hyperparameters by the names of parameters."""


def optimizers_of(evidence: Evidence) -> ExpectedOptimizers:
    """The experiment's optimizers and schedulers, on a model of their own."""
    case = evidence.case
    return ExpectedOptimizers(
        evidence.experiment, build(evidence.experiment, case.precision.parameters, case.device)
    )


class Timeline:
    """Hyperparameters of the experiment's optimizers after any number of scheduler calls.

    Attributes:
        events: calls of ``LRScheduler.step`` that one call of the schedule makes: a scheduler may
            call others.
    """

    def __init__(self, expected: ExpectedOptimizers) -> None:
        self._expected = expected
        self._after = [self._now()]
        self._ended = False
        self.events = 0

    def after(self, calls: int) -> Hyperparameters | None:
        """After so many calls; None where the schedule has no such call (it raises)."""
        while len(self._after) <= calls and not self._ended:
            self._advance()
        return self._after[calls] if 0 <= calls < len(self._after) else None

    def moving(self) -> frozenset[str]:
        """Names of the hyperparameters that have moved so far."""
        first = self._after[0]
        return frozenset(
            key
            for now in self._after[1:]
            for name, values in now.items()
            for key, value in values.items()
            if not close(value, first[name].get(key))
        )

    def _advance(self) -> None:
        calls: list[None] = []
        try:
            with watched(LRScheduler, "step", after=lambda *_, **__: calls.append(None)):
                self._expected.advance(len(self._after))
        except Exception:  # a schedule may end, or ask for a metric: there is no more to predict
            self._ended = True
            return
        self.events = self.events or len(calls)
        self._after.append(self._now())

    def _now(self) -> Hyperparameters:
        held = [self._expected.hyperparameters(o) for o in self._expected.optimizers]
        return {name: values for groups in held for name, values in by_name(groups).items()}


def close(a: Any, b: Any) -> bool:
    """The same value, numbers within ``SAME``."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        a, b = (v.tolist() if isinstance(v, Tensor) else v for v in (a, b))
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(close, a, b))
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=SAME, abs_tol=1e-16) or (a != a and b != b)
    return bool(a == b)


def alike(
    found: Hyperparameters, wanted: Hyperparameters, keys: frozenset[str] | None = None
) -> bool:
    """``found`` has the wanted values, of these keys or of all that are judged."""
    return all(
        name in wanted
        and all(
            close(values.get(key), value)
            for key, value in wanted[name].items()
            if (key in keys if keys is not None else key not in NOT_JUDGED)
        )
        for name, values in found.items()
    )


def follows_its_groups(
    expected: ExpectedOptimizers, update: UpdateTrace, seen: OptimizerTrace
) -> bool:
    """The experiment's optimizer gives the parameters bit for bit, with the groups that were seen.

    Then whatever is wrong with the update is wrong with these groups.
    """
    optimizer = expected.matching(seen)
    if optimizer is None or seen.kind is not type(optimizer):
        return False
    return took_groups(expected, optimizer, seen) and gives(expected, optimizer, update, seen)


def took_groups(expected: ExpectedOptimizers, optimizer: Optimizer, seen: OptimizerTrace) -> bool:
    """Give ``optimizer`` the hyperparameters that were seen; False where its groups have several.

    They are known by the names of the parameters: groups may be cut and ordered otherwise.
    """
    held = by_name(seen.groups)
    names = [names for names, _ in expected.hyperparameters(optimizer)]
    for group, members in zip(optimizer.param_groups, names, strict=True):
        values = [held[name] for name in members]
        if not all(alike({"": one}, {"": values[0]}) for one in values):
            return False
        group.update({k: v for k, v in values[0].items() if k in group})
    return True


def gives(
    expected: ExpectedOptimizers, optimizer: Optimizer, update: UpdateTrace, seen: OptimizerTrace
) -> bool:
    """``optimizer`` makes the loop's parameters of its gradient and state, bit for bit."""
    try:
        after, _ = expected.updated(optimizer, update.before, update.clipped, seen)
    except Exception:  # it may refuse what another class takes
        return False
    return all(same_values(update.after.get(name), after[name]) for name in seen.names)


def named_in(optimizers: Sequence[OptimizerTrace]) -> Hyperparameters:
    """Hyperparameters of all parameters that these optimizers hold."""
    return {n: values for one in optimizers for n, values in by_name(one.groups).items()}
