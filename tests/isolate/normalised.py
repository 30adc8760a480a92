"""Models that normalise by their batch, in every way that torch has and a few of one's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from equivtest import Experiment, Loss

EXAMPLES = 16


def examples(*shape: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        {"x": torch.randn(shape, generator=generator), "y": torch.tensor(i % 3)}
        for i in range(EXAMPLES)
    ]


FLAT, LINE, IMAGE, CUBE = (
    examples(6),
    examples(2, 6),
    examples(2, 4, 4),
    examples(2, 3, 3, 3),
)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    out = model(batch["x"])
    return Loss(F.cross_entropy(out, batch["y"], reduction="sum"), count=len(out))


def an_experiment(model: Any, data: Any = FLAT, **changes: Any) -> Experiment:
    given: dict[str, Any] = {
        "model": model,
        "data": data,
        "loss": loss,
        "count": lambda batch: len(batch["y"]),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    }
    return Experiment(**{**given, **changes})


def dense(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Tanh(), nn.Linear(8, 3))


def line(*middle: nn.Module) -> nn.Sequential:
    return _conv(nn.Conv1d(2, 4, 3), nn.AdaptiveAvgPool1d(1), middle)


def image(*middle: nn.Module) -> nn.Sequential:
    return _conv(nn.Conv2d(2, 4, 3), nn.AdaptiveAvgPool2d(1), middle)


def cube(*middle: nn.Module) -> nn.Sequential:
    return _conv(nn.Conv3d(2, 4, 2), nn.AdaptiveAvgPool3d(1), middle)


def _conv(conv: nn.Module, pool: nn.Module, middle: tuple[nn.Module, ...]) -> nn.Sequential:
    # Not the mean of what was just normalised, which is zero whatever the weights are.
    return nn.Sequential(conv, *middle, nn.GELU(), pool, nn.Flatten(), nn.Linear(4, 3))


def materialised(model: nn.Module, data: list[dict[str, Tensor]]) -> nn.Module:
    """A lazy model takes its sizes from a first forward."""
    model(torch.stack([example["x"] for example in data[:4]]))
    return model


def pairs(apart: float) -> list[dict[str, Tensor]]:
    """Examples of which every two are ``apart`` from each other, in float64."""
    generator = torch.Generator().manual_seed(5)

    def draw() -> Tensor:
        return torch.randn(6, generator=generator, dtype=torch.float64)

    centres = [draw() for _ in range(EXAMPLES // 2)]
    return [
        {"x": centre + apart * draw(), "y": torch.tensor((i + j) % 3)}
        for i, centre in enumerate(centres)
        for j in range(2)
    ]


class Sees(nn.Module):
    """Adds a little of what the batch has in the mean: a coupling beside BatchNorm."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        return x + self.share * x.square().mean(0)


def deep(blocks: int, eps: float, seen: float = 0.0) -> nn.Sequential:
    """BatchNorm on BatchNorm, and a coupling of size ``seen`` before the head."""
    layers: list[nn.Module] = [nn.Linear(6, 8)]
    for _ in range(blocks):
        layers += [nn.BatchNorm1d(8, eps=eps), nn.Tanh(), nn.Linear(8, 8)]
    return nn.Sequential(*layers, *([Sees(seen)] if seen else []), nn.Tanh(), nn.Linear(8, 3))


class Tokens(nn.Module):
    """Positions of all examples normalised together, folded into one axis.

    Args:
        minor: fold with the batch second, so that the examples take turns.
    """

    def __init__(self, minor: bool) -> None:
        super().__init__()
        self.minor = minor
        self.up, self.norm, self.down = nn.Linear(2, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        places = x.permute(2, 0, 1) if self.minor else x.transpose(1, 2)
        hidden = self.up(places)
        hidden = self.norm(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
        return self.down(hidden.tanh().mean(0 if self.minor else 1))


class BatchLast(nn.Module):
    """The batch on the last axis of what is normalised: shape ``(L, C, N)``."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(2, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.up(x.permute(2, 0, 1)).transpose(1, 2)).transpose(1, 2)
        return self.down(hidden.tanh().mean(0))


class Chosen(nn.Module):
    """Only positions above a bound are normalised: as many rows as an example has of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(2, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        places = x.transpose(1, 2)
        chosen = places[..., 0] > -0.5
        rows = self.norm(self.up(places[chosen]))
        hidden = rows.new_zeros(*places.shape[:2], 5)
        hidden[chosen] = rows
        return self.down(hidden.tanh().mean(1))


class Shared(nn.Module):
    """One BatchNorm, called three times in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.norm(self.first(x)).tanh()
        return self.last(x)


class Functional(nn.Module):
    """Normalises by hand, through one of torch's two functions."""

    def __init__(self, low: bool = False) -> None:
        super().__init__()
        self.low = low
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.low:
            return torch.batch_norm(x, self.gain, None, None, None, True, 0.1, 1e-5, False)
        return F.batch_norm(x, None, None, self.gain, training=True)


class Checkpointed(nn.Module):
    """Blocks that are recomputed in backward, one inside another, folded minor."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(dense(nn.BatchNorm1d(8)) for _ in range(2))
        self.tokens = Tokens(minor=True)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        outs = [
            checkpoint(block, x.flatten(1)[:, :6], use_reentrant=self.reentrant)
            for block in self.blocks
        ]
        return sum(outs) + checkpoint(self.tokens, x, use_reentrant=self.reentrant)


class FreezesItself(nn.Module):
    """Its forward puts the first BatchNorm into evaluation."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.both = both
        self.first = dense(nn.BatchNorm1d(8))
        self.last = dense(nn.BatchNorm1d(8))

    def forward(self, x: Tensor) -> Tensor:
        self.first.eval()
        if self.both:
            self.last.eval()
        return self.first(x) + self.last(x)


class NeverTrains(nn.BatchNorm1d):
    """Frozen by a subclass, as detection models have it."""

    def train(self, mode: bool = True) -> NeverTrains:
        return super().train(False)


def frozen(model: nn.Module) -> nn.Module:
    return model.eval()


def without_affine_gradient(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.requires_grad_(False)
    return model
