"""Wrong verdicts that were found once: each a case of its own, the right verdict beside it."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from equivtest import Experiment, Loss, Plan, Rank, check

PLAN = Plan(2, 2, 2)
generator = torch.Generator().manual_seed(0)
DATA = [
    {"x": torch.randn(6, generator=generator), "y": torch.randint(0, 4, (), generator=generator)}
    for _ in range(32)
]
Batch = dict[str, Tensor]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def half_frozen() -> nn.Module:
    module = net()
    module[0].requires_grad_(False)
    return module


def entropy(model: nn.Module, batch: Batch) -> Loss:
    logits = model(batch["x"])
    return Loss(F.cross_entropy(logits, batch["y"], reduction="sum"), len(logits))


def two_terms(model: nn.Module, batch: Batch) -> dict[str, Loss]:
    logits = model(batch["x"])
    return {
        "ce": Loss(F.cross_entropy(logits, batch["y"], reduction="sum"), len(logits)),
        "aux": Loss(logits.square().sum(), len(logits)),
    }


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


def experiment(**changes: Any) -> Experiment:
    given = {"model": net, "data": DATA, "loss": entropy, "optimizer": adamw, "updates": 2}
    return Experiment(**{**given, **changes})


def run(rank: Rank, objective: Any) -> None:
    for group in rank.groups:
        for batch in group:
            with rank.autocast():
                value = objective(rank, batch, group)
            (value * rank.D).backward()
        if rank.clip_norm is not None:
            nn.utils.clip_grad_norm_(rank.module.parameters(), rank.clip_norm)
        rank.optimizer.step()
        rank.optimizer.zero_grad()


def plain(rank: Rank) -> None:
    run(rank, lambda r, b, g: r.loss(r.model, b).total / g.count)


# -- terms weighed against each other


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16-mixed"])
@pytest.mark.parametrize(("weight", "status"), [(1.0, "equivalent"), (1.015, "fault")])
def test_a_term_that_weighs_more_than_it_should(precision: str, weight: float, status: str) -> None:
    def loop(rank: Rank) -> None:
        def objective(r: Rank, batch: Batch, group: Any) -> Tensor:
            terms = r.loss(r.model, batch)
            first = terms["ce"].total / group.count["ce"]
            return first + weight * terms["aux"].total / group.count["aux"]

        run(rank, objective)

    verdict = check(experiment(loss=two_terms), PLAN, precision=precision, loop=loop)
    assert verdict.status == status, verdict.explain()


# -- parameters that the experiment does not train


def test_a_loop_that_trains_a_frozen_layer_is_a_fault() -> None:
    def loop(rank: Rank) -> None:
        rank.module.requires_grad_(True)
        rank.model = DistributedDataParallel(rank.module)
        plain(rank)

    assert check(experiment(model=half_frozen), PLAN, loop=plain).status == "equivalent"
    verdict = check(experiment(model=half_frozen), PLAN, precision="fp64", loop=loop)
    assert verdict.status == "fault"
    assert "freezes it" in verdict.findings[0].text


@pytest.mark.parametrize("loop", [None, plain])
def test_gradients_that_no_optimizer_uses_may_pile_up(loop: Any) -> None:
    def head_only(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module[2].parameters(), lr=0.1)

    verdict = check(experiment(optimizer=head_only), PLAN, loop=loop)
    assert verdict.status == "equivalent", verdict.explain()
    assert any("no optimizer holds" in note for note in verdict.notes)


# -- what does not repeat is no evidence


class Noisy(nn.Module):
    """Noise that no seed reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.frombuffer(bytearray(os.urandom(4 * len(x))), dtype=torch.uint8)
        return self.net(x) + noise.view(-1, 4) / 255.0


class Counting(nn.Module):
    """A forward that depends on how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = net(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.net(x) * (1 + 1e-3 * self.calls)


@pytest.mark.parametrize("model", [Noisy, Counting])
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16-mixed"])
def test_a_forward_that_does_not_repeat_is_unexplained(model: Any, precision: str) -> None:
    verdict = check(experiment(model=model), PLAN, precision=precision)
    assert verdict.status == "unexplained", verdict.explain()
    assert "not repeatable" in verdict.findings[0].text


class DropsALayer(nn.Module):
    """Leaves its second layer out in one forward of twenty-five, by Python's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.dropped = net(), net()

    def forward(self, x: Tensor) -> Tensor:
        return self.kept(x) + self.dropped(x) * (random.random() >= 0.04)


def dropped(seed: int, replica: int) -> list[bool]:
    """For the four forwards of a replica in two updates, as ranks are seeded."""
    draws = random.Random((seed * 1_000_003 + 1 + replica) % 2**32)
    return [draws.random() < 0.04 for _ in range(4)]


def only_in_the_second_update(seed: int) -> bool:
    both = [dropped(seed, replica) for replica in (0, 1)]
    return any(any(d[2:]) for d in both) and not any(any(d[:2]) for d in both)


def test_a_rare_draw_is_looked_for_in_every_update() -> None:
    seed = next(filter(only_in_the_second_update, range(99)))
    for updates, status in ((1, "equivalent"), (2, "explained")):
        drawn = experiment(model=DropsALayer, seed=seed, updates=updates)
        verdict = check(drawn, PLAN, precision="fp64")
        assert verdict.status == status, verdict.explain()


def test_a_wrong_loop_over_noise_is_not_acquitted() -> None:
    def without_replicas(rank: Rank) -> None:
        run(rank, lambda r, b, g: r.loss(r.model, b).total / g.count / r.D)

    for precision in ("fp32", "bf16-mixed"):
        verdict = check(experiment(model=Noisy), PLAN, precision=precision, loop=without_replicas)
        assert verdict.status in ("unexplained", "fault")


def noisy_collate(examples: list[Batch]) -> Batch:
    batch = torch.utils.data.default_collate(examples)
    return {**batch, "x": batch["x"] + 0.1 * torch.randn_like(batch["x"])}


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16-mixed"])
def test_augmentation_in_collate_is_unexplained(precision: str) -> None:
    verdict = check(experiment(collate=noisy_collate), PLAN, precision=precision)
    assert verdict.status == "unexplained", verdict.explain()


# -- optimizers of another class, arrangement or implementation


def own_class(factor: float) -> Any:
    class Own(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["lr"] = 1e-3 * factor
            result = super().step(closure)
            for group in self.param_groups:
                group["lr"] = 1e-3
            return result

    def loop(rank: Rank) -> None:
        rank.optimizer = Own(rank.module.parameters(), lr=1e-3)
        plain(rank)

    return loop


@pytest.mark.parametrize(
    ("factor", "status"), [(1.0, "equivalent"), (0.0, "fault"), (3.0, "fault")]
)
def test_a_class_that_hides_its_learning_rate_in_bfloat16(factor: float, status: str) -> None:
    verdict = check(experiment(), PLAN, precision="bf16", loop=own_class(factor))
    assert verdict.status == status, verdict.explain()


def test_weights_scaled_beside_another_implementation_in_bfloat16() -> None:
    def loop(rank: Rank) -> None:
        rank.optimizer.param_groups[0]["foreach"] = True
        rank.optimizer.register_step_post_hook(
            lambda *_: [p.data.mul_(1.01) for p in rank.module.parameters()]
        )
        plain(rank)

    assert check(experiment(), PLAN, precision="bf16", loop=loop).status == "fault"


def test_groups_may_be_cut_and_ordered_otherwise() -> None:
    def loop(rank: Rank) -> None:
        held = list(rank.module.parameters())
        groups = [{"params": held[:2]}, {"params": held[:1:-1], "name": "head"}]
        rank.optimizer = torch.optim.AdamW(groups, lr=1e-3)
        plain(rank)

    verdict = check(experiment(), PLAN, loop=loop)
    assert verdict.status == "equivalent", verdict.explain()


# -- a loss of the loop's own


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize(("factor", "status"), [(1.0, "equivalent"), (1.03, "fault")])
def test_a_loss_of_its_own_that_is_a_little_too_large(
    precision: str, factor: float, status: str
) -> None:
    def loop(rank: Rank) -> None:
        def objective(r: Rank, batch: Batch, group: Any) -> Tensor:
            total = F.cross_entropy(r.model(batch["x"]), batch["y"], reduction="sum")
            return factor * total / group.count

        run(rank, objective)

    verdict = check(experiment(), PLAN, precision=precision, loop=loop)
    assert verdict.status == status, verdict.explain()


# -- clip


@pytest.mark.parametrize(("bound", "status"), [(1.0, "equivalent"), (1.05, "fault")])
def test_another_bound_in_bfloat16(bound: float, status: str) -> None:
    def loop(rank: Rank) -> None:
        assert rank.clip_norm is not None
        rank.clip_norm *= bound
        plain(rank)

    verdict = check(experiment(clip_norm=0.1), PLAN, precision="bf16", loop=loop)
    assert verdict.status == status, verdict.explain()


# -- a user's mistake is no limit of torch


def test_dtypes_that_do_not_match_are_an_error_and_not_a_skip() -> None:
    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x.double())

    verdict = check(experiment(model=Doubled), PLAN, precision="fp32")
    assert verdict.status == "error"
    assert verdict.failure is not None
    assert "same dtype" in verdict.failure.text


@pytest.mark.parametrize("ignored", [0, 1])
def test_a_mean_where_a_sum_belongs_is_told_so(ignored: int) -> None:
    def mean(model: nn.Module, batch: Batch) -> Loss:
        logits = model(batch["x"])
        target = torch.where(batch["x"][:, 0] > 3 - 2 * ignored, -100, batch["y"])
        return Loss(F.cross_entropy(logits, target), (target != -100).sum())

    verdict = check(experiment(loss=mean, updates=1), PLAN, precision="fp64")
    assert verdict.status == "unexplained"
    assert 'reduction="sum"' in verdict.findings[0].text


# -- what is left after the last update, on every rank


def test_state_cleared_after_the_last_update_is_found() -> None:
    def loop(rank: Rank) -> None:
        plain(rank)
        for state in rank.optimizer.state.values():
            state["exp_avg"].zero_()

    verdict = check(experiment(), PLAN, loop=loop)
    assert verdict.cause == "differs.state"
    assert "after the last update" in verdict.findings[0].text


def test_a_learning_rate_that_one_rank_changes_at_the_end_is_found() -> None:
    def loop(rank: Rank) -> None:
        plain(rank)
        if rank.dp_rank == 1:
            rank.optimizer.param_groups[0]["lr"] /= 2

    verdict = check(experiment(), PLAN, loop=loop)
    assert verdict.cause == "differs.ranks"
    assert "lr=0.0005" in verdict.findings[0].text


def test_a_forward_past_the_hooks_is_said_and_not_called_a_fault() -> None:
    def loop(rank: Rank) -> None:
        def objective(r: Rank, batch: Batch, group: Any) -> Tensor:
            logits = r.module.forward(batch["x"])
            return F.cross_entropy(logits, batch["y"], reduction="sum") / group.count

        run(rank, objective)

    alone = Plan(2, 4, 1)
    verdict = check(experiment(), alone, loop=loop)
    assert verdict.status == "equivalent", verdict.explain()
    assert any("observed" in note for note in verdict.notes)


# -- a clip by value, written by hand


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("factor", [1.0, -1.0, 0.0], ids=["right", "negated", "zeroed"])
def test_a_small_bound_hides_no_sign(precision: str, factor: float) -> None:
    bound = 5e-4  # of a gradient of some tenths: nearly every element is at it

    def loop(rank: Rank) -> None:
        for parameter in rank.module.parameters():
            parameter.register_hook(lambda gradient: gradient * factor)
        for group in rank.groups:
            for batch in group:
                with rank.autocast():
                    loss = rank.loss(rank.model, batch)
                (rank.D * loss.total / group.count).backward()
            with torch.no_grad():
                for parameter in rank.module.parameters():
                    parameter.grad.clamp_(-bound, bound)  # type: ignore[union-attr]
            rank.optimizer.step()
            rank.optimizer.zero_grad()

    clipped = experiment(
        clip_value=bound,
        updates=1,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    )
    verdict = check(clipped, Plan(4, 1, 2), precision=precision, loop=loop)
    assert verdict.status == ("equivalent" if factor == 1.0 else "fault"), verdict.explain()


# -- what is kept between cases


def counted(module: nn.Module) -> torch.optim.Optimizer:
    """A factory that leaves something on the model, and reads it."""
    module.built = getattr(module, "built", 0) + 1  # type: ignore[assignment]
    module.eval()
    return torch.optim.SGD(module.parameters(), lr=0.1 * module.built)  # type: ignore[operator]


def test_what_a_factory_leaves_on_the_model_does_not_reach_the_next_case() -> None:
    made = experiment(optimizer=counted, updates=1)
    for _ in range(3):
        verdict = check(made, PLAN, precision="fp64")
        assert verdict.status == "equivalent", verdict.explain()


def patching(model: nn.Module, batch: Batch) -> Loss:
    F.tanhshrink = lambda x: 2 * x  # type: ignore[assignment]
    return entropy(model, batch)


def shrinking(model: nn.Module, batch: Batch) -> Loss:
    logits = F.tanhshrink(model(batch["x"]))
    return Loss(F.cross_entropy(logits, batch["y"], reduction="sum"), len(logits))


def test_what_a_loss_patches_does_not_reach_the_next_case() -> None:
    check(experiment(loss=patching, updates=1), PLAN, precision="fp64")
    verdict = check(experiment(loss=shrinking, updates=1), PLAN, precision="fp64")
    assert verdict.status == "equivalent", verdict.explain()
