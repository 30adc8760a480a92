"""Small experiments for the planted faults, each with something that the others lack.

Microbatches of most of them count unequally, so that what the loss is divided by shows.
"""

from itertools import product

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from equivtest import Experiment, Loss, Plan
from equivtest.faults.losses import pairs

EXAMPLES = 48  # two groups of 24
IGNORED = -100

PLANS = (Plan(4, 3, 2), Plan(6, 2, 2), Plan((2, 4, 6), 3, 2))
"""m, A and D pairwise different; A = D; and microbatches of unequal sizes."""


def numbers():
    """A generator of the same numbers in every process."""
    return torch.Generator().manual_seed(0)


def small_scaler(device):
    return torch.amp.GradScaler(device, init_scale=2.0**10)


# -- ragged lines of tokens, padded, some targets ignored; AdamW under a schedule, with an average

WORDS, WIDTH = 12, 8


def lines():
    made, draw = [], numbers()
    for i in range(EXAMPLES):
        tokens = torch.randint(WORDS, (3 + i * 5 % 7,), generator=draw)
        target = tokens.roll(-1)
        target[-1] = IGNORED
        target[torch.rand(len(target), generator=draw) < 0.2] = IGNORED
        target[0] = tokens[1]
        made.append({"x": tokens, "target": target})
    return made


def padded(examples):
    return {
        "x": pad_sequence([one["x"] for one in examples], batch_first=True),
        "target": pad_sequence(
            [one["target"] for one in examples], batch_first=True, padding_value=IGNORED
        ),
    }


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(16, WIDTH)
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.places(places)
        query, key, value = self.mixed(self.norm(x)).unsqueeze(1).chunk(3, dim=-1)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.head(x + seen.squeeze(1))


def token_loss(model, batch):
    logits = model(batch["x"])
    total = cross_entropy(
        logits.flatten(0, 1), batch["target"].flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return Loss(total, count=(batch["target"] != IGNORED).sum())


ragged = Experiment(
    model=Transformer,
    data=lines(),
    collate=padded,
    loss=token_loss,
    count=lambda batch: (batch["target"] != IGNORED).sum(),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 10),
    averages=lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    scaler=small_scaler,
    name="ragged",
)


# -- a regression in which examples have one to six outputs; SGD with momentum, and a clip


def rows():
    draw = numbers()
    made = []
    for i in range(EXAMPLES):
        x = torch.randn(5, generator=draw)
        y = torch.stack([x.sum(), x.prod(), *x[:4].sin()])
        made.append({"x": x, "y": y, "known": torch.arange(6) <= i * 5 % 6})
    return made


def network():
    return nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.Linear(16, 6))


def known_loss(model, batch):
    wrong = mse_loss(model(batch["x"]), batch["y"], reduction="none")
    return Loss(wrong[batch["known"]].sum(), count=batch["known"].sum())


regression = Experiment(
    model=network,
    data=rows(),
    loss=known_loss,
    count=lambda batch: batch["known"].sum(),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    clip_norm=0.1,
    scaler=small_scaler,
    name="regression",
)


# -- pictures with a class each and a mask for some: two terms, two optimizers


def pictures():
    draw = numbers()
    made = []
    for i in range(EXAMPLES):
        shown = torch.rand(1, 6, 6, generator=draw)
        # None for the seventh to the twelfth: a microbatch of every plan without any.
        masked = (torch.rand(1, 6, 6, generator=draw) < 0.3 + i % 5 / 10) & (not 6 <= i < 12)
        made.append({"x": shown, "kind": shown.mean() > 0.5, "masked": masked})
    return made


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.Tanh())
        self.kind = nn.Linear(6, 2)
        self.pixels = nn.Conv2d(6, 1, 1)

    def forward(self, batch):
        seen = self.body(batch["x"].masked_fill(batch["masked"], 0.0))
        return self.kind(seen.mean((2, 3))), self.pixels(seen)


def picture_loss(model, batch):
    kind, pixels = model(batch)
    wrong = (pixels - batch["x"]).square() * batch["masked"]
    return {
        "kind": Loss(
            cross_entropy(kind, batch["kind"].long(), reduction="sum"), count=len(batch["kind"])
        ),
        "pixels": Loss(wrong.sum(), count=batch["masked"].sum()),
    }


def two_optimizers(model):
    heads = [*model.kind.parameters(), *model.pixels.parameters()]
    return {
        "body": torch.optim.Adam(model.body.parameters(), lr=1e-2),
        "heads": torch.optim.SGD(heads, lr=0.1),
    }


two_terms = Experiment(
    model=Pictures,
    data=pictures(),
    loss=picture_loss,
    count=lambda batch: {"kind": len(batch["kind"]), "pixels": batch["masked"].sum()},
    optimizer=two_optimizers,
    scaler=small_scaler,
    name="two_terms",
)


# -- the regression with one supervised element an example


def row_loss(model, batch):
    wrong = mse_loss(model(batch["x"]), batch["y"], reduction="none").mean(1)
    return Loss(wrong.sum(), count=len(wrong))


by_row = Experiment(
    model=network,
    data=rows(),
    loss=row_loss,
    count=lambda batch: len(batch["x"]),
    optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-2),
    scaler=small_scaler,
    name="by_row",
)

# -- for what needs random numbers, or features of other replicas

dropping = Experiment(
    model=lambda: nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 6)),
    data=rows(),
    loss=row_loss,
    count=lambda batch: len(batch["x"]),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
    scaler=small_scaler,
    name="dropping",
)

contrastive = pairs(examples=EXAMPLES, scaler=small_scaler, name="contrastive")

EVERYWHERE = tuple(product((ragged, regression, two_terms, by_row), PLANS))

SETTINGS = {
    "rng": tuple((dropping, plan) for plan in PLANS),
    "loss": ((contrastive, Plan(12, 1, 2)), (contrastive, Plan(8, 1, 3))),
}
"""Experiments and plans by family of causes; ``EVERYWHERE`` for the others."""
