"""Modules in another mode than the model was built in, and modes that change nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from equivtest import Experiment, Loss, Plan, Rank, check
from equivtest.loops import normalised, update

GENERATOR = torch.Generator().manual_seed(2)
DATA = [torch.randn(3, generator=GENERATOR) for _ in range(24)]


def net(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), *between, nn.Linear(4, 2))


def dropping() -> nn.Module:
    return net(nn.Dropout(0.5))


def normalising() -> nn.Module:
    return net(nn.BatchNorm1d(4))


def both() -> nn.Module:
    return net(nn.BatchNorm1d(4), nn.Dropout(0.5))


def frozen() -> nn.Module:
    return normalising().eval()


def an_experiment(model: Callable[[], nn.Module]) -> Experiment:
    return Experiment(
        model=model,
        data=DATA,
        loss=lambda model, batch: Loss(model(batch).square().sum(), len(batch)),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        updates=2,
        last_group="drop",
    )


def loop(
    first: Callable[[nn.Module], object] = lambda _: None,
    after: Callable[[nn.Module], object] = lambda _: None,
    objective: Callable[[Rank, object, Loss], Tensor] = lambda rank, group, loss: normalised(
        loss, group
    ),
) -> Callable[[Rank], None]:
    """A right loop, but for what is done to the model first and after each update."""

    def run(rank: Rank) -> None:
        first(rank.module)
        for group in rank.groups:
            for batch in group:
                (objective(rank, group, rank.loss(rank.model, batch)) * rank.D).backward()
            update(rank, [rank.optimizer])
            rank.optimizer.zero_grad()
            after(rank.module)

    return run


def no_dropout(module: nn.Module) -> None:
    module[-2].eval()


@pytest.mark.parametrize(
    ("model", "planted", "sources"),
    [
        (dropping, loop(nn.Module.eval), ["source.dropout"]),
        (dropping, loop(after=nn.Module.eval), ["source.dropout"]),  # an evaluation, never left
        (normalising, loop(nn.Module.eval), ["source.batchnorm"]),
        (both, loop(no_dropout), ["source.batchnorm", "source.dropout"]),
        (frozen, loop(nn.Module.train), []),
    ],
)
def test_another_mode_than_the_models_own_is_named(
    model: Callable[[], nn.Module], planted: Callable[[Rank], None], sources: list[str]
) -> None:
    verdict = check(an_experiment(model), Plan(2, 2, 2), precision="fp64", loop=planted)
    first, *others = verdict.causes
    assert (first, sorted(others)) == ("mode.changed", sources), verdict.explain()


def test_a_weight_is_seen_beside_it() -> None:
    def per_microbatch(rank: Rank, group: object, loss: Loss) -> Tensor:
        return loss.total / loss.count  # and no division by A

    planted = loop(nn.Module.eval, objective=per_microbatch)
    verdict = check(an_experiment(dropping), Plan(2, 2, 2), precision="fp64", loop=planted)
    assert "mode.changed" in verdict.causes
    # The factor is D over m = 2, where D over the 8 examples of the group is right.
    found = verdict.weights["found"]
    assert list(found) == pytest.approx([4.0] * len(found))


@pytest.mark.parametrize(
    ("model", "right"),
    [
        (net, loop(nn.Module.eval)),  # nothing in it depends on the mode
        (frozen, loop()),
        (normalising, loop(after=lambda module: module.eval() and module.train())),
    ],
)
def test_a_mode_that_changes_nothing_is_left_alone(
    model: Callable[[], nn.Module], right: Callable[[Rank], None]
) -> None:
    verdict = check(an_experiment(model), Plan(2, 2, 2), precision="fp64", loop=right)
    assert "mode.changed" not in verdict.causes
    assert verdict.status in ("equivalent", "explained"), verdict.explain()
