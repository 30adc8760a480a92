"""Loops that copy, checkpoint, transform or scale by themselves are seen for what they do."""

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import a_rank, weight
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from watching import groups, numbers, observed

from equivtest import Loss, Rank
from equivtest.loops import accumulate
from equivtest.observe import Trace
from equivtest.observe.observer import Observer

NUMBERS = numbers([[1.0, 2.0], [3.0]], [[4.0], [5.0]])
IDS = [[(0, 1), (2,)], [(3,), (4,)]]


def received(trace: Trace) -> list[list[tuple[int, ...] | None]]:
    return [[m.ids for m in u.microbatches] for u in trace.updates]


def stepping(backward: Callable[[Rank, Tensor], None]) -> Callable[[Rank], None]:
    """A loop that lets ``backward`` run each microbatch."""

    def loop(rank: Rank) -> None:
        for group in rank.groups:
            for batch in group:
                backward(rank, batch)
            rank.optimizer.step()
            rank.optimizer.zero_grad()

    return loop


# -- checkpoints


@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
def test_a_checkpoints_repetition_is_no_microbatch(reentrant: bool) -> None:
    def backward(rank: Rank, batch: Tensor) -> None:
        given = batch.requires_grad_(reentrant)
        checkpoint(rank.model, given, use_reentrant=reentrant).sum().backward()

    trace = observed(stepping(backward), a_rank(nn.Linear(1, 1)), NUMBERS)
    assert received(trace) == IDS
    assert [e.kind for e in trace.events].count("forward") == 4


def test_a_loss_inside_a_checkpoint_is_made_once() -> None:
    def backward(rank: Rank, batch: Tensor) -> None:
        made = checkpoint(lambda b: rank.loss(rank.model, b).total, batch, use_reentrant=False)
        made.backward()

    trace = observed(stepping(backward), a_rank(nn.Linear(1, 1)), NUMBERS)
    assert received(trace) == IDS
    assert {m.factors for u in trace.updates for m in u.microbatches} == {(1.0,)}


def test_dtypes_that_a_checkpoint_keeps_to_itself_are_unknown() -> None:
    def backward(rank: Rank, batch: Tensor) -> None:
        checkpoint(rank.model, batch, use_reentrant=False).exp().sum().backward()

    trace = observed(stepping(backward), a_rank(nn.Linear(1, 1)), NUMBERS)
    assert {m.dtypes for u in trace.updates for m in u.microbatches} == {()}


def test_each_microbatch_has_the_dtypes_of_its_own_forward() -> None:
    def autocast_first(rank: Rank) -> None:
        totals = []
        for k, batch in enumerate(rank.groups[0]):
            low = torch.autocast("cpu", torch.bfloat16) if k == 0 else contextlib.nullcontext()
            with low:
                totals.append(rank.loss(rank.model, batch).total)
        sum(totals).backward()  # type: ignore[union-attr]
        rank.optimizer.step()

    (update,) = observed(autocast_first, a_rank(nn.Linear(1, 1)), NUMBERS).updates
    assert ["torch.bfloat16" in m.dtypes for m in update.microbatches] == [True, False]


# -- a scaler of the loop's own


class OwnScaler(torch.amp.GradScaler):
    """Has a ``scale`` of its own, as a sharded scaler does: its unscaling tells of it."""

    def scale(self, outputs: Any) -> Any:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(outputs.device)
        return outputs * self._scale


def scaling_by(scaler: torch.amp.GradScaler) -> Callable[[Rank], None]:
    def loop(rank: Rank) -> None:
        for group in rank.groups:
            for batch in group:
                loss = rank.loss(rank.model, batch).total
                scaler.scale(loss).backward()
            scaler.step(rank.optimizer)
            scaler.update(16.0)
            rank.optimizer.zero_grad()

    return loop


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, OwnScaler])
def test_the_scale_is_that_of_the_scaler_that_the_loop_uses(kind: Any) -> None:
    given = torch.amp.GradScaler("cpu", init_scale=1024.0)
    own = kind("cpu", init_scale=8.0)
    trace = observed(scaling_by(own), a_rank(weight(), scaler=given), NUMBERS)
    assert [(u.scale, u.scale_after) for u in trace.updates] == [(8.0, 16.0), (16.0, 16.0)]


def test_a_scaler_that_is_switched_off_scales_nothing() -> None:
    given = torch.amp.GradScaler("cpu", init_scale=1024.0)
    own = torch.amp.GradScaler("cpu", enabled=False)
    trace = observed(scaling_by(own), a_rank(weight(), scaler=given), NUMBERS)
    assert [u.scale for u in trace.updates] == [None, None]


# -- copies


def test_a_copy_of_the_module_trains_and_is_not_reported() -> None:
    def copies(rank: Rank) -> None:
        loss = copy.deepcopy(rank.loss)
        shadow = AveragedModel(rank.module)
        for group in rank.groups:
            for batch in group:
                copy.deepcopy(rank.module)(batch).sum().backward()
                shadow(batch)
                loss(rank.model, batch).total.backward()
            rank.optimizer.step()
            rank.optimizer.zero_grad()
            shadow.update_parameters(rank.module)

    trace = observed(copies, a_rank(weight()), NUMBERS)
    assert received(trace) == IDS
    assert [e.kind for e in trace.events].count("forward") == 4


def test_the_module_is_saved_without_its_watchers() -> None:
    saved = io.BytesIO()

    def saves(rank: Rank) -> None:
        accumulate(rank)
        torch.save(rank.module, saved)

    observed(saves, a_rank(weight(2.0)), NUMBERS)
    saved.seek(0)
    restored = torch.load(saved, weights_only=False)
    assert restored(torch.ones(1, 1)).shape == (1, 1)


# -- transforms of torch.func


class Derivative(nn.Module):
    """Weighs the cosine of its input, taken as the sine's derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        cosine = torch.func.vmap(torch.func.grad(lambda v: torch.sin(v).sum()))
        return self.linear(cosine(x))


def test_a_forward_may_transform_functions() -> None:
    trace = observed(accumulate, a_rank(Derivative()), NUMBERS)
    assert received(trace) == IDS
    assert {m.dtypes for u in trace.updates for m in u.microbatches} == {("torch.float32",)}


def gradients_of(rank: Rank, batch: Tensor) -> dict[str, Tensor]:
    """As ``torch.func.grad`` gives them for the whole microbatch."""

    def function(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(rank.module, parameters, (batch,)).sum()

    held = {n: p.detach() for n, p in rank.module.named_parameters()}
    return torch.func.grad(function)(held)


def gradients_by_example(rank: Rank, batch: Tensor) -> dict[str, Tensor]:
    """The same, example by example and added up."""

    def function(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        out = torch.func.functional_call(rank.module, parameters, (x[None],))
        return Loss(out.sum(), count=1).total

    held = {n: p.detach() for n, p in rank.module.named_parameters()}
    alone = torch.func.vmap(torch.func.grad(function), in_dims=(None, 0))(held, batch)
    return {name: gradient.sum(0) for name, gradient in alone.items()}


@pytest.mark.parametrize("gradients", [gradients_of, gradients_by_example])
def test_a_loop_may_take_its_gradients_by_a_transform(gradients: Any) -> None:
    def add(rank: Rank, batch: Tensor) -> None:
        taken = gradients(rank, batch)
        for name, parameter in rank.module.named_parameters():
            held = parameter.grad
            parameter.grad = taken[name] if held is None else held + taken[name]

    trace = observed(stepping(add), a_rank(weight(1.0)), NUMBERS)
    assert received(trace) == IDS
    assert [u.start.parameters["weight"].item() for u in trace.updates] == [1.0, -5.0]
    assert [u.gradient["weight"].item() for u in trace.updates] == [6.0, 9.0]  # type: ignore[union-attr]


def test_parameters_swapped_for_a_call_are_not_the_modules_own() -> None:
    def backward(rank: Rank, batch: Tensor) -> None:
        doubled = {n: 2 * p for n, p in rank.module.named_parameters()}
        torch.func.functional_call(rank.module, doubled, (batch,)).sum().backward()

    first = observed(stepping(backward), a_rank(weight(1.0)), NUMBERS).updates[0]
    assert first.start.parameters["weight"].item() == 1.0


# -- forwards past the hooks


def past_the_hooks(rank: Rank, batch: Tensor) -> None:
    rank.module.forward(batch).sum().backward()


def test_gradients_without_an_observed_forward_are_said_to_be_unobserved() -> None:
    trace = observed(stepping(past_the_hooks), a_rank(weight(), clip_norm=100.0), NUMBERS)
    assert [(u.observed, u.microbatches) for u in trace.updates] == [(False, ()), (False, ())]
    assert [u.gradient["weight"].item() for u in trace.updates] == [6.0, 9.0]  # type: ignore[union-attr]
    assert trace.left_over == 0


def test_an_update_without_a_backward_has_no_microbatch_and_is_observed() -> None:
    def twice(rank: Rank) -> None:
        for batch in rank.groups[0]:
            rank.loss(rank.model, batch).total.backward()
        rank.optimizer.step()
        rank.optimizer.step()

    trace = observed(twice, a_rank(weight()), NUMBERS)
    assert [(u.observed, len(u.microbatches)) for u in trace.updates] == [(True, 2), (True, 0)]


def test_a_second_backward_through_a_known_forward_is_observed() -> None:
    def again(rank: Rank) -> None:
        loss = rank.loss(rank.model, rank.groups[0][0]).total
        for _ in range(2):
            loss.backward(retain_graph=True)
            rank.optimizer.step()
            rank.optimizer.zero_grad()

    trace = observed(again, a_rank(weight()), NUMBERS)
    assert [(u.observed, len(u.microbatches)) for u in trace.updates] == [(True, 1), (True, 0)]


# -- what the loop leaves


def test_what_the_loop_leaves_after_its_last_update_is_kept() -> None:
    module = weight()
    given = torch.optim.SGD(module.parameters(), lr=1.0)
    rank = a_rank(module, optimizer=given, average=AveragedModel(module))

    def own_optimizer(rank: Rank) -> None:
        rank.optimizer = torch.optim.SGD(rank.module.parameters(), lr=1.0, momentum=0.5)
        accumulate(rank)
        for state in rank.optimizer.state.values():
            state["momentum_buffer"].fill_(7.0)

    observer = Observer(rank, [2, 2], lambda event: None)
    rank.groups = groups(NUMBERS, observer.fetched)
    with observer.watching():
        own_optimizer(rank)
    observer.loop_ended([given])
    trace = observer.trace()
    names = trace.updates[-1].optimizers[0].names
    assert list(trace.state_after) == [names]
    assert trace.state_after[names]["weight"]["momentum_buffer"].item() == 7.0
    last = trace.updates[-1].optimizers[0].state_after["weight"]["momentum_buffer"]
    assert last.item() != 7.0
    assert trace.averages_after["n_averaged"].item() == 2


def test_gradients_taken_microbatch_by_microbatch_are_as_many_microbatches() -> None:
    def taken(rank: Rank, batch: Tensor) -> None:
        (parameter,) = rank.module.parameters()
        (gradient,) = torch.autograd.grad(rank.model(batch).sum(), [parameter])
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    assert received(observed(stepping(taken), a_rank(weight()), NUMBERS)) == IDS
