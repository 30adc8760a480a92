"""Models and losses in which examples see each other, and look-alikes in which they do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from scenes import PADDING, WIDTH, WORDS, around, squares
from torch import Tensor, nn
from torch.nn import functional as F

from equivtest import Loss


class Centred(nn.Module):
    """Takes the mean over the batch away."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class InTurns(nn.Module):
    """Three steps of each example as rows, the examples taking turns, less their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = Centred()

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.stack([x, 2 * x.tanh(), x.sin()])  # steps, examples, features
        rows = self.middle(steps.flatten(0, 1))
        return rows.unflatten(0, (3, len(x))).square().sum(0)


class Spread(nn.Module):
    """Standard deviation of the batch by feature: no rows of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x.std(0, correction=0) + 0.1


class Standardised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spread = Spread()

    def forward(self, x: Tensor) -> Tensor:
        return x / self.spread(x)


class CentredBetween(nn.Module):
    """Takes the mean over the batch away in its own forward, between modules that know none.

    BatchNorm before and dropout behind it are sources of their own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.25)
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.enter(x)).tanh()
        return self.leave(self.drop(x - x.mean(0)))


class Experts(nn.Module):
    """Each row by the expert that it scores highest, and a term that balances their loads.

    The term is Switch Transformer's: experts times the sum over them of the share of rows and the
    mean score.
    """

    N = 3

    def __init__(self, keep: bool) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, self.N)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(self.N))
        self.keep = keep
        self.balance: Any = None

    def forward(self, x: Tensor) -> Any:
        scores = self.router(x).softmax(-1)
        best = scores.argmax(-1)
        mixed = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            at = (best == e).nonzero()[:, 0]
            mixed = mixed.index_add(0, at, expert(x[at]) * scores[at, e : e + 1])
        share = F.one_hot(best, self.N).to(x.dtype).mean(0)
        balance = self.N * (share * scores.mean(0)).sum()
        if not self.keep:
            return mixed, balance
        self.balance = balance
        return mixed


class Full(nn.Module):
    """An expert that all rows choose, and that takes the first quarter of them.

    No row that is another makes room for others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        taken = torch.arange(len(x)) < max(1, len(x) // 4)
        return x + self.expert(x) * taken.unsqueeze(-1)


class Mixture(nn.Module):
    def __init__(self, keep: bool) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.mixture = Experts(keep)
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Any:
        if self.mixture.keep:
            return self.leave(self.mixture(self.enter(x))), self.mixture.balance
        mixed, balance = self.mixture(self.enter(x))
        return self.leave(mixed), balance


def balanced(model: nn.Module, batch: Any) -> Loss:
    x, y = batch
    found, balance = model(x)
    return Loss((found - y).square().sum() + balance * len(x), count=len(x))


class Towers(nn.Module):
    """Two towers of unit vectors for pairs (x, x turned by a place)."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Any:
        other = x.roll(1, -1)
        return F.normalize(self.left(x), dim=-1), F.normalize(self.right(other), dim=-1)


class Scores(Towers):
    """The similarities of all pairs: a tensor of examples by examples."""

    def forward(self, x: Tensor) -> Any:
        left, right = super().forward(x)
        return left @ right.T


def negatives(model: nn.Module, batch: Any) -> Loss:
    """In-batch negatives, as InfoNCE with a temperature of 0.2."""
    found = model(batch[0])
    scores = found if isinstance(found, Tensor) else found[0] @ found[1].T
    right = torch.arange(len(scores))
    return Loss(F.cross_entropy(scores / 0.2, right, reduction="sum"), count=len(scores))


def by_the_mean(model: nn.Module, batch: Any) -> Loss:
    """Residuals from their mean over the batch."""
    x, y = batch
    residual = model(x) - y
    return Loss((residual - residual.mean()).square().sum(), count=len(x))


def of_the_mean(model: nn.Module, batch: Any) -> Loss:
    """A mistake: a mean where the sum is asked for."""
    x, y = batch
    return Loss((model(x) - y).square().mean(), count=len(x))


def decayed(model: nn.Module, batch: Any) -> Loss:
    """A mistake: a term of the parameters that each microbatch adds once more."""
    fit, decay = squares(model, batch), sum(p.square().sum() for p in model.parameters())
    return Loss(fit.total + decay, count=fit.count)


class Lines(nn.Module):
    """Embedding, positions, one attention, a head.

    Args:
        masked: the attention is told which keys are padding.
        from_right: positions are counted from the end of the batch.
        second: the batch is the second axis inside.
    """

    def __init__(
        self,
        masked: bool = True,
        from_right: bool = False,
        second: bool = False,
        middle: Callable[[], nn.Module] = nn.Identity,
    ) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(WORDS, 8), nn.Embedding(16, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=not second)
        self.middle = middle()
        self.head = nn.Linear(8, WORDS)
        self.masked, self.from_right, self.second = masked, from_right, second

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1])
        x = self.token(tokens) + self.position(positions.flip(0) if self.from_right else positions)
        x = x.transpose(0, 1) if self.second else x
        mask = tokens == PADDING if self.masked else None
        x = x + self.attention(x, x, x, key_padding_mask=mask, need_weights=False)[0]
        x = self.middle(x)
        return self.head(x.transpose(0, 1) if self.second else x)


class Steps(nn.Module):
    """An LSTM with the batch second."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(WORDS, 8)
        self.lstm = nn.LSTM(8, 8)
        self.head = nn.Linear(8, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.token(tokens.T))
        return self.head(states).transpose(0, 1)


class Tied(nn.Module):
    """One matrix as embedding and as head."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(WORDS, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens).tanh() @ self.token.weight.T


class CentredSecond(nn.Module):
    """Takes the mean over the batch away, which is the second axis."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


class Channels(nn.Module):
    """A vector as channels of length 3, for normalisations by channel."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.unflatten(-1, (2, 3))).flatten(-2)


CORRECT_ON_VECTORS = {
    "layer norm": lambda: around(nn.LayerNorm(WIDTH)),
    "group norm": lambda: around(nn.GroupNorm(2, WIDTH)),
    "instance norm": lambda: around(Channels(nn.InstanceNorm1d(2))),
    "frozen batch norm": lambda: around(nn.BatchNorm1d(WIDTH).eval()),
    "relu": lambda: around(nn.ReLU()),
}
CORRECT_ON_LINES = {
    "attention with a mask": Lines,
    "attention, batch second": lambda: Lines(second=True),
    "LSTM, batch second": Steps,
    "tied weights": Tied,
}
