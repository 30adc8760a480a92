"""Word vectors from their neighbours: sparse gradients, and an optimizer of their own for them.

A batch touches few words. ``sparse=True`` makes a gradient of those rows, and SparseAdam moves
no other row; the rest of the model is trained by Adam with L2 regularisation.
"""

from pydoc_data.topics import topics

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from equivtest import Experiment, Loss, plans

NEIGHBOURS = 2  # on each side

# A passage of Python's own help on the language.
words = "".join(c if c.isalnum() else " " for c in topics["lambda"] + topics["while"]).lower()
words = words.split()[: 64 + 2 * NEIGHBOURS]
vocabulary = sorted(set(words))
ids = torch.tensor([vocabulary.index(word) for word in words])
examples = [
    {
        "context": torch.cat([ids[i - NEIGHBOURS : i], ids[i + 1 : i + 1 + NEIGHBOURS]]),
        "word": ids[i],
    }
    for i in range(NEIGHBOURS, len(ids) - NEIGHBOURS)
]


class WordVectors(nn.Module):
    def __init__(self):
        super().__init__()
        self.vectors = nn.Embedding(len(vocabulary), 16, sparse=True)
        self.head = nn.Linear(16, len(vocabulary))

    def forward(self, context):
        return self.head(self.vectors(context).mean(dim=1))


def loss(model, batch):
    logits = model(batch["context"])
    return Loss(cross_entropy(logits, batch["word"], reduction="sum"), count=len(logits))


def sparse_and_dense(model):
    return {
        "vectors": torch.optim.SparseAdam(model.vectors.parameters(), lr=1e-2),
        "head": torch.optim.Adam(model.head.parameters(), lr=1e-2, weight_decay=1e-3),
    }


word_vectors = Experiment(
    model=WordVectors,
    data=examples,
    loss=loss,
    count=lambda batch: len(batch["word"]),
    optimizer=sparse_and_dense,
    scaler=lambda device: torch.amp.GradScaler(device, init_scale=2.0**10),
    updates=2,
)


@pytest.mark.parametrize("plan", plans(32, max_D=4), ids=str)
@pytest.mark.parametrize("precision", ["fp32"])
def test_word_vectors(equivalence, plan, precision):
    equivalence(word_vectors, plan, precision=precision)
