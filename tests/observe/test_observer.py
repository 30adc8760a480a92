"""The observer: it tells what a loop did, and changes nothing that the loop does."""

from typing import Any

import pytest
import torch
from ranks import a_rank, weight
from torch import Tensor, nn
from watching import numbers, observed, unobserved

import equivtest
from equivtest import Experiment, Loss, Plan, Rank
from equivtest.loops import accumulate
from equivtest.observe import Trace


def kinds(trace: Trace, update: int | None = None) -> list[str]:
    return [e.kind for e in trace.events if update is None or e.update == update]


# -- nothing is changed


def dropout_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 1)
    )


def run_both(loop: Any, make_rank: Any, updates: Any) -> list[tuple[Any, ...]]:
    """State and random numbers after the loop, observed and unobserved."""
    ends = []
    for run in (observed, unobserved):
        rank = make_rank()
        torch.manual_seed(11)
        run(loop, rank, updates)
        ends.append(
            (
                [t.clone() for t in rank.module.state_dict().values()],
                [v for s in rank.optimizer.state.values() for v in s.values()],
                torch.rand(3),
            )
        )
    return ends


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaler"])
def test_a_watched_loop_ends_with_the_bits_of_an_unwatched_one(scaled: bool) -> None:
    def make_rank() -> Rank:
        module = dropout_net()
        return a_rank(
            module,
            optimizer=torch.optim.AdamW(module.parameters(), lr=1e-2),
            clip_norm=0.5,
            scaler=torch.amp.GradScaler("cpu", init_scale=256.0) if scaled else None,
            average=torch.optim.swa_utils.AveragedModel(module),
        )

    generator = torch.Generator().manual_seed(0)
    updates = [[torch.randn(3, 4, generator=generator) for _ in range(3)] for _ in range(3)]
    (state, moments, drawn), (other, others, again) = run_both(accumulate, make_rank, updates)
    assert all(torch.equal(a, b) for a, b in zip(state, other, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(moments, others, strict=True))
    assert torch.equal(drawn, again)


def test_what_was_watched_is_as_before_when_watching_ends() -> None:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    before = [
        torch.autograd.backward,
        Optimizer.zero_grad,
        LRScheduler.step,
        torch.amp.GradScaler.step,
    ]
    rank = a_rank(weight())
    with pytest.raises(ZeroDivisionError):
        observed(lambda rank: 1 / 0, rank, numbers([[1.0]]))
    assert before == [
        torch.autograd.backward,
        Optimizer.zero_grad,
        LRScheduler.step,
        torch.amp.GradScaler.step,
    ]
    assert Loss.observer is None
    assert not rank.module._forward_pre_hooks
    assert not rank.module._forward_hooks


class ChangesWhatWasSaved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        y = (x * self.weight).exp()  # its backward needs y
        y.add_(1.0)
        return y


@pytest.mark.parametrize("run", [observed, unobserved], ids=["observed", "unobserved"])
def test_an_in_place_change_of_a_saved_tensor_still_raises(run: Any) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(accumulate, a_rank(ChangesWhatWasSaved()), numbers([[1.0]]))


# -- events

case = Experiment(
    model=lambda: nn.Linear(2, 1),
    data=[torch.ones(2) * i for i in range(8)],
    loss=lambda model, batch: Loss(model(batch).sum() * 1e-3, count=len(batch)),
    count=len,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
    averages=torch.optim.swa_utils.AveragedModel,
    scaler=lambda: torch.amp.GradScaler("cpu", init_scale=256.0),
    clip_norm=1.0,
    updates=2,
)


@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed"])
def test_the_recipes_events_come_in_its_order_on_each_rank(precision: str) -> None:
    verdict = equivtest.check(case, Plan(1, 2, 2), precision=precision, timeout_s=60)
    expected = ["forward", "backward", "forward", "backward", "collective"]
    expected += ["unscale"] if precision == "fp16-mixed" else []
    expected += ["clip", "update attempted", "update applied"]
    expected += ["scaler update"] if precision == "fp16-mixed" else []
    expected += ["scheduler", "average", "zero_grad"]
    for rank in (0, 1):
        for update in (0, 1):
            seen = [e.kind for e in verdict.events if (e.rank, e.update) == (rank, update)]
            assert seen == expected


def test_a_skipped_update_is_attempted_and_not_applied() -> None:
    rank = a_rank(weight(1.0), scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
    trace = observed(accumulate, rank, numbers([[float("inf")]], [[1.0]]))
    assert kinds(trace, 0) == [
        "forward",
        "backward",
        "unscale",
        "update attempted",
        "update skipped",
        "scaler update",
        "zero_grad",
    ]
    skipped, applied = trace.updates
    assert (skipped.applied, applied.applied) == (False, True)
    assert (skipped.scale, skipped.scale_after) == (4.0, 2.0)
    # Updates since the scale last moved.
    assert [update.scaler_after["_growth_tracker"] for update in trace.updates] == [0, 1]
    assert skipped.after["weight"].item() == 1.0
    assert applied.scale == 2.0


def test_events_carry_the_microbatch_they_belong_to() -> None:
    trace = observed(accumulate, a_rank(weight()), numbers([[1.0], [2.0]]))
    assert [(e.kind, e.microbatch) for e in trace.events[:4]] == [
        ("forward", 0),
        ("backward", 0),
        ("forward", 1),
        ("backward", 1),
    ]


def test_every_event_is_told_at_once_where_it_survives_the_process() -> None:
    from equivtest.observe.observer import Observer

    told: list[str] = []
    rank = a_rank(weight())
    with Observer(rank, [1], told.append).watching():
        rank.loss(rank.model, torch.ones(1, 1)).total.backward()
        assert told[-1].startswith("backward of microbatch 0")


# -- what each microbatch leaves


def test_losses_counts_and_root_factors_are_seen() -> None:
    # w = 2, microbatches 1, 2 | 3: totals 6 and 6, counts 2 and 1, each over the group's 3.
    trace = observed(accumulate, a_rank(weight(2.0)), numbers([[1.0, 2.0], [3.0]]))
    first, second = trace.updates[0].microbatches
    assert (first.totals, first.counts) == ((6.0,), (2.0,))
    assert (second.totals, second.counts) == ((6.0,), (1.0,))
    assert first.factors == second.factors == (pytest.approx(1 / 3),)


def test_the_root_factor_is_what_the_loop_multiplied_the_total_by() -> None:
    def by_mean_times_seven(rank: Rank) -> None:
        for group in rank.groups:
            for batch in group:
                loss = rank.loss(rank.model, batch)
                (loss.total / loss.count * 7).backward()
            rank.optimizer.step()

    trace = observed(by_mean_times_seven, a_rank(weight()), numbers([[1.0, 2.0], [3.0]]))
    assert [m.factors for m in trace.updates[0].microbatches] == [(3.5,), (7.0,)]


def test_a_loss_that_no_backward_reaches_has_no_factor() -> None:
    def only_the_last(rank: Rank) -> None:
        for group in rank.groups:
            losses = [rank.loss(rank.model, batch) for batch in group]
            losses[-1].total.backward()
            rank.optimizer.step()

    trace = observed(only_the_last, a_rank(weight()), numbers([[1.0], [2.0]]))
    assert [m.factors for m in trace.updates[0].microbatches][-1] == (1.0,)
    assert all(m.factors == (None,) for m in trace.updates[0].microbatches[:-1])


def test_random_state_is_kept_where_the_forward_drew_from_it() -> None:
    updates = [[torch.ones(2, 4)]]
    drew = observed(accumulate, a_rank(dropout_net()), updates).updates[0].microbatches[0]
    assert drew.rng is not None
    plain = observed(accumulate, a_rank(weight()), numbers([[1.0]]))
    assert plain.updates[0].microbatches[0].rng is None


def test_dtypes_of_the_forward_are_those_that_autograd_saved() -> None:
    rank = a_rank(nn.Linear(1, 1), _autocast=lambda: torch.autocast("cpu", dtype=torch.bfloat16))
    seen = observed(accumulate, rank, numbers([[1.0]])).updates[0].microbatches[0].dtypes
    assert "torch.bfloat16" in seen
    plain = observed(accumulate, a_rank(nn.Linear(1, 1)), numbers([[1.0]]))
    assert plain.updates[0].microbatches[0].dtypes == ("torch.float32",)


# -- examples


def received(loop: Any, updates: Any = None) -> list[list[tuple[int, ...] | None]]:
    trace = observed(
        loop, a_rank(weight()), updates or numbers([[1.0, 2.0], [3.0]], [[4.0], [5.0]])
    )
    return [[m.ids for m in u.microbatches] for u in trace.updates]


def with_batches(change: Any) -> Any:
    """A loop whose forward gets ``change(batch)``, past the experiment's loss."""

    def loop(rank: Rank) -> None:
        for group in rank.groups:
            for batch in group:
                rank.model(change(batch)).sum().backward()
            rank.optimizer.step()

    return loop


def test_examples_are_known_in_every_microbatch_of_every_update() -> None:
    assert received(accumulate) == [[(0, 1), (2,)], [(3,), (4,)]]


@pytest.mark.parametrize(
    "change",
    [lambda b: b, lambda b: b.view(-1, 1), lambda b: b[..., -1:], lambda b: b.detach()],
    ids=["itself", "view", "columns", "detached"],
)
def test_examples_are_known_by_the_memory_that_the_forward_received(change: Any) -> None:
    assert received(with_batches(change)) == [[(0, 1), (2,)], [(3,), (4,)]]


def test_examples_of_a_copy_are_unknown_and_never_guessed_from_order() -> None:
    assert received(with_batches(torch.clone)) == [[None, None], [None, None]]


def test_a_loop_that_reads_ahead_is_seen_with_the_examples_it_used() -> None:
    def reads_ahead(rank: Rank) -> None:
        batches = [(batch, k == len(g) - 1) for g in rank.groups for k, batch in enumerate(g)]
        for batch, last in batches:
            rank.loss(rank.model, batch).total.backward()
            if last:
                rank.optimizer.step()

    assert received(reads_ahead) == [[(0, 1), (2,)], [(3,), (4,)]]


def test_a_batch_of_two_microbatches_examples_is_unknown() -> None:
    def pair_loss(model: Any, batch: Any) -> Loss:
        return Loss(sum(model(b).sum() for b in batch), count=2)

    def as_one(rank: Rank) -> None:
        for group in rank.groups:
            rank.loss(rank.model, list(group)).total.backward()
            rank.optimizer.step()

    trace = observed(as_one, a_rank(weight(), loss=pair_loss), numbers([[1.0], [2.0]]))
    assert trace.updates[0].microbatches[0].ids is None


# -- updates


def test_gradients_are_taken_before_and_after_the_clip() -> None:
    # Gradient (3 + 5) / 2 = 4, bound 2.
    trace = observed(accumulate, a_rank(weight(), clip_norm=2.0), numbers([[3.0], [5.0]]))
    (update,) = trace.updates
    assert update.gradient["weight"].item() == 4.0  # type: ignore[union-attr]
    assert update.clipped["weight"].item() == pytest.approx(2.0, rel=1e-6)  # type: ignore[union-attr]
    assert update.clip_bounds == (2.0,)
    assert update.before["weight"].item() == 0.0
    assert update.after["weight"].item() == pytest.approx(-2.0, rel=1e-6)


def test_gradients_are_taken_before_and_after_a_clip_by_value() -> None:
    # The same gradient of 4, bounded by 2.5; both halves of the clamp are one clip.
    rank = a_rank(weight(), clip_value=2.5)
    trace = observed(accumulate, rank, numbers([[3.0], [5.0]]))
    (update,) = trace.updates
    assert update.gradient["weight"].item() == 4.0  # type: ignore[union-attr]
    assert update.clipped["weight"].item() == 2.5  # type: ignore[union-attr]
    assert update.clip_bounds == (2.5,)
    assert [e.detail for e in trace.events if e.kind == "clip"] == ["bound 2.5"]


def test_clamping_anything_else_is_no_clip() -> None:
    def loop(rank: Rank) -> None:
        for group in rank.groups:
            for batch in group:
                rank.loss(rank.model, batch).total.backward()
            torch._foreach_clamp_min_([torch.zeros(2)], 1.0)
            rank.optimizer.step()

    trace = observed(loop, a_rank(weight(), clip_value=2.5), numbers([[3.0]]))
    assert trace.updates[0].clip_bounds == ()


def test_gradients_are_taken_without_the_loss_scale() -> None:
    rank = a_rank(weight(), scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    (update,) = observed(accumulate, rank, numbers([[3.0], [5.0]])).updates
    assert update.gradient["weight"].item() == 4.0  # type: ignore[union-attr]
    assert update.scale == 1024.0


def test_a_clip_of_scaled_gradients_is_said_and_the_gradient_descaled() -> None:
    def clips_too_early(rank: Rank) -> None:
        for group in rank.groups:
            for batch in group:
                rank.scaler.scale(rank.loss(rank.model, batch).total).backward()
            nn.utils.clip_grad_norm_(rank.module.parameters(), 1.0)
            rank.scaler.step(rank.optimizer)
            rank.scaler.update()

    rank = a_rank(weight(), scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    (update,) = observed(clips_too_early, rank, numbers([[0.5]])).updates
    assert update.clipped_scaled
    assert update.gradient["weight"].item() == 0.5  # type: ignore[union-attr]
    # Norm 512 clipped to 1, over the scale.
    assert update.clipped["weight"].item() == pytest.approx(1 / 1024, rel=1e-4)  # type: ignore[union-attr]


def test_an_unused_parameter_has_none_for_a_gradient() -> None:
    module = nn.ModuleDict({"used": weight(), "unused": weight()})
    module.forward = module["used"].forward  # type: ignore[method-assign]
    (update,) = observed(accumulate, a_rank(module), numbers([[1.0]])).updates
    assert update.gradient["unused.weight"] is None
    assert update.gradient["used.weight"] is not None


def test_microbatches_after_the_last_update_are_left_over() -> None:
    def forgets_the_tail(rank: Rank) -> None:
        first, second = rank.groups
        accumulate(_with_groups(rank, [first]))
        for batch in second:
            rank.loss(rank.model, batch).total.backward()

    trace = observed(forgets_the_tail, a_rank(weight()), numbers([[1.0]], [[1.0], [2.0]]))
    assert len(trace.updates) == 1
    assert trace.left_over == 2


def _with_groups(rank: Rank, groups: Any) -> Rank:
    rank.groups = groups
    return rank


def test_an_evaluation_without_gradients_is_no_microbatch() -> None:
    def evaluates(rank: Rank) -> None:
        for group in rank.groups:
            with torch.no_grad():
                rank.loss(rank.model, group[0])
            accumulate(_with_groups(rank, [group]))

    trace = observed(evaluates, a_rank(weight()), numbers([[1.0], [2.0]]))
    assert len(trace.updates[0].microbatches) == 2


def test_a_second_update_without_a_forward_is_an_update_of_its_own() -> None:
    def twice(rank: Rank) -> None:
        for group in rank.groups:
            for batch in group:
                rank.loss(rank.model, batch).total.backward()
            rank.optimizer.step()
            rank.optimizer.step()

    trace = observed(twice, a_rank(weight()), numbers([[1.0]]))
    assert [len(u.microbatches) for u in trace.updates] == [1, 0]


def two_parts() -> tuple[nn.Module, dict[str, torch.optim.Optimizer]]:
    module = nn.Sequential(weight(1.0), weight(1.0))
    return module, {
        "first": torch.optim.SGD(module[0].parameters(), lr=1.0),
        "second": torch.optim.AdamW(module[1].parameters(), lr=0.5),
    }


def test_two_optimizers_share_one_update() -> None:
    module, optimizers = two_parts()
    (update,) = observed(accumulate, a_rank(module, optimizer=optimizers), numbers([[2.0]])).updates
    assert [o.kind.__name__ for o in update.optimizers] == ["SGD", "AdamW"]
    assert [sorted(o.names) for o in update.optimizers] == [["0.weight"], ["1.weight"]]
    assert update.before["0.weight"].item() == 1.0
    assert update.after["0.weight"].item() == -1.0  # its gradient is 2
    assert update.clipped["0.weight"].item() == 2.0  # type: ignore[union-attr]
    assert update.clipped["1.weight"].item() == 2.0  # type: ignore[union-attr]


def test_state_is_kept_before_and_after_the_update() -> None:
    module = weight()
    rank = a_rank(module, optimizer=torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.5))
    first, second = observed(accumulate, rank, numbers([[1.0]], [[1.0]])).updates
    momentum = [
        [s.get("weight", {}).get("momentum_buffer") for s in (o.state_before, o.state_after)]
        for o in (first.optimizers[0], second.optimizers[0])
    ]
    # 1, then 0.5 x 1 + 1
    assert [[None if m is None else m.item() for m in pair] for pair in momentum] == [
        [None, 1.0],
        [1.0, 1.5],
    ]


def test_a_last_microbatch_inside_the_closure_belongs_to_the_update() -> None:
    # As some trainers do: the last backward runs inside optimizer.step(closure).
    def in_closure(rank: Rank) -> None:
        for group in rank.groups:
            *first, last = group
            for batch in first:
                rank.loss(rank.model, batch).total.backward()

            def closure(last: Tensor = last) -> Tensor:
                loss = rank.loss(rank.model, last).total
                loss.backward()
                return loss

            rank.optimizer.step(closure)
            rank.optimizer.zero_grad()

    trace = observed(in_closure, a_rank(weight()), numbers([[1.0], [2.0]], [[3.0], [4.0]]))
    assert [len(u.microbatches) for u in trace.updates] == [2, 2]
    assert [u.gradient["weight"].item() for u in trace.updates] == [3.0, 7.0]  # type: ignore[union-attr]
    assert [u.optimizers[0].closures for u in trace.updates] == [1, 1]
    assert all(u.applied for u in trace.updates)


def test_an_optimizer_that_evaluates_its_closure_again_makes_one_update() -> None:
    def quadratic(model: nn.Module, batch: Tensor) -> Loss:
        return Loss(((model(batch) - 1) ** 2).sum(), count=len(batch))

    def with_closure(rank: Rank) -> None:
        for group in rank.groups:

            def closure(batch: Tensor = group[0]) -> Tensor:
                rank.optimizer.zero_grad()
                loss = rank.loss(rank.model, batch).total
                loss.backward()
                return loss

            rank.optimizer.step(closure)

    module = weight()
    lbfgs = torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3)
    rank = a_rank(module, optimizer=lbfgs, loss=quadratic)
    trace = observed(with_closure, rank, numbers([[1.0]], [[2.0]]))
    assert len(trace.updates) == 2
    for update in trace.updates:
        assert update.applied
        assert update.optimizers[0].closures > 1
    # The first evaluation's gradient: 2 (0 - 1) x 1.
    assert trace.updates[0].gradient["weight"].item() == -2.0  # type: ignore[union-attr]
    assert trace.updates[0].after["weight"].item() != 0.0


# -- memory


class Exponential(nn.Module):
    """Saves its input for the weight's gradient, and its output for the exponential's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).exp()


def one_backward(rank: Rank) -> None:
    for group in rank.groups:
        sum(rank.loss(rank.model, batch).total for batch in group).backward()  # type: ignore[union-attr]
        rank.optimizer.step()
        rank.optimizer.zero_grad()


def peaks(loop: Any, microbatches: int) -> list[int]:
    updates = [[torch.ones(100, 1) for _ in range(microbatches)]]
    (update,) = observed(loop, a_rank(Exponential()), updates).updates
    return [m.peak_bytes for m in update.microbatches]


def test_a_microbatch_holds_what_its_graph_saved() -> None:
    # 100 inputs and 100 outputs of four bytes; the input wants no gradient, so no weight is saved.
    assert peaks(accumulate, 3) == [800, 800, 800]


def test_one_backward_for_all_microbatches_holds_the_activations_of_all() -> None:
    assert max(peaks(one_backward, 1)) == 800
    assert max(peaks(one_backward, 4)) == 4 * 800
