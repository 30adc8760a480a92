"""The registry: every name once, every cause its own, and where a kind can show."""

from __future__ import annotations

import subprocess
import sys

import pytest
from faults.probes import PLAN_T, PLAN_T0, PROBE_T, PROBE_T0, linear, readout

from equivtest import Plan
from equivtest.faults import FAULTS, Planted, planted


def test_importing_the_package_does_not_import_torch() -> None:
    told = "import sys, equivtest.faults; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", told], check=False).returncode == 0


def test_names_are_unique_and_begin_with_their_cause() -> None:
    names = [one.name for one in FAULTS]
    assert len(set(names)) == len(names)
    assert all(one.name.partition("/")[0] == one.cause for one in FAULTS)


@pytest.mark.parametrize("one", FAULTS, ids=lambda one: one.name)
def test_every_entry_says_how_it_goes_wrong(one: Planted) -> None:
    code = [made for made in (one.loop, one.wrap, one.made) if made is not None]
    assert code or one.conditions
    assert planted(one.name) is one
    assert one.status in ("fault", "explained", "equivalent", "error")


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'norm\.x': pass one of norm\.mean_of_means_accum, "):
        planted("norm.x")


EVEN = readout([2.0] * 6, [8.0, 2.0, -1.0, 1.0, -1.0, 4.0])


@pytest.mark.parametrize(
    ("name", "experiment", "plan", "reason"),
    [
        ("norm.mean_of_means_accum", PROBE_T, PLAN_T, ""),
        ("norm.mean_of_means_accum", EVEN, PLAN_T, "it changes no weight here"),
        (
            "norm.mean_of_means_accum",
            PROBE_T0,
            Plan(3, 1, 1),
            "A is 1: there is nothing to accumulate",
        ),
        ("norm.mean_of_means_both", PROBE_T, PLAN_T, ""),
        ("norm.mean_of_means_both", PROBE_T0, PLAN_T0, "D is 1: there is nothing to reduce"),
        ("norm.local_denominator_dp", PROBE_T, PLAN_T, ""),
        ("norm.mean_of_means_samples", PROBE_T, PLAN_T, "the supervised elements are not the"),
        ("norm.mean_of_means_samples", linear(*[[1.0]] * 4), Plan((3, 1), 2, 1), ""),
        ("norm.mean_of_means_samples", linear(*[[1.0]] * 4), Plan(2, 2, 1), "it changes no weight"),
        ("norm.miscounted", linear(*[[1.0]] * 4), Plan(2, 2, 1), "an example is one supervised"),
        ("norm.empty_microbatch", PROBE_T, PLAN_T, "every microbatch has a supervised element"),
        ("norm.weight_denominator_mismatch", PROBE_T, PLAN_T, "here it is norm.mean_of_means_both"),
    ],
)
def test_where_it_cannot_show_it_says_why(name, experiment, plan, reason) -> None:
    told = planted(name).applies(experiment, plan)
    assert told.startswith(reason)
    assert bool(told) == bool(reason)
    assert (planted(name).plant(experiment, plan) is None) == bool(reason)
