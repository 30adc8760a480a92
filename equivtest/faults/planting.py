"""An entry of the registry, and the case that it makes of an experiment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from equivtest.causes import Cause, Kind
from equivtest.experiment import Experiment, Rank
from equivtest.faults.setting import Condition, Setting
from equivtest.plan import Plan


@dataclass(frozen=True)
class Planting:
    """A case to run: pass it to ``check`` with the plan and precision that it was made for.

    Attributes:
        loop, wrap: None for equivtest's recipe and DistributedDataParallel.
    """

    experiment: Experiment
    loop: Callable[[Rank], None] | None
    wrap: Callable[[Any], Any] | None


@dataclass(frozen=True)
class Planted:
    """One kind, or one way of writing it.

    Attributes:
        name: the cause's, with ``/`` and the variant behind where there are several.
        cause: what a verdict on it must name.
        reference: where it was reported, ``repository #issue``.
        loop, wrap: the code; None where the recipe, or the default wrapper, is meant.
        made: makes the loop instead, where it must know more of the experiment than a rank does.
        conditions: each says why the kind cannot show, or nothing; asked in order.
        shaped: an experiment like the given one in which it can: with a clip, a scheduler, a last
            group. None where nothing helps, or nothing is needed.
        stops: torch itself stops the loop, whatever the kind of the cause.
    """

    name: str
    cause: Cause
    reference: str
    loop: Callable[[Rank], None] | None = None
    wrap: Callable[[Any], Any] | None = None
    made: Callable[[Experiment], Callable[[Rank], None]] | None = None
    conditions: tuple[Condition, ...] = ()
    shaped: Callable[[Experiment, Plan], Experiment] | None = None
    stops: bool = False

    @property
    def family(self) -> str:
        """The first half of the cause's name."""
        return self.cause.partition(".")[0]

    @property
    def expect(self) -> str:
        """What ``expect`` takes for it: every kind is named, costs and logs in a note."""
        return str(self.cause)

    @property
    def status(self) -> str:
        """The status that goes with it."""
        return "error" if self.stops else _STATUS[self.cause.kind]

    def applies(self, experiment: Experiment, plan: Plan, precision: str = "fp64") -> str:
        """Why the kind cannot show in this experiment as it is; empty if it can.

        Raises:
            PlanError: the plan does not fit the data.
        """
        return self.why_not(Setting(experiment, plan, precision))

    def why_not(self, setting: Setting) -> str:
        """The same of a setting, which remembers what it has counted."""
        reasons = (condition(setting) for condition in self.conditions)
        return next((reason for reason in reasons if reason), "")

    def into(self, experiment: Experiment) -> Planting:
        """The kind planted in the experiment as it is."""
        loop = self.made(experiment) if self.made else self.loop
        return Planting(experiment, loop, self.wrap)

    def plant(self, experiment: Experiment, plan: Plan, precision: str = "fp64") -> Planting | None:
        """The kind in the experiment, changed so that it can show; None where it cannot.

        Raises:
            PlanError: the plan does not fit the data.
        """
        made = self._shaped(experiment, plan)
        return None if self.applies(made, plan, precision) else self.into(made)

    def reason(self, experiment: Experiment, plan: Plan, precision: str = "fp64") -> str:
        """Why ``plant`` gives None; empty where it does not.

        Raises:
            PlanError: the plan does not fit the data.
        """
        return self.applies(self._shaped(experiment, plan), plan, precision)

    def _shaped(self, experiment: Experiment, plan: Plan) -> Experiment:
        return self.shaped(experiment, plan) if self.shaped else experiment


_STATUS = {
    Kind.FAULT: "fault",
    Kind.SOURCE: "explained",
    Kind.CONVENTION: "explained",
    Kind.COST: "equivalent",
    Kind.LOG: "equivalent",
    Kind.ERROR: "error",
}
