"""What happened to the gradients, in order: the operations of an update and of its microbatches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import a_rank, weight
from torch import Tensor, nn
from watching import numbers, observed

from equivtest import Rank
from equivtest.loops import accumulate
from equivtest.observe import Trace, UpdateTrace


def kinds(update: UpdateTrace) -> list[tuple[str, int | None, bool]]:
    """Kind, last microbatch begun, and whether it came after the attempt."""
    return [(one.kind, one.microbatch, one.attempted) for one in update.operations]


def each(run: Callable[[Rank, Tensor, int], None]) -> Callable[[Rank], None]:
    """A loop that updates after ``run`` has had each microbatch."""

    def loop(rank: Rank) -> None:
        for group in rank.groups:
            for k, batch in enumerate(group):
                run(rank, batch, k)
            rank.optimizer.step()

    return loop


def watch(loop: Any, module: nn.Module | None = None, updates: Any = None, **how: Any) -> Trace:
    return observed(loop, a_rank(module or weight(), **how), updates or numbers([[3.0], [5.0]]))


def test_the_recipes_operations_come_in_its_order() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    (update,) = watch(accumulate, clip_norm=2.0, scaler=scaler).updates
    assert kinds(update) == [
        ("backward", 0, False),
        ("backward", 1, False),
        ("unscale", 1, False),
        ("clip", 1, False),
        ("zero", 1, True),
    ]
    assert [one.microbatches for one in update.operations[:2]] == [(0,), (1,)]
    unscale, clip = update.operations[2:4]
    assert unscale.factor == 0.25
    # The gradient is (3 + 5) / 2 = 4, its bound 2.
    assert clip.factor == pytest.approx(0.5, rel=1e-6)
    assert [m.backward for m in update.microbatches] == [0, 1]
    assert [m.scale for m in update.microbatches] == [4.0, 4.0]


def test_a_clip_that_is_not_active_multiplies_by_one() -> None:
    (update,) = watch(accumulate, clip_norm=100.0).updates
    assert [one.factor for one in update.operations if one.kind == "clip"] == [1.0]


def test_a_clip_by_value_is_a_kind_of_its_own() -> None:
    (update,) = watch(accumulate, clip_value=2.5).updates
    assert kinds(update)[2] == ("clamp", 1, False)


def test_a_clearing_between_microbatches_is_seen_there() -> None:
    def clears(rank: Rank, batch: Tensor, _: int) -> None:
        rank.optimizer.zero_grad()
        rank.loss(rank.model, batch).total.backward()

    first, second = watch(each(clears), updates=numbers([[3.0], [5.0]], [[7.0]])).updates
    assert kinds(first) == [
        ("backward", 0, False),
        ("zero", 0, False),
        ("backward", 1, False),
        ("zero", 1, True),  # that of the next group comes before its first forward
    ]
    assert kinds(second) == [("backward", 0, False)]


def test_a_clearing_of_the_module_is_one() -> None:
    def loop(rank: Rank) -> None:
        accumulate(rank)
        rank.loss(rank.model, torch.ones(1, 1)).total.backward()
        rank.module.zero_grad()
        rank.optimizer.step()

    trace = watch(loop)
    assert kinds(trace.updates[1]) == [("backward", 0, False), ("zero", 0, False)]
    details = [e.detail for e in trace.events if e.kind == "zero_grad"]
    assert details == ["", "of a module"]  # the recipe's finds nothing left to clear


def test_an_operation_says_whose_gradients_it_concerns() -> None:
    module = nn.Sequential(weight(1.0), weight(1.0))
    half = torch.optim.SGD(module[0].parameters(), lr=1.0)

    def half_of_it(rank: Rank, batch: Tensor, _: int) -> None:
        rank.loss(rank.model, batch).total.backward()
        nn.utils.clip_grad_norm_(rank.module[1].parameters(), 1.0)  # type: ignore[index]
        rank.optimizer.zero_grad()
        rank.module.zero_grad()

    (update,) = watch(each(half_of_it), module, numbers([[3.0]]), optimizer=half).updates
    assert [(one.kind, one.parameters) for one in update.operations] == [
        ("backward", None),
        ("clip", frozenset({"1.weight"})),
        ("zero", frozenset({"0.weight"})),
        ("zero", None),
    ]


def test_a_second_clearing_clears_nothing() -> None:
    def twice(rank: Rank) -> None:
        rank.optimizer.zero_grad()
        accumulate(rank)
        rank.optimizer.zero_grad()

    (update,) = watch(twice).updates
    assert [one.kind for one in update.operations] == ["backward", "backward", "zero"]


def test_one_backward_for_all_reaches_all() -> None:
    def deferred(rank: Rank) -> None:
        losses = [rank.loss(rank.model, batch).total for batch in rank.groups[0]]
        (sum(losses) / 4).backward()  # type: ignore[union-attr]
        rank.optimizer.step()

    (update,) = watch(deferred, weight(2.0)).updates
    assert [one.microbatches for one in update.operations] == [(0, 1)]
    assert [m.backward for m in update.microbatches] == [0, 0]
    assert [m.root for m in update.microbatches] == [4.0, 4.0]  # 2 x (3 + 5) / 4


def test_a_forward_that_no_backward_reaches_has_no_number() -> None:
    def last_only(rank: Rank) -> None:
        losses = [rank.loss(rank.model, batch).total for batch in rank.groups[0]]
        losses[-1].backward()
        rank.optimizer.step()

    (update,) = watch(last_only).updates
    # The first forward led to nothing, and is no microbatch of the update.
    assert [one.microbatches for one in update.operations] == [(0,)]
    assert [one.microbatch for one in update.operations] == [0]


def test_a_last_backward_inside_the_closure_comes_before_the_attempt() -> None:
    def in_closure(rank: Rank) -> None:
        first, last = rank.groups[0]
        rank.loss(rank.model, first).total.backward()

        def closure() -> Tensor:
            loss = rank.loss(rank.model, last).total
            loss.backward()
            return loss

        rank.optimizer.step(closure)
        rank.optimizer.zero_grad()

    (update,) = watch(in_closure).updates
    assert kinds(update) == [("backward", 0, False), ("backward", 1, False), ("zero", 1, True)]


def test_a_backward_that_raises_leaves_the_next_one_alone() -> None:
    def retries(rank: Rank) -> None:
        for batch in rank.groups[0]:
            output = rank.model(batch)
            output.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                output.sum().backward()
            rank.loss(rank.model, batch).total.backward()
        rank.optimizer.step()

    (update,) = watch(retries, updates=numbers([[3.0]])).updates
    assert [one.microbatches for one in update.operations] == [(), (1,)]


# -- what a backward starts from


def roots(backward: Callable[[Tensor, Tensor], None], value: float = 2.0) -> list[float | None]:
    """Roots of microbatches 3 and 5 under a weight of 2; ``backward`` gets losses and outputs."""

    def run(rank: Rank, batch: Tensor, _: int) -> None:
        output = rank.model(batch)
        backward(output.sum(), output)

    (update,) = watch(each(run), weight(value)).updates
    return [m.root for m in update.microbatches]


@pytest.mark.parametrize(
    ("backward", "expected"),
    [
        (lambda loss, _: (loss / 4).backward(), [1.5, 2.5]),
        (lambda loss, _: loss.backward(gradient=torch.tensor(0.5)), [3.0, 5.0]),
        (lambda loss, _: torch.autograd.backward([loss, loss / 2]), [9.0, 15.0]),
        (lambda loss, _: torch.autograd.backward((loss, loss), (None, None)), [12.0, 20.0]),
        (lambda loss, _: [loss.backward(retain_graph=True) for _ in range(2)], [12.0, 20.0]),
        (lambda _, output: output.backward(torch.ones_like(output)), [6.0, 10.0]),
    ],
    ids=["divided", "gradient", "two roots", "no factors", "twice", "one number"],
)
def test_the_root_is_what_the_backward_started_from(backward: Any, expected: list[float]) -> None:
    assert roots(backward) == expected


def test_a_backward_from_no_scalar_has_no_root() -> None:
    def run(rank: Rank, batch: Tensor, _: int) -> None:
        output = rank.model(batch)
        output.backward(torch.ones_like(output))

    (update,) = watch(each(run), updates=numbers([[3.0, 4.0]])).updates
    assert [m.root for m in update.microbatches] == [None]


def test_a_loss_that_is_added_to_in_place_afterwards_is_kept_as_it_was() -> None:
    def adds(rank: Rank) -> None:
        running = None
        for batch in rank.groups[0]:
            loss = rank.loss(rank.model, batch).total
            loss.backward()
            running = loss.detach() if running is None else running.add_(loss.detach())
        rank.optimizer.step()

    (update,) = watch(adds, weight(2.0)).updates
    assert [m.root for m in update.microbatches] == [6.0, 10.0]
    assert [m.totals for m in update.microbatches] == [(6.0,), (10.0,)]


# -- what the graph still holds


def held(loop: Callable[[Rank], None]) -> list[tuple[int, int, int]]:
    updates = [[torch.ones(100, 1) for _ in range(3)] for _ in range(2)]
    trace = watch(loop, updates=updates)
    return [
        (m.held_bytes, m.held_nodes, m.held_graphs) for u in trace.updates for m in u.microbatches
    ]


def test_a_right_loop_holds_no_more_than_the_loss_of_the_microbatch_before() -> None:
    assert [a for a, _, _ in held(accumulate)] == [0] * 6
    assert [c for _, _, c in held(accumulate)] == [0, 1, 1, 1, 1, 1]


def test_a_kept_loss_keeps_its_graph_and_none_of_its_bytes() -> None:
    kept = []

    def keeps(rank: Rank, batch: Tensor, _: int) -> None:
        loss = rank.loss(rank.model, batch).total
        loss.backward()
        kept.append(loss)

    assert held(each(keeps)) == [(0, 0, k) for k in range(6)]


def test_a_kept_output_without_a_backward_keeps_its_bytes() -> None:
    kept = []

    def keeps(rank: Rank, batch: Tensor, _: int) -> None:
        kept.append(rank.module(batch.clone()))
        rank.loss(rank.model, batch).total.backward()

    found = held(each(keeps))
    # A column of 100 float32 each; the microbatch is the loss's, the output before it is one more.
    assert [a for a, _, _ in found][:3] == [400, 800, 1200]
