"""Right loops that are written in an odd way are left alone, and one mistake has its one name."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from diagnose.event_cases import (
    EQUAL,
    PLAN,
    accumulated,
    causes,
    experiment,
    finish,
    microbatches,
    verdict,
)
from diagnose.test_schedule import SCHEDULED
from diagnose.test_state import AVERAGED
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, get_total_norm

from equivtest import Experiment, Group, Loss, Plan, Rank
from equivtest.faults.pieces import averaged, bare, cleared, right, summed, updated
from equivtest.loops import accumulate
from equivtest.observe.handed import HandedOut
from equivtest.observe.memory import GraphMemory, LivingGraphs

PRECISIONS = ["fp64", "fp32", "bf16-mixed"]


def momentum(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


# -- the schedule at the top of an update


def scheduled_at_the_top(rank: Rank) -> None:
    scheduler, rank.scheduler = rank.scheduler, None
    for group in rank.groups:
        if group.update:
            scheduler.step()
        accumulated(rank, group)
        finish(rank)


def rate_set_at_the_top(rank: Rank) -> None:
    """No scheduler moves: the loop sets what it works out itself."""
    rank.scheduler = None
    for group in rank.groups:
        for held in rank.optimizer.param_groups:
            held["lr"] = held["initial_lr"] * max(0.0, 1 - group.update / 12)
        accumulated(rank, group)
        finish(rank)


def never_scheduled(rank: Rank) -> None:
    rank.scheduler = None
    accumulate(rank)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("loop", [scheduled_at_the_top, rate_set_at_the_top])
def test_a_schedule_at_the_top_of_an_update_is_right(
    loop: Callable[[Rank], None], precision: str
) -> None:
    assert verdict(SCHEDULED, PLAN, loop, precision).status == "equivalent"


def test_one_that_never_moves_is_not() -> None:
    assert causes(SCHEDULED, PLAN, never_scheduled) == {"sched.never"}
    # Of a single update nothing but what it leaves tells.
    alone = experiment(scheduler=SCHEDULED.scheduler, updates=1)
    assert verdict(alone, PLAN, never_scheduled).status == "fault"


def at_each_turn(rank: Rank) -> None:
    """One loop over microbatches that ends with the schedule: after the update with the last."""
    scheduler, rank.scheduler = rank.scheduler, None
    for group in rank.groups:
        for k in microbatches(rank, group):
            if k == len(group) - 1:
                finish(rank)
            scheduler.step()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("plan", [PLAN, Plan(6, 1, 2)], ids=str)
def test_a_schedule_of_microbatches_moves_before_the_update_or_behind_it(
    plan: Plan, precision: str
) -> None:
    given = replace(SCHEDULED, scheduler_unit="microbatch")
    assert verdict(given, plan, accumulate, precision).status == "equivalent"
    assert verdict(given, plan, at_each_turn, precision).status == "equivalent"


def test_one_of_microbatches_that_moves_with_updates_is_a_fault() -> None:
    given = replace(SCHEDULED, scheduler_unit="microbatch")

    def per_update(rank: Rank) -> None:
        scheduler, rank.scheduler = rank.scheduler, None
        for group in rank.groups:
            accumulated(rank, group)
            finish(rank)
            scheduler.step()

    assert verdict(given, PLAN, per_update).status == "fault"


def halving(every: int) -> Callable[[torch.optim.Optimizer], Any]:
    return lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, every, gamma=0.5)


def second_updates_alone(rank: Rank) -> None:
    scheduler, rank.scheduler = rank.scheduler, None
    for group in rank.groups:
        accumulated(rank, group)
        finish(rank)
        if group.update % 2:
            scheduler.step()


@pytest.mark.parametrize("updates", [2, 3])
def test_a_schedule_at_the_top_may_be_flat_until_the_end(updates: int) -> None:
    given = experiment(scheduler=halving(updates), updates=updates, optimizer=momentum)
    assert verdict(given, PLAN, scheduled_at_the_top).status == "equivalent"
    assert causes(given, PLAN, never_scheduled) == {"sched.never"}


@pytest.mark.parametrize(("plan", "updates"), [(PLAN, 3), (EQUAL, 4)], ids=str)
def test_calls_that_were_seen_refuse_a_reading(plan: Plan, updates: int) -> None:
    given = experiment(scheduler=halving(2), updates=updates, optimizer=momentum)
    assert causes(given, plan, second_updates_alone) == {"differs.hyperparameters"}


# -- gradients without backward()


def by_autograd_grad(rank: Rank) -> None:
    """Two calls a microbatch, each for half of the loss."""
    parameters = list(rank.module.parameters())
    for group in rank.groups:
        for batch in group:
            with rank.autocast():
                objective = right(rank, group, batch)
            for half in (objective * 0.25, objective * 0.75):
                gradients = torch.autograd.grad(half, parameters, retain_graph=True)
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    held = parameter.grad
                    parameter.grad = gradient if held is None else held + gradient
        averaged(rank)
        updated(rank)
        cleared(rank)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("plan", [PLAN, EQUAL], ids=str)
def test_gradients_by_autograd_grad_are_right(plan: Plan, precision: str) -> None:
    found = verdict(experiment(scaler=None), plan, by_autograd_grad, precision, wrap=bare)
    assert found.status == "equivalent", found.explain()


# -- forwards without a backward, and parts of a batch


def with_a_probe(rank: Rank) -> None:
    """Reads the loss of each microbatch once more with gradients on, and keeps its number."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            if not k:
                float(rank.module(batch["x"].to(rank.module.first.weight.dtype)).sum())
        accumulated(rank, group)
        finish(rank)


class Remembering(nn.Module):
    """A layer that autograd gives its own output to save."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.line(x))


def test_a_forward_without_backward_leaves_no_graph() -> None:
    """Watched or not: what a tanh saves is what it gave."""
    module = Remembering()
    memory, graphs = GraphMemory(), LivingGraphs()
    for _ in range(3):
        assert graphs.begin() == 0
        assert memory.held == (0, 0)
        with memory.watching():
            output = module(torch.ones(4, 3))
        graphs.mark(output)
        assert memory.held[1] > 0
        del output


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_forward_for_its_number_alone_costs_nothing(precision: str) -> None:
    found = verdict(experiment(), PLAN, with_a_probe, precision)
    assert "mem.kept_graph" not in found.causes
    assert "mem.kept_graph" not in {f.cause for f in found.findings}


def test_rows_of_a_batch_are_not_the_batch() -> None:
    handed, x = HandedOut(), torch.arange(12.0).reshape(4, 3)
    handed.remember({"x": x}, (7, 3, 5, 1))
    assert handed.examples([x]) == (7, 3, 5, 1)
    assert handed.examples([x[:, :2]]) == (7, 3, 5, 1)  # every row, but its last column
    assert handed.examples([x[:, 1:]]) == (7, 3, 5, 1)
    assert handed.examples([x[:2]]) is None
    assert handed.examples([x[2:]]) is None
    assert handed.examples([x, x[:1]]) is None
    one = torch.ones(1, 3)
    handed.remember(one, (9,))
    assert handed.examples([one[:, 1:]]) == (9,)


def row_by_row(rank: Rank) -> None:
    """Each microbatch cut finer by the loop: right in value, and the plan's examples."""
    for group in rank.groups:
        for batch in group:
            for i in range(len(batch["x"])):
                row = {name: held[i : i + 1] for name, held in batch.items()}
                with rank.autocast():
                    right(rank, group, row).backward()
        averaged(rank)
        updated(rank)
        cleared(rank)


def test_a_microbatch_cut_finer_holds_no_example_twice() -> None:
    found = causes(experiment(scaler=None), PLAN, row_by_row, wrap=bare)
    assert "differs.examples" not in found
    assert found <= {"differs.counters"}


def by_hand(rank: Rank) -> None:
    """No optimizer runs."""
    for group in rank.groups:
        accumulated(rank, group)
        with torch.no_grad():
            for parameter in rank.module.parameters():
                parameter -= 0.1 * parameter.grad
        cleared(rank)


def test_an_update_by_hand_is_said_not_to_be_seen() -> None:
    given = experiment(
        scaler=None, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1), updates=1
    )
    (finding, *_) = verdict(given, PLAN, by_hand).findings
    assert "attempted 0 updates" in finding.text
    assert "seen when a torch.optim.Optimizer runs" in finding.text


# -- clips that a hook or a hand makes


def own_sums(rank: Rank, group: Group) -> list[Tensor]:
    """Gradients of each microbatch's own sum, undivided, by a loss of the loop's own."""
    for k, batch in enumerate(group):
        last = k == len(group) - 1
        with contextlib.nullcontext() if last else rank.model.no_sync():
            with rank.autocast():
                off = rank.model(batch["x"].to(rank.module.first.weight.dtype)) - batch["y"]
            (off.square() * batch["counts"]).sum().backward()
    return [p.grad for p in rank.module.parameters()]


def clipped_by_a_hook(rank: Rank) -> None:
    held, bound = list(rank.module.parameters()), rank.clip_norm
    rank.optimizer.register_step_pre_hook(lambda *_: clip_grad_norm_(held, bound) and None)
    for group in rank.groups:
        accumulated(rank, group)
        updated(rank)
        cleared(rank)


def divided_and_clipped_at_once(rank: Rank) -> None:
    for group in rank.groups:
        gradients, share = own_sums(rank, group), rank.D / float(group.count)
        size = float(get_total_norm(gradients)) * share
        torch._foreach_mul_(gradients, share * min(1.0, rank.clip_norm / (size + 1e-6)))
        updated(rank)
        cleared(rank)


def clipped_to_a_scaled_bound(rank: Rank) -> None:
    """The sum is clipped to the bound of the sum, and divided then."""
    for group in rank.groups:
        gradients, share = own_sums(rank, group), rank.D / float(group.count)
        clip_grad_norm_(rank.module.parameters(), rank.clip_norm / share)
        torch._foreach_mul_(gradients, share)
        updated(rank)
        cleared(rank)


def clipped_before_it_is_divided(rank: Rank) -> None:
    for group in rank.groups:
        gradients, share = own_sums(rank, group), rank.D / float(group.count)
        clip_grad_norm_(rank.module.parameters(), rank.clip_norm)
        torch._foreach_mul_(gradients, share)
        updated(rank)
        cleared(rank)


def cleared_before_the_update(rank: Rank) -> None:
    for group in rank.groups:
        accumulated(rank, group)
        clip_grad_norm_(rank.module.parameters(), rank.clip_norm)
        rank.optimizer.zero_grad(set_to_none=False)
        rank.optimizer.step()


CLIPPED = experiment(scaler=None, clip_norm=0.1)
RIGHT_CLIPS = (clipped_by_a_hook, divided_and_clipped_at_once, clipped_to_a_scaled_bound)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("loop", RIGHT_CLIPS)
def test_a_clip_may_be_made_in_any_way(loop: Callable[[Rank], None], precision: str) -> None:
    found = verdict(CLIPPED, PLAN, loop, precision)
    assert found.status == "equivalent", found.explain()


@pytest.mark.parametrize(
    ("loop", "says"),
    [
        (clipped_before_it_is_divided, "times the clipped gradient: it was multiplied after"),
        (cleared_before_the_update, "nothing but zeros reached the optimizer"),
    ],
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_becomes_of_a_gradient_after_its_clip_is_said(
    loop: Callable[[Rank], None], says: str, precision: str
) -> None:
    found = verdict(CLIPPED, PLAN, loop, precision)
    assert found.status == "fault"
    assert any(f.cause == "differs.clip" and says in f.text for f in found.findings)


def clamped_by_hand(times: float) -> Callable[[Rank], None]:
    """Its own sums, divided, ``times`` over, and clamped."""

    def loop(rank: Rank) -> None:
        for group in rank.groups:
            gradients = own_sums(rank, group)
            torch._foreach_mul_(gradients, times * rank.D / float(group.count))
            for gradient in gradients:
                gradient.clamp_(-rank.clip_value, rank.clip_value)
            updated(rank)
            cleared(rank)

    return loop


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("plan", [PLAN, EQUAL], ids=str)
def test_a_clamp_by_hand_hides_no_factor(plan: Plan, precision: str) -> None:
    """But where all elements are beyond the bound, and every factor gives the same update."""
    tight = experiment(scaler=None, clip_value=0.005, optimizer=momentum)
    assert verdict(tight, plan, clamped_by_hand(1.0), precision).status == "equivalent"
    given = replace(tight, clip_value=0.02)
    assert verdict(given, plan, clamped_by_hand(1.0), precision).status == "equivalent"
    for times in (0.7, 0.8, 1.1, 1.5):
        assert verdict(given, plan, clamped_by_hand(times), precision).status == "fault"


def clipped_by_hand(
    rank: Rank, divide: float = 1.0, bound: float = 1.0, clips: bool = True
) -> None:
    """Divided and clipped with a norm that no hook sees, each times a factor that may be wrong."""
    for group in rank.groups:
        gradients = own_sums(rank, group)
        torch._foreach_mul_(gradients, divide * rank.D / float(group.count))
        size = float(sum((g * g).sum() for g in gradients).sqrt())
        if clips:
            torch._foreach_mul_(gradients, min(1.0, bound * rank.clip_norm / (size + 1e-6)))
        updated(rank)
        cleared(rank)


@pytest.mark.parametrize(
    ("bound", "loop", "named"),
    [
        (0.1, partial(clipped_by_hand, bound=1.01), "differs.clip"),
        (0.1, partial(clipped_by_hand, clips=False), "clip.missing"),
        (50.0, partial(clipped_by_hand, divide=0.9), "differs.gradient"),
        (50.0, partial(clipped_by_hand, divide=0.9, clips=False), "differs.gradient"),
        (50.0, partial(clipped_by_hand, divide=0.5), "norm.missing_world_size"),
    ],
)
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_what_is_divided_by_hand_is_not_called_undivided(
    bound: float, loop: Callable[[Rank], None], named: str, precision: str
) -> None:
    assert causes(replace(CLIPPED, clip_norm=bound), PLAN, loop, precision) == {named}


@pytest.mark.parametrize("bound", [0.444, 0.445, 0.446, 0.447])
def test_a_norm_at_the_bound_may_be_on_either_side_of_it(bound: float) -> None:
    """The gradient's norm is 0.4444, and under autocast rounds by as much as 0.4 %."""
    given = replace(CLIPPED, clip_norm=bound, optimizer=momentum)
    assert verdict(given, PLAN, clipped_by_hand, "bf16-mixed").status == "equivalent"


def hook_that_removes_itself(rank: Rank) -> None:
    for group in rank.groups:
        accumulated(rank, group)
        held: list[Any] = []

        def clip(*_: Any, held: list[Any] = held) -> None:
            clip_grad_norm_(rank.module.parameters(), rank.clip_norm)
            held[0].remove()

        held.append(rank.optimizer.register_step_pre_hook(clip))
        updated(rank)
        cleared(rank)


def clipped_twice(rank: Rank) -> None:
    for group in rank.groups:
        accumulated(rank, group)
        for bound in (10 * rank.clip_norm, rank.clip_norm):
            clip_grad_norm_(rank.module.parameters(), bound)
        updated(rank)
        cleared(rank)


def hook_of_each(rank: Rank) -> None:
    """Of two optimizers, each of which clips the whole model before it runs."""
    held, bound = list(rank.module.parameters()), rank.clip_norm
    for optimizer in rank.optimizer.values():
        optimizer.register_step_pre_hook(lambda *_: clip_grad_norm_(held, bound) and None)
    for group in rank.groups:
        accumulated(rank, group)
        updated(rank)
        cleared(rank)


def two_optimizers(module: nn.Module) -> dict[str, torch.optim.Optimizer]:
    return {
        "first": torch.optim.SGD(module.first.parameters(), lr=0.1),
        "last": torch.optim.SGD(module.last.parameters(), lr=0.1),
    }


@pytest.mark.parametrize("precision", PRECISIONS)
def test_clips_in_turn_are_one_clip(precision: str) -> None:
    assert verdict(CLIPPED, PLAN, hook_that_removes_itself, precision).status == "equivalent"
    assert verdict(CLIPPED, PLAN, clipped_twice, precision).status == "equivalent"
    given = replace(CLIPPED, optimizer=two_optimizers)
    assert verdict(given, PLAN, hook_of_each, precision).status == "equivalent"


# -- a skip by hand


def skipping_by_hand(rank: Rank) -> None:
    """A guard that leaves an update out whose gradient is not finite."""
    for group in rank.groups:
        accumulated(rank, group)
        norms = [p.grad.norm() for p in rank.module.parameters()]
        if torch.stack(norms).isfinite().all():
            updated(rank)
        cleared(rank)


def skipping_a_finite_one(rank: Rank) -> None:
    for group in rank.groups:
        accumulated(rank, group)
        if group.update != 1:
            updated(rank)
        cleared(rank)


def with_an_infinite_target() -> Experiment:
    """That of example 15, which is in the second update."""
    given = experiment(scaler=None)
    data = [dict(example) for _ in range(2) for example in given.data]
    data[15]["y"] = torch.full((2,), torch.inf)
    return replace(given, data=data, updates=2)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("plan", [PLAN, EQUAL], ids=str)
def test_a_skip_by_hand_of_what_is_not_finite_is_right(plan: Plan, precision: str) -> None:
    found = verdict(with_an_infinite_target(), plan, skipping_by_hand, precision)
    assert found.status == "equivalent", found.explain()
    assert [row.applied for row in found.updates].count(False) == 1


def test_an_infinite_gradient_that_is_applied_is_not() -> None:
    """The large batch has it as well: it is the experiment's."""
    found = verdict(with_an_infinite_target(), PLAN, accumulate)
    assert found.status == "unexplained"
    assert "the experiment itself diverges" in found.findings[0].text


def test_a_skip_by_hand_of_what_is_finite_is_a_fault() -> None:
    assert verdict(experiment(scaler=None), PLAN, skipping_a_finite_one).status == "fault"


# -- one mistake, one name


def rate_by_microbatches(rank: Rank) -> None:
    """The loop works out the learning rate itself, by a counter of microbatches."""
    rank.scheduler, done = None, 0
    for group in rank.groups:
        for held in rank.optimizer.param_groups:
            held["lr"] = held["initial_lr"] * max(0.0, 1 - done / 12)
        for _ in microbatches(rank, group):
            done += 1
        finish(rank)


def test_a_rate_by_a_counter_of_microbatches_is_a_schedule_per_microbatch() -> None:
    assert causes(SCHEDULED, PLAN, rate_by_microbatches) == {"sched.per_microbatch"}


def updates_inside(rank: Rank) -> None:
    """Updates per microbatch, and the schedule per group as it is due."""
    scheduler, rank.scheduler = rank.scheduler, None
    for group in rank.groups:
        for batch in group:
            right(rank, group, batch).backward()
            finish(rank)
        scheduler.step()


def test_updates_per_microbatch_have_a_schedule_that_moves() -> None:
    given = replace(SCHEDULED, scaler=None)
    assert causes(given, PLAN, updates_inside) == {"opt.update_per_microbatch"}


def over_both_sizes(rank: Rank) -> None:
    for group in rank.groups:
        for k, batch in enumerate(group):
            last = k == len(group) - 1
            with contextlib.nullcontext() if last else rank.model.no_sync():
                (right(rank, group, batch) / rank.D / len(group)).backward()
        finish(rank)


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_a_loss_over_both_sizes_has_both_names(precision: str) -> None:
    both = {"norm.missing_world_size", "norm.double_accum_division"}
    assert causes(experiment(scaler=None), PLAN, over_both_sizes, precision) == both


def divided_by_hand(rank: Rank) -> None:
    """The wrapper averages, and the loop divides what it left by D once more."""
    for group in rank.groups:
        accumulated(rank, group)
        for parameter in rank.module.parameters():
            parameter.grad.div_(rank.D)
        updated(rank)
        cleared(rank)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("plan", [PLAN, EQUAL], ids=str)
def test_gradients_divided_once_more_are_no_other_loss(plan: Plan, precision: str) -> None:
    found = verdict(experiment(scaler=None), plan, divided_by_hand, precision)
    assert set(found.causes) == {"hook.double_division"}
    # Where A = D a probe plan tells that it is D, not A, that divides.
    assert not found.findings[0].alternatives


def first_unscaled(rank: Rank) -> None:
    """The scaler is forgotten for microbatch 0."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            last = k == len(group) - 1
            with contextlib.nullcontext() if last else rank.model.no_sync():
                with rank.autocast():
                    objective = right(rank, group, batch)
                (rank.scaler.scale(objective) if k else objective).backward()
        finish(rank)


def test_a_microbatch_without_the_scale_is_said_to_have_none() -> None:
    found = verdict(experiment(), PLAN, first_unscaled, "fp16-mixed")
    assert found.causes[0] == "amp.scale_changes_inside_group"
    assert "none, 256, 256 by microbatch" in found.findings[0].text, found.findings[0].text


def test_half_of_one_element_each_is_not_one_more_count() -> None:
    """A = 1 and an element an example: 1 / (1 + 1) is any half."""
    data = [torch.randn(3, generator=torch.Generator().manual_seed(i)) for i in range(12)]
    given = Experiment(
        model=lambda: nn.Linear(3, 1),
        data=data,
        loss=lambda model, batch: Loss(model(batch).square().sum(), count=len(batch)),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        updates=2,
    )

    def halved(rank: Rank) -> None:
        for group in rank.groups:
            for batch in group:
                (right(rank, group, batch) * 0.5).backward()
            finish(rank)

    assert causes(given, Plan(2, 1, 3), halved) == {"differs.gradient"}


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(tokens)))


def next_token(model: nn.Module, lines: Tensor) -> Loss:
    total = F.cross_entropy(
        model(lines[:, :-1]).flatten(0, 1), lines[:, 1:].flatten(), reduction="sum"
    )
    return Loss(total, count=lines[:, 1:].numel())


def scaled(times: float) -> Callable[[Rank], None]:
    def loop(rank: Rank) -> None:
        for group in rank.groups:
            for k, batch in enumerate(group):
                last = k == len(group) - 1
                with contextlib.nullcontext() if last else rank.model.no_sync():
                    (right(rank, group, batch) * times).backward()
            finish(rank)

    return loop


@pytest.mark.parametrize(
    ("length", "times", "plan"),
    [
        (5, 2 / 3, PLAN),
        (5, 4 / 3, PLAN),
        (5, 0.4, PLAN),
        (5, 0.2, EQUAL),
        (3, 1 / 3, EQUAL),
        (3, 1 / 6, Plan(3, 4, 1)),
    ],
)
def test_any_number_is_a_product_and_has_no_name_for_that(
    length: int, times: float, plan: Plan
) -> None:
    """Lines of one length: means over anything are numbers."""
    drawn = torch.Generator().manual_seed(1)
    lines = [torch.randint(1, 20, (length,), generator=drawn) for _ in range(48)]
    given = Experiment(Tokens, lines, next_token, optimizer=momentum, updates=2)
    assert causes(given, plan, scaled(times)) == {"differs.gradient"}


def overlapping_halves(rank: Rank) -> None:
    for group in rank.groups:
        for batch in group:
            n = len(batch["x"])
            for first, end in ((0, n // 2 + 1), (n // 2, n)):
                part = {name: held[first:end] for name, held in batch.items()}
                right(rank, group, part).backward()
        averaged(rank)
        updated(rank)
        cleared(rank)


def test_rows_that_overlap_are_no_padding() -> None:
    """12 examples come out even over 2 replicas and in batches of 6."""
    found = causes(experiment(scaler=None), Plan(6, 1, 2), overlapping_halves, wrap=bare)
    assert found == {"differs.examples", "differs.counters"}


def calls(rank: Rank, after: Callable[[Group], int]) -> None:
    """So many calls on the average after the update of a group."""
    for group in rank.groups:
        accumulated(rank, group)
        updated(rank)
        cleared(rank)
        for _ in range(after(group)):
            rank.average.update_parameters(rank.module)


def test_an_average_that_misses_one_update_does_not_never_move() -> None:
    missing = lambda rank: calls(rank, lambda group: int(group.update > 0))  # noqa: E731
    assert causes(AVERAGED, PLAN, missing) == {"differs.state"}


def test_two_calls_after_the_update_are_not_one_a_microbatch() -> None:
    twice = lambda rank: calls(rank, lambda group: 2)  # noqa: E731
    each = lambda rank: calls(rank, len)  # noqa: E731
    assert causes(AVERAGED, PLAN, twice) == {"differs.state"}
    assert causes(AVERAGED, PLAN, each) == {"state.ema_per_microbatch"}
    assert causes(AVERAGED, PLAN, lambda rank: calls(rank, lambda group: 3)) == {"differs.state"}
    assert causes(AVERAGED, Plan(2, 2, 3), twice) == {"differs.state"}
    # At A = 2 they are the same, and a probe plan with another A tells.
    assert causes(AVERAGED, EQUAL, twice) == {"differs.state"}
    assert causes(AVERAGED, EQUAL, each) == {"state.ema_per_microbatch"}


# -- what is said


def reporting_own_loss(times: float) -> Callable[[Rank], None]:
    """A loss of the loop's own, over the replicas, is reported ``times`` over."""

    def loop(rank: Rank) -> None:
        for group in rank.groups:
            total = 0.0
            for k, batch in enumerate(group):
                last = k == len(group) - 1
                with contextlib.nullcontext() if last else rank.model.no_sync():
                    off = rank.model(batch["x"].to(rank.module.first.weight.dtype)) - batch["y"]
                    share = (off.square() * batch["counts"]).sum() / group.count
                    (share * rank.D).backward()
                total += float(share)
            rank.report(summed(rank, total) * times)
            updated(rank)
            cleared(rank)

    return loop


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_what_a_loop_reports_of_a_loss_of_its_own_is_compared(precision: str) -> None:
    given = experiment(scaler=None)
    assert verdict(given, PLAN, reporting_own_loss(1.0), precision).noted == ()
    assert verdict(given, PLAN, reporting_own_loss(1 / 3), precision).noted == ("log.loss_factor",)


def test_a_clip_that_never_acts_is_said_to_show_nothing() -> None:
    idle = verdict(replace(CLIPPED, clip_norm=1e3), PLAN, accumulate)
    assert any("the bound 1000: no update is clipped" in note for note in idle.notes), idle.notes
    active = verdict(CLIPPED, PLAN, accumulate)
    assert not any("no update is clipped" in note for note in active.notes)


def test_a_model_that_the_loop_cast_is_a_fault_and_no_error() -> None:
    def cast(rank: Rank) -> None:
        rank.module.float()
        accumulate(rank)

    found = verdict(experiment(scaler=None), PLAN, cast, "fp64")
    assert found.status == "fault", found.explain()
    assert any("is float32 in update 0, and float64" in f.text for f in found.findings)


def test_a_factor_that_float32_rounded_is_said_to_be_one() -> None:
    def in_single(rank: Rank) -> None:
        for group in rank.groups:
            third = float(torch.tensor(1.0) / 3.0)  # 1/3 in float32 is off by 3e-8 of itself
            for k, batch in enumerate(group):
                last = k == len(group) - 1
                with contextlib.nullcontext() if last else rank.model.no_sync():
                    (right(rank, group, batch) * third * 3.0).backward()
            finish(rank)

    found = verdict(experiment(scaler=None), PLAN, in_single, "fp64")
    assert found.causes == ("differs.gradient",)
    assert "counts 1 + 3.0e-8 times what the plan gives it" in found.findings[0].text
    assert "float32 rounded" in found.findings[0].text


def test_an_average_beside_the_ranks_own_is_said_to_be_another() -> None:
    def kept(rank: Rank) -> None:
        own = copy.deepcopy(rank.average)
        for group in rank.groups:
            accumulated(rank, group)
            updated(rank)
            cleared(rank)
            own.update_parameters(rank.module)

    found = verdict(AVERAGED, PLAN, kept)
    assert found.causes == ("state.ema_never",)
    assert "on another object than rank.average" in found.findings[0].text
