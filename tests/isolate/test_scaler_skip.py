"""An overflow in one arm or in both: where it is, when it came, and what the skip did."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from isolate.placements import FACTOR, LARGEST, Branches, named, placements, total
from torch import Tensor, nn

import equivtest
from equivtest import Experiment, Loss, Plan, Rank
from equivtest.arms.extremes import GRADIENT_AT, GRADIENT_OF, OUTPUT, Extreme, watching
from equivtest.arms.replay import Replay, Start
from equivtest.compare.verdict import Verdict
from equivtest.isolate.scaler_skip import Arms, detect
from equivtest.isolate.skip.overflow import entered, first_microbatch, in_a_sum
from equivtest.isolate.skip.skip import Attempt, attempt
from equivtest.loops import accumulate
from equivtest.observe.trace import OptimizerTrace, State, UpdateTrace
from equivtest.plan import layout
from equivtest.precision import precision

MIXED = precision("fp16-mixed")
NAMES = ["a", "b"]


def test_rank_microbatch_and_tensor_of_an_overflow_are_named() -> None:
    wrong = [text for placement in placements(8, seed=0) for text in named(placement)]
    assert not wrong, "\n".join(wrong)


# -- one arm or the other


def branches(inputs: dict[int, float], examples: int, **changed: Any) -> Experiment:
    """The model of ``placements``; the first branch's input is 0 but for these examples."""
    data = torch.zeros(examples, 3, 4)
    for example, value in inputs.items():
        data[example, 0, 0] = value
    data[:, 1:] = 1.0
    scale = FACTOR * examples
    made = Experiment(
        model=Branches,
        data=list(data),
        loss=total,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
        scaler=lambda: torch.amp.GradScaler("cpu", init_scale=scale),
        updates=1,
    )
    return replace(made, **changed)


def check(experiment: Experiment, plan: Plan, loop: Any = None, **how: Any) -> Verdict:
    return equivtest.check(experiment, plan, precision="fp16-mixed", loop=loop, **how)


def test_a_sum_that_overflows_in_the_large_batch_alone_is_explained() -> None:
    # 64 x 800 = 51200 in each microbatch, 102400 in both; float16 ends at 65504.
    verdict = check(branches({0: 800.0, 2: 800.0}, 4), Plan(2, 2, 1))
    assert verdict.status == "explained", verdict.explain()
    assert verdict.causes == ("source.scaler_skip",)
    assert verdict.sources == {"source.scaler_skip": 1.0}
    (finding,) = verdict.findings
    assert finding.text.startswith(
        "update 0 of SGD was applied, and the large batch skips it: the gradient of 'a.weight' "
        "reaches 1.024e+05, float16 holds 65504; loss scale 256, then 256 (first attempt:"
    )
    assert (finding.rank, finding.tensor) == (None, "a.weight")
    assert all(row.state == "equal" for row in verdict.rows)


def test_parts_that_cancel_overflow_in_the_split_alone_and_no_factor_decides() -> None:
    # 64 x 2000 = 128000 and as much below zero: their sum is 0.
    verdict = check(branches({0: 2000.0, 2: -2000.0}, 4), Plan(2, 2, 1))
    assert verdict.status == "explained", verdict.explain()
    (finding,) = verdict.findings
    assert "and the large batch applies it: rank 0, microbatch 0: the gradient" in finding.text
    assert "; 2 microbatches overflow;" in finding.text
    assert "factor" not in finding.text


def arms(largest: float) -> Arms:
    """Arms of which the large batch must not run."""
    replay = Replay(expected=[torch.tensor([1.0, -largest])], reduced=[], scale=[])
    group = layout(Plan(1, 1, 1), 1, updates=1)[0]
    start = Start({}, ())
    return Arms(["a"], MIXED, group, start, (), FACTOR, replay, pytest.fail, pytest.fail)


def test_a_gradient_far_from_the_largest_number_costs_no_large_batch() -> None:
    # 64 x 63 = 4032 is below 65504 / 16 = 4094, and 64 x 65 is not.
    assert (
        detect(arms(63.0), [update(FACTOR, True)], [], [update(FACTOR, True).optimizers[0]]) == []
    )
    assert not arms(63.0).near({"a"})
    assert arms(65.0).near({"a"})
    assert not arms(65.0).near({"b"})


def test_every_update_skipped_by_both_is_said_to_be() -> None:
    verdict = check(branches({0: 1e4}, 4, updates=2), Plan(2, 2, 1))
    assert verdict.status == "inconclusive", verdict.explain()
    skipped = "of SGD was skipped, and the large batch skips it as well: rank 0, microbatch 0:"
    assert verdict.notes[0].startswith(f"update 0 {skipped}")
    assert verdict.notes[1].startswith(f"update 1 {skipped}")
    assert list(verdict.notes[2:]) == [
        "all 2 updates were skipped, and no gradient could be judged: start from a lower scale",
    ]


def test_nothing_is_named_where_isolation_is_switched_off() -> None:
    verdict = check(branches({0: 800.0, 2: 800.0}, 4), Plan(2, 2, 1), isolate="never")
    assert (verdict.status, verdict.causes, verdict.sources) == ("unexplained", (), {})


# -- a loop whose own factors overflow


def undivided(rank: Rank) -> None:
    """Sums, which are divided by the count after the backward: a right loop, in other factors."""
    for group in rank.groups:
        for batch in group:
            with rank.autocast():
                objective = rank.loss(rank.model, batch).total * rank.D
            rank.scaler.scale(objective).backward()
        for parameter in rank.module.parameters():
            if parameter.grad is not None:
                parameter.grad /= group.count
        rank.scaler.step(rank.optimizer)
        rank.scaler.update()
        rank.optimizer.zero_grad()


@pytest.mark.parametrize(("updates", "status"), [(1, "unexplained"), (3, "explained")])
def test_other_factors_are_a_source_where_an_applied_update_shows_that_they_are_right(
    updates: int, status: str
) -> None:
    # The loop's factor is 256 where the plan's is 64: 256 x 500 = 128000 overflows, and at half
    # the scale 64000 does not.
    verdict = check(branches({0: 500.0}, 4, updates=updates), Plan(2, 2, 1), undivided)
    assert verdict.status == status, verdict.explain()
    assert "the loop's factor on its losses is not the plan's" in verdict.findings[0].text


# -- where it enters


class Deep(nn.Module):
    """A forward that overflows in ``wide`` alone: weights of 16 on inputs of up to 1000."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.wide = nn.Linear(8, 8, bias=False)
        self.last = nn.Linear(8, 1)
        for part in (self.first, self.wide):
            nn.init.constant_(part.weight, 16.0)
        nn.init.constant_(self.last.weight, 2.0**-8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.wide(self.first(x).relu()).relu())


def squares(model: nn.Module, x: Tensor) -> Loss:
    return Loss((model(x).float() - 1).square().sum(), count=len(x))


def test_an_overflow_in_the_forward_is_where_it_enters() -> None:
    # 16 x 16 x (4 x 1000) x 8, about 8.2 million, at the output of `wide`.
    data = torch.full((8, 4), 2.0**-8)
    data[5] = 1000.0
    experiment = branches({}, 8, model=Deep, loss=squares, data=list(data))
    verdict = check(experiment, Plan(2, 2, 2))
    assert verdict.status == "inconclusive", verdict.explain()
    expected = (
        "rank 1, microbatch 0: the output of `wide` (Linear) reaches 8.192e+06, float16 holds 65504"
    )
    assert expected in verdict.notes[0]


def test_points_come_in_order_with_their_largest_magnitudes() -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU())
    model[0].weight.data.fill_(3.0)
    seen: list[Extreme] = []
    with watching(model, seen):
        (model(torch.tensor([[2.0]])) * 5).sum().backward()
    model(torch.tensor([[2.0]])).sum().backward()  # watched no more
    assert [(e.kind, e.name, e.largest) for e in seen] == [
        (OUTPUT, "0", 6.0),
        (OUTPUT, "1", 6.0),
        (OUTPUT, "", 6.0),
        (GRADIENT_AT, "1", 5.0),
        (GRADIENT_AT, "", 5.0),
        (GRADIENT_AT, "0", 5.0),
        (GRADIENT_OF, "0.weight", 10.0),
    ]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_scripted_layer_takes_no_hooks_and_its_parameters_are_seen() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(1, 1, bias=False)), nn.ReLU())
    model[0].weight.data.fill_(3.0)
    seen: list[Extreme] = []
    with watching(model, seen):
        model(torch.tensor([[2.0]])).sum().backward()
    assert [(e.kind, e.name) for e in seen] == [
        (OUTPUT, "1"),
        (OUTPUT, ""),
        (GRADIENT_AT, "1"),
        (GRADIENT_AT, ""),
        (GRADIENT_OF, "0.weight"),
    ]


def point(kind: str, name: str, largest: float, dtype: str = "float16") -> Extreme:
    return Extreme(kind, name, "Linear", 0, dtype, largest)


def test_an_infinity_that_float64_has_too_is_a_mask_and_no_overflow() -> None:
    masked = point(OUTPUT, "mask", math.inf)
    low = [masked, point(GRADIENT_AT, "b", math.nan), point(GRADIENT_OF, "b.weight", math.nan)]
    exact = [masked, point(GRADIENT_AT, "b", 1e5), point(GRADIENT_OF, "b.weight", 2e5)]
    found = entered((low, exact), {"b.weight"}, "b.weight", MIXED)
    assert (found.where, found.largest) == ("the gradient at the output of `b` (Linear)", 1e5)
    assert str(found) == (
        "the gradient at the output of `b` (Linear) reaches 1e+05, float16 holds 65504 (and with "
        "it the gradient of 'b.weight')"
    )


def test_what_is_infinite_in_float64_is_said_to_be() -> None:
    both = [point(GRADIENT_OF, "a", math.inf, "float32")]
    found = entered((both, both), {"a"}, "a", MIXED)
    assert str(found) == "the gradient of 'a' is not finite, in float64 neither"


def test_beyond_float32_it_is_float32_that_overflows() -> None:
    low = [point(GRADIENT_OF, "a", math.inf, "float32")]
    exact = [point(GRADIENT_OF, "a", 1e39, "float64")]
    found = entered((low, exact), {"a"}, "a", MIXED)
    assert found.dtype == "float32"
    assert found.limit == pytest.approx(3.4028e38, rel=1e-4)  # (2 - 2^-23) 2^127


def a_replay(
    added: dict[tuple[int, int], list[float]], reduced: list[Tensor | None], rank: int | None = None
) -> Replay:
    return Replay(expected=[], reduced=reduced, scale=[], added=added, overflowing=rank)


def test_the_first_microbatch_in_time_is_named_and_the_others_counted() -> None:
    added = {(0, 1): [math.nan, 1.0], (1, 0): [math.inf, 1.0], (0, 0): [1.0, math.inf]}
    replay = a_replay(added, [])
    assert first_microbatch(replay, NAMES, {"a"}) == ((1, 0), "a", 2)
    assert first_microbatch(replay, NAMES, {"a", "b"}) == ((0, 0), "b", 3)
    assert first_microbatch(replay, ["c", "d"], {"e"}) is None


@pytest.mark.parametrize(
    ("rank", "where"),
    [
        (1, "rank 1: the sum over its microbatches overflows float16"),
        (None, "the sum over replicas overflows float16"),
    ],
)
def test_an_overflow_of_a_sum_alone_is_named(rank: int | None, where: str) -> None:
    reduced = [torch.ones(1), torch.tensor([torch.inf], dtype=torch.float16)]
    found = in_a_sum(a_replay({(0, 0): [1.0, 6e4]}, reduced, rank), NAMES, set(NAMES))
    assert found.tensor == "b"
    assert str(found).startswith(where)


# -- when it came


def update(scale: float, applied: bool) -> UpdateTrace:
    optimizer = OptimizerTrace(
        torch.optim.SGD, {}, ((("a",), {}),), {}, {}, closures=0, applied=applied
    )
    nothing = State({}, {})
    return UpdateTrace((), nothing, {}, {}, {}, {}, nothing, {}, (optimizer,), applied, scale=scale)


@pytest.mark.parametrize(
    ("before", "scale", "when"),
    [
        ([], 8.0, Attempt.FIRST),
        ([(16.0, False)], 8.0, Attempt.FIRST),
        ([(8.0, True)], 16.0, Attempt.GROWTH),
        ([(8.0, True), (16.0, False), (8.0, True)], 16.0, Attempt.GROWTH),
        ([(16.0, True), (8.0, True)], 16.0, Attempt.HELD),
        ([(8.0, True)], 8.0, Attempt.HELD),
    ],
)
def test_the_scales_of_updates_that_were_applied_say_when(
    before: list[tuple[float, bool]], scale: float, when: Attempt
) -> None:
    history = [update(s, applied) for s, applied in before] + [update(scale, False)]
    assert attempt(history, frozenset({"a"})) is when


# -- what is no source


def on_last_rank(change: Callable[[Any], None]) -> Callable[[Rank], None]:
    """The recipe, after the last rank has changed its scaler."""

    def loop(rank: Rank) -> None:
        rank.scaler.scale(torch.ones(()))  # its state is made with the first scaling
        if rank.dp_rank == rank.D - 1:
            change(rank.scaler)
        accumulate(rank)

    return loop


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda scaler: scaler._growth_tracker.fill_(7), "growth_tracker 8 and 1"),
        (lambda scaler: scaler.set_growth_interval(5), "growth_interval 5 and 2000"),
    ],
)
def test_a_scaler_that_is_not_the_other_ranks_is_a_fault(
    change: Callable[[Any], None], told: str
) -> None:
    verdict = check(branches({}, 4), Plan(1, 2, 2), on_last_rank(change))
    assert (verdict.status, verdict.causes) == ("fault", ("differs.ranks",)), verdict.explain()
    text = f"the loss scaler of rank 1 is not rank 0's in update 0: {told}"
    assert verdict.findings[0].text == text
    untouched = check(branches({}, 4), Plan(1, 2, 2), on_last_rank(lambda _: None))
    assert untouched.status == "equivalent", untouched.explain()


def zeroes_what_overflows(rank: Rank) -> None:
    """Bad gradients replaced by zeros, and the update called all the same."""
    for group in rank.groups:
        for batch in group:
            with rank.autocast():
                objective = rank.loss(rank.model, batch).total / group.count * rank.D
            rank.scaler.scale(objective).backward()
        for parameter in rank.module.parameters():
            assert parameter.grad is not None
            parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
        rank.scaler.step(rank.optimizer)
        rank.scaler.update()
        rank.optimizer.zero_grad()


def test_an_update_on_zeros_where_a_gradient_overflows_is_a_fault() -> None:
    assert 2000 * FACTOR > LARGEST
    verdict = check(branches({0: 2000.0}, 4), Plan(1, 4, 1), zeroes_what_overflows)
    assert (verdict.status, verdict.causes) == ("fault", ("skip.update_on_zero",)), (
        verdict.explain()
    )
    assert "the gradient of 'a.weight' overflows in a microbatch" in verdict.findings[0].text
