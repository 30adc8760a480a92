"""A character-level transformer on ragged lines: each token counts once, however lines are cut.

Lines of different lengths are what a mean of microbatch means gets wrong, so the loss is a sum and
the count is the number of supervised tokens.
"""

from pydoc_data.topics import topics

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from equivtest import Experiment, Loss, plans

WIDTH, HEADS, BLOCKS, LONGEST = 16, 2, 1, 32
IGNORED = -100

# Real text that Python itself ships: the first 64 different lines of its help on the language.
stripped = (line.strip() for topic in sorted(topics) for line in topics[topic].splitlines())
lines = list(dict.fromkeys(line for line in stripped if 8 <= len(line) <= LONGEST))[:64]
characters = sorted(set("".join(lines)))
examples = [torch.tensor([characters.index(c) for c in line]) for line in lines]


def pad_to_longest(examples):
    tokens = pad_sequence(examples, batch_first=True, padding_value=IGNORED)
    # The attention is causal: what stands in for padding is never seen by a supervised token.
    return {"tokens": tokens[:, :-1].clamp(min=0), "targets": tokens[:, 1:]}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (
            project(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(gelu(self.up(self.norm2(x))))


class CharsTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(len(characters), WIDTH)
        self.position = nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(characters))

    def forward(self, tokens):
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


def supervised(batch):
    return (batch["targets"] != IGNORED).sum()


def loss(model, batch):
    logits = model(batch["tokens"])
    total = cross_entropy(
        logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return Loss(total, count=supervised(batch))


def warmup(optimizer):
    # From a learning rate of 0: the first update moves nothing, and that is right.
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: min(1.0, update / 4))


chars_transformer = Experiment(
    model=CharsTransformer,
    data=examples,
    collate=pad_to_longest,
    loss=loss,
    count=supervised,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    scheduler=warmup,
    clip_norm=1.0,
    scaler=lambda device: torch.amp.GradScaler(device, init_scale=2.0**10),
    updates=2,
)


@pytest.mark.parametrize("plan", plans(32, max_D=4), ids=str)
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "bf16-mixed", "fp16-mixed"])
def test_chars_transformer(equivalence, plan, precision):
    equivalence(chars_transformer, plan, precision=precision)
