"""Parameters, state, clip, schedule and averages, judged on the loop's own gradient."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equivtest
from equivtest import Experiment, Loss, Plan, Rank, Verdict
from equivtest.compare import optimizer as replayed
from equivtest.compare.norm_clip import NormClip
from equivtest.loops import accumulate, normalised
from equivtest.observe.snapshot import hyperparameters
from equivtest.observe.trace import OptimizerTrace

generator = torch.Generator().manual_seed(0)
DATA = [
    {"x": torch.randn(5, generator=generator), "y": torch.randn(1, generator=generator)}
    for _ in range(24)
]
PLAN = Plan(2, 2, 2)


def squared(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    return Loss(F.mse_loss(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"]))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def an_experiment(**changes) -> Experiment:
    given = {
        "model": lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)),
        "data": DATA,
        "loss": squared,
        "count": lambda batch: len(batch["y"]),
        "optimizer": adamw,
        "updates": 3,
    }
    return Experiment(**{**given, **changes})


def check(loop: Callable[[Rank], None] | None, precision: str = "fp32", **changes) -> Verdict:
    return equivtest.check(
        an_experiment(**changes), PLAN, precision=precision, loop=loop, timeout_s=60
    )


def backwards(rank: Rank, group) -> None:
    for k, batch in enumerate(group):
        rank.model.require_backward_grad_sync = k == len(group) - 1  # type: ignore[assignment]
        with rank.autocast():
            loss = rank.loss(rank.model, batch)
        objective = normalised(loss, group) * rank.D
        (rank.scaler.scale(objective) if rank.scaler else objective).backward()


def updating(update: Callable[[Rank, int], None]) -> Callable[[Rank], None]:
    """A loop that is right up to its gradient; ``update`` does the rest of update u."""

    def loop(rank: Rank) -> None:
        for u, group in enumerate(rank.groups):
            backwards(rank, group)
            update(rank, u)
            rank.optimizer.zero_grad()

    return loop


def the_optimizer(rank: Rank, u: int) -> None:
    rank.optimizer.step()


def test_a_loop_with_its_own_accumulation_is_equivalent() -> None:
    verdict = check(updating(the_optimizer))
    assert verdict.status == "equivalent", verdict.explain()


# -- hyperparameters

PRECISIONS = ["fp64", "fp32", "bf16", "bf16-mixed"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_learning_rate_one_percent_off_is_a_fault_in_every_precision(precision: str) -> None:
    def loop(rank: Rank) -> None:
        rank.optimizer.param_groups[0]["lr"] *= 1.01
        accumulate(rank)

    verdict = check(loop, precision)
    assert verdict.status == "fault"
    assert verdict.causes == ("differs.hyperparameters",)
    assert "lr=0.0101, expected 0.01" in verdict.explain()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_decay_left_out_is_a_fault_in_every_precision(precision: str) -> None:
    def loop(rank: Rank) -> None:
        rank.optimizer.param_groups[0]["weight_decay"] = 0.0
        accumulate(rank)

    assert check(loop, precision).causes == ("differs.hyperparameters",)


def test_a_hyperparameter_put_back_after_the_update_is_still_seen() -> None:
    def sneaky(rank: Rank, u: int) -> None:
        group = rank.optimizer.param_groups[0]
        group["lr"] *= 2
        rank.optimizer.step()
        group["lr"] /= 2

    assert "differs.hyperparameters" in check(updating(sneaky)).causes


def test_same_hyperparameters_are_compared_by_value() -> None:
    wanted = {"lr": 0.1, "betas": (0.9, 0.99), "foreach": None, "initial_lr": 1.0}
    same = {"lr": torch.tensor(0.1, dtype=torch.float64), "betas": (0.9, 0.99), "foreach": True}
    assert replayed.same_hyperparameters(same, wanted) == []
    assert replayed.same_hyperparameters({**same, "betas": (0.9, 0.999)}, wanted) == [
        "betas=(0.9, 0.999), expected (0.9, 0.99)"
    ]
    # A key of the loop's own (a group's name) changes nothing; one that is missing does.
    assert replayed.same_hyperparameters({**same, "name": "all"}, wanted) == []
    assert replayed.same_hyperparameters({"betas": (0.9, 0.99)}, wanted) == [
        "lr=None, expected 0.1"
    ]


# -- schedule


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


@pytest.mark.parametrize(
    ("unit", "rates"),
    [
        # After update u: gamma^u; by microbatch two calls an update come before it.
        ("applied", [1e-2, 5e-3, 2.5e-3]),
        ("attempted", [1e-2, 5e-3, 2.5e-3]),
        ("microbatch", [2.5e-3, 6.25e-4, 1.5625e-4]),
    ],
)
def test_the_recipe_moves_the_schedule_in_each_unit(unit: str, rates: list[float]) -> None:
    verdict = check(None, scheduler=halving, scheduler_unit=unit)
    assert verdict.status == "equivalent", verdict.explain()
    assert [row.lr for row in verdict.updates] == pytest.approx(rates, rel=1e-15)


def test_a_schedule_moved_by_microbatch_is_a_fault_where_updates_were_announced() -> None:
    def loop(rank: Rank) -> None:
        rank.scheduler_unit = "microbatch"
        accumulate(rank)

    assert check(loop, scheduler=halving).causes == ("sched.per_microbatch",)


def test_a_schedule_never_moved_is_a_fault_even_after_a_single_update() -> None:
    def loop(rank: Rank) -> None:
        rank.scheduler = None
        accumulate(rank)

    assert check(loop, scheduler=halving, updates=1).causes == ("sched.never",)


class OverflowsOnce(nn.Module):
    """Infinite for the examples that say so."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * torch.where(x[:, :1] > 100, torch.inf, 1.0)


def overflowing_at(update: int) -> list[dict[str, Tensor]]:
    """Groups of eight, of which one has an example that overflows."""
    data = [dict(example) for example in DATA]
    data[8 * update] = {"x": torch.full((5,), 1e3), "y": torch.zeros(1)}
    return data


@pytest.mark.parametrize(
    ("unit", "rates"),
    [
        ("applied", [1e-2, 5e-3, 5e-3]),  # the second update is skipped
        ("attempted", [1e-2, 5e-3, 2.5e-3]),
    ],
)
def test_a_skipped_update_moves_an_attempted_schedule_and_not_an_applied_one(
    unit: str, rates: list[float]
) -> None:
    verdict = check(
        None,
        "fp16-mixed",
        model=OverflowsOnce,
        data=overflowing_at(1),
        scheduler=halving,
        scheduler_unit=unit,
        scaler=lambda: torch.amp.GradScaler("cpu", init_scale=4.0),
    )
    assert verdict.status == "equivalent", verdict.explain()
    assert [row.applied for row in verdict.updates] == [True, False, True]
    assert [row.lr for row in verdict.updates] == pytest.approx(rates, rel=1e-15)
    assert [row.loss_scale for row in verdict.updates] == [4.0, 4.0, 2.0]


# -- the update itself


def test_another_optimizer_class_is_a_fault() -> None:
    def loop(rank: Rank) -> None:
        group = rank.optimizer.param_groups[0]
        rank.optimizer = torch.optim.Adam(
            rank.module.parameters(), lr=group["lr"], weight_decay=group["weight_decay"]
        )
        accumulate(rank)

    verdict = check(loop)
    assert verdict.status == "fault"
    assert verdict.cause in ("differs.parameters", "differs.hyperparameters")


@pytest.mark.parametrize("flag", ["foreach", "fused"])
@pytest.mark.parametrize("on", [False, True])
def test_another_implementation_of_the_same_optimizer_is_equivalent(flag: str, on: bool) -> None:
    def loop(rank: Rank) -> None:
        rank.optimizer = torch.optim.AdamW(
            rank.module.parameters(), lr=1e-2, weight_decay=0.1, **{flag: on}
        )
        accumulate(rank)

    verdict = check(loop)
    assert verdict.status == "equivalent", verdict.explain()


def test_code_that_writes_to_parameters_beside_the_optimizer_is_a_fault() -> None:
    @torch.no_grad()
    def nudged(rank: Rank, u: int) -> None:
        rank.optimizer.step()
        rank.module[0].weight.mul_(1 + 1e-5)  # type: ignore[index,operator]

    verdict = check(updating(nudged))
    assert verdict.status == "fault", verdict.explain()


def test_an_optimizer_built_again_for_each_update_is_a_fault() -> None:
    def forgetful(rank: Rank, u: int) -> None:
        rank.optimizer = adamw(rank.module)
        rank.optimizer.step()

    assert "differs.state" in check(updating(forgetful)).causes


def test_momentum_halved_between_updates_is_a_fault() -> None:
    def tired(rank: Rank, u: int) -> None:
        rank.optimizer.step()
        for state in rank.optimizer.state.values():
            state["exp_avg"].mul_(0.5)

    assert check(updating(tired)).cause == "differs.state"


def test_a_counter_that_never_moves_is_a_fault() -> None:
    def frozen(rank: Rank, u: int) -> None:
        rank.optimizer.step()
        for state in rank.optimizer.state.values():
            state["step"].zero_()

    assert check(updating(frozen)).causes == ("opt.counter_frozen",)


def test_a_parameter_without_gradient_is_left_alone_as_torch_does() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.frozen = nn.Linear(5, 1), nn.Linear(5, 1)
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x) + self.frozen(x)

    verdict = check(None, model=Partly)
    assert verdict.status == "equivalent", verdict.explain()


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)


def with_closure(rank: Rank) -> None:
    for group in rank.groups:

        def closure(group=group) -> Tensor:
            rank.optimizer.zero_grad()
            backwards(rank, group)
            return torch.zeros(())

        rank.optimizer.step(closure)


def test_a_closure_optimizers_parameters_are_not_judged_and_that_is_said() -> None:
    verdict = check(with_closure, optimizer=lbfgs, updates=2)
    assert verdict.status == "equivalent", verdict.explain()
    assert any("parameters are not judged" in note for note in verdict.notes)


def test_a_closure_evaluated_once_is_no_mistake() -> None:
    once = lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=1)  # noqa: E731
    verdict = check(with_closure, optimizer=once, updates=2)
    assert verdict.status == "equivalent", verdict.explain()


# -- clip


def test_a_clip_scales_by_the_bound_over_the_total_norm() -> None:
    # (1.5, 0) and (0, 2) over two tensors: norm 2.5, bound 1: (0.6, 0.8), but for torch's 1e-6.
    found = NormClip(1.0).clipped({"a": torch.tensor([1.5, 0.0]), "b": torch.tensor([0.0, 2.0])})
    assert found["a"].tolist() == pytest.approx([0.6, 0.0], rel=1e-6)  # type: ignore[union-attr]
    assert found["b"].tolist() == pytest.approx([0.0, 0.8], rel=1e-6)  # type: ignore[union-attr]


def test_a_clip_leaves_the_gradient_it_was_given() -> None:
    given = {"a": torch.tensor([3.0]), "none": None}
    assert NormClip(1.0).clipped(given)["none"] is None
    assert given["a"].item() == 3.0  # type: ignore[union-attr]


def by_hand(bound: float) -> Callable[[Rank], None]:
    """Clips without torch's 1e-6 in the denominator."""

    def clip(rank: Rank, u: int) -> None:
        gradients = [p.grad for p in rank.module.parameters()]
        norm = torch.sqrt(sum((g**2).sum() for g in gradients))  # type: ignore[operator,misc,arg-type]
        if norm > bound:
            for g in gradients:
                g.mul_(bound / norm)  # type: ignore[union-attr]
        rank.optimizer.step()

    return updating(clip)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_clip_written_by_hand_is_equivalent(precision: str) -> None:
    verdict = check(by_hand(0.05), precision, clip_norm=0.05)
    assert verdict.status == "equivalent", verdict.explain()


def test_a_clip_left_out_where_it_is_active_is_named() -> None:
    verdict = check(updating(the_optimizer), clip_norm=0.05)
    assert verdict.causes == ("clip.missing",)


def test_a_clip_left_out_where_it_is_inactive_cannot_be_seen() -> None:
    verdict = check(updating(the_optimizer), clip_norm=1e6)
    assert verdict.status == "equivalent", verdict.explain()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_another_bound_is_named(precision: str) -> None:
    assert "differs.clip" in check(by_hand(0.1), precision, clip_norm=0.05).causes


def test_a_clip_that_the_experiment_does_not_have_is_a_fault() -> None:
    verdict = check(by_hand(0.05))
    assert verdict.status == "fault", verdict.explain()


# -- averages


def averaged(model: nn.Module) -> nn.Module:
    ema = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    return torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=ema)


def test_the_recipes_average_moves_once_for_each_applied_update() -> None:
    verdict = check(None, averages=averaged)
    assert verdict.status == "equivalent", verdict.explain()


def test_an_average_moved_by_microbatch_is_a_fault() -> None:
    def loop(rank: Rank) -> None:
        for group in rank.groups:
            backwards(rank, group)
            rank.optimizer.step()
            for _ in group:
                rank.average.update_parameters(rank.module)
            rank.optimizer.zero_grad()

    assert check(loop, averages=averaged).causes == ("state.ema_per_microbatch",)


def test_an_average_never_moved_is_a_fault() -> None:
    assert check(updating(the_optimizer), averages=averaged).causes == ("state.ema_never",)


# -- the replayed optimizer


def seen_by(optimizer: torch.optim.Optimizer) -> OptimizerTrace:
    """The trace of an optimizer of one parameter, before its first update."""
    names = {id(p): "w" for group in optimizer.param_groups for p in group["params"]}
    return OptimizerTrace(
        type(optimizer), optimizer.defaults, hyperparameters(optimizer, names), {}, {}
    )


def test_a_clone_of_the_loops_own_optimizer_makes_its_update() -> None:
    # SGD with lr 0.5 and decay 0.1: 2 - 0.5 (1 + 0.1 x 2) = 1.4
    parameter = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    optimizer = torch.optim.SGD([parameter], lr=0.5, weight_decay=0.1, momentum=0.9)
    after, state = replayed.real_clone_updated(
        {"w": parameter.detach()},
        {"w": torch.ones(1, dtype=torch.float64)},
        seen_by(optimizer),
        torch.device("cpu"),
    )
    assert after["w"].item() == pytest.approx(1.4, rel=1e-15)
    assert state["w"]["momentum_buffer"].item() == pytest.approx(1.2, rel=1e-15)
    assert parameter.item() == 2.0


def test_the_update_in_float64_starts_from_the_stored_values() -> None:
    # The first Adam update moves by lr g / (|g| + eps): 1 - 1e-3 / (1 + 1e-8) in float64.
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([parameter], lr=1e-3)
    seen = seen_by(optimizer)
    after = replayed.float64_updated(
        {"w": parameter.detach()},
        {"w": torch.ones(1)},
        seen,
        optimizer,
        seen.groups,
        torch.device("cpu"),
    )
    assert after["w"].dtype is torch.float64
    assert after["w"].item() == pytest.approx(1 - 1e-3 / (1 + 1e-8), rel=1e-15)


def test_the_distance_of_parameters_is_over_their_norm_and_their_update() -> None:
    # |p - p*| = 1 over |p| + |delta| = 5 + 5.
    after, wanted, before = torch.tensor([5.0]), torch.tensor([4.0]), torch.tensor([-1.0])
    assert replayed.parameter_distance(after, wanted, before) == pytest.approx(0.1)


class TwoHeads(nn.Module):
    """Two heads with an optimizer each; the second one's gradients overflow float16 first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x).squeeze(1), self.b(x * 1e4).squeeze(1)


def test_one_optimizer_may_be_skipped_beside_another_that_is_not() -> None:
    generator = torch.Generator().manual_seed(0)
    xs = torch.randn(16, 4, generator=generator)

    def loss(model: nn.Module, x: Tensor) -> dict[str, Loss]:
        a, b = model(x)
        return {
            "a": Loss((a.float() - 1).square().sum(), len(x)),
            "b": Loss((b.float() / 1e3 - 1).square().sum(), len(x)),
        }

    experiment = Experiment(
        model=TwoHeads,
        data=list(xs),
        loss=loss,
        optimizer=lambda m: {
            "a": torch.optim.SGD(m.a.parameters(), lr=0.1, momentum=0.9),
            "b": torch.optim.SGD(m.b.parameters(), lr=0.1, momentum=0.9),
        },
        scaler=lambda: torch.amp.GradScaler("cpu", init_scale=2.0**14),
        updates=2,
    )
    verdict = equivtest.check(experiment, Plan(2, 4, 2), precision="fp16-mixed")
    states = {(row.update, row.tensor): row.state for row in verdict.rows}
    assert verdict.status == "equivalent", verdict.explain()
    assert states[0, "a.weight"] == "equal"
    assert states[0, "b.weight"] == "not judged"
    assert "update 0 of SGD was skipped" in verdict.notes[0]
