"""Lines sorted by topic with an attention that is not told what is padding.

A line is padded to the longest of its microbatch, in the large batch to the longest of all: what
attends to padding is another line there.
"""

import os
from pydoc_data.topics import topics

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from equivtest import Experiment, Loss, Plan, plans

FULL = os.environ.get("EQUIVTEST_FULL") == "1"
PLANS = plans(16, max_D=4) if FULL else [Plan(16, 1, 1), Plan(4, 4, 1), Plan(1, 4, 4)]
WHERE = "through padding, first at `block.self_attn` (MultiheadAttention)"
PRECISIONS = ["fp64", "fp32", "bf16-mixed"] if FULL else ["fp32"]

PADDING = 0
LONGEST = 24
TOPICS = ["assert", "class", "for", "lambda"]

# The first short lines of some of Python's own help texts, in turns.
short = [
    [line for line in map(str.strip, topics[topic].splitlines()) if 4 <= len(line) <= LONGEST]
    for topic in TOPICS
]
lines = [(label, line) for turn in zip(*short, strict=False) for label, line in enumerate(turn)]
characters = sorted({c for _, line in lines for c in line})
examples = [
    {
        "tokens": torch.tensor([1 + characters.index(c) for c in line]),
        "label": torch.tensor(label),
    }
    for label, line in (lines * 32)[:32]
]


def pad_to_longest(examples):
    tokens = [example["tokens"] for example in examples]
    return {
        "tokens": pad_sequence(tokens, batch_first=True, padding_value=PADDING),
        "label": torch.stack([example["label"] for example in examples]),
    }


class Sorter(nn.Module):
    """The mean over a line's own positions of what attention makes of them.

    Args:
        masked: tell the attention what is padding.
    """

    def __init__(self, masked):
        super().__init__()
        self.token = nn.Embedding(1 + len(characters), 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, len(TOPICS))
        self.masked = masked

    def forward(self, tokens):
        padding = tokens == PADDING
        x = self.block(self.token(tokens), src_key_padding_mask=padding if self.masked else None)
        own = (~padding).unsqueeze(-1)
        return self.head((x * own).sum(1) / own.sum(1))


def loss(model, batch):
    logits = model(batch["tokens"])
    return Loss(cross_entropy(logits, batch["label"], reduction="sum"), count=len(logits))


def sorting_lines(masked):
    return Experiment(
        model=lambda: Sorter(masked),
        data=examples,
        collate=pad_to_longest,
        loss=loss,
        count=lambda batch: len(batch["label"]),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        updates=2,
        name="sorting_lines" if masked else "sorting_lines_without_mask",
    )


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_attention_to_padding(equivalence, plan, precision):
    expect = "equivalent" if plan.m == 16 else "source.coupling"
    verdict = equivalence(sorting_lines(masked=False), plan, precision=precision, expect=expect)
    assert [row.where for row in verdict.source_rows] == ([] if plan.m == 16 else [WHERE])


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_attention_with_a_mask(equivalence, plan, precision):
    equivalence(sorting_lines(masked=True), plan, precision=precision)
