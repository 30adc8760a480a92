"""A script of a user's: from nothing to a first verdict."""

import experiments

from equivtest import Plan, check

if __name__ == "__main__":
    verdict = check(experiments.smallest(updates=1), Plan(m=4, A=4, D=2))
    assert verdict.status == "equivalent", verdict.explain()
