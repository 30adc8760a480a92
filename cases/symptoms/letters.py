"""Words of unequal length, and a network that guesses the next letter: what the symptoms train."""

import pydoc_data.topics

import torch
from torch import nn

from equivtest import Experiment, Loss

WORDS = sorted({w for w in pydoc_data.topics.topics["for"].lower().split() if w.isalpha()})[:48]
PADDING = 0


class NextLetter(nn.Module):
    def __init__(self):
        super().__init__()
        self.letter = nn.Embedding(27, 12)
        self.mix = nn.Linear(12, 24)
        self.guess = nn.Linear(24, 27)

    def forward(self, letters):
        return self.guess(torch.tanh(self.mix(self.letter(letters))))


def pad(words):
    return nn.utils.rnn.pad_sequence(words, batch_first=True, padding_value=PADDING)


def letter_loss(model, batch):
    """Summed over the letters that follow another; padding is no letter."""
    target = batch[:, 1:].flatten()
    logits = model(batch[:, :-1]).flatten(0, 1)
    total = nn.functional.cross_entropy(logits, target, ignore_index=PADDING, reduction="sum")
    return Loss(total, count=(target != PADDING).sum())


def letters(**more):
    return Experiment(
        model=NextLetter,
        data=[torch.tensor([ord(c) - 96 for c in f"{word}{word[0]}"]) for word in WORDS],
        collate=pad,
        loss=letter_loss,
        count=lambda batch: (batch[:, 1:] != PADDING).sum(),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        **more,
    )
