"""What the ``equivalence`` fixture does: check, record, then pass, skip or fail the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from equivtest.arms.case import Case, case_of
from equivtest.check import check
from equivtest.compare.card import planned_card, uncut_card
from equivtest.compare.prose import reason
from equivtest.compare.verdict import Failure, Status, Verdict, expectation
from equivtest.devices import Machine
from equivtest.experiment import Experiment
from equivtest.plan import Plan, comparable
from equivtest.pool import PoolError, current_pool
from equivtest.report import identity, record
from equivtest.report.listing import listings

if TYPE_CHECKING:
    from equivtest.options import Settings
    from equivtest.report.run import RunFolder


class Cases:
    """The cases of this process: one session compares plans of one product per experiment."""

    def __init__(self, chosen: Settings, folder: RunFolder) -> None:
        self._settings = chosen
        self._folder = folder
        self._plans: dict[Experiment, list[Plan]] = {}

    def run(
        self,
        experiment: Experiment,
        plan: Plan,
        *,
        expect: Any,
        precision: str,
        isolate: str | None,
        **how: Any,
    ) -> Verdict:
        """The verdict on one case.

        Raises:
            PlanError: another plan of this experiment has another product.
            ValueError, TypeError: arguments that ``check`` refuses.
        """
        if isinstance(experiment, Experiment) and isinstance(plan, Plan):
            seen = self._plans.setdefault(experiment, [])
            comparable([*seen, plan])
            seen.append(plan)
            bound = self._settings.max_ranks
            if bound is not None and plan.processes > bound:
                device = self._settings.device
                case = case_of(experiment, plan, precision=precision, device=device, **how)
                return _too_many_ranks(case, experiment, bound, expect)
        return check(
            experiment,
            plan,
            precision=precision,
            expect=expect,
            isolate=self._settings.isolate if isolate is None else isolate,
            device=self._settings.device,
            share_gpus=self._settings.share_gpus,
            timeout_s=self._settings.timeout_s,
            sensitivity=self._settings.sensitivity,
            **how,
        )

    def refused(
        self, experiment: Experiment, plan: Plan, precision: str, error: Exception
    ) -> Verdict:
        """A case whose arguments cannot be, which is never what was expected of it."""
        card = uncut_card(experiment, plan, precision, self._settings.device)
        return Verdict(Status.ERROR, card, failure=Failure(str(error)))

    def write(self, case: record.Record) -> None:
        """Leave the record at once: what happens to the test later cannot take it back."""
        record.write(case, self._folder.cases)

    def rerun_command(self, nodeid: str) -> str:
        """The command that runs the test again with this session's device and time-out."""
        chosen = self._settings
        return identity.rerun_command(
            nodeid,
            device=chosen.device,
            share_gpus=chosen.share_gpus,
            timeout_s=chosen.timeout_s,
        )

    def environment(self) -> dict[str, str]:
        """Versions and hardware of this process's cases."""
        if self._settings.device == "cpu":
            return identity.environment()
        try:
            return identity.environment(current_pool().machine())
        except PoolError:  # CUDA is there and fails: the case's error says how
            return identity.environment(Machine())


class Equivalence:
    """The fixture's value in one test; may be called several times."""

    def __init__(self, cases: Cases, request: pytest.FixtureRequest) -> None:
        self._cases = cases
        self._item = request.node
        self._names = vars(request.module) if request.module is not None else {}
        self._calls = 0

    def __call__(
        self,
        experiment: Experiment,
        plan: Plan,
        *,
        precision: str = "fp32",
        loop: Callable[..., Any] | None = None,
        wrap: Callable[..., Any] | None = None,
        expect: Any = "equivalent",
        isolate: str | None = None,
        planted: str = "",
    ) -> Verdict:
        """Check the case; see ``equivtest.check`` for the arguments and what they may not be.

        ``planted`` names the planted fault that the loop is, for ``equivtest faults``.
        """
        __tracebackhide__ = True
        bad: ValueError | TypeError | None = None
        try:
            verdict = self._cases.run(
                experiment,
                plan,
                precision=precision,
                loop=loop,
                wrap=wrap,
                expect=expect,
                isolate=isolate,
            )
        except (ValueError, TypeError) as error:  # arguments that cannot be: nothing has run
            bad = error
        if bad is not None:  # outside of the handler, so that pytest tells it once
            if isinstance(experiment, Experiment) and isinstance(plan, Plan):
                refused = self._cases.refused(experiment, plan, str(precision), bad)
                self._keep(experiment, loop, wrap, refused, planted)
            pytest.fail(f"{type(bad).__name__}: {bad}", pytrace=False)
        case = self._keep(experiment, loop, wrap, verdict, planted)
        if not verdict.passed and verdict.status is Status.NOT_RUN:
            pytest.skip(reason(verdict))
        if not verdict.passed:
            pytest.fail(f"{verdict.explain()}\nRerun: {case.rerun}", pytrace=False)
        return verdict

    def _keep(
        self, experiment: Experiment, loop: Any, wrap: Any, verdict: Verdict, planted: str
    ) -> record.Record:
        """Leave the record; where it cannot be written the test fails, and says what it was."""
        __tracebackhide__ = True
        self._calls += 1
        nodeid = self._item.nodeid
        case = record.Record(
            id=nodeid if self._calls == 1 else f"{nodeid}#{self._calls}",
            nodeid=nodeid,
            experiment=identity.experiment_name(experiment, self._names),
            loop=identity.loop_name(loop),
            wrap=identity.wrap_name(wrap),
            rerun=self._cases.rerun_command(nodeid),
            environment=self._cases.environment(),
            verdict=verdict,
            planted=planted,
            listings=listings(loop, verdict.events, self._item.config.rootpath),
        )
        self._item.user_properties.extend(_properties(verdict))
        try:
            self._cases.write(case)
        except OSError as error:
            pytest.fail(
                f"the record of this case could not be written: {error}; free the disk, or pass "
                f"another folder with --equiv-reports\nWithout a record: {verdict.explain()}",
                pytrace=False,
            )
        return case


def _properties(verdict: Verdict) -> list[tuple[str, str]]:
    """For JUnit; exact strings, because anything else ends an xdist run."""
    return [
        ("equivtest_status", verdict.status.value),
        ("equivtest_cause", ";".join(str(cause) for cause in verdict.causes)),
        ("equivtest_margin", f"{float(verdict.margin):.3g}"),
    ]


def _too_many_ranks(case: Case, experiment: Experiment, bound: int, expect: Any) -> Verdict:
    plan = case.plan
    each = f" ({plan.D} replicas of {plan.tp} x {plan.pp})" if plan.processes != plan.D else ""
    needs = f"{plan} needs {plan.processes} processes{each}"
    return Verdict(
        status=Status.NOT_RUN,
        card=planned_card(experiment, case),
        failure=Failure(f"{needs}, and --equiv-max-ranks is {bound}"),
        expect=expectation(expect),
    )
