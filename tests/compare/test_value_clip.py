"""A clip by value: replayed bit for bit, seen when it is wrong, acquitted when written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import equivtest
from equivtest import Experiment, Loss, Plan, Rank, Verdict
from equivtest.compare.value_clip import ValueClip
from equivtest.observe.trace import OptimizerTrace, State, UpdateTrace

generator = torch.Generator().manual_seed(0)
DATA = [
    {"x": torch.randn(5, generator=generator), "y": torch.randn(1, generator=generator)}
    for _ in range(24)
]
PLAN = Plan(2, 2, 2)
ACTIVE = 0.02
INACTIVE = 1e3
PRECISIONS = ["fp64", "fp32", "bf16", "fp16", "bf16-mixed", "fp16-mixed"]
SOME = ["fp64", "bf16", "fp16-mixed"]


def squared(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    return Loss(F.mse_loss(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"]))


def an_experiment(**changes: Any) -> Experiment:
    given: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)),
        "data": DATA,
        "loss": squared,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "scaler": lambda: torch.amp.GradScaler("cpu", init_scale=2.0**10),
        "updates": 3,
    }
    return Experiment(**{**given, **changes})


def check(
    loop: Callable[[Rank], None] | None, precision: str = "fp32", wrap: Any = None, **changes: Any
) -> Verdict:
    given = {"clip_value": ACTIVE, **changes}
    return equivtest.check(
        an_experiment(**given), PLAN, precision=precision, loop=loop, wrap=wrap, timeout_s=60
    )


def updating(update: Callable[[Rank], None], weight: float = 1.0) -> Callable[[Rank], None]:
    """A loop that is right up to its gradient, but for ``weight``; ``update`` does the rest."""

    def loop(rank: Rank) -> None:
        for group in rank.groups:
            for k, batch in enumerate(group):
                rank.model.require_backward_grad_sync = k == len(group) - 1  # type: ignore[assignment]
                with rank.autocast():
                    loss = rank.loss(rank.model, batch)
                objective = weight * loss.total / group.count * rank.D
                (rank.scaler.scale(objective) if rank.scaler else objective).backward()
            update(rank)
            rank.optimizer.zero_grad()

    return loop


def finish(rank: Rank) -> None:
    """Ask for the update, by the scaler where there is one."""
    if rank.scaler is None:
        rank.optimizer.step()
        return
    rank.scaler.step(rank.optimizer)
    rank.scaler.update()


def unscaled(rank: Rank) -> None:
    if rank.scaler is not None:
        rank.scaler.unscale_(rank.optimizer)


def gradients(rank: Rank) -> list[Tensor]:
    return [p.grad for p in rank.module.parameters() if p.grad is not None]


def clamping(clamp: Callable[[list[Tensor]], None]) -> Callable[[Rank], None]:
    """A clip that ``clamp`` makes of the gradients, after unscale."""

    def update(rank: Rank) -> None:
        unscaled(rank)
        clamp(gradients(rank))
        finish(rank)

    return update


# -- the replay


def test_a_clip_by_value_clamps_each_element_and_leaves_what_it_was_given() -> None:
    given = {"a": torch.tensor([-3.0, 0.25, 0.5, 7.0]), "none": None}
    found = ValueClip(0.5).clipped(given)
    assert found["a"].tolist() == [-0.5, 0.25, 0.5, 0.5]  # type: ignore[union-attr]
    assert found["none"] is None
    assert given["a"].tolist() == [-3.0, 0.25, 0.5, 7.0]  # type: ignore[union-attr]


def an_update(held: dict[str, Tensor | None]) -> UpdateTrace:
    """One that received ``held``."""
    state = State({}, {})
    optimizer = OptimizerTrace(torch.optim.SGD, {}, ((tuple(held), {}),), {}, {})
    return UpdateTrace((), state, held, held, {}, {}, state, {}, (optimizer,), True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bound", [0.1, 1e-5, 1e-8])  # in float16 normal, subnormal, nothing
def test_a_bound_as_a_dtype_holds_it_is_the_bound(dtype: torch.dtype, bound: float) -> None:
    received = torch.tensor([1.0, 0.0]).to(dtype).clamp(-bound, bound)
    told = ValueClip(bound).received(an_update({"a": received}), {"a": torch.ones(2)})
    assert told.bounds == {"a": bound}


def test_a_tensor_whose_largest_element_is_below_the_bound_was_not_clamped_to_it() -> None:
    held = {"a": torch.tensor([0.5, 0.1]), "b": torch.tensor([0.49, 0.1]), "c": None}
    told = ValueClip(0.5).received(an_update(held), dict.fromkeys("abc", torch.ones(2)))
    assert told.bounds == {"a": 0.5, "b": torch.inf, "c": torch.inf}


def test_the_largest_element_of_a_sparse_gradient_is_told() -> None:
    held = {"a": torch.tensor([0.0, -3.0]).to_sparse(), "none": None}
    assert ValueClip(0.5).size(an_update(held)) == "the gradient's largest element is 3"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("foreach", [True, False])
def test_the_replay_has_the_bits_of_torchs_clip(dtype: torch.dtype, foreach: bool) -> None:
    # Two bounds that no binary dtype holds exactly.
    for bound in (0.1, 1 / 3):
        parameter = nn.Parameter(torch.zeros(1000, dtype=dtype))
        gradient = torch.randn(1000, generator=torch.Generator().manual_seed(1)).to(dtype)
        parameter.grad = gradient.clone()
        clip_grad_value_([parameter], bound, foreach=foreach)
        replayed = ValueClip(bound).clipped({"p": gradient})["p"]
        assert torch.equal(parameter.grad, replayed)  # type: ignore[arg-type]


# -- right loops


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bound", [ACTIVE, INACTIVE])
def test_the_recipe_clips_by_value(precision: str, bound: float) -> None:
    verdict = check(None, precision, clip_value=bound)
    assert verdict.status == "equivalent", verdict.explain()
    assert all(row.clipped for row in verdict.updates)


def one_by_one(held: list[Tensor]) -> None:
    for gradient in held:
        gradient.clamp_(-ACTIVE, ACTIVE)


def last_first(held: list[Tensor]) -> None:
    for gradient in reversed(held):
        gradient.copy_(torch.where(gradient.abs() > ACTIVE, ACTIVE * gradient.sign(), gradient))


def by_foreach(held: list[Tensor]) -> None:
    torch._foreach_clamp_max_(held, ACTIVE)
    torch._foreach_clamp_min_(held, -ACTIVE)


@pytest.mark.parametrize("precision", SOME)
@pytest.mark.parametrize("clamp", [one_by_one, last_first, by_foreach])
def test_a_clip_written_by_hand_is_equivalent(
    clamp: Callable[[list[Tensor]], None], precision: str
) -> None:
    verdict = check(updating(clamping(clamp)), precision)
    assert verdict.status == "equivalent", verdict.explain()


@pytest.mark.parametrize("precision", ["fp64", "bf16-mixed"])
def test_divided_and_clipped_by_hand_is_equivalent_and_hides_nothing(precision: str) -> None:
    """The elements within the bound say by what all were divided."""

    def loop(rank: Rank) -> None:
        for group in rank.groups:
            for k, batch in enumerate(group):
                rank.model.require_backward_grad_sync = k == len(group) - 1  # type: ignore[assignment]
                with rank.autocast():
                    rank.loss(rank.model, batch).total.backward()
            for gradient in gradients(rank):
                gradient.mul_(rank.D / group.count).clamp_(-ACTIVE, ACTIVE)
            rank.optimizer.step()
            rank.optimizer.zero_grad()

    verdict = check(loop, precision)
    assert verdict.status == "equivalent", verdict.explain()
    assert not any("by hand hides" in note for note in verdict.notes)


def divided_and_clamped(bound: float) -> Callable[[Rank], None]:
    """Four times the gradient, divided and clipped by hand."""

    def update(rank: Rank) -> None:
        for gradient in gradients(rank):
            gradient.div_(4.0).clamp_(-bound, bound)
        rank.optimizer.step()

    return updating(update, weight=4.0)


# In bf16 and fp16 the gradient's own tolerance is larger than this bound.
TIGHT = 0.005


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("bound", [TIGHT, INACTIVE])
def test_a_bound_by_hand_after_a_division_is_equivalent(precision: str, bound: float) -> None:
    verdict = check(divided_and_clamped(bound), precision, clip_value=bound)
    assert verdict.status == "equivalent", verdict.explain()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("factor", [0.5, 0.9, 1.1])
def test_another_bound_by_hand_after_a_division_is_a_fault(precision: str, factor: float) -> None:
    verdict = check(divided_and_clamped(factor * TIGHT), precision, clip_value=TIGHT)
    assert verdict.status == "fault", verdict.explain()


def test_a_bound_on_scaled_gradients_is_the_same_clip() -> None:
    def update(rank: Rank) -> None:
        clip_grad_value_(rank.module.parameters(), ACTIVE * rank.scaler.get_scale())
        finish(rank)

    verdict = check(updating(update), "fp16-mixed")
    assert verdict.status == "equivalent", verdict.explain()


class WithSpare(nn.Module):
    """A layer that no optimizer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
        self.spare = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.spare(x)


def test_what_no_optimizer_holds_need_not_be_clipped() -> None:
    def update(rank: Rank) -> None:
        clip_grad_value_(rank.module.net.parameters(), ACTIVE)  # type: ignore[union-attr,operator]
        rank.optimizer.step()
        rank.module.zero_grad()

    verdict = check(
        updating(update),
        model=WithSpare,
        optimizer=lambda model: torch.optim.SGD(model.net.parameters(), lr=0.1),
    )
    assert verdict.status == "equivalent", verdict.explain()
    assert any("no optimizer holds 'spare.bias'" in note for note in verdict.notes)


# -- faults


@pytest.mark.parametrize("precision", SOME)
def test_a_clip_left_out_where_it_is_active_is_named(precision: str) -> None:
    def update(rank: Rank) -> None:
        unscaled(rank)
        finish(rank)

    verdict = check(updating(update), precision)
    assert verdict.causes == ("clip.missing",), verdict.explain()
    assert "largest element" in verdict.findings[0].text


def test_a_clip_left_out_where_it_is_inactive_cannot_be_seen() -> None:
    verdict = check(updating(finish), clip_value=INACTIVE)
    assert verdict.status == "equivalent", verdict.explain()


@pytest.mark.parametrize("precision", SOME)
@pytest.mark.parametrize("factor", [0.98, 1.02])
def test_another_bound_is_named(precision: str, factor: float) -> None:
    def update(rank: Rank) -> None:
        unscaled(rank)
        clip_grad_value_(rank.module.parameters(), factor * ACTIVE)
        finish(rank)

    verdict = check(updating(update), precision)
    assert verdict.causes == ("differs.clip",), verdict.explain()


@pytest.mark.parametrize("precision", ["fp64", "bf16-mixed"])
def test_another_bound_by_hand_is_named(precision: str) -> None:
    def clamp(held: list[Tensor]) -> None:
        for gradient in held:
            gradient.clamp_(-1.02 * ACTIVE, 1.02 * ACTIVE)

    verdict = check(updating(clamping(clamp)), precision)
    assert verdict.causes == ("differs.clip",), verdict.explain()


def test_a_bound_that_is_off_by_a_bit_is_seen() -> None:
    def update(rank: Rank) -> None:
        clip_grad_value_(rank.module.parameters(), ACTIVE * (1 + 2**-23))
        rank.optimizer.step()

    verdict = check(updating(update))
    assert verdict.causes == ("differs.clip",), verdict.explain()


def one_sided(held: list[Tensor]) -> None:
    for gradient in held:
        gradient.clamp_(max=ACTIVE)


def first_only(held: list[Tensor]) -> None:
    held[0].clamp_(-ACTIVE, ACTIVE)


@pytest.mark.parametrize("clamp", [one_sided, first_only])
def test_half_a_clip_is_a_fault(clamp: Callable[[list[Tensor]], None]) -> None:
    verdict = check(updating(clamping(clamp)))
    assert verdict.causes == ("differs.clip",), verdict.explain()


def test_a_clip_before_unscale_is_named() -> None:
    def update(rank: Rank) -> None:
        clip_grad_value_(rank.module.parameters(), ACTIVE)
        unscaled(rank)
        finish(rank)

    verdict = check(updating(update), "fp16-mixed")
    assert verdict.causes == ("clip.before_unscale",)
    assert "came before unscale" in verdict.findings[0].text


def test_a_clip_by_norm_in_its_place_is_a_fault() -> None:
    def update(rank: Rank) -> None:
        clip_grad_norm_(rank.module.parameters(), ACTIVE)
        rank.optimizer.step()

    verdict = check(updating(update))
    assert verdict.causes == ("differs.clip",), verdict.explain()


def test_a_clip_by_value_in_the_place_of_one_by_norm_is_a_fault() -> None:
    def update(rank: Rank) -> None:
        clip_grad_value_(rank.module.parameters(), ACTIVE)
        rank.optimizer.step()

    verdict = check(updating(update), clip_value=None, clip_norm=ACTIVE)
    assert verdict.causes == ("differs.clip",), verdict.explain()


def test_a_clip_that_the_experiment_does_not_have_is_a_fault() -> None:
    def update(rank: Rank) -> None:
        clip_grad_value_(rank.module.parameters(), ACTIVE)
        rank.optimizer.step()

    verdict = check(updating(update), clip_value=None)
    assert verdict.causes == ("differs.clip",), verdict.explain()


def test_each_microbatch_clipped_is_a_fault() -> None:
    def loop(rank: Rank) -> None:
        for group in rank.groups:
            for k, batch in enumerate(group):
                rank.model.require_backward_grad_sync = k == len(group) - 1  # type: ignore[assignment]
                (rank.loss(rank.model, batch).total / group.count * rank.D).backward()
                clip_grad_value_(rank.module.parameters(), ACTIVE)
            rank.optimizer.step()
            rank.optimizer.zero_grad()

    verdict = check(loop)
    assert verdict.causes == ("clip.per_microbatch",)


@pytest.mark.parametrize("clamp", [None, one_by_one])
@pytest.mark.parametrize("precision", ["fp64", "bf16-mixed"])
def test_a_clip_does_not_hide_a_gradient_that_is_too_large(clamp: Any, precision: str) -> None:
    def by_torch(rank: Rank) -> None:
        clip_grad_value_(rank.module.parameters(), ACTIVE)
        rank.optimizer.step()

    update = by_torch if clamp is None else clamping(clamp)
    verdict = check(updating(update, weight=1.01), precision)
    assert "differs.gradient" in verdict.causes, verdict.explain()


def test_replicas_that_are_not_reduced_are_seen_behind_a_clip() -> None:
    verdict = check(updating(clamping(one_by_one)), wrap=Unreduced)
    assert verdict.causes == ("sync.never",), verdict.explain()


class Unreduced(DistributedDataParallel):
    """Reduces nothing."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self.no_sync():
            return super().forward(*inputs, **kwargs)
