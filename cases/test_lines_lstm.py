"""An LSTM that predicts the next character of ragged lines, trained with RMSprop."""

from pydoc_data.topics import topics

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from equivtest import Experiment, Loss, Plan, plans

LONGEST = 16
IGNORED = -100

# Short lines of Python's own help texts: an LSTM takes its time by the character.
stripped = (line.strip() for topic in sorted(topics) for line in topics[topic].splitlines())
lines = list(dict.fromkeys(line for line in stripped if 8 <= len(line) <= LONGEST))[:64]
characters = sorted(set("".join(lines)))
examples = [torch.tensor([characters.index(c) for c in line]) for line in lines]


def pad_to_longest(examples):
    tokens = pad_sequence(examples, batch_first=True, padding_value=IGNORED)
    # The LSTM reads from the left: padding comes after everything that is supervised.
    return {"tokens": tokens[:, :-1].clamp(min=0), "targets": tokens[:, 1:]}


class LinesLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(len(characters), 16)
        self.lstm = nn.LSTM(16, 32, batch_first=True)
        self.head = nn.Linear(32, len(characters))

    def forward(self, tokens):
        states, _ = self.lstm(self.token(tokens))
        return self.head(states)


def supervised(batch):
    return (batch["targets"] != IGNORED).sum()


def loss(model, batch):
    logits = model(batch["tokens"])
    total = cross_entropy(
        logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return Loss(total, count=supervised(batch))


lines_lstm = Experiment(
    model=LinesLSTM,
    data=examples,
    collate=pad_to_longest,
    loss=loss,
    count=supervised,
    optimizer=lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3),
    scaler=lambda device: torch.amp.GradScaler(device, init_scale=2.0**10),
    updates=2,
)


def lstm_expected(precision):
    # On the CPU torch has no float16 LSTM (and in pure float16 RMSprop's eps is 0), and under
    # autocast a bfloat16 one only where the processor has more than AVX2.
    refused = ["fp16", "fp16-mixed"]
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        refused.append("bf16-mixed")
    return "not-run" if precision in refused else "equivalent"


@pytest.mark.parametrize("plan", plans(32, max_D=4), ids=str)
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16-mixed"])
def test_lines_lstm(equivalence, plan, precision):
    equivalence(lines_lstm, plan, precision=precision, expect=lstm_expected(precision))


def test_lines_lstm_under_fp16_autocast(equivalence):
    equivalence(lines_lstm, Plan(4, 4, 2), precision="fp16-mixed", expect="not-run")
