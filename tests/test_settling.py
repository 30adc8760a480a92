"""A factor with two readings is settled where m, A and D are pairwise different."""

from __future__ import annotations

from dataclasses import replace

import pytest
from diagnose.ragged import ragged

from equivtest import Plan, Verdict, check
from equivtest.compare.verdict import Finding, Status
from equivtest.faults import planted
from equivtest.settling import probe_plan, settled

TIED = Plan(3, 2, 2)
"""A = D: a division by either gives every microbatch half of its weight."""


def verdict_on(name: str, plan: Plan, precision: str = "fp64", updates: int = 1) -> Verdict:
    found = planted(name)
    made = found.plant(ragged(updates=updates), plan, precision)
    assert made is not None
    return check(made.experiment, plan, precision=precision, loop=made.loop, wrap=made.wrap)


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("norm.double_accum_division", "fault"),
        ("norm.missing_world_size", "fault"),
        ("norm.sum_convention", "explained"),
    ],
)
def test_a_loop_that_two_readings_fit_is_named_by_the_one_that_holds(
    name: str, status: str, precision: str
) -> None:
    verdict = verdict_on(name, TIED, precision)
    assert verdict.causes == (name,), verdict.explain()
    assert verdict.status == status
    assert "ruled that out" in verdict.findings[0].text
    if name == "norm.double_accum_division":
        assert "by D once more" not in verdict.findings[0].text


def test_what_has_no_name_beside_a_settled_convention_stays_unexplained() -> None:
    """And the sentence is the probe's: the first one is of the reading that was ruled out."""
    probed = verdict_on("norm.sum_convention", Plan(1, 3, 2))
    two = Finding("norm.missing_accum_division", "it divides", alternatives=probed.causes)
    tied = replace(probed, status=Status.FAULT, findings=(two, Finding("", "it differs")))
    found = settled(tied, ragged(updates=1), TIED, lambda *_: probed)
    assert found.status == "unexplained"
    assert found.causes == ("norm.sum_convention",)
    assert "it divides" not in found.findings[0].text
    assert found.findings[0].text.endswith(f"ruled that out: there, {probed.findings[0].text}")
    # What becomes of a tail shows in no full group: no rerun is made for it.
    tail = Finding("window.tail_dropped", "it ends", alternatives=("count.micro_vs_update",))
    tied = replace(tied, findings=(tail,))
    assert settled(tied, ragged(updates=1), TIED, lambda *_: 1 / 0) is tied


def test_where_no_probe_fits_the_readings_stay() -> None:
    """Six examples: the smallest plan of pairwise different sizes at D=2 takes 1 x 3 x 2 = 6."""
    assert probe_plan(TIED, 6) == Plan(1, 3, 2)
    assert probe_plan(TIED, 5) is None


@pytest.mark.parametrize(
    ("plan", "probe"),
    [
        (Plan(2, 2, 2), Plan(5, 3, 2)),  # 30 examples
        (Plan(2, 3, 3), Plan(5, 2, 3)),  # A = 3 is taken by D
        (Plan(2, 3, 4), Plan(5, 2, 4)),  # another A even so: calls may be counted by it
        (Plan(2, 2, 1), Plan(5, 3, 1)),
    ],
    ids=str,
)
def test_a_probe_plan_has_as_many_replicas_and_three_sizes(plan: Plan, probe: Plan | None) -> None:
    assert probe_plan(plan, 100) == probe
