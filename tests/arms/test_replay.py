"""The replay: the plan's microbatches in the plan's order, sharing the candidate's bits."""

import copy

import pytest
import torch
from setups import an_experiment, pairs, replayed, squared, whole
from torch import Tensor, nn

from equivtest import Experiment, Loss, Plan, Rank, check
from equivtest.arms.bench import Bench
from equivtest.batches import Batches
from equivtest.loops import normalised
from equivtest.observe.rng import RandomState
from equivtest.observe.trace import MicrobatchTrace

generator = torch.Generator().manual_seed(2)
DATA = [
    {"x": torch.randn(3, generator=generator), "y": torch.randn(1, generator=generator)}
    for _ in range(8)
]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))


curved = an_experiment(net, DATA, squared)
ONE_REPLICA = [[[0, 1], [2, 3], [4, 5], [6, 7]]]
TWO_REPLICAS = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def seen(ids, factor=1 / 8, **more) -> list[list[MicrobatchTrace]]:
    """What a loop left that multiplied each total by ``factor``."""
    return [[MicrobatchTrace(tuple(i), factors=(factor,), **more) for i in r] for r in ids]


def accumulated(ids: list[list[int]], factor: float, dtype: torch.dtype) -> list[Tensor]:
    """The gradient that plain autograd accumulates over microbatches, one backward each."""
    bench = Bench(curved, dtype)
    module, batches = bench.module, Batches(curved, dtype)
    for microbatch in ids:
        (squared(module, batches(microbatch)).total * factor).backward()
    return [p.grad for p in module.parameters()]  # type: ignore[misc]


def test_one_replica_in_float32_gives_the_bits_of_plain_accumulation() -> None:
    found = replayed(curved, ONE_REPLICA, seen(ONE_REPLICA), torch.float32)
    plain = accumulated(ONE_REPLICA[0], 1 / 8, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(found.reduced, plain, strict=True))


def test_two_replicas_are_halved_and_then_added() -> None:
    # DDP averages over 2 replicas, so the loop's factor is 2 / 8.
    found = replayed(curved, TWO_REPLICAS, seen(TWO_REPLICAS, 2 / 8), torch.float32)
    one, other = (accumulated(ids, 2 / 8, torch.float32) for ids in TWO_REPLICAS)
    plain = [a / 2 + b / 2 for a, b in zip(one, other, strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(found.reduced, plain, strict=True))


@pytest.mark.parametrize("ids", [ONE_REPLICA, TWO_REPLICAS], ids=["D1", "D2"])
def test_the_expected_gradient_is_the_large_batchs(ids) -> None:
    found, truth = replayed(curved, ids), whole(curved).gradients
    for a, b in zip(found.expected, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("factor", [1.0, 1 / 32, -3.0, 1000.0])
def test_a_wrong_factor_of_the_loop_does_not_move_what_is_expected(factor: float) -> None:
    # Powers of two aside, a factor moves the last bits of the microbatches' gradients.
    wrong = replayed(curved, TWO_REPLICAS, seen(TWO_REPLICAS, factor))
    for a, b in zip(wrong.expected, whole(curved).gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-15)


def test_the_reduced_gradient_keeps_the_loops_factor() -> None:
    right = replayed(curved, ONE_REPLICA, seen(ONE_REPLICA, 1 / 8))
    halved = replayed(curved, ONE_REPLICA, seen(ONE_REPLICA, 1 / 16))
    for a, b in zip(halved.reduced, right.reduced, strict=True):
        assert torch.equal(a * 2, b)  # type: ignore[operator]


def test_a_loss_scale_is_taken_out_after_the_reduction() -> None:
    scaled = replayed(curved, ONE_REPLICA, seen(ONE_REPLICA, 1024 / 8), loss_scale=1024.0)
    plain = replayed(curved, ONE_REPLICA, seen(ONE_REPLICA, 1 / 8))
    for a, b in zip(scaled.reduced + scaled.expected, plain.reduced + plain.expected, strict=True):
        assert torch.equal(a, b)  # type: ignore[arg-type]


def test_the_scale_is_the_sum_of_the_microbatches_norms() -> None:
    # One weight, loss (w x)^2 at w = 1: gradients 2 x^2 over count 2, of x = 1 and x = 3.
    def one() -> nn.Module:
        module = nn.Linear(1, 1, bias=False)
        nn.init.ones_(module.weight)
        return module

    made = an_experiment(one, pairs([[1], [3]], [[0], [0]]), squared)
    found = replayed(made, [[[0], [1]]])
    assert found.scale == [10.0]  # 1 + 9
    assert float(found.expected[0]) == 10.0  # type: ignore[arg-type]
    assert found.loss == 5.0  # (1 + 9) / 2


def test_contributions_by_microbatch_are_kept_when_asked_for() -> None:
    found = replayed(curved, TWO_REPLICAS, keep=True)
    assert sorted(found.parts) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for t, expected in enumerate(found.expected):
        total = sum(part[t] for part in found.parts.values())
        torch.testing.assert_close(total, expected, rtol=1e-14, atol=1e-16)


# -- sharing the candidate's bits


@pytest.mark.parametrize(
    ("backwards", "shared"), [(1, True), (0, False), (2, False)], ids=["one", "none", "in parts"]
)
def test_bits_are_shared_where_the_losses_are_the_candidates(backwards: int, shared: bool) -> None:
    """And went backward once: by ``torch.autograd.grad`` no backward is seen."""
    first = replayed(curved, ONE_REPLICA)
    left = [
        [
            MicrobatchTrace(
                tuple(ids), totals=first.totals[0, k], factors=(1 / 8,), backwards=backwards
            )
            for k, ids in enumerate(ONE_REPLICA[0])
        ]
    ]
    assert replayed(curved, ONE_REPLICA, left).shared is shared


def test_bits_are_not_shared_where_one_loss_is_another() -> None:
    first = replayed(curved, ONE_REPLICA)
    left = [
        [
            MicrobatchTrace(
                tuple(ids),
                totals=(first.totals[0, k][0] * (1 + 1e-15 * (k == 2)),),
                factors=(1 / 8,),
                backwards=1,
            )
            for k, ids in enumerate(ONE_REPLICA[0])
        ]
    ]
    assert not replayed(curved, ONE_REPLICA, left).shared


def test_without_a_candidate_nothing_is_shared() -> None:
    assert not replayed(curved, ONE_REPLICA).shared


def test_a_candidate_with_another_number_of_microbatches_is_not_replayed_but_the_plan() -> None:
    odd = [seen(ONE_REPLICA)[0][:3]]
    found = replayed(curved, ONE_REPLICA, odd)
    assert not found.shared
    for a, b in zip(found.expected, whole(curved).gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-15)


def test_dropout_masks_are_those_that_the_candidate_drew() -> None:
    def dropped() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 1))

    made = an_experiment(dropped, DATA, squared)
    bench, batches = Bench(made, torch.float64), Batches(made, torch.float64)
    torch.manual_seed(123)
    left, totals = [], []
    for ids in ONE_REPLICA[0]:
        before = RandomState.now()
        loss = squared(bench.module, batches(ids))
        (loss.total / 8).backward()
        totals.append(loss.total.item())
        left.append(
            MicrobatchTrace(tuple(ids), (totals[-1],), factors=(1 / 8,), rng=before, backwards=1)
        )
        torch.rand(7)  # the loop draws numbers of its own in between
    candidate = [p.grad.clone() for p in bench.module.parameters()]  # type: ignore[union-attr]
    torch.manual_seed(0)
    found = replayed(made, ONE_REPLICA, [left])
    assert found.shared
    assert all(torch.equal(a, b) for a, b in zip(found.reduced, candidate, strict=True))


# -- terms


def two_terms(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Loss]:
    out = model(batch["x"])
    return {"sum": Loss(out.sum(), len(out)), "first": Loss(out[:, :1].sum() * 3, count=1)}


def test_terms_that_the_loop_weighed_unevenly_are_put_right() -> None:
    made = an_experiment(net, DATA, two_terms)
    counts = {"sum": 8.0, "first": 4.0}
    right = replayed(made, ONE_REPLICA, counts=counts)
    uneven = [[MicrobatchTrace(tuple(ids), factors=(1 / 8, 1 / 2)) for ids in ONE_REPLICA[0]]]
    found = replayed(made, ONE_REPLICA, uneven, counts=counts)
    for a, b in zip(found.expected, right.expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-15)


# -- buffers: one BatchNorm feature, momentum 0.5, rows 0, 2 | 4, 10, two groups without an update.
# A microbatch moves the mean to (mean + its mean) / 2 and the variance to (variance + its unbiased
# variance) / 2, from 0 and 1. Means: 1, 7, whole 4. Variances: 2, 18, whole 56/3.


def feature() -> nn.Module:
    return nn.BatchNorm1d(1, momentum=0.5)


def cubed(model: nn.Module, batch: Tensor) -> Loss:
    return Loss((model(batch) ** 3).sum(), count=len(batch))


rows = an_experiment(
    feature, [torch.tensor([v], dtype=torch.float64) for v in (0.0, 2.0, 4.0, 10.0)], cubed
)


def statistics(buffers: dict[str, Tensor]) -> tuple[float, float, int]:
    return (
        buffers["running_mean"].item(),
        buffers["running_var"].item(),
        int(buffers["num_batches_tracked"]),
    )


def after_two_groups(ids, broadcast: bool = False) -> list[tuple[float, float, int]]:
    left = seen(ids, factor=len(ids) / 4, broadcasts=(0,) if broadcast else ())
    first = replayed(rows, ids, left)
    second = replayed(rows, ids, left, buffers=[dict(b) for b in first.buffers])
    return [statistics(dict(b)) for b in second.buffers]


def test_the_large_batch_has_the_right_statistics() -> None:
    # mean 2, 3; variance (1 + 56/3) / 2 = 59/6, (59/6 + 56/3) / 2 = 14.25
    (found,) = after_two_groups([[[0, 1, 2, 3]]])
    assert found == (3.0, pytest.approx(14.25, rel=1e-15), 2)


def test_two_accumulations_move_the_statistics_twice_a_group() -> None:
    # mean 0.5, 3.75, 2.375, 4.6875; variance 1.5, 9.75, 5.875, 11.9375
    assert after_two_groups([[[0, 1], [2, 3]]]) == [(4.6875, 11.9375, 4)]


def test_two_replicas_without_broadcast_have_statistics_of_their_own() -> None:
    # rank 0: 0.5, 0.75 and 1.5, 1.75; rank 1: 3.5, 5.25 and 9.5, 13.75
    found = after_two_groups([[[0, 1]], [[2, 3]]])
    assert found == [(0.75, 1.75, 2), (5.25, 13.75, 2)]


def test_a_broadcast_makes_the_second_replica_continue_from_the_first() -> None:
    # rank 1's second forward starts from rank 0's 0.5 and 1.5: (0.5 + 7) / 2, (1.5 + 18) / 2
    found = after_two_groups([[[0, 1]], [[2, 3]]], broadcast=True)
    assert found == [(0.75, 1.75, 2), (3.75, 9.75, 2)]


def test_the_gain_of_a_batch_norm_has_another_gradient_when_split() -> None:
    # d(gain) = 3 mean(z^3). Whole: (-64 - 8 + 0 + 216) / 4 / 14^1.5 x 3 = 2.0617 (variance 14, and
    # torch's eps of 1e-5 in it); in two halves each z is -1, 1 and the cubes cancel.
    (large, _), (split, _) = whole(rows).gradients, replayed(rows, [[[0, 1], [2, 3]]]).expected
    assert large is not None
    assert split is not None
    assert large.item() == pytest.approx(2.0617, abs=5e-5)
    assert split.item() == pytest.approx(0.0, abs=1e-14)


def test_uneven_terms_move_the_statistics_once_a_microbatch() -> None:
    def two(model: nn.Module, batch: Tensor) -> dict[str, Loss]:
        out = model(batch)
        return {"a": Loss((out**3).sum(), len(out)), "b": Loss((out**2).sum(), len(out))}

    made = copy.copy(rows)
    object.__setattr__(made, "loss", two)
    left = [[MicrobatchTrace((0, 1, 2, 3), factors=(1 / 4, 1.0))]]
    found = replayed(made, [[[0, 1, 2, 3]]], left, counts={"a": 4.0, "b": 4.0})
    assert statistics(dict(found.buffers[0]))[::2] == (2.0, 1)


def test_replicas_that_drifted_apart_each_run_on_their_own_parameters() -> None:
    """``w x`` squared, one example each: gradient ``2 w x^2``, of which the plan has the mean."""
    verdict = check(
        Experiment(
            model=one,
            data=[torch.tensor([1.0]), torch.tensor([2.0])] * 2,
            loss=lambda model, batch: Loss(model(batch).square().sum(), len(batch)),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.125),
        ),
        Plan(1, 1, 2),
        precision="fp64",
        loop=drifting,
    )
    # Halves of 2 and 8 leave 1 - 1/8 = 0.875 and 1 - 4/8 = 0.5; the second gradient is then the
    # mean of 2 * 0.875 * 1 and 2 * 0.5 * 4.
    rows = [row for row in verdict.rows if row.update == 1]
    assert [row.state for row in rows] == ["equal"]
    assert [row.norm for row in rows] == [2.875]
    assert verdict.status == "fault"
    assert "differs.loss" not in verdict.causes


def one() -> nn.Module:
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    return module


def drifting(rank: Rank) -> None:
    """The first update is each rank's own, the second is reduced."""
    for u, group in enumerate(rank.groups):
        model = rank.model if u else rank.module
        for batch in group:
            (normalised(rank.loss(model, batch), group) * rank.D).backward()
        if not u:
            for parameter in rank.module.parameters():
                parameter.grad.div_(rank.D)
        rank.optimizer.step()
        rank.optimizer.zero_grad()
