"""Learn where capital letters come: many a microbatch has no target at all.

A mean over no targets is 0/0, and a mean over the others' means counts a microbatch with one target
as much as one with five. The sum over none is 0, and its gradient too.
"""

from pydoc_data.topics import topics

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils.rnn import pad_sequence

from equivtest import Experiment, Loss, plans

SEEN, LONGEST = 4, 16
IGNORED = -100

# Every second of the short lines of Python's own help: four of five have no capital to learn.
stripped = (line.strip() for topic in sorted(topics) for line in topics[topic].splitlines())
lines = list(dict.fromkeys(line for line in stripped if 6 <= len(line) <= LONGEST))[:128:2]
characters = sorted(set("".join(lines)))


def example(line):
    tokens = torch.tensor([characters.index(c) for c in line])
    capital = torch.tensor([c.isupper() for c in line])
    return {"tokens": tokens[:-1], "targets": tokens.masked_fill(~capital, IGNORED)[1:]}


def pad_to_longest(examples):
    tokens = pad_sequence([e["tokens"] for e in examples], batch_first=True)
    targets = pad_sequence(
        [e["targets"] for e in examples], batch_first=True, padding_value=IGNORED
    )
    return {"tokens": tokens, "targets": targets}


class CapitalsConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(len(characters), 12)
        self.window = nn.Conv1d(12, 24, SEEN)
        self.head = nn.Linear(24, len(characters))

    def forward(self, tokens):
        x = self.token(tokens).transpose(1, 2)
        x = self.window(pad(x, (SEEN - 1, 0)))  # a character sees those before it
        return self.head(x.relu().transpose(1, 2))


def supervised(batch):
    return (batch["targets"] != IGNORED).sum()


def loss(model, batch):
    logits = model(batch["tokens"])
    total = cross_entropy(
        logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return Loss(total, count=supervised(batch))


rare_targets = Experiment(
    model=CapitalsConv,
    data=[example(line) for line in lines],
    collate=pad_to_longest,
    loss=loss,
    count=supervised,
    optimizer=lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
    scaler=lambda device: torch.amp.GradScaler(device, init_scale=2.0**10),
    updates=2,
)


@pytest.mark.parametrize("plan", plans(32, max_D=4), ids=str)
@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed"])
def test_rare_targets(equivalence, plan, precision):
    equivalence(rare_targets, plan, precision=precision)
