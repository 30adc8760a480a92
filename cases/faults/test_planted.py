"""Every planted fault is caught and named: each once in `make cases`, all of them in `make full`.

`equivtest faults` prints the table of the last run.
"""

import os
from itertools import product

import pytest
from experiments import EVERYWHERE, SETTINGS

from equivtest.faults import FAULTS, planted

FULL = os.environ.get("EQUIVTEST_FULL") == "1"
PRECISIONS = ("fp64", "fp32", "bf16-mixed", "fp16-mixed")
NAMES = [one.name for one in FAULTS]

BESIDE = {"rng": {"source.dropout"}}
"""What a family's experiments have without any fault."""


def settings(one):
    """Every precision with every experiment and plan of the kind."""
    return list(product(PRECISIONS, SETTINGS.get(one.family, EVERYWHERE)))


def run(equivalence, one, precision, plan, planting):
    beside = BESIDE.get(one.family, set())
    verdict = equivalence(
        planting.experiment,
        plan,
        precision=precision,
        loop=planting.loop,
        wrap=planting.wrap,
        expect={one.expect, *beside},
        planted=one.name,
        isolate="auto" if beside else "never",
    )
    assert verdict.status == one.status


if FULL:
    ALL = [(name, *setting) for name in NAMES for setting in settings(planted(name))]

    @pytest.mark.parametrize(
        ("name", "precision", "experiment", "plan"),
        [(name, precision, *pair) for name, precision, pair in ALL],
        ids=[f"{name}-{e.name}-{plan}-{precision}" for name, precision, (e, plan) in ALL],
    )
    def test_planted(equivalence, name, precision, experiment, plan):
        one = planted(name)
        planting = one.plant(experiment, plan, precision)
        if planting is None:
            pytest.skip(one.reason(experiment, plan, precision))
        run(equivalence, one, precision, plan, planting)

else:

    @pytest.mark.parametrize("name", NAMES)
    def test_planted(equivalence, name):
        """In the first setting in which it can show; each kind begins with another one."""
        one = planted(name)
        choice = settings(one)
        start = NAMES.index(name) * 7 % len(choice)
        for precision, (experiment, plan) in choice[start:] + choice[:start]:
            planting = one.plant(experiment, plan, precision)
            if planting is not None:
                run(equivalence, one, precision, plan, planting)
                return
        precision, (experiment, plan) = choice[0]
        pytest.skip(one.reason(experiment, plan, precision))


@pytest.mark.parametrize("precision", PRECISIONS if FULL else ("fp64", "bf16-mixed"))
@pytest.mark.parametrize(
    ("experiment", "plan"), EVERYWHERE, ids=[f"{e.name}-{plan}" for e, plan in EVERYWHERE]
)
def test_without_a_fault(equivalence, experiment, plan, precision):
    equivalence(experiment, plan, precision=precision)
