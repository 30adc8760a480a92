"""Random numbers of the forward explain what they make differ, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from equivtest import Experiment, Loss, Plan, check

WORDS, WIDTH = 30, 8
LENGTHS = (5, 9, 3, 8, 7, 4, 10, 6)
LINES = [
    torch.randint(1, WORDS, (n,), generator=torch.Generator().manual_seed(k))
    for k, n in enumerate(LENGTHS)
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        ahead = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        y = self.first(x)
        y, _ = self.attention(y, y, y, attn_mask=ahead, need_weights=False)
        x = x + self.drop(y)
        return x + self.drop(self.inner(self.second(x)))


class LanguageModel(nn.Module):
    """A causal transformer, its blocks under activation checkpointing or not."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)
        self.use_reentrant = use_reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.use_reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


def padded(examples: Sequence[Tensor]) -> Tensor:
    return pad_sequence(list(examples), batch_first=True)


def token_loss(model: nn.Module, tokens: Tensor) -> Loss:
    target = tokens[:, 1:]
    total = F.cross_entropy(
        model(tokens[:, :-1]).flatten(0, 1), target.flatten(), ignore_index=0, reduction="sum"
    )
    return Loss(total=total, count=(target != 0).sum())


def experiment(model: Callable[[], nn.Module], **options: Any) -> Experiment:
    return Experiment(
        model=model,
        data=LINES,
        collate=padded,
        loss=options.pop("loss", token_loss),
        count=lambda tokens: (tokens[:, 1:] != 0).sum(),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        **options,
    )


@pytest.mark.parametrize(
    ("use_reentrant", "plan", "precision"),
    [
        (None, Plan(2, 2, 2), "fp32"),
        (False, Plan(1, 8, 1), "fp64"),
        (True, Plan(2, 1, 4), "bf16-mixed"),
    ],
)
def test_a_transformer_on_ragged_lines(
    use_reentrant: bool | None, plan: Plan, precision: str
) -> None:
    verdict = check(
        experiment(partial(LanguageModel, use_reentrant)),
        plan,
        precision=precision,
        expect="source.dropout",
    )
    assert verdict.passed, verdict.explain()
    assert verdict.causes == ("source.dropout",)
    assert verdict.sources["source.dropout"] >= 0.9999
    assert "first at `blocks.0.attention` (MultiheadAttention)" in verdict.findings[0].text
    assert verdict.findings[0].distance < 2e-15
