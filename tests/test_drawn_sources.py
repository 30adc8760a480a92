"""A few drawn cases with sources and, isolating always, without; thousands in ``soak``."""

from __future__ import annotations

from correct import check_correct
from drawn import Drawn
from drawn_sources import Planted, check, check_sources

from equivtest import Plan


def test_no_source_is_claimed_where_there_is_none() -> None:
    _, wrong = check_correct(examples=15, stream=10, isolate="always")
    assert not wrong, "\n".join(wrong)


def test_planted_sources_are_named_and_no_other() -> None:
    _, wrong = check_sources(examples=15, stream=11)
    assert not wrong, "\n".join(wrong)


def test_random_numbers_may_leave_nothing_of_a_scale() -> None:
    # The oracle of update 1 drops every supervised example: its scale is 0, and so no measure.
    case = Drawn(
        architecture="transformer",
        width=3,
        depth=3,
        activation="gelu",
        normalised=True,
        optimizer="amsgrad",
        plan=Plan(2, 1, 2),
        examples=8,
        precision="fp32",
        updates=2,
        clip=None,
        schedule=True,
        trained=0,
        ragged=True,
        last_group=None,
        seed=8475,
        scheduler_unit="attempted",
    )
    verdict = check(Planted(case, ("source.dropout",), 1544282592))
    assert verdict.status == "explained", verdict.explain()
    assert verdict.causes == ("source.dropout",), verdict.explain()
    assert verdict.sources["source.dropout"] >= 0.9999
