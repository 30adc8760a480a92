"""transformers' GPT-2 from a small config with random weights, trained as one would a large one.

AdamW decays matrices only, the gradient is clipped by its norm, the learning rate falls linearly.
"""

from pydoc_data.topics import topics

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from equivtest import Experiment, Loss, plans

LONGEST = 24
IGNORED = -100

# Short lines of Python's own help on the language, by the character.
stripped = (line.strip() for topic in sorted(topics) for line in topics[topic].splitlines())
lines = list(dict.fromkeys(line for line in stripped if 8 <= len(line) <= LONGEST))[:64]
characters = sorted(set("".join(lines)))
examples = [torch.tensor([characters.index(c) for c in line]) for line in lines]


def pad_to_longest(examples):
    tokens = pad_sequence(examples, batch_first=True, padding_value=IGNORED)
    # The attention is causal: what stands in for padding is never seen by a supervised token.
    return {"tokens": tokens[:, :-1].clamp(min=0), "targets": tokens[:, 1:]}


def small_gpt2():
    # Here, and not above: it takes seconds, and only what builds the model needs it.
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=len(characters),
        n_positions=LONGEST,
        n_embd=16,
        n_layer=1,
        n_head=2,
        # Dropout draws other masks for another cut, and the updates are then not the same.
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def supervised(batch):
    return (batch["targets"] != IGNORED).sum()


def loss(model, batch):
    logits = model(batch["tokens"]).logits
    # Not model(..., labels=...).loss, which is the mean over the microbatch's own tokens.
    total = cross_entropy(
        logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return Loss(total, count=supervised(batch))


def adamw(model):
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]  # biases and norms
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3)


def linear_decay(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=10)


gpt2 = Experiment(
    model=small_gpt2,
    data=examples,
    collate=pad_to_longest,
    loss=loss,
    count=supervised,
    optimizer=adamw,
    scheduler=linear_decay,
    clip_norm=0.5,  # active: the norm of the first gradient is 0.87
    scaler=lambda device: torch.amp.GradScaler(device, init_scale=2.0**10),
    updates=2,
)


@pytest.mark.parametrize("plan", plans(32, max_D=4), ids=str)
@pytest.mark.parametrize("precision", ["fp32"])
def test_gpt2(equivalence, plan, precision):
    equivalence(gpt2, plan, precision=precision)
