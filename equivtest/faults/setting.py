"""What a planted fault asks of an experiment and its plan before anything runs.

A condition is a function of a ``Setting`` that says why a kind cannot show there, or ``""``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from equivtest.arms.build import build
from equivtest.arms.candidate import counter, group_counts
from equivtest.arms.case import groups_of
from equivtest.batches import Batches, by_term, denominator
from equivtest.experiment import Experiment
from equivtest.loops import several
from equivtest.observe.rng import RandomState
from equivtest.plan import GroupLayout, Plan
from equivtest.precision import Precision
from equivtest.precision import precision as precision_called


@dataclass(frozen=True)
class Counted:
    """One group: supervised elements and examples, by replica and microbatch.

    Attributes:
        supervised: of one term of the loss.
        examples: in the same order.
    """

    supervised: Sequence[Sequence[float]]
    examples: Sequence[Sequence[int]]

    @property
    def total(self) -> float:
        """Supervised elements of the group."""
        return sum(map(sum, self.supervised))

    @property
    def rows(self) -> int:
        """Examples of the group."""
        return sum(map(sum, self.examples))

    @property
    def accumulations(self) -> int:
        return len(self.supervised[0])

    @property
    def replicas(self) -> int:
        return len(self.supervised)

    def weights(self, weight: Weight) -> list[float]:
        """What ``weight`` gives each microbatch that has a supervised element; 1 is right."""
        return [
            weight(self, r, k)
            for r, replica in enumerate(self.supervised)
            for k, n in enumerate(replica)
            if n
        ]


Weight = Callable[[Counted, int, int], float]
"""How often the microbatch of this replica and number counts, in units of the right weight."""


class Setting:
    """An experiment under a plan and a precision.

    Args:
        precision: as users write it.
    """

    def __init__(self, experiment: Experiment, plan: Plan, precision: str = "fp64") -> None:
        self.experiment = experiment
        self.plan = plan
        self.precision: Precision = precision_called(precision)

    @cached_property
    def groups(self) -> tuple[GroupLayout, ...]:
        return groups_of(self.experiment, self.plan)

    @property
    def accumulations(self) -> int:
        """Most microbatches that a replica has in a group."""
        return max(len(replica) for group in self.groups for replica in group.ids)

    @cached_property
    def counted(self) -> tuple[Counted, ...]:
        """Every group, and in it every term of the loss."""
        kept = RandomState.now()
        try:
            count = counter(self.experiment, {}, "", torch.float64)
            return tuple(
                Counted(
                    [[counts.get(term, 0.0) for counts in replica] for replica in table],
                    group.shape,
                )
                for group in self.groups
                for table in [group_counts(count, group)]
                for term in table[0][0]
            )
        finally:
            kept.restore()

    def weights(self, weight: Weight) -> list[float]:
        """What ``weight`` gives each microbatch of every group and term."""
        return [w for counted in self.counted for w in counted.weights(weight)]

    def alike(self, one: Weight, other: Weight) -> bool:
        """Both give every microbatch the same weight."""
        pairs = zip(self.weights(one), self.weights(other), strict=True)
        return all(math.isclose(a, b, rel_tol=1e-9) for a, b in pairs)

    @property
    def optimizer(self) -> Any:
        """The experiment's, or its mapping of them, over a model of its own."""
        kept = RandomState.now()
        try:
            return self.experiment.optimizer(build(self.experiment, torch.float64))
        finally:
            kept.restore()

    @property
    def optimizers(self) -> list[Any]:
        """Of a model of its own."""
        return several(self.optimizer)

    @cached_property
    def draws(self) -> bool:
        """A forward of the first microbatch draws random numbers."""
        kept = RandomState.now()
        try:
            module = build(self.experiment, torch.float64)
            batch = Batches(self.experiment, torch.float64)(self.groups[0].ids[0][0])
            before = RandomState.now()
            self.experiment.loss(module, batch)
            return before.moved()
        finally:
            kept.restore()

    @cached_property
    def gradients(self) -> list[Tensor]:
        """The right gradient of the first update at the initial parameters, in float64."""
        kept = RandomState.now()
        try:
            module = build(self.experiment, torch.float64)
            batch = Batches(self.experiment, torch.float64)(self.groups[0].flat)
            terms = by_term(self.experiment.loss(module, batch))
            count = counter(self.experiment, {}, "", torch.float64)(self.groups[0].flat)
            shares = [loss.total / denominator(count, term) for term, loss in terms.items()]
            trained = [p for p in module.parameters() if p.requires_grad]
            found = torch.autograd.grad(torch.stack(shares).sum(), trained, allow_unused=True)
            return [gradient for gradient in found if gradient is not None]
        finally:
            kept.restore()


Condition = Callable[[Setting], str]
"""Why a kind cannot show in a setting; empty if it can."""


def right(counted: Counted, r: int, k: int) -> float:
    """Every microbatch counts once."""
    return 1.0


def accumulates(setting: Setting) -> str:
    return "" if setting.accumulations > 1 else "A is 1: there is nothing to accumulate"


def replicates(setting: Setting) -> str:
    return "" if setting.plan.D > 1 else "D is 1: there is nothing to reduce"


def repeats(setting: Setting) -> str:
    return "" if setting.experiment.updates > 1 else "one update: there is none after it"


def clips(setting: Setting) -> str:
    bounds = (setting.experiment.clip_norm, setting.experiment.clip_value)
    return "the experiment does not clip" if bounds == (None, None) else ""


def clips_norm(setting: Setting) -> str:
    return "" if setting.experiment.clip_norm is not None else "the experiment clips no norm"


def not_overflowing(setting: Setting) -> str:
    """An undivided loss overflows at the first scales that torch takes: no update shows it."""
    fp16 = setting.precision.name == "fp16-mixed"
    return "fp16-mixed: every update overflows and is skipped" if fp16 else ""


def scales(setting: Setting) -> str:
    """A loop may bring a scaler of its own: torch's refuses gradients in float16 alone."""
    if setting.precision.parameters is torch.float16:
        return "torch's GradScaler refuses float16 gradients"
    return ""


def weighs(weight: Weight) -> Condition:
    """The weights are not all 1."""

    def condition(setting: Setting) -> str:
        if setting.alike(weight, right):
            return "it changes no weight here: the counts make it right"
        return ""

    return condition


def unlike(weight: Weight, name: str, other: Weight) -> Condition:
    """The weights are not those of another kind, which is then the one to name."""

    def condition(setting: Setting) -> str:
        return (
            f"here it is {name}: the weights are the same" if setting.alike(weight, other) else ""
        )

    return condition
