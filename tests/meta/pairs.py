"""Two faults in one loop: both must be named, and no third."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from meta.composed import (
    FAULTS,
    ClipBeforeUnscale,
    ClipMissing,
    ClipPerMicrobatch,
    DoubleUnscale,
    MissingWorldSize,
    NeverReduced,
    OnlyLast,
    PartialDivisor,
    Planted,
    ScaleChangesInside,
    ScaleDiffers,
    StaleCarryover,
    SummingHook,
    TailDropped,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from equivtest import Experiment, Loss, Plan, Verdict, check
from equivtest.faults.schedule import linear_decay
from equivtest.faults.state import exponential_average

PLAN = Plan(2, 3, 2)
"""m, A and D pairwise different."""

PRECISIONS = ("fp64", "fp32", "bf16-mixed")

LENGTHS = (6, 9, 4, 7, 11, 3, 8, 5, 4, 10, 6, 8, 3, 5, 12, 4, 7, 9, 5, 4, 10, 3, 8, 6)
"""Tokens of each example: two groups of 12."""

VOCABULARY, IGNORED = 7, -100


class TinyLM(nn.Module):
    """Each token from the one before it and its place."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 6)
        self.hidden = nn.Linear(6, 8)
        self.scores = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token numbers (batch, length) to scores (batch, length, vocabulary)."""
        scores: Tensor = self.scores(torch.tanh(self.hidden(self.tokens(tokens))))
        return scores


def token_loss(model: Any, batch: dict[str, Tensor]) -> Loss:
    scores = model(batch["tokens"])
    total = F.cross_entropy(
        scores.flatten(0, 1), batch["next"].flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return Loss(total=total, count=(batch["next"] != IGNORED).sum())


def padded(examples: list[Tensor]) -> dict[str, Tensor]:
    tokens = pad_sequence([one[:-1] for one in examples], batch_first=True)
    following = pad_sequence([one[1:] for one in examples], batch_first=True, padding_value=IGNORED)
    return {"tokens": tokens, "next": following}


def lines(lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(11)
    return [torch.randint(0, VOCABULARY, (n,), generator=drawn) for n in lengths]


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def ragged(needs: frozenset[str] = frozenset(), **changes: Any) -> Experiment:
    """Two updates of a token model, or four, with what the faults need to show."""
    given: dict[str, Any] = {
        "model": TinyLM,
        "data": lines(),
        "loss": token_loss,
        "collate": padded,
        "count": lambda batch: (batch["next"] != IGNORED).sum(),
        "optimizer": _adamw,
        "updates": 4 if needs & {"stop", "tail"} else 2,
        "last_group": "process",
    }
    if "clip" in needs:
        given["clip_norm"] = 0.02  # its gradients have norms of some 0.3
    if "schedule" in needs:
        given["scheduler"] = partial(linear_decay, over=64)
    if "average" in needs:
        given["averages"] = exponential_average
    if "tail" in needs:
        given["data"] = lines(LENGTHS[:16])  # a group of 12 and one of a microbatch a replica
    return Experiment(**{**given, **changes})


@dataclass(frozen=True)
class Pair:
    """Two faults of different places."""

    one: type[Planted]
    other: type[Planted]

    @property
    def name(self) -> str:
        return f"{self.one.cause}+{self.other.cause}"

    @property
    def causes(self) -> set[str]:
        return {str(self.one.cause), str(self.other.cause)}

    def check(self, precision: str) -> Verdict:
        loop = type("Both", (self.one, self.other), {})()
        needs = self.one.needs | self.other.needs
        return check(ragged(needs), PLAN, precision=precision, loop=loop)


INCOMPATIBLE: tuple[tuple[type[Planted], type[Planted], str], ...] = (
    (ClipPerMicrobatch, OnlyLast, "what was clipped is cleared"),
    (StaleCarryover, OnlyLast, "each microbatch clears what was carried over"),
    (PartialDivisor, TailDropped, "the group that is divided wrongly is never used"),
    (MissingWorldSize, SummingHook, "they cancel: the loop is right"),
    (ClipMissing, DoubleUnscale, "divided twice, the gradient is within the bound"),
    (ScaleChangesInside, OnlyLast, "one scale is left, and it is the one that is taken out"),
    (ScaleDiffers, NeverReduced, "each rank takes out its own scale, and nothing is mixed"),
    (ClipBeforeUnscale, DoubleUnscale, "what is divided by hand before the clip is unscaled"),
    (ClipMissing, ClipPerMicrobatch, "both are about whether there is a clip"),
    (ClipBeforeUnscale, ClipPerMicrobatch, "both are about the place of the clip"),
)
"""Of two, one takes away what the other does, or both are of one thing."""


def _compatible(one: type[Planted], other: type[Planted]) -> bool:
    if NeverReduced in (one, other) and "reduce" in (one.place, other.place):
        return False  # a hook is not called where nothing is reduced
    if any({one, other} == {a, b} for a, b, _ in INCOMPATIBLE):
        return False
    return one.place != other.place


PAIRS = tuple(Pair(a, b) for a, b in itertools.combinations(FAULTS, 2) if _compatible(a, b))


@dataclass
class Named:
    """What verdicts on pairs named.

    Attributes:
        both, one, none: pairs by how many of the two were named.
        third: pairs beside which another cause was named, told in words.
        left: pairs beside which a general finding is left that no cause accounts for.
        missed: pairs of which one was not named, told in words.
    """

    both: int = 0
    one: int = 0
    none: int = 0
    left: int = 0
    third: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Of pairs of which both are named."""
        return self.both / max(1, self.both + self.one + self.none)

    def add(self, pair: Pair, verdict: Verdict) -> None:
        found = set(map(str, verdict.causes))
        missing, others = pair.causes - found, found - pair.causes
        told = f"{pair.name}: {verdict.status}, {sorted(found)}"
        self.both += not missing
        self.one += len(missing) == 1
        self.none += len(missing) == 2
        if missing:
            self.missed.append(told)
        if any(not cause.startswith(GENERAL) for cause in others):
            self.third.append(told)
        elif others:
            self.left += 1

    def __str__(self) -> str:
        return (
            f"both {self.both}, one {self.one}, none {self.none}; a third beside "
            f"{len(self.third)}, a general finding left beside {self.left}"
        )


GENERAL = "differs."
"""How causes begin that say what differs and not why."""


def named(pairs: Iterable[Pair], precision: str) -> Named:
    """Check each pair in this precision."""
    found = Named()
    for pair in pairs:
        found.add(pair, pair.check(precision))
    return found
