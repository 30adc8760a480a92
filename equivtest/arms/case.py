"""A case: one experiment under one plan, precision, loop and wrapper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from equivtest.experiment import Experiment, Rank
from equivtest.plan import GroupLayout, Plan, layout
from equivtest.precision import Precision


@dataclass(frozen=True)
class Case:
    """What one run of ``check`` compares; travels to the ranks beside the experiment.

    Attributes:
        groups: which example goes where, for each attempted update.
        loop, wrap: the code under test, None for equivtest's recipe and DistributedDataParallel.
        digest: identifies the experiment's bytes, for what processes keep of it.
    """

    plan: Plan
    precision: Precision
    groups: tuple[GroupLayout, ...]
    loop: Callable[[Rank], None] | None
    wrap: Callable[[Any], Any] | None
    device: str
    digest: str


def groups_of(experiment: Experiment, plan: Plan) -> tuple[GroupLayout, ...]:
    """The groups that ``plan`` makes of the experiment's data."""
    return layout(
        plan,
        len(experiment.data),
        updates=experiment.updates,
        shuffle=experiment.shuffle,
        last_group=experiment.last_group,
        seed=experiment.seed,
    )
