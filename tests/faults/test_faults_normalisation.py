"""Loss normalisation: each loop gives the numbers of the field's toy, on real process groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from faults.probes import PLAN_T, PLAN_T0, PROBE_T, PROBE_T0, T_COUNTS, gradients, linear, readout
from torch import nn

from equivtest import Experiment, Loss, Plan, Rank
from equivtest.faults import normalisation as n
from equivtest.faults.pieces import finish
from equivtest.loops import accumulate

Loop = Callable[[Rank], None]

FIFTEENTHS: dict[Loop, tuple[float, list[float]]] = {
    accumulate: (0.8, [1, 3, 2, 2, 6, 1]),
    # counts of both replicas 3, 9, 3: (10/3 + 0 + 2/3) / 3
    n.mean_of_means_accum: (4 / 3, [5 / 3, 5 / 3, 10 / 3, 10 / 3, 10 / 3, 5 / 3]),
    n.local_denominator_dp: (1.0, [1.25, 3.75, 2.5, 5 / 3, 5.0, 5 / 6]),
    n.mean_of_means_both: (13 / 6, [2.5] * 6),
    n.missing_world_size: (0.4, [0.5, 1.5, 1, 1, 3, 0.5]),
    n.non_autograd_reduce: (0.4, [0.5, 1.5, 1, 1, 3, 0.5]),
    n.double_accum_division: (0.8 / 3, [1 / 3, 1, 2 / 3, 2 / 3, 2, 1 / 3]),
    n.missing_accum_division: (6.5, [7.5] * 6),
    # 12 over D
    n.missing_division: (6.0, [7.5, 22.5, 15, 15, 45, 7.5]),
    # 15 of 15 + 6 rows
    n.miscounted: (0.8 * 15 / 21, [w * 15 / 21 for w in (1, 3, 2, 2, 6, 1)]),
    n.sum_convention: (1.6, [2, 6, 4, 4, 12, 2]),
    n.empty_microbatch: (0.8, [1, 3, 2, 2, 6, 1]),
}
"""Loop: ds, and w in units of 1/15. Printed as 0.8, 1.0, 2.1667, 0.4, 0.2667, 6.5, 0.5714."""


@pytest.mark.parametrize("loop", FIFTEENTHS, ids=lambda loop: loop.__name__)
def test_probe_t_gives_each_loop_its_number(loop: Loop) -> None:
    ds, weights = FIFTEENTHS[loop]
    for held in gradients(PROBE_T, PLAN_T, loop):
        assert held["s"] == pytest.approx([ds], abs=1e-12)
        assert held["w"] == pytest.approx([w / 15 for w in weights], abs=1e-12)


@pytest.mark.parametrize(
    ("loop", "ds"), [(accumulate, 2.0), (n.mean_of_means_accum, 3.0)], ids=["right", "means"]
)
def test_probe_t0_is_2_and_the_mean_of_means_3(loop: Loop, ds: float) -> None:
    (held,) = gradients(PROBE_T0, PLAN_T0, loop)
    assert held["s"] == pytest.approx([ds], abs=1e-12)


def test_the_loss_reduced_without_a_gradient_has_the_right_value() -> None:
    """Sums of the microbatches over both ranks: at s = w = 0 every loss is 0; at s = 1, 0.8."""

    def shifted(rank: Rank) -> None:
        with torch.no_grad():
            rank.module.s.fill_(1.0)
        n.non_autograd_reduce(rank)

    for held in gradients(PROBE_T, PLAN_T, shifted):
        assert held["s"] == pytest.approx([0.4], abs=1e-12)


def test_the_sum_by_batch_is_times_m_and_d() -> None:
    """m = 1, D = 2 in T; with m = 3, D = 1 in T0."""
    for held in gradients(PROBE_T, PLAN_T, n.sum_convention_by_batch):
        assert held["s"] == pytest.approx([1.6], abs=1e-12)
    (held,) = gradients(PROBE_T0, Plan(3, 1, 1), n.sum_convention_by_batch)
    assert held["s"] == pytest.approx([6.0], abs=1e-12)


def test_means_weighted_by_examples_give_4_for_3() -> None:
    """One example of 1 token, g = 8, beside two of 5 tokens, sum 10: 8/3 + 2 * 2/3, not 18/6."""
    toy = readout([1.0, 2.0, 3.0], [8.0, 2.0, 2.0])
    plan = Plan((1, 2), 2, 1)
    (right,) = gradients(toy, plan)
    (wrong,) = gradients(toy, plan, n.weight_denominator_mismatch)
    assert (right["s"], wrong["s"]) == (pytest.approx([3.0]), pytest.approx([4.0], abs=1e-12))


def test_three_rows_beside_one_give_3_for_2() -> None:
    """Three rows g = 1 and one row g = 5: (1 + 5) / 2, not 8 / 4."""
    rows = linear([1.0], [1.0], [1.0], [5.0])
    plan = Plan((3, 1), 2, 1)
    (right,) = gradients(rows, plan)
    (wrong,) = gradients(rows, plan, n.mean_of_means_both)
    assert (right["v"], wrong["v"]) == ([2.0], [3.0])


def test_replicas_of_three_rows_and_one_give_3_for_2() -> None:
    """The same over replicas, which no plan deals so: a loader of one's own does."""

    def uneven(rank: Rank) -> None:
        shards = (rank.dataset[:3], rank.dataset[3:])
        batch = torch.stack(list(shards[rank.dp_rank])).double()
        loss = rank.loss(rank.model, batch)
        assert isinstance(loss, Loss)
        (loss.total / loss.count).backward()
        finish(rank)

    for held in gradients(linear([1.0], [1.0], [1.0], [5.0]), Plan(1, 2, 2), uneven):
        assert held["v"] == [3.0]


def test_an_empty_microbatch_makes_the_shared_scalar_nan_everywhere() -> None:
    """T without the six elements of replica 1, k = 1: (8 + 6 - 2 + 2 + 4) / 9 = 2."""
    counts = list(T_COUNTS)
    counts[4] = 0.0
    toy = readout(counts, (8.0, 2.0, -1.0, 1.0, -1.0, 4.0))
    for right, wrong in zip(
        gradients(toy, PLAN_T), gradients(toy, PLAN_T, n.empty_microbatch), strict=True
    ):
        assert right["s"] == pytest.approx([2.0], abs=1e-12)
        assert torch.tensor(wrong["s"]).isnan().all()  # on both replicas


class Classes(nn.Module):
    """Logits over two classes from one weight a class."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[..., None] * self.v


def of_classes(*rows: tuple[list[float], list[int]]) -> Experiment:
    def loss(model: Any, batch: Any) -> Loss:
        total = nn.functional.cross_entropy(
            model(batch["x"]).flatten(0, 1),
            batch["target"].flatten(),
            ignore_index=-100,
            reduction="sum",
        )
        return Loss(total, count=(batch["target"] != -100).sum())

    return Experiment(
        model=Classes,
        data=[{"x": torch.tensor(x), "target": torch.tensor(y)} for x, y in rows],
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
        updates=1,
    )


def test_torchs_mean_is_the_mean_of_means() -> None:
    """Softmax at zero: the gradient of an element is x (1/2 - hit). One of x = 6, three of x = 2.

    Right: (6 + 3 * 2) / 4 / 2 = 1.5; of the means (6 + 2) / 2 / 2 = 2.
    """
    toy = of_classes(([6.0, 0.0, 0.0], [1, -100, -100]), ([2.0, 2.0, 2.0], [1, 1, 1]))
    (right,) = gradients(toy, Plan(1, 2, 1))
    (wrong,) = gradients(toy, Plan(1, 2, 1), n.mean_of_means_by_torch)
    assert (right["v"], wrong["v"]) == (pytest.approx([1.5, -1.5]), pytest.approx([2.0, -2.0]))
