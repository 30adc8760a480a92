"""Random numbers of the forward explain what they make differ, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import scenes
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate

from equivtest import Experiment, Loss, Plan, check
from equivtest.isolate.dropout import RandomNumbers
from equivtest.isolate.places import Place
from equivtest.isolate.random.fields import NO_ROWS, NOT_PROBED, PERMUTES, Layouts, Untied
from equivtest.isolate.random.probing import OTHER_GENERATORS

WORDS, WIDTH = 30, 8
LENGTHS = (5, 9, 3, 8, 7, 4, 10, 6)
LINES = [
    torch.randint(1, WORDS, (n,), generator=torch.Generator().manual_seed(k))
    for k, n in enumerate(LENGTHS)
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        ahead = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        y = self.first(x)
        y, _ = self.attention(y, y, y, attn_mask=ahead, need_weights=False)
        x = x + self.drop(y)
        return x + self.drop(self.inner(self.second(x)))


class LanguageModel(nn.Module):
    """A causal transformer, its blocks under activation checkpointing or not."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)
        self.use_reentrant = use_reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.use_reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


def padded(examples: Sequence[Tensor]) -> Tensor:
    return pad_sequence(list(examples), batch_first=True)


def token_loss(model: nn.Module, tokens: Tensor) -> Loss:
    target = tokens[:, 1:]
    total = F.cross_entropy(
        model(tokens[:, :-1]).flatten(0, 1), target.flatten(), ignore_index=0, reduction="sum"
    )
    return Loss(total=total, count=(target != 0).sum())


def experiment(model: Callable[[], nn.Module], **options: Any) -> Experiment:
    return Experiment(
        model=model,
        data=LINES,
        collate=padded,
        loss=options.pop("loss", token_loss),
        count=lambda tokens: (tokens[:, 1:] != 0).sum(),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        **options,
    )


@pytest.mark.parametrize(
    ("use_reentrant", "plan", "precision"),
    [
        (None, Plan(2, 2, 2), "fp32"),
        (False, Plan(1, 8, 1), "fp64"),
        (True, Plan(2, 1, 4), "bf16-mixed"),
    ],
)
def test_a_transformer_on_ragged_lines(
    use_reentrant: bool | None, plan: Plan, precision: str
) -> None:
    verdict = check(
        experiment(partial(LanguageModel, use_reentrant)),
        plan,
        precision=precision,
        expect="source.dropout",
    )
    assert verdict.passed, verdict.explain()
    assert verdict.causes == ("source.dropout",)
    assert verdict.sources["source.dropout"] >= 0.9999
    assert "first at `blocks.0.attention` (MultiheadAttention)" in verdict.findings[0].text
    assert verdict.findings[0].distance < 2e-15


class Mixing(nn.Module):
    """Mixup: each example with another one, drawn anew."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.7 * x + 0.3 * x[torch.randperm(len(x))]


class OnlyFours(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if len(x) % 4:
            raise ValueError(f"{len(x)} is no multiple of 4")
        return F.dropout(x, self.rate)


class SeededAnew(nn.Module):
    """The same numbers in every forward, by row and not by example."""

    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        return x + torch.randn(x.shape, generator=generator, dtype=x.dtype)


def test_a_generator_of_the_models_own_is_isolated() -> None:
    told = scenes.explained(scenes.on_vectors(lambda: scenes.around(SeededAnew())))
    assert told.within
    assert [(row.source, row.where) for row in told.rows] == [
        ("source.dropout", "first at `1` (SeededAnew)")
    ]


def test_a_permutation_of_the_batch_couples_and_draws() -> None:
    """Once the microbatches are permuted by themselves, they draw what they draw alone."""
    told = scenes.explained(scenes.on_vectors(lambda: scenes.around(Mixing())))
    assert told.within
    assert [(row.source, row.where, row.claimed) for row in told.rows] == [
        ("source.dropout", "first at `1` (Mixing)", True),
        ("source.coupling", "first at `1` (Mixing)", True),
    ]
    assert told.notes == ()


class TestWhatIsLeft:
    """Where not all that is drawn can be isolated, nothing is claimed and the reason is said."""

    def test_a_collate_that_sorts(self) -> None:
        def by_size(examples: Sequence[tuple[Tensor, Tensor]]) -> Any:
            return default_collate(sorted(examples, key=lambda example: float(example[0].sum())))

        def model() -> nn.Module:
            return scenes.around(nn.Dropout(0.5))

        made = scenes.an_experiment(model, scenes.squares, scenes.vectors(), collate=by_size)
        told = scenes.explained(made)
        assert not told.within
        assert any("collate puts examples in an order of its own" in note for note in told.notes)

    def test_one_reason_for_each_place(self) -> None:
        mixing, other = Place("1", "Mixing"), Place("2", "Noise")
        odd = Untied(mixing, PERMUTES), Untied(None, OTHER_GENERATORS)
        numbers = RandomNumbers(Layouts(odd=odd), "")
        numbers.unkeyed += [Untied(mixing, NOT_PROBED), *[Untied(other, NO_ROWS)] * 2]
        assert numbers.said() == [
            "at `1` (Mixing), not all random numbers could be tied to their examples: a "
            "permutation of the batch cannot be drawn by example",
            f"not all random numbers could be tied to their examples: {OTHER_GENERATORS}",
            f"at `2` (Noise), not all random numbers could be tied to their examples: {NO_ROWS}",
        ]

    def test_a_model_that_refuses_the_batches_of_a_probe(self) -> None:
        made = scenes.on_vectors(lambda: scenes.around(OnlyFours(0.5)))
        told = scenes.explained(made, Plan(4, 1, 2))
        assert not told.within
        assert told.notes == (
            "not every source could be looked for: a forward of a few examples raised "
            "ValueError: 2 is no multiple of 4",
        )


def test_nothing_is_claimed_where_nothing_is_drawn_or_what_is_drawn_is_not_used() -> None:
    class Unused(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            F.dropout(x, 0.5)
            return x

    for layer in (nn.Tanh(), nn.Dropout(0.5).eval(), Unused()):
        told = scenes.explained(scenes.on_vectors(lambda layer=layer: scenes.around(layer)))
        assert told.findings == ()
        assert told.within


@pytest.mark.parametrize(
    "layers",
    [
        lambda: (nn.Dropout(0.5), nn.BatchNorm1d(scenes.WIDTH)),
        lambda: (nn.BatchNorm1d(scenes.WIDTH), nn.Dropout(0.5)),
    ],
)
def test_beside_batchnorm(layers: Callable[[], tuple[nn.Module, ...]]) -> None:
    made = scenes.on_vectors(lambda: scenes.around(*layers(), nn.Tanh()))
    told = scenes.explained(made, Plan(4, 1, 2))
    shares = {row.source: row.share for row in told.rows if row.claimed}
    assert shares.keys() == {"source.batchnorm", "source.dropout"}
    assert abs(sum(shares.values()) + told.remainder - 1) < 1e-6
    assert told.within


def test_within_a_module_that_couples() -> None:
    """The module runs microbatch by microbatch, and draws for each what it draws alone."""

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.drop(x)
            return self.drop(x - x.mean(0) / 2)

    told = scenes.explained(scenes.on_vectors(lambda: scenes.around(Centred(), nn.Tanh())))
    assert told.within
    assert {row.source for row in told.rows if row.claimed} == {
        "source.coupling",
        "source.dropout",
    }
