"""Every planted fault is caught and named: each once in `make cases`, all of them in `make full`.

`equivtest faults` prints the table of the last run.
"""

import os
from itertools import product

import pytest
from experiments import EXPERIMENTS, PLANS

from equivtest.faults import FAULTS, planted

FULL = os.environ.get("EQUIVTEST_FULL") == "1"
PRECISIONS = ("fp64", "fp32", "bf16-mixed", "fp16-mixed")
NAMES = [one.name for one in FAULTS]


def run(equivalence, one, experiment, plan, precision, planting):
    verdict = equivalence(
        planting.experiment,
        plan,
        precision=precision,
        loop=planting.loop,
        wrap=planting.wrap,
        expect=one.expect,
        planted=one.name,
        isolate="never",
    )
    assert verdict.status == one.status


def in_turn(number):
    """Every setting, beginning with another one for each kind."""
    settings = list(product(PRECISIONS, EXPERIMENTS, PLANS))
    start = number * 7 % len(settings)
    return settings[start:] + settings[:start]


if FULL:

    @pytest.mark.parametrize("precision", PRECISIONS)
    @pytest.mark.parametrize("plan", PLANS, ids=str)
    @pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda e: e.name)
    @pytest.mark.parametrize("name", NAMES)
    def test_planted(equivalence, name, experiment, plan, precision):
        one = planted(name)
        planting = one.plant(experiment, plan, precision)
        if planting is None:
            pytest.skip(one.reason(experiment, plan, precision))
        run(equivalence, one, experiment, plan, precision, planting)

else:

    @pytest.mark.parametrize("name", NAMES)
    def test_planted(equivalence, name):
        one = planted(name)
        for precision, experiment, plan in in_turn(NAMES.index(name)):
            planting = one.plant(experiment, plan, precision)
            if planting is not None:
                run(equivalence, one, experiment, plan, precision, planting)
                return
        pytest.skip(one.reason(EXPERIMENTS[0], PLANS[0], PRECISIONS[0]))


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda e: e.name)
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("precision", PRECISIONS if FULL else ("fp64", "bf16-mixed"))
def test_without_a_fault(equivalence, experiment, plan, precision):
    equivalence(experiment, plan, precision=precision)
