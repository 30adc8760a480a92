"""The experiments of ``cases/`` with a mistake in the loop: each is seen, and for what it is.

A case that is equivalent says little if the same experiment done wrong is equivalent as well.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from equivtest import Experiment, Group, Loss, Plan, Rank, Verdict, check
from equivtest.loops import accumulate, advance, normalised, several

CASES = Path(__file__).parents[1] / "cases"
PLAN = Plan(2, 8, 2)

Loop = Callable[[Rank], None]


def case(file: str) -> Any:
    """The module of a case file."""
    if file not in sys.modules:
        spec = spec_from_file_location(file, CASES / f"{file}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[file] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[file])
    return sys.modules[file]


def nothing(rank: Rank) -> None:
    """No mistake here."""


def share(loss: Any, group: Group) -> Tensor:
    """The right share of a microbatch in the group's loss."""
    return normalised(loss, group)


def every(rank: Rank) -> list[Any]:
    return several(rank.optimizer)


def average_once(rank: Rank) -> None:
    if rank.average is not None:
        rank.average.update_parameters(rank.module)


def a_loop(
    *,
    objective: Callable[[Any, Group], Tensor] = share,
    before: Loop = nothing,
    optimizers: Callable[[Rank], list[Any]] = every,
    average: Loop = average_once,
    reduces: bool = True,
) -> Loop:
    """The recipe without a scaler, with one piece of it replaced; ``before`` is the update's."""

    def loop(rank: Rank) -> None:
        for group in rank.groups:
            for k, batch in enumerate(group):
                last = k == len(group) - 1
                rank.model.require_backward_grad_sync = reduces and last  # type: ignore[assignment]
                with rank.autocast():
                    loss = rank.loss(rank.model, batch)
                (objective(loss, group) * rank.D).backward()
            before(rank)
            for optimizer in optimizers(rank):
                optimizer.step()
            advance(rank, "applied")
            average(rank)
            rank.module.zero_grad()

    return loop


def judged(
    experiment: Experiment,
    loop: Loop | None,
    *,
    precision: str = "fp32",
    wrap: Any = None,
    plan: Plan = PLAN,
) -> Verdict:
    return check(experiment, plan, precision=precision, loop=loop, wrap=wrap, timeout_s=60)


def test_the_loop_is_right_without_a_mistake() -> None:
    for file, name in (
        ("test_wines", "averaged"),
        ("test_half_labelled", "half_labelled"),
        ("test_word_vectors", "word_vectors"),
        ("test_weighted_regression", "weighted_regression"),
        ("test_rare_targets", "rare_targets"),
    ):
        verdict = judged(getattr(case(file), name), a_loop())
        assert verdict.status == "equivalent", verdict.explain()


# -- weights, terms, and microbatches without targets


def mean_of_means(loss: Loss, group: Group) -> Tensor:
    return loss.total / loss.count / len(group) / 2  # two replicas


def mean_of_means_where_any(loss: Loss, group: Group) -> Tensor:
    return loss.total / torch.as_tensor(loss.count).clamp(min=1) / len(group) / 2


def by_the_number_of_examples(loss: Loss, group: Group) -> Tensor:
    return loss.total / 32


@pytest.mark.parametrize(
    ("objective", "cause"),
    [
        (mean_of_means, "norm.mean_of_means_both"),
        (by_the_number_of_examples, "norm.miscounted"),
    ],
)
@pytest.mark.parametrize("precision", ["fp64", "bf16-mixed"])
def test_weights_that_the_denominator_leaves_out(
    objective: Callable[[Loss, Group], Tensor], cause: str, precision: str
) -> None:
    experiment = case("test_weighted_regression").weighted_regression
    verdict = judged(experiment, a_loop(objective=objective), precision=precision)
    assert verdict.causes == (cause,), verdict.explain()


def sum_in_float32(batch: Any) -> Tensor:
    return batch["weight"].float().sum()


def too_much(batch: Any) -> Tensor:
    return 1.01 * batch["weight"].sum()


@pytest.mark.parametrize("precision", ["fp64", "bf16", "bf16-mixed"])
def test_a_sum_of_weights_adds_up_but_for_rounding(precision: str) -> None:
    experiment = case("test_weighted_regression").weighted_regression
    # Weights of which no dtype holds the sum, and a plain recipe.
    thirds = [{**e, "weight": e["weight"].double() / 3} for e in experiment.data]
    right = replace(experiment, data=thirds, count=sum_in_float32)
    verdict = judged(right, None, precision=precision)
    assert verdict.status == "equivalent", verdict.explain()
    verdict = judged(replace(right, count=too_much), None, precision=precision)
    assert verdict.status == "error"
    assert "adds up to" in verdict.explain()


def without_one(rank: Rank) -> None:
    """The recipe, with the loss of one microbatch of rank 0 times zero."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            rank.model.require_backward_grad_sync = k == len(group) - 1  # type: ignore[assignment]
            with rank.autocast():
                loss = normalised(rank.loss(rank.model, batch), group) * rank.D
            (loss * 0 if (rank.dp_rank, k) == (0, 3) else loss).backward()
        rank.optimizer.step()
        rank.optimizer.zero_grad()


def test_a_microbatch_left_out_where_there_are_fewer_elements_than_microbatches() -> None:
    # Three elements are too few to tell 64 weights by, and bfloat16 allows C more than what is left
    # out (0.005 of the scale): only the replay sees it, which shares the forwards' bits.
    draw = torch.Generator().manual_seed(1)
    data = [
        {"x": torch.randn(3, generator=draw), "y": torch.randn(1, generator=draw)}
        for _ in range(64)
    ]
    few = Experiment(
        model=lambda: torch.nn.Linear(3, 1, bias=False),
        data=data,
        loss=lambda m, b: Loss((m(b["x"]) - b["y"]).square().sum(), len(b["y"])),
        count=lambda b: len(b["y"]),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.01),
        updates=1,
    )
    verdict = judged(few, without_one, precision="bf16-mixed", plan=Plan(1, 32, 2))
    assert (verdict.status, verdict.causes) == ("fault", ("differs.gradient",)), verdict.explain()
    right = judged(few, a_loop(), precision="bf16-mixed", plan=Plan(1, 32, 2))
    assert right.status == "equivalent", right.explain()


def test_unequal_microbatches_as_if_they_were_equal() -> None:
    experiment = case("test_weighted_regression").weighted_regression
    loop = a_loop(objective=mean_of_means)
    verdict = judged(experiment, loop, precision="fp64", plan=Plan((15, 1), 2, 2))
    assert verdict.causes == ("norm.mean_of_means_both",), verdict.explain()


@pytest.mark.parametrize("objective", [mean_of_means, mean_of_means_where_any])
@pytest.mark.parametrize("precision", ["fp64", "bf16-mixed"])
def test_a_mean_over_no_targets(objective: Callable[[Loss, Group], Tensor], precision: str) -> None:
    # Over no targets the loss is NaN or zero, and cross_entropy's gradient zero either way.
    experiment = case("test_rare_targets").rare_targets
    verdict = judged(experiment, a_loop(objective=objective), precision=precision)
    assert verdict.causes == ("norm.mean_of_means_both",), verdict.explain()


def one_count_for_both(loss: Any, group: Group) -> Tensor:
    return (loss["pixels"].total + loss["labels"].total) / group.count["labels"]


def one_term_by_its_own_count(loss: Any, group: Group) -> Tensor:
    own = torch.as_tensor(loss["labels"].count).clamp(min=1) * len(group) * 2
    return loss["pixels"].total / group.count["pixels"] + loss["labels"].total / own


def one_term_left_out(loss: Any, group: Group) -> Tensor:
    return loss["pixels"].total / group.count["pixels"] + 0 * loss["labels"].total


@pytest.mark.parametrize(
    ("objective", "cause"),
    [
        (one_count_for_both, "differs.gradient"),
        (one_term_by_its_own_count, "norm.mean_of_means_both"),
        (one_term_left_out, "differs.gradient"),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_two_terms_and_the_wrong_counts(
    objective: Callable[[Any, Group], Tensor], cause: str, precision: str
) -> None:
    experiment = case("test_half_labelled").half_labelled
    verdict = judged(experiment, a_loop(objective=objective), precision=precision)
    assert verdict.cause == cause, verdict.explain()
    # Under autocast the prediction does not reach every tensor: those keep the general name.
    left = {"differs.gradient"} if precision == "bf16-mixed" else set()
    assert set(verdict.causes) <= {cause} | left, verdict.explain()


# -- two optimizers


def only_the_first(rank: Rank) -> list[Any]:
    return several(rank.optimizer)[:1]


def only_the_last(rank: Rank) -> list[Any]:
    return several(rank.optimizer)[1:]


@pytest.mark.parametrize("optimizers", [only_the_first, only_the_last])
@pytest.mark.parametrize("file", ["half_labelled", "word_vectors"])
def test_an_optimizer_that_is_never_asked(
    file: str, optimizers: Callable[[Rank], list[Any]]
) -> None:
    experiment = getattr(case(f"test_{file}"), file)
    verdict = judged(experiment, a_loop(optimizers=optimizers))
    assert "differs.counters" in verdict.causes, verdict.explain()
    assert "was not called for update 0" in verdict.explain()


def test_one_of_two_schedules_does_not_move() -> None:
    def loop(rank: Rank) -> None:
        rank.scheduler = {"coder": rank.scheduler["coder"]}
        a_loop()(rank)

    verdict = judged(case("test_half_labelled").half_labelled, loop)
    assert verdict.causes == ("sched.never",), verdict.explain()


# -- sparse gradients


def sparse_halved(rank: Rank) -> None:
    weight = rank.module.vectors.weight  # type: ignore[union-attr]
    weight.grad = weight.grad * 0.5  # type: ignore[operator]


def one_row_left_out(rank: Rank) -> None:
    weight = rank.module.vectors.weight  # type: ignore[union-attr]
    held = weight.grad.coalesce()  # type: ignore[union-attr]
    weight.grad = torch.sparse_coo_tensor(
        held.indices()[:, 1:], held.values()[1:], held.shape, check_invariants=True
    )


@pytest.mark.parametrize("before", [sparse_halved, one_row_left_out])
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16-mixed"])
def test_a_sparse_gradient_that_is_not_the_whole(before: Loop, precision: str) -> None:
    verdict = judged(
        case("test_word_vectors").word_vectors, a_loop(before=before), precision=precision
    )
    assert verdict.causes == ("differs.gradient",), verdict.explain()
    assert verdict.findings[0].tensor == "vectors.weight"


def test_a_sparse_gradient_may_be_coalesced() -> None:
    def coalesced(rank: Rank) -> None:
        weight = rank.module.vectors.weight  # type: ignore[union-attr]
        weight.grad = weight.grad.coalesce()  # type: ignore[union-attr,operator]

    verdict = judged(case("test_word_vectors").word_vectors, a_loop(before=coalesced))
    assert verdict.status == "equivalent", verdict.explain()


def test_sparse_gradients_that_are_not_reduced() -> None:
    verdict = judged(case("test_word_vectors").word_vectors, a_loop(reduces=False))
    assert verdict.causes == ("sync.never",), verdict.explain()


def test_rows_that_no_example_touched_are_moved() -> None:
    """Dense Adam on a sparse gradient made dense: rows of the update before keep on moving."""

    def loop(rank: Rank) -> None:
        weight = rank.module.vectors.weight  # type: ignore[union-attr]
        rank.optimizer["vectors"] = torch.optim.Adam([weight], lr=1e-2)  # type: ignore[list-item]

        def dense(rank: Rank) -> None:
            weight.grad = weight.grad.to_dense()  # type: ignore[union-attr,operator]

        a_loop(before=dense)(rank)

    verdict = judged(case("test_word_vectors").word_vectors, loop)
    assert verdict.causes == ("differs.parameters",), verdict.explain()
    assert "SparseAdam refuses the gradient" in verdict.findings[0].text


# -- tied, frozen and unused parameters


def shared(
    loop: Loop | None, precision: str = "fp32", wrap: Any = None, plan: Plan = PLAN
) -> Verdict:
    cases = case("test_shared_layers")
    wrap = wrap or cases.find_unused
    return judged(cases.shared_layers, loop, precision=precision, wrap=wrap, plan=plan)


def test_without_find_unused_parameters_torch_says_so() -> None:
    verdict = shared(None, wrap=DistributedDataParallel)
    assert verdict.status == "error"
    assert verdict.failure is not None
    assert "find_unused_parameters=True" in verdict.failure.text


@pytest.mark.parametrize("precision", ["fp64", "bf16-mixed"])
def test_a_tied_parameter_whose_gradient_misses_one_of_its_uses(precision: str) -> None:
    def loop(rank: Rank) -> None:
        rank.module.embedding.register_forward_hook(lambda *a: a[-1].detach())  # type: ignore[operator,union-attr]
        a_loop()(rank)

    verdict = shared(loop, precision)
    assert verdict.causes == ("differs.gradient",), verdict.explain()
    assert verdict.findings[0].tensor == "embedding.weight"


def test_a_parameter_tied_no_longer() -> None:
    def loop(rank: Rank) -> None:
        head = rank.module.head
        head.weight = torch.nn.Parameter(head.weight.detach().clone())  # type: ignore[union-attr,operator]
        rank.optimizer.add_param_group({"params": [head.weight]})  # type: ignore[union-attr]
        rank.model = DistributedDataParallel(rank.module, find_unused_parameters=True)
        a_loop()(rank)

    assert shared(loop).status in ("fault", "error")


def test_a_frozen_parameter_that_is_trained() -> None:
    def loop(rank: Rank) -> None:
        rank.module.position.requires_grad_(True)  # type: ignore[union-attr,operator]
        rank.optimizer.add_param_group({"params": rank.module.position.parameters()})  # type: ignore[union-attr]
        rank.model = DistributedDataParallel(rank.module, find_unused_parameters=True)
        a_loop()(rank)

    verdict = shared(loop)
    assert "differs.gradient" in verdict.causes, verdict.explain()
    assert any("'position.weight' has a gradient" in f.text for f in verdict.findings)


def test_a_frozen_parameter_that_is_moved_by_hand() -> None:
    def moved(rank: Rank) -> None:
        rank.module.position.weight.mul_(1.001)  # type: ignore[union-attr,operator]

    verdict = shared(a_loop(before=moved))
    assert verdict.cause == "differs.state", verdict.explain()
    assert verdict.findings[0].tensor == "position.weight"


def test_zeros_for_a_parameter_that_nothing_used() -> None:
    """Weight decay then moves what it must leave alone."""

    def zeros(rank: Rank) -> None:
        for parameter in rank.module.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    verdict = shared(a_loop(before=zeros))
    assert verdict.cause == "differs.gradient", verdict.explain()
    assert "is None on one side" in verdict.findings[0].text


@pytest.mark.parametrize("precision", ["fp64", "bf16-mixed"])
def test_an_adapter_that_few_microbatches_use_and_that_is_not_reduced(precision: str) -> None:
    # One replica's last microbatch of one example uses one adapter: the other's gradient is older.
    def loop(rank: Rank) -> None:
        ignored = [f"adapters.0.{name}" for name in ("weight", "bias")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(rank.module, ignored)
        rank.model = DistributedDataParallel(rank.module, find_unused_parameters=True)
        a_loop()(rank)

    verdict = shared(loop, precision, plan=Plan(1, 16, 2))
    assert verdict.causes == ("sync.some_unreduced",), verdict.explain()
    assert verdict.findings[0].tensor is not None
    assert verdict.findings[0].tensor.startswith("adapters.0.")


# -- averages, epochs, schedules, clips


def average_twice(rank: Rank) -> None:
    average_once(rank)
    average_once(rank)


def average_of_ten(rank: Rank) -> None:
    with torch.no_grad():
        held = zip(rank.average.module.parameters(), rank.module.parameters(), strict=True)
        for shadow, parameter in held:
            shadow.lerp_(parameter, 0.11)  # the experiment's takes a tenth
    rank.average.n_averaged += 1


@pytest.mark.parametrize(
    ("average", "cause"),
    [
        (nothing, "state.ema_never"),
        (average_twice, "differs.state"),
        (average_of_ten, "differs.state"),
    ],
)
def test_an_average_that_is_moved_otherwise(average: Loop, cause: str) -> None:
    verdict = judged(case("test_wines").averaged, a_loop(average=average))
    assert verdict.causes == (cause,), verdict.explain()


def by_a_full_groups_count(loss: Loss, group: Group) -> Tensor:
    return loss.total / 32


def test_a_last_group_under_the_denominator_of_a_full_one() -> None:
    verdict = judged(case("test_wines").two_epochs, a_loop(objective=by_a_full_groups_count))
    assert verdict.causes == ("window.partial_divisor",), verdict.explain()
    beyond = {row.update for row in verdict.rows if row.margin > 1}
    assert beyond == {1, 3}


def test_a_last_group_left_out() -> None:
    def loop(rank: Rank) -> None:
        rank.groups = [group for group in rank.groups if group.update % 2 == 0]
        a_loop()(rank)

    verdict = judged(case("test_wines").two_epochs, loop)
    assert verdict.causes == ("window.tail_dropped",), verdict.explain()


def test_a_second_epoch_in_the_order_of_the_first() -> None:
    def loop(rank: Rank) -> None:
        rank.groups = [*rank.groups[:2], *rank.groups[:2]]
        a_loop()(rank)

    verdict = judged(case("test_wines").two_epochs, loop)
    assert "differs.examples" in verdict.causes, verdict.explain()


def test_momentum_without_nesterov() -> None:
    def loop(rank: Rank) -> None:
        rank.optimizer.param_groups[0]["nesterov"] = False
        accumulate(rank)

    verdict = judged(case("test_digits_conv").digits_conv, loop)
    assert verdict.causes == ("differs.hyperparameters",), verdict.explain()


def test_a_clip_by_value_left_out() -> None:
    verdict = judged(case("test_digits_conv").digits_conv, a_loop())
    assert verdict.causes == ("clip.missing",), verdict.explain()


def test_a_bound_that_the_experiment_does_not_reach() -> None:
    def clipped(rank: Rank) -> None:
        clip_grad_norm_(rank.module.parameters(), 0.5)

    verdict = judged(case("test_wines").norm_within_bound, a_loop(before=clipped))
    assert verdict.causes == ("differs.clip",), verdict.explain()


def test_l2_as_if_it_were_decoupled_decay() -> None:
    def loop(rank: Rank) -> None:
        rank.optimizer = torch.optim.AdamW(rank.module.parameters(), lr=1e-2, weight_decay=1e-3)
        a_loop()(rank)

    verdict = judged(case("test_wines").two_epochs, loop)
    assert verdict.status == "fault", verdict.explain()


# -- loss scale


def scaled(loop_update: Loop) -> Loop:
    def loop(rank: Rank) -> None:
        for group in rank.groups:
            for k, batch in enumerate(group):
                rank.model.require_backward_grad_sync = k == len(group) - 1  # type: ignore[assignment]
                with rank.autocast():
                    loss = rank.loss(rank.model, batch)
                rank.scaler.scale(normalised(loss, group) * rank.D).backward()
            loop_update(rank)
            rank.optimizer.zero_grad()

    return loop


def scheduled_when_skipped(rank: Rank) -> None:
    rank.scaler.unscale_(rank.optimizer)
    clip_grad_norm_(rank.module.parameters(), 1.0)
    rank.scaler.step(rank.optimizer)
    rank.scaler.update()
    rank.scheduler.step()


def applied_when_it_overflows(rank: Rank) -> None:
    rank.scaler.unscale_(rank.optimizer)
    clip_grad_norm_(rank.module.parameters(), 1.0)
    rank.optimizer.step()
    rank.scaler.update()
    advance(rank, "applied")


def clipped_before_unscale(rank: Rank) -> None:
    clip_grad_norm_(rank.module.parameters(), 1.0)
    rank.scaler.unscale_(rank.optimizer)
    scale = rank.scaler.get_scale()
    rank.scaler.step(rank.optimizer)
    rank.scaler.update()
    if rank.scaler.get_scale() >= scale:
        rank.scheduler.step()


@pytest.mark.parametrize(
    ("update", "cause"),
    [
        (scheduled_when_skipped, "sched.steps_on_skip"),
        (applied_when_it_overflows, "prec.nonfinite"),
        (clipped_before_unscale, "clip.before_unscale"),
    ],
)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_skipped_update_and_what_must_not_follow_it(update: Loop, cause: str) -> None:
    verdict = judged(case("test_loss_scaling").loss_scaling, scaled(update), precision="fp16-mixed")
    assert cause in verdict.causes, verdict.explain()
