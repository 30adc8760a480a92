"""Tied, frozen and unused parameters, under DistributedDataParallel's ``find_unused_parameters``.

The next character after four others. The head is the embedding (tied), positions are sines and
cosines (frozen), and an adapter for each kind of line is used by the examples of that kind alone:
a microbatch may hold none of them, and no line at all is of the last kind.
"""

from pydoc_data.topics import topics

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from equivtest import Experiment, Loss, plans

WIDTH, SEEN = 16, 4
KINDS = (str.islower, str.isupper, str.isdigit)  # of a line's first character

stripped = (line.strip() for topic in sorted(topics) for line in topics[topic].splitlines())
lines = [line for line in stripped if len(line) > SEEN and line[0].isalpha()][:64]
characters = sorted(set("".join(line[: SEEN + 1] for line in lines)))
examples = [
    {
        "tokens": torch.tensor([characters.index(c) for c in line[:SEEN]]),
        "target": torch.tensor(characters.index(line[SEEN])),
        "kind": torch.tensor([kind(line[0]) for kind in KINDS].index(True)),
    }
    for line in lines
]


def sines_and_cosines():
    angles = torch.arange(SEEN)[:, None] / 100 ** (torch.arange(WIDTH // 2) / (WIDTH // 2))
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class AdaptedLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(len(characters), WIDTH)
        self.position = nn.Embedding.from_pretrained(sines_and_cosines(), freeze=True)
        self.mix = nn.Linear(SEEN * WIDTH, WIDTH)
        self.adapters = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in KINDS)
        self.head = nn.Linear(WIDTH, len(characters))
        self.head.weight = self.embedding.weight

    def forward(self, tokens, kind):
        x = self.mix((self.embedding(tokens) + self.position.weight).flatten(1)).tanh()
        for k, adapter in enumerate(self.adapters):
            rows = (kind == k).nonzero().squeeze(1)
            if len(rows):
                x = x.index_add(0, rows, adapter(x[rows]).to(x.dtype))
        return self.head(x)


def loss(model, batch):
    logits = model(batch["tokens"], batch["kind"])
    return Loss(cross_entropy(logits, batch["target"], reduction="sum"), count=len(logits))


shared_layers = Experiment(
    model=AdaptedLM,
    data=examples,
    loss=loss,
    count=lambda batch: len(batch["target"]),
    # Weight decay leaves a parameter without gradient alone, so that None is not the same as zero.
    optimizer=lambda model: torch.optim.AdamW(
        (p for p in model.parameters() if p.requires_grad), lr=1e-2, weight_decay=0.1
    ),
    scaler=lambda device: torch.amp.GradScaler(device, init_scale=2.0**10),
    updates=2,
)


def find_unused(module):
    return DistributedDataParallel(module, find_unused_parameters=True)


@pytest.mark.parametrize("plan", plans(32, max_D=4), ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_shared_layers(equivalence, plan, precision):
    equivalence(shared_layers, plan, precision=precision, wrap=find_unused)
