"""Tiny experiments and one update of each, explained without any process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from equivtest import Experiment, Loss, Plan
from equivtest.arms.case import case_of
from equivtest.arms.reference import Reference
from equivtest.arms.replay import Start
from equivtest.compare import noise
from equivtest.isolate.explained import Explained
from equivtest.isolate.explaining import explain
from equivtest.isolate.scene import Scene, scene_of

TOLERANCE = 64 * 4 * 2.0**-53
"""Comparison B's where nothing magnifies rounding: 64 floors of 4 roundoffs."""

OF_8 = Plan(2, 2, 2)

WIDTH = 6
PADDING = 0
WORDS = 11
LENGTHS = (3, 7, 5, 4, 8, 6, 3, 5)


def an_experiment(model: Callable[[], nn.Module], loss: Any, data: Any, **how: Any) -> Experiment:
    return Experiment(
        model=model,
        data=data,
        loss=loss,
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
        updates=1,
        **how,
    )


def a_scene(experiment: Experiment, plan: Plan = OF_8) -> Scene:
    """The first update of ``experiment`` in float64."""
    case = case_of(experiment, plan, precision="fp64", loop=None, wrap=None, device="cpu")
    reference = Reference({}, experiment, case)
    initial = reference.initial()
    start = Start(initial.parameters, (initial.buffers,) * plan.D)
    return scene_of(reference, case.groups[0], start, ())


def explained(experiment: Experiment, plan: Plan = OF_8) -> Explained:
    scene = a_scene(experiment, plan)
    names = scene.bench.names
    null = noise.null(scene.oracle, range(len(names)))
    return explain(scene, names, null, [TOLERANCE] * len(names))


# -- vectors


def vectors(n: int = 8) -> list[tuple[Tensor, Tensor]]:
    """Pairs of a vector and a target."""
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(WIDTH, generator=generator), torch.randn(1, generator=generator))
        for _ in range(n)
    ]


def squares(model: nn.Module, batch: Any) -> Loss:
    x, y = batch
    return Loss((model(x) - y).square().sum(), count=len(x))


def around(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers, nn.Linear(WIDTH, 1))


def on_vectors(model: Callable[[], nn.Module], loss: Any = squares) -> Experiment:
    return an_experiment(model, loss, vectors())


# -- lines


def lines() -> list[Tensor]:
    """Ragged rows of words, none of them ``PADDING``."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, WORDS, (n,), generator=generator) for n in LENGTHS]


def padded(examples: Sequence[Tensor]) -> Tensor:
    return pad_sequence(list(examples), batch_first=True, padding_value=PADDING)


def itself(model: nn.Module, tokens: Tensor) -> Loss:
    """Cross entropy of each word from the model's outputs (examples, positions, words)."""
    total = F.cross_entropy(
        model(tokens).flatten(0, 1), tokens.flatten(), ignore_index=PADDING, reduction="sum"
    )
    return Loss(total, count=(tokens != PADDING).sum())


def on_lines(model: Callable[[], nn.Module], loss: Any = itself) -> Experiment:
    return an_experiment(model, loss, lines(), collate=padded)
