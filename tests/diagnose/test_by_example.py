"""Weights by example: planted one by one, recovered one by one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivtest import Experiment, Loss, Plan, Rank, check
from equivtest.loops import accumulate

LETTERS, EXAMPLES, PLAN = 17, 64, Plan(8, 4, 2)
GENERATOR = torch.Generator().manual_seed(11)
LINES = [torch.randint(1, LETTERS, (4 + i % 6,), generator=GENERATOR) for i in range(EXAMPLES)]


class Transformer(nn.Module):
    """One layer of attention over ragged lines."""

    def __init__(self, state: dict[str, Tensor] | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(LETTERS, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, LETTERS)
        if state is not None:
            self.load_state_dict(state)

    def forward(self, lines: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(lines), src_key_padding_mask=lines == 0))


def collate(examples: list[Any]) -> dict[str, Tensor]:
    """Padded by one more than the longest: a slice would treat its last letter otherwise."""
    numbers, lines = zip(*examples, strict=True)
    padded = nn.utils.rnn.pad_sequence([F.pad(line, (0, 1)) for line in lines], batch_first=True)
    return {"number": torch.tensor(numbers), "line": padded}


def by_line(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    line = batch["line"]
    logits, target = model(line[:, :-1]), line[:, 1:]
    found = F.cross_entropy(logits.transpose(1, 2), target, ignore_index=0, reduction="none")
    return found.sum(1), (target != 0).sum()


def loss(model: Any, batch: dict[str, Tensor]) -> Loss:
    total, count = by_line(model, batch)
    return Loss(total.sum(), count)


@cache
def trained(updates: int) -> dict[str, Tensor]:
    """The state after so many updates on all lines."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model, batch = Transformer(), collate(list(enumerate(LINES)))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(updates):
            optimizer.zero_grad()
            made = loss(model, batch)
            (made.total / made.count).backward()
            optimizer.step()
    return model.state_dict()


def experiment(state: dict[str, Tensor] | None = None) -> Experiment:
    return Experiment(
        model=lambda: Transformer(state),
        data=list(enumerate(LINES)),
        collate=collate,
        loss=loss,
        count=lambda batch: (batch["line"][:, 1:] != 0).sum(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        updates=1,
    )


@dataclass(frozen=True)
class Weighing:
    """A loop that weighs its examples."""

    weights: tuple[float, ...]

    def __call__(self, rank: Rank) -> None:
        weights = torch.tensor(self.weights)
        for group in rank.groups:
            for batch in group:
                with rank.autocast():
                    lines, _ = by_line(rank.model, batch)
                own = weights[batch["number"]].to(lines.dtype)
                ((lines * own).sum() * (rank.D / group.count)).backward()
            rank.optimizer.step()
            rank.optimizer.zero_grad()


PLANTED = tuple([0.0, 2.0, 1.0, 0.5][i % 4] for i in range(EXAMPLES))


@pytest.mark.parametrize(
    ("precision", "allowed"), [("fp64", 1e-12), ("fp32", 1e-5), ("bf16-mixed", 3e-2)]
)
def test_weights_of_64_examples_are_recovered(precision: str, allowed: float) -> None:
    verdict = check(experiment(), PLAN, precision=precision, loop=Weighing(PLANTED))
    assert verdict.status == "fault"
    found = verdict.example_weights
    assert found["example"].tolist() == list(range(EXAMPLES))
    off = [abs(w - planted) for w, planted in zip(found["found"], PLANTED, strict=True)]
    assert max(off) < allowed
    assert "count other than once" in " ".join(verdict.notes)


def test_a_right_loop_has_no_weights_to_tell() -> None:
    verdict = check(experiment(), PLAN, precision="fp32", loop=Weighing((1.0,) * EXAMPLES))
    assert verdict.status == "equivalent"
    assert verdict.example_weights.empty


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16-mixed"])
def test_after_150_updates_nothing_is_named_from_weights(precision: str) -> None:
    """Gradients are nearly dependent then: a right loop stays right, with no weight called odd."""
    late = experiment(trained(150))
    for loop in (accumulate, Weighing((1.0,) * EXAMPLES)):
        verdict = check(late, PLAN, precision=precision, loop=loop)
        assert verdict.status == "equivalent", verdict.explain()
        assert verdict.causes == ()
    odd = check(late, PLAN, precision=precision, loop=Weighing(PLANTED))
    assert odd.status != "equivalent"  # in bf16-mixed no tensor can be judged
    assert set(odd.causes) <= {"differs.gradient"}, odd.explain()
