"""Draw cases, plant a fault in each, and count what ``check`` says."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from drawn import Drawn, drawn
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from meta.catalogue import Fault
from meta.correct_loops import CORRECT, Correct
from meta.predicted import Predicted

from equivtest import Plan, Verdict, check

QUICK_DEPTH = 3


@dataclass
class Tally:
    """Cases by precision: asked, right, and not applicable; what went wrong in words."""

    asked: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)
    not_applicable: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    harmless: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        return sum(self.right.values()) / max(1, sum(self.asked.values()))

    def __str__(self) -> str:
        told = [
            f"{p}: {self.right[p]}/{self.asked[p]} ({self.not_applicable[p]} n/a, "
            f"{self.refused[p]} not run)"
            for p in sorted(self.asked | self.not_applicable | self.refused)
        ]
        return ", ".join(told)


def faulty(fault: Fault, cases: int, quick: bool) -> Tally:
    """Plant ``fault`` in ``cases`` drawn cases in which it shows."""
    tally = Tally()

    def one(case: Drawn) -> bool:
        case = fault.shaped(case)
        predicted = Predicted(case)
        plant = fault.plant(predicted)
        if plant is None:
            tally.not_applicable[case.precision] += 1
            return False
        verdict = check(
            predicted.experiment,
            case.plan,
            precision=case.precision,
            loop=plant.loop,
            wrap=plant.wrap,
        )
        if verdict.status == "not-run":
            tally.refused[case.precision] += 1
            return False
        tally.asked[case.precision] += 1
        named = not fault.causes or set(fault.causes) & set(verdict.causes)
        if verdict.status == "fault" and named:
            tally.right[case.precision] += 1
        else:
            tally.wrong.append(_told(fault.name, case, verdict))
        return True

    _draw(fault.name, fault.precisions, one, cases, quick)
    return tally


def unharmed(fault: Fault, cases: int, quick: bool) -> Tally:
    """Run the loop of ``fault`` where counts make it right: it must be called equivalent."""
    tally = Tally()

    def one(case: Drawn) -> bool:
        case = fault.shaped(_even(case))
        predicted = Predicted(case)
        if fault.plant(predicted) is not None:
            tally.not_applicable[case.precision] += 1
            return False
        assert fault.right is not None
        verdict = check(predicted.experiment, case.plan, precision=case.precision, loop=fault.right)
        return _count_right(tally, fault.name, case, verdict)

    _draw(fault.name, fault.precisions, one, cases, quick)
    return tally


def correct(loop: Correct, cases: int, quick: bool) -> Tally:
    """Run a loop that is right, written otherwise than the recipe, in drawn cases."""
    tally = Tally()

    def one(case: Drawn) -> bool:
        case = loop.shaped(case)
        predicted = Predicted(case)
        planted = loop.made(predicted.experiment)
        verdict = check(
            predicted.experiment,
            case.plan,
            precision=case.precision,
            loop=planted,
            wrap=loop.wrap,
        )
        return _count_right(tally, loop.name, case, verdict)

    _draw(loop.name, loop.precisions, one, cases, quick)
    return tally


def correct_in_any_way(cases: int, stream: int) -> Tally:
    """Draw a right loop with each case: the ways of writing it, as often as one another."""
    tally = Tally()
    draws = st.sampled_from(CORRECT).flatmap(
        lambda loop: st.tuples(st.just(loop), drawn(loop.precisions, stream=stream))
    )

    @settings(max_examples=cases)
    @given(draws)
    def one(draw: tuple[Correct, Drawn]) -> None:
        loop, case = draw
        case = loop.shaped(
            replace(case, scheduler_unit="applied", depth=min(case.depth, QUICK_DEPTH))
        )
        made = Predicted(case).experiment
        verdict = check(
            made, case.plan, precision=case.precision, loop=loop.made(made), wrap=loop.wrap
        )
        _count_right(tally, loop.name, case, verdict)

    one()
    return tally


def _count_right(tally: Tally, name: str, case: Drawn, verdict: Verdict) -> bool:
    if verdict.status == "not-run":
        tally.refused[case.precision] += 1
        return False
    tally.asked[case.precision] += 1
    if verdict.status == "equivalent":
        tally.right[case.precision] += 1
    else:
        tally.wrong.append(_told(name, case, verdict))
    return True


def _even(case: Drawn) -> Drawn:
    """The same without padding or a last group: every microbatch counts as much."""
    plan = Plan(max(case.plan.sizes), case.plan.A, case.plan.D)
    return replace(case, plan=plan, ragged=False, examples=plan.examples, last_group=None)


def _draw(name: str, precisions: tuple[str, ...], one, cases: int, quick: bool) -> None:  # type: ignore[no-untyped-def]
    """Feed ``one`` with drawn cases until it has counted ``cases`` of them."""
    counted = 0

    @seed(sum(map(ord, name)))
    @settings(
        max_examples=20 * cases,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn(precisions, stream=sum(map(ord, name))))
    def feed(case: Drawn) -> None:
        nonlocal counted
        if counted >= cases:
            return
        # The loops move their scheduler with applied updates.
        case = replace(case, scheduler_unit="applied")
        counted += one(replace(case, depth=min(case.depth, QUICK_DEPTH)) if quick else case)

    feed()
    assert counted == cases, f"only {counted} of {cases} draws could show {name}"


def _told(name: str, case: Drawn, verdict: Verdict) -> str:
    failure = verdict.failure.text.strip().splitlines() if verdict.failure else []
    found = "; ".join(f"{f.cause}: {f.text}" for f in verdict.findings[:2])
    return (
        f"{name}: {verdict.status} {list(verdict.causes)} margin {verdict.margin:.3g} "
        f"oracle {verdict.oracle_margin} in {case} {found} {failure[:1]} {failure[-1:]}"
        f" {verdict.notes[:2]}"
    )
