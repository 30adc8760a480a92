"""Sixty drawn correct loops, and a loss scaled by powers of two; thousands in ``soak``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from correct import check, check_correct, check_scaled
from drawn import Drawn
from drawn_table import PROPERTY

from equivtest import Plan


@pytest.mark.parametrize("stream", range(4))
def test_correct_loops_raise_no_alarm(
    stream: int, record_property: Callable[[str, object], None]
) -> None:
    tally, wrong = check_correct(examples=15, stream=stream)
    record_property(PROPERTY, tally.text())
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("stream", range(2))
def test_a_power_of_two_on_the_loss_changes_no_margin(
    stream: int, record_property: Callable[[str, object], None]
) -> None:
    tally, wrong = check_scaled(examples=4, stream=stream)
    record_property(PROPERTY, tally.text())
    assert not wrong, "\n".join(wrong)


def test_a_scale_of_exactly_zero_is_no_measure() -> None:
    # In update 1 each part's gradient of the null scalar is 0, and the split's a last bit.
    case = Drawn(
        architecture="plain",
        width=13,
        depth=2,
        activation="relu",
        normalised=False,
        optimizer="momentum",
        plan=Plan((6, 3), 2, 2),
        examples=21,
        precision="fp16",
        updates=3,
        clip=100.0,
        schedule=True,
        trained=0,
        ragged=True,
        last_group="process",
        seed=4221,
        shift=True,
    )
    verdict = check(case)
    assert verdict.status == "equivalent", verdict.explain()
