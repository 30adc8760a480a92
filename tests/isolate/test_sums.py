"""A right loop whose own sums are beyond comparison A: whose rounding it is, and no fault.

One weight ``w`` and loss ``sum of w x``: a microbatch's gradient is its x over the group's count.
"""

import contextlib
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import equivtest
from equivtest import Experiment, Group, Loss, Plan, Rank
from equivtest.arms.replay import Replay
from equivtest.isolate.sums import in_another_order, reproduced


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w


def total(model: nn.Module, batch: Tensor) -> Loss:
    return Loss(model(batch).sum(), count=len(batch))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def check(values: Sequence[float], plan: Plan, precision: str, **how) -> equivtest.Verdict:
    data = [torch.tensor([value], dtype=torch.float64) for value in values]
    experiment = Experiment(model=Weight, data=data, loss=total, optimizer=sgd, updates=1)
    return equivtest.check(experiment, plan, precision=precision, **how)


EQUAL = [1.0] * 512
ONE_AND_SMALL = [1.0] + [2.0**-24] * 127
"""Half the spacing of float32 at 1: each addition to 1 is a tie, and rounds to 1."""


def test_equal_addends_that_bfloat16_loses_are_the_accumulators() -> None:
    # 512 x 1/512: from 256/512 on the spacing is 2^-8, and 1/512 is half of it. 0.5 for 1, where
    # comparison A allows 4 sqrt(512) 2^-8 = 0.354.
    verdict = check(EQUAL, Plan(1, 512, 1), "bf16")
    assert verdict.status == "explained", verdict.explain()
    assert verdict.causes == ("source.accumulator_dtype",)
    assert verdict.sources == {
        "source.accumulator_dtype": pytest.approx(1.0, abs=1e-12),
        "source.reduction_order": pytest.approx(0.0, abs=1e-12),
    }
    assert verdict.remainder == pytest.approx(0.0, abs=1e-12)
    (row,) = verdict.rows
    assert (row.state, row.replay_distance, row.exact_distance) == ("rounding", 0.5, 0.0)
    assert verdict.margin < 1
    assert "Sums of 512 microbatches in bfloat16 are up to 0.5 ('w')" in verdict.findings[0].text


@pytest.mark.parametrize("D", [1, 2])
def test_terms_that_float32_loses_one_by_one_are_the_order(D: int) -> None:
    # On rank 0, n = 127 terms of u relative to the first are lost: 127 u, or half of it where the
    # other 128 examples double the count; A allows 4 sqrt(128) u = 45 u and 4 sqrt(256) u = 64 u,
    # of a scale that is the first term's, but for 2^-17.
    verdict = check(ONE_AND_SMALL + [2.0**-24] * 128 * (D - 1), Plan(1, 128, D), "fp32")
    assert verdict.status == "explained", verdict.explain()
    assert verdict.causes == ("source.reduction_order",)
    assert verdict.sources == {"source.reduction_order": pytest.approx(1.0, abs=1e-12)}
    (row,) = verdict.rows
    assert row.replay_distance == pytest.approx(127 * 2.0**-24, rel=1e-4)
    assert row.exact_distance == 0.0
    text = verdict.findings[0].text
    assert "accumulation order 7.6e-06 ('w'), all-reduce order 0, kernel shape " in text
    assert text.startswith("in the accumulation: 100.00%")


def test_fewer_such_terms_are_within_tolerance_and_no_source() -> None:
    # 15 u of 4 sqrt(16) u = 16 u.
    verdict = check(ONE_AND_SMALL[:16], Plan(1, 16, 1), "fp32")
    assert (verdict.status, dict(verdict.sources)) == ("equivalent", {})
    assert verdict.margin == pytest.approx(15 / 16, rel=1e-3)


def test_what_is_not_to_be_isolated_is_unexplained() -> None:
    verdict = check(ONE_AND_SMALL, Plan(1, 128, 1), "fp32", isolate="never")
    assert (verdict.status, verdict.causes) == ("unexplained", ())
    assert "is to the bit what the plan's microbatches add up to" in verdict.findings[0].text


# -- faults beside it


def in_bfloat16(rank: Rank) -> None:
    """Keeps sums in bfloat16, whatever the precision."""
    for group in rank.groups:
        sums = torch.zeros(1, dtype=torch.bfloat16)
        for batch in group:
            rank.optimizer.zero_grad()
            with rank.autocast():
                loss = rank.loss(rank.model, batch)
            (loss.total / group.count * rank.D).backward()
            sums += rank.module.w.grad
        rank.module.w.grad = sums.to(rank.module.w.dtype)
        rank.optimizer.step()
        rank.optimizer.zero_grad()


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_accumulators_in_bfloat16_are_a_fault_where_the_precision_does_not_promise_them(
    precision: str,
) -> None:
    verdict = check(EQUAL, Plan(1, 512, 1), precision, loop=in_bfloat16)
    assert (verdict.status, verdict.causes) == ("fault", ("prec.low_precision_accumulator",))


def weighed(rank: Rank, factor: float) -> None:
    """Each loss times ``factor`` beside what the plan says."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            last = k == len(group) - 1
            with contextlib.nullcontext() if last else rank.model.no_sync():
                objective = rank.loss(rank.model, batch).total / group.count * rank.D
            (objective * factor).backward()
        rank.optimizer.step()
        rank.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("values", "precision"), [(EQUAL, "bf16"), (ONE_AND_SMALL, "fp32")], ids=["bf16", "fp32"]
)
def test_sums_that_lose_their_terms_do_not_hide_a_wrong_weight(
    values: list[float], precision: str
) -> None:
    # The replay gives these bits too: it takes the loop's factors.
    verdict = check(values, Plan(1, len(values), 1), precision, loop=partial(weighed, factor=0.5))
    assert verdict.updates[0].replay_bits_equal
    # Half of each weight: a bare scalar, which has no name.
    assert (verdict.status, verdict.causes) == ("fault", ("differs.gradient",))


# -- with a source of the forward


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.w = nn.BatchNorm1d(1), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) ** 3 + x * self.w


def test_shares_of_sums_and_of_a_forward_add_up() -> None:
    # Pairs of 0.9 and 1.1 but for the first: BatchNorm makes -1 and 1 of each pair, and something
    # else of the whole; the sums of bfloat16 lose terms as above. Without BatchNorm's share of the
    # squared distance nothing would be left but that of the sums.
    data = [torch.tensor([value]) for value in (3.0, -1.0, *(0.9, 1.1) * 383)]
    experiment = Experiment(model=Normalised, data=data, loss=total, optimizer=sgd, updates=1)
    verdict = equivtest.check(experiment, Plan(2, 384, 1), precision="bf16")
    assert verdict.status == "explained", verdict.explain()
    assert set(verdict.causes) == {"source.batchnorm", "source.accumulator_dtype"}
    assert verdict.remainder == pytest.approx(0.0, abs=1e-12)
    assert sum(verdict.sources.values()) + verdict.remainder == pytest.approx(1.0, abs=1e-12)
    assert {type(source) for source in verdict.sources} == {str}  # as they print, from any source
    assert all(row.margin < 1 for row in verdict.rows)
    assert not any("kernel shape" in finding.text for finding in verdict.findings)


# -- another order


def share(rank: Rank, group: Group, batch: Tensor) -> Tensor:
    return rank.loss(rank.model, batch).total / group.count * rank.D


def in_pieces(rank: Rank) -> None:
    """Goes back through each microbatch but the last in two parts of 0.3 and 0.7."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            last = k == len(group) - 1
            with contextlib.nullcontext() if last else rank.model.no_sync():
                objective = share(rank, group, batch)
                if not last:
                    (objective * 0.3).backward(retain_graph=True)
                (objective if last else objective * 0.7).backward()
        rank.optimizer.step()
        rank.optimizer.zero_grad()


def last_first(rank: Rank) -> None:
    """Goes back through the microbatches before the last one from the last of them to the first."""
    for group in rank.groups:
        *batches, last = group
        with rank.model.no_sync():
            for objective in reversed([share(rank, group, batch) for batch in batches]):
                objective.backward()
        share(rank, group, last).backward()
        rank.optimizer.step()
        rank.optimizer.zero_grad()


def test_a_right_loop_that_adds_in_another_order_is_told_so() -> None:
    rows = torch.randn(12, 50, generator=torch.Generator().manual_seed(0))
    line = Experiment(
        model=partial(nn.Linear, 50, 1), data=list(rows), loss=total, optimizer=sgd, updates=1
    )
    verdict = equivtest.check(line, Plan(1, 4, 3), loop=last_first)
    assert verdict.status == "equivalent", verdict.explain()
    assert not verdict.updates[0].replay_bits_equal
    assert any("of 2 gradients are not, to the bit" in note for note in verdict.notes)
    # A loss in parts shares no bits with the replay: nothing is told of its order.
    parts = equivtest.check(line, Plan(1, 4, 3), loop=in_pieces)
    assert parts.status == "equivalent", parts.explain()
    assert not parts.updates[0].replay_bits_equal
    plain = equivtest.check(line, Plan(1, 4, 3))
    assert plain.updates[0].replay_bits_equal
    assert not any("to the bit" in note for note in plain.notes)


def replayed(reduced: float, **changes) -> Replay:
    """Of one float32 that three replicas add up to ``reduced``, of terms of norm 1 together."""
    held = torch.tensor([reduced])
    return Replay([held.double()], [held], [1.0], **{"exact": True, **changes})


def test_only_the_bits_of_a_replay_that_is_the_candidates_acquit() -> None:
    held = [[torch.tensor([0.5])]]
    assert reproduced(held, replayed(0.5), D=3)
    assert not reproduced(held, replayed(0.5, shared=False), D=3)
    assert not reproduced(held, replayed(0.5, weighed=False), D=3)
    assert not reproduced([*held, [torch.tensor([0.5 + 2.0**-24])]], replayed(0.5), D=3)


def test_where_the_order_over_replicas_is_unknown_another_order_of_it_acquits() -> None:
    # 4 sqrt(3) u is 6.9 u of the scale: 6 u are within and 8 u are not.
    for units, right in ((6, True), (8, False)):
        held = [[torch.tensor([0.5 + units * 2.0**-24])]]
        assert reproduced(held, replayed(0.5, exact=False), D=3) is right
        assert not reproduced(held, replayed(0.5), D=3)


def test_another_order_is_told_in_roundoffs_of_an_exact_replay_alone() -> None:
    held = [torch.tensor([0.5 + 3 * 2.0**-24])]
    text = in_another_order(held, replayed(0.5), ["w"])
    assert text is not None
    assert "at most 3 ('w') roundoffs" in text
    assert in_another_order(held, replayed(0.5, exact=False), ["w"]) is None
    assert in_another_order([torch.tensor([0.5])], replayed(0.5), ["w"]) is None
