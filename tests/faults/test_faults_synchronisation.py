"""Synchronisation: each rank's own numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from faults.probes import PLAN_T, PROBE_T, gradients, linear, traces

from equivtest import Plan, Rank, check
from equivtest.faults import synchronisation as s

LOCAL: dict[Callable[[Rank], None], tuple[tuple[float, ...], tuple[tuple[int, ...], ...]]] = {
    # reduced with the first, the others each rank's own, times D
    s.inverted_boundary: ((1.2, 0.4), ((1, 6, 4, 2, 0, 0), (1, 0, 0, 2, 12, 2))),
    s.flag_after_forward: ((1.2, 0.4), ((1, 6, 4, 2, 0, 0), (1, 0, 0, 2, 12, 2))),
    s.never: ((1.6, 0.0), ((2, 6, 4, 0, 0, 0), (0, 0, 0, 4, 12, 2))),
    s.always_suppressed: ((1.6, 0.0), ((2, 6, 4, 0, 0, 0), (0, 0, 0, 4, 12, 2))),
    s.extra: ((0.8, 0.8), ((1, 3, 2, 2, 6, 1), (1, 3, 2, 2, 6, 1))),
}
"""ds by rank, and w by rank in units of 1/15."""


@pytest.mark.parametrize("loop", LOCAL, ids=lambda loop: loop.__name__)
def test_probe_t_by_rank(loop: Callable[[Rank], None]) -> None:
    scalars, weights = LOCAL[loop]
    found = gradients(PROBE_T, PLAN_T, loop)
    for held, ds, ws in zip(found, scalars, weights, strict=True):
        assert held["s"] == pytest.approx([ds], abs=1e-12)
        assert held["w"] == pytest.approx([w / 15 for w in ws], abs=1e-12)


def test_a_replaced_parameter_keeps_each_ranks_gradient() -> None:
    """1 and 3 where the average is 2."""
    rows = linear([1.0], [3.0])
    plan = Plan(1, 1, 2)
    assert [held["v"] for held in gradients(rows, plan)] == [[2.0], [2.0]]
    alone = gradients(rows, plan, s.param_replaced, s.finding_unused)
    assert [held["v"] for held in alone] == [[1.0], [3.0]]


def test_another_parameter_than_the_replaced_one_is_reduced() -> None:
    """The first is ``s``; ``w`` reads right: (1, 3, 2 | 2, 6, 1) / 15."""
    found = gradients(PROBE_T, PLAN_T, s.param_replaced, s.finding_unused)
    assert [held["s"] for held in found] == [pytest.approx([1.6]), pytest.approx([0.0], abs=1e-12)]
    for held in found:
        assert held["w"] == pytest.approx([w / 15 for w in (1, 3, 2, 2, 6, 1)], abs=1e-12)


def test_a_static_graph_with_no_sync_is_stopped_by_torch() -> None:
    verdict = check(PROBE_T, PLAN_T, precision="fp64", wrap=s.static_graph)
    assert verdict.status == "error"
    assert verdict.failure is not None
    assert "INTERNAL ASSERT FAILED" in verdict.failure.text


def test_no_sync_around_the_backward_alone_reduces_every_microbatch() -> None:
    for trace in traces(PROBE_T, PLAN_T, s.extra):
        assert [m.reduces for m in trace.updates[0].microbatches] == [True] * 3
