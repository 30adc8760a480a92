"""A transformer with dropout on ragged lines: a split draws other masks than the large batch.

A stream of random numbers is dealt out in the order in which it is asked for, so a mask depends on
which examples stand beside a line and on how far they are padded. No loop is at fault, and on
average over masks the gradients agree; number by number they do not. With numbers that depend on
the line and the place within it instead, nothing is left of the difference, also where activation
checkpointing draws them again in backward.
"""

import os
from functools import partial
from pydoc_data.topics import topics

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from equivtest import Experiment, Loss, Plan, plans

FULL = os.environ.get("EQUIVTEST_FULL") == "1"
PLANS = [p for p in plans(16, max_D=4) if p.m < 16] if FULL else [Plan(4, 2, 2)]
PRECISIONS = ["fp64", "fp32", "bf16-mixed"] if FULL else ["fp32"]
RECOMPUTED = ["re-entrant", "not re-entrant"]

WIDTH, HEADS, LONGEST, DROPPED = 16, 2, 24, 0.1
IGNORED = -100

stripped = (line.strip() for topic in sorted(topics) for line in topics[topic].splitlines())
lines = list(dict.fromkeys(line for line in stripped if 8 <= len(line) <= LONGEST))[:32]
characters = sorted(set("".join(lines)))
examples = [torch.tensor([characters.index(c) for c in line]) for line in lines]


def pad_to_longest(examples):
    tokens = pad_sequence(examples, batch_first=True, padding_value=IGNORED)
    # The attention is causal: what stands in for padding is never seen by a supervised token.
    return {"tokens": tokens[:, :-1].clamp(min=0), "targets": tokens[:, 1:]}


class Block(nn.Module):
    def __init__(self, dropped):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropped)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(q, k, v, dropout_p=self.drop.p, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).flatten(-2)))
        return x + self.drop(self.down(gelu(self.up(self.norm2(x)))))


class DropoutTransformer(nn.Module):
    def __init__(self, dropped=DROPPED, recomputed=None):
        super().__init__()
        self.token = nn.Embedding(len(characters), WIDTH)
        self.position = nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(Block(dropped) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(characters))
        self.recomputed = recomputed

    def forward(self, tokens):
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            if self.recomputed is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recomputed == "re-entrant")
        return self.head(self.norm(x))


def supervised(batch):
    return (batch["targets"] != IGNORED).sum()


def loss(model, batch):
    logits = model(batch["tokens"])
    total = cross_entropy(
        logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return Loss(total, count=supervised(batch))


def lines_dropout(dropped=DROPPED, recomputed=None):
    return Experiment(
        model=partial(DropoutTransformer, dropped, recomputed),
        data=examples,
        collate=pad_to_longest,
        loss=loss,
        count=supervised,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        updates=2,
    )


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_dropout(equivalence, plan, precision):
    equivalence(lines_dropout(), plan, precision=precision, expect="source.dropout")


@pytest.mark.parametrize("plan", PLANS if FULL else [Plan(2, 2, 4)], ids=str)
@pytest.mark.parametrize("recomputed", RECOMPUTED)
def test_dropout_under_checkpointing(equivalence, plan, recomputed):
    equivalence(lines_dropout(recomputed=recomputed), plan, expect="source.dropout")


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_without_dropout(equivalence, plan):
    equivalence(lines_dropout(dropped=0.0), plan)
