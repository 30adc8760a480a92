"""Continuity and agreement, on traces written by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from equivtest.compare.continuity import agreement, continuity, same_values
from equivtest.observe.trace import OptimizerTrace, State, Trace, UpdateTrace

W0, W1, W2 = (torch.tensor([float(v)]) for v in (1, 2, 3))
GROUPS = ((("w",), {"lr": 0.1}),)


def counted(steps: float, momentum: float) -> dict[str, dict[str, Tensor]]:
    return {"w": {"step": torch.tensor(steps), "m": torch.tensor([momentum])}}


def an_update(before: Tensor, after: Tensor, u: int, **changes: Any) -> UpdateTrace:
    optimizer = OptimizerTrace(
        torch.optim.Adam,
        {},
        GROUPS,
        state_before=counted(u, float(u)) if u else {},
        state_after=counted(u + 1, float(u + 1)),
        applied=True,
    )
    given: dict[str, Any] = {
        "microbatches": (),
        "start": State({"w": before}, {}),
        "gradient": {"w": torch.ones(1)},
        "clipped": {"w": torch.ones(1)},
        "before": {"w": before},
        "after": {"w": after},
        "end": State({"w": after}, {}),
        "averages": {},
        "optimizers": (optimizer,),
        "applied": True,
    }
    return UpdateTrace(**{**given, **changes})


FIRST, SECOND = an_update(W0, W1, 0), an_update(W1, W2, 1)


def found(*updates: UpdateTrace, initial: Tensor = W0) -> list[tuple[str, int | None, str]]:
    trace = Trace(rank=1, updates=updates)
    return [(f.cause, f.update, f.text) for f in continuity(trace, {"w": initial})]


def with_optimizer(update: UpdateTrace, **changes: Any) -> UpdateTrace:
    return replace(update, optimizers=(replace(update.optimizers[0], **changes),))


def test_a_run_in_which_only_updates_move_is_continuous() -> None:
    assert found(FIRST, SECOND) == []


def test_the_first_update_starts_from_what_the_factory_gives() -> None:
    ((cause, update, text),) = found(FIRST, SECOND, initial=W2)
    # |1 - 3| / 3
    assert (cause, update) == ("differs.state", 0)
    assert "parameter 'w' moved by 0.667 of its norm before the first update" in text


def test_parameters_that_move_between_updates_are_found_there() -> None:
    moved = an_update(W1 + 1e-6, W2, 1)
    ((cause, update, text),) = found(FIRST, moved)
    assert (cause, update) == ("differs.state", 1)
    assert "between update 0 and 1" in text


def test_parameters_that_move_while_gradients_accumulate_are_found() -> None:
    moved = replace(FIRST, before={"w": W0 + 1})
    ((cause, update, text),) = found(moved)
    assert (cause, update) == ("differs.state", 0)
    assert "during accumulation" in text


def test_parameters_that_move_after_the_last_update_are_found() -> None:
    moved = replace(SECOND, end=State({"w": W2 + 1}, {}))
    ((cause, update, text),) = found(FIRST, moved)
    assert (cause, update) == ("differs.state", 1)
    assert "after the last update" in text


def test_one_unit_in_the_last_place_is_a_move() -> None:
    next_to = torch.nextafter(W1, torch.tensor([9.0]))
    assert len(found(FIRST, an_update(next_to, W2, 1))) == 1


def test_a_parameter_that_disappears_is_named() -> None:
    gone = replace(FIRST, start=State({}, {}), before={}, after={}, end=State({}, {}))
    assert ("differs.state", 0) in [(c, u) for c, u, t in found(gone) if "'w' disappeared" in t]


def test_state_that_is_gone_says_that_the_optimizer_was_built_again() -> None:
    lost = with_optimizer(SECOND, state_before={}, state_after=counted(1, 1.0))
    ((cause, update, text),) = found(FIRST, lost)
    assert (cause, update) == ("differs.state", 1)
    assert "optimizer state of 1 of 1 parameters is gone" in text


def test_momentum_that_changed_between_updates_is_named_by_its_key() -> None:
    halved = with_optimizer(SECOND, state_before=counted(1, 0.5))
    ((cause, update, text),) = found(FIRST, halved)
    assert (cause, update) == ("differs.state", 1)
    assert "optimizer state 'm' of 'w' moved by 0.5 of its norm" in text


def test_a_counter_that_stands_still_is_a_fault_of_counters() -> None:
    still = with_optimizer(FIRST, state_after=counted(0, 1.0))
    assert [c for c, _, _ in found(still)] == ["differs.counters"]


def test_a_counter_that_moves_with_a_skipped_update_is_a_fault_of_counters() -> None:
    skipped = with_optimizer(FIRST, applied=False)
    skipped = replace(skipped, applied=False, after={"w": W0}, end=State({"w": W0}, {}))
    assert [c for c, _, _ in found(skipped)] == ["differs.counters"]


def test_a_counter_that_begins_above_zero_is_a_fault_of_state() -> None:
    old = with_optimizer(FIRST, state_before=counted(5, 0.0), state_after=counted(6, 1.0))
    ((cause, _, text),) = found(old)
    assert cause == "differs.state"
    assert "already counted" in text


def test_a_loss_scale_that_moves_between_updates_is_found() -> None:
    first = replace(FIRST, scale=4.0, scale_after=2.0)
    assert found(first, replace(SECOND, scale=2.0)) == []
    ((cause, update, text),) = found(first, replace(SECOND, scale=4.0))
    assert (cause, update) == ("differs.state", 1)
    assert "is 4 at update 1, and was 2 after update 0" in text


# -- equality


def test_values_are_the_same_element_by_element_with_nan_as_nan() -> None:
    nan = torch.tensor([1.0, float("nan")])
    assert same_values(nan, nan.clone())
    assert not same_values(nan, torch.tensor([float("nan"), 1.0]))
    assert same_values(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_values(torch.ones(2), torch.ones(1, 2))
    assert not same_values(torch.ones(1), torch.ones(1).double())
    assert not same_values(torch.ones(1), None)
    assert same_values(3, 3)
    assert not same_values(3, torch.tensor(3))


def test_a_sparse_tensor_is_the_same_as_itself_and_not_as_another() -> None:
    where, shape = torch.tensor([[1]]), (3,)
    one, two = (
        torch.sparse_coo_tensor(where, torch.tensor([v]), shape, check_invariants=True)
        for v in (1.0, 2.0)
    )
    assert same_values(one, one.clone())
    assert not same_values(one, two)


# -- ranks


def test_a_rank_alone_agrees() -> None:
    assert agreement([Trace(0, (FIRST,))]) == ([], ("rank 0: alone",))


def test_ranks_with_the_same_bits_agree() -> None:
    findings, said = agreement([Trace(0, (FIRST, SECOND)), Trace(1, (FIRST, SECOND))])
    assert findings == []
    assert said[1] == "rank 1: gradients and parameters are rank 0's, bit for bit"


@pytest.mark.parametrize(
    ("field", "what"),
    [
        ("gradient", "gradient 'w'"),
        ("clipped", "clipped gradient 'w'"),
        ("after", "parameter after the update 'w'"),
    ],
)
def test_a_rank_that_differs_is_named_with_where_and_by_how_much(field: str, what: str) -> None:
    # Right mean, wrong ranks: 1 and 3, say, for 2.
    ours = replace(FIRST, **{field: {"w": torch.tensor([1.0])}})
    theirs = replace(FIRST, **{field: {"w": torch.tensor([3.0])}})
    (finding,), said = agreement([Trace(0, (ours,)), Trace(1, (theirs,))])
    assert (finding.cause, finding.rank, finding.update) == ("differs.ranks", 1, 0)
    assert finding.distance == 2.0
    assert finding.text.startswith(f"{what} of rank 1 is 2 of its norm away")
    assert said[1] == f"rank 1: {finding.text}"


def test_none_on_one_rank_is_not_zero_on_another() -> None:
    zero = replace(FIRST, gradient={"w": torch.zeros(1)})
    none = replace(FIRST, gradient={"w": None})
    assert [f.cause for f in agreement([Trace(0, (none,)), Trace(1, (zero,))])[0]] == [
        "differs.ranks"
    ]
    assert agreement([Trace(0, (none,)), Trace(1, (none,))])[0] == []


def test_ranks_with_other_numbers_of_updates_disagree() -> None:
    (finding,), _ = agreement([Trace(0, (FIRST, SECOND)), Trace(1, (FIRST,))])
    assert finding.text == "rank 1 attempted 1 updates and rank 0 2"
