"""What the benchmarks run: the smallest case, and a 4-layer language model."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from equivtest import Experiment, Loss

IGNORED = -100
WIDTH, HEADS, LAYERS, LONGEST = 48, 4, 4, 32

images, labels = load_digits(return_X_y=True)
digits = [
    (torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))
    for x, y in zip(images[:64], labels[:64], strict=True)
]

stripped = (line.strip() for topic in sorted(topics) for line in topics[topic].splitlines())
lines = list(dict.fromkeys(line for line in stripped if 8 <= len(line) <= LONGEST))[:64]
characters = sorted(set("".join(lines)))
encoded = [torch.tensor([characters.index(c) for c in line]) for line in lines]


def digit_loss(model: Any, batch: Any) -> Loss:
    x, y = batch
    return Loss(F.cross_entropy(model(x), y, reduction="sum"), count=len(y))


def smallest(updates: int) -> Experiment:
    """A linear classifier of digits."""
    return Experiment(
        model=lambda: nn.Linear(64, 10),
        data=digits,
        loss=digit_loss,
        count=lambda batch: len(batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        updates=updates,
    )


class LM(nn.Module):
    """A causal transformer over characters, of 4 layers and 48 wide."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(len(characters), WIDTH)
        self.position = nn.Embedding(LONGEST, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, len(characters))

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.token(tokens) + self.position(torch.arange(length, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def pad(examples: list[Tensor]) -> tuple[Tensor, Tensor]:
    tokens = pad_sequence(examples, batch_first=True, padding_value=IGNORED)
    return tokens[:, :-1].clamp(min=0), tokens[:, 1:]


def lm_loss(model: Any, batch: Any) -> Loss:
    tokens, targets = batch
    logits = model(tokens).flatten(0, 1)
    total = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return Loss(total, count=(targets != IGNORED).sum())


def language_model(updates: int) -> Experiment:
    """A 4-layer language model on ragged lines."""
    return Experiment(
        model=LM,
        data=encoded,
        collate=pad,
        loss=lm_loss,
        count=lambda batch: (batch[1] != IGNORED).sum(),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        updates=updates,
    )
