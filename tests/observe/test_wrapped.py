"""What the wrapper holds, wishes and does is seen in a real process group."""

import contextlib
from typing import Any

import pytest
import torch
from real import two_layers, watch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from equivtest import Rank
from equivtest.loops import accumulate
from equivtest.observe import UpdateTrace

FOUR = ([[1.0], [2.0], [3.0]], [[4.0], [5.0], [6.0]])


def synchronising(when: Any) -> Any:
    """A loop that suppresses the reduction unless ``when(k, last)``."""

    def loop(rank: Rank) -> None:
        for group in rank.groups:
            for k, batch in enumerate(group):
                with contextlib.nullcontext() if when(k, len(group) - 1) else rank.model.no_sync():
                    rank.loss(rank.model, batch).total.backward()
            rank.optimizer.step()
            rank.optimizer.zero_grad()

    return loop


def reduces(update: UpdateTrace) -> list[tuple[bool, bool, bool]]:
    return [(m.wrapped, m.reduces, m.flag) for m in update.microbatches]


def places(update: UpdateTrace) -> list[tuple[str, int | None]]:
    return [(one.kind, one.microbatch) for one in update.operations]


def test_the_recipe_reduces_with_the_last_backward() -> None:
    for update in watch(accumulate, *FOUR).updates:
        assert reduces(update) == [(True, False, False)] * 2 + [(True, True, True)]
        assert places(update) == [
            ("backward", 0),
            ("backward", 1),
            ("backward", 2),
            ("reduce", 2),
            ("zero", 2),
        ]
        assert update.operations[3].parameters is None


def test_an_inverted_boundary_reduces_with_the_first() -> None:
    (update,) = watch(synchronising(lambda k, _: k == 0), FOUR[0]).updates
    assert reduces(update) == [(True, True, True)] + [(True, False, False)] * 2
    assert places(update)[1] == ("reduce", 0)


def test_a_flag_that_changes_between_forward_and_backward_is_seen_at_both() -> None:
    def after_forward(rank: Rank) -> None:
        for k, batch in enumerate(rank.groups[0]):
            loss = rank.loss(rank.model, batch).total
            rank.model.require_backward_grad_sync = k == len(rank.groups[0]) - 1
            loss.backward()
        rank.optimizer.step()

    (update,) = watch(after_forward, FOUR[0]).updates
    assert reduces(update) == [(True, True, False), (True, False, False), (True, False, True)]
    assert [where for kind, where in places(update) if kind == "reduce"] == [0]


def test_a_forward_past_the_wrapper_is_bare_and_reduces_nothing() -> None:
    def bare(rank: Rank) -> None:
        for batch in rank.groups[0]:
            rank.loss(rank.module, batch).total.backward()
        rank.optimizer.step()

    trace = watch(bare)
    assert reduces(trace.updates[0]) == [(False, False, True)] * 2
    assert "collective" not in [e.kind for e in trace.events]


def test_a_reduction_that_one_forward_began_ends_with_the_backward_of_all() -> None:
    def deferred(rank: Rank) -> None:
        first, second = rank.groups[0]
        losses = rank.loss(rank.model, first).total
        with rank.model.no_sync():
            losses = losses + rank.loss(rank.model, second).total
        losses.backward()
        rank.optimizer.step()

    (update,) = watch(deferred).updates
    assert places(update) == [("backward", 1), ("reduce", 1)]


def test_a_wrapper_of_the_loops_own_is_followed() -> None:
    def own(rank: Rank) -> None:
        model = DistributedDataParallel(rank.module)
        for batch in rank.groups[0]:
            rank.loss(model, batch).total.backward()
        rank.optimizer.step()

    (update,) = watch(own).updates
    assert reduces(update) == [(True, True, True)] * 2
    assert places(update)[1::2] == [("reduce", 0), ("reduce", 1)]


# -- what it holds


def test_a_parameter_assigned_after_wrapping_is_not_the_wrappers() -> None:
    def replaces(rank: Rank) -> None:
        rank.module[1].weight = nn.Parameter(torch.ones(1, 2))  # type: ignore[index, union-attr]
        rank.optimizer = torch.optim.SGD(rank.module.parameters(), lr=0.125)
        accumulate(rank)

    (update,) = watch(replaces, wrap=DistributedDataParallel).updates
    assert update.unwrapped == frozenset({"1.weight"})
    (reduced,) = [one.parameters for one in update.operations if one.kind == "reduce"]
    assert reduced == frozenset({"0.weight", "0.bias", "1.bias"})


def test_a_parameter_thawed_after_wrapping_is_not_the_wrappers() -> None:
    def frozen(module: nn.Module) -> Any:
        module[0].requires_grad_(False)  # type: ignore[index, operator]
        return DistributedDataParallel(module)

    def thaws(rank: Rank) -> None:
        accumulate(rank)
        rank.module[0].requires_grad_(True)  # type: ignore[index, operator]
        rank.groups = rank.groups[:1]
        accumulate(rank)

    first, second = watch(thaws, wrap=frozen).updates
    assert first.unwrapped == frozenset()
    assert second.unwrapped == frozenset({"0.weight", "0.bias"})


def test_a_parameter_that_the_wrapper_was_told_to_ignore_is_not_reported() -> None:
    def ignoring(module: nn.Module) -> Any:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["0.weight"])
        return DistributedDataParallel(module)

    (update,) = watch(accumulate, wrap=ignoring).updates
    assert update.unwrapped == frozenset()
    (reduced,) = [one.parameters for one in update.operations if one.kind == "reduce"]
    assert reduced == frozenset({"0.bias", "1.weight", "1.bias"})


def test_without_a_wrapper_nothing_is_missing() -> None:
    (update,) = watch(_plainly, build=two_layers, wrap=lambda module: module).updates
    assert (update.unwrapped, update.comm_hook) == (frozenset(), "")
    assert reduces(update) == [(True, False, False)] * 2


def _plainly(rank: Rank) -> None:
    for batch in rank.groups[0]:
        rank.loss(rank.model, batch).total.backward()
    rank.optimizer.step()


@pytest.mark.parametrize(
    ("hook", "name"), [(None, ""), (default_hooks.allreduce_hook, "allreduce_hook")]
)
def test_the_communication_hook_goes_by_its_name(hook: Any, name: str) -> None:
    def wrap(module: nn.Module) -> Any:
        wrapper = DistributedDataParallel(module)
        if hook is not None:
            wrapper.register_comm_hook(None, hook)
        return wrapper

    assert [u.comm_hook for u in watch(accumulate, *FOUR, wrap=wrap).updates] == [name, name]
