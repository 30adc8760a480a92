"""Collectives called from Python are seen, whoever calls them, and whose gradients they move."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from real import watch
from torch import nn
from torch.distributed import all_reduce  # by name, as loops do
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from equivtest import Rank
from equivtest.loops import accumulate
from equivtest.observe import Trace, UpdateTrace

NAMES = ("0.weight", "0.bias", "1.weight", "1.bias")


def wider() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 8), nn.Linear(8, 1))


def backward_of_all(rank: Rank) -> None:
    """On each replica alone."""
    for batch in rank.groups[0]:
        rank.loss(rank.module, batch).total.backward()


def after(reduce: Any) -> Any:
    """A loop that reduces by hand once its microbatches are done."""

    def loop(rank: Rank) -> None:
        backward_of_all(rank)
        reduce(rank)
        rank.optimizer.step()

    return loop


def seen(trace: Trace) -> list[tuple[Any, ...]]:
    (update,) = trace.updates
    return [(c.name, c.op, c.dtype, c.elements, c.microbatch, c.phase) for c in update.collectives]


def whose(update: UpdateTrace) -> list[frozenset[str]]:
    return [c.parameters for c in update.collectives]


def test_gradients_reduced_one_by_one_are_known_by_their_memory() -> None:
    def each(rank: Rank) -> None:
        for parameter in rank.module.parameters():
            all_reduce(parameter.grad, op=dist.ReduceOp.SUM, group=rank.dp_group)
            parameter.grad /= rank.D

    trace = watch(after(each))
    assert seen(trace) == [("all_reduce", "sum", "float32", n, 1, "after") for n in (2, 2, 2, 1)]
    assert whose(trace.updates[0]) == [frozenset({name}) for name in NAMES]
    kinds = [one.kind for one in trace.updates[0].operations]
    assert kinds == ["backward"] * 2 + ["collective"] * 4
    details = [e.detail for e in trace.events if e.kind == "collective"]
    assert details[0] == "all_reduce sum float32, 2 elements, by hand"
    assert details[3] == "all_reduce sum float32, 1 element, by hand"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("divided", [False, True], ids=["whole", "divided"])
def test_a_flat_copy_of_the_gradients_is_known_by_its_contents(
    dtype: torch.dtype, divided: bool
) -> None:
    def flat(rank: Rank) -> None:
        held = [p.grad for p in rank.module.parameters()]
        buffer = torch.cat([g.flatten() for g in held]).to(dtype)  # type: ignore[union-attr]
        work = dist.all_reduce(
            buffer / rank.D if divided else buffer, group=rank.dp_group, async_op=True
        )
        work.wait()

    (update,) = watch(after(flat), build=wider).updates
    (collective,) = update.collectives
    assert (collective.elements, collective.dtype) == (25, str(dtype).removeprefix("torch."))
    assert collective.parameters == frozenset(NAMES)


def test_what_is_no_gradient_has_no_names() -> None:
    def counts(rank: Rank) -> None:
        for n in (1, 2, 4, 7, 25):
            dist.all_reduce(torch.arange(n).float(), group=rank.dp_group)
        dist.all_reduce(torch.ones(25, dtype=torch.int64), dist.ReduceOp.MAX, rank.dp_group)

    trace = watch(after(counts), build=wider)
    assert whose(trace.updates[0]) == [frozenset()] * 6
    assert trace.updates[0].collectives[-1].op == "max"
    assert "collective" not in [one.kind for one in trace.updates[0].operations]


def test_a_collective_before_the_first_forward_belongs_to_no_microbatch() -> None:
    def counts_first(rank: Rank) -> None:
        dist.all_reduce(torch.ones(1), group=rank.dp_group)
        accumulate(rank)

    assert seen(watch(counts_first)) == [("all_reduce", "sum", "float32", 1, None, "after")]


def test_every_kind_goes_by_the_name_that_users_call_it() -> None:
    def all_kinds(rank: Rank) -> None:
        one, two, group = torch.ones(1), torch.ones(2), rank.dp_group
        dist.all_gather([torch.ones(1), torch.ones(1)], one, group=group)
        dist.all_gather_into_tensor(two, one, group=group)
        dist.broadcast(one, src=0, group=group)
        dist.reduce(one, dst=0, group=group)
        dist.reduce_scatter_tensor(one, two, group=group)
        dist.all_to_all_single(two, two.clone(), group=group)

    named = [(name, elements) for name, _, _, elements, *_ in seen(watch(after(all_kinds)))]
    assert named == [
        ("all_gather", 1),
        ("all_gather_into_tensor", 1),
        ("broadcast", 1),
        ("reduce", 1),
        ("reduce_scatter_tensor", 2),
        ("all_to_all_single", 2),
    ]


def test_a_gather_in_the_forward_and_its_gradient_are_told_apart() -> None:
    def gathers(rank: Rank) -> None:
        (batch, _) = rank.groups[0]
        output = rank.module(batch)
        total = differentiable.all_reduce(output, group=rank.dp_group)
        total.sum().backward()
        rank.optimizer.step()

    assert [phase for *_, phase in seen(watch(gathers))] == ["forward", "backward"]


def by_hand(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0] / dist.get_world_size())


@pytest.mark.parametrize("hook", [by_hand, default_hooks.allreduce_hook])
def test_a_hooks_collective_is_inside_the_backward(hook: Any) -> None:
    def wrap(module: nn.Module) -> Any:
        wrapper = DistributedDataParallel(module)
        wrapper.register_comm_hook(None, hook)
        return wrapper

    trace = watch(accumulate, wrap=wrap)
    assert seen(trace) == [("all_reduce", "sum", "float32", 7, 1, "backward")]
    assert trace.updates[0].comm_hook == hook.__name__
    assert [one.kind for one in trace.updates[0].operations] == [
        "backward",
        "backward",
        "reduce",
        "zero",
    ]


def test_the_wrappers_own_are_not_the_loops() -> None:
    trace = watch(accumulate)
    assert seen(trace) == []
    assert [e.detail for e in trace.events if e.kind == "collective"] == [""]


def test_the_process_group_is_as_before_when_watching_ends() -> None:
    from ranks import a_rank, weight
    from watching import numbers, observed

    before = dist.ProcessGroup.__dict__["allreduce"]
    observed(accumulate, a_rank(weight()), numbers([[1.0]]))
    assert dist.ProcessGroup.__dict__["allreduce"] is before
