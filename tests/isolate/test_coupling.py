"""What couples examples is isolated where it enters, and explains the distance of the split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from couplings import (
    CORRECT_ON_LINES,
    CORRECT_ON_VECTORS,
    Centred,
    CentredBetween,
    Full,
    InTurns,
    Lines,
    Mixture,
    Scores,
    Standardised,
    Towers,
    balanced,
    by_the_mean,
    decayed,
    negatives,
    of_the_mean,
)
from scenes import a_scene, an_experiment, around, explained, on_lines, on_vectors, squares, vectors
from torch import Tensor, nn
from torch.nn import functional as F

from equivtest import Loss, Plan, check
from equivtest.isolate import coupling


def normalised(examples: list[tuple[Tensor, Tensor]]) -> Any:
    """Inputs less the mean of their batch."""
    x, y = (torch.stack(column) for column in zip(*examples, strict=True))
    return x - x.mean(0), y


EXPERIMENTS = {
    "statistics over the batch": (on_vectors(lambda: around(Centred())), "first at `1` (Centred)"),
    "not linear statistics": (
        on_vectors(lambda: around(Standardised())),
        "first at `1.spread` (Spread), isolated as all of `1` (Standardised)",
    ),
    "behind a scripted layer": (
        on_vectors(lambda: around(torch.jit.script(nn.Linear(6, 6)), Centred())),
        "first at `2` (Centred)",
    ),
    "rows of examples in turns": (
        on_vectors(lambda: around(InTurns())),
        "first at `1.middle` (Centred)",
    ),
    "a full expert": (on_vectors(lambda: around(Full())), "first at `1` (Full)"),
    "balance as a result": (
        on_vectors(lambda: Mixture(False), balanced),
        "first at `mixture` (Experts)",
    ),
    "balance as an attribute": (
        on_vectors(lambda: Mixture(True), balanced),
        "first at `mixture` (Experts)",
    ),
    "negatives": (on_vectors(Towers, negatives), "in the loss"),
    "negatives from all pairs": (on_vectors(Scores, negatives), "in the loss"),
    "residuals from their mean": (on_vectors(around, by_the_mean), "in the loss"),
    "no mask": (
        on_lines(lambda: Lines(masked=False)),
        "through padding, first at `attention` (MultiheadAttention)",
    ),
    "no mask, batch second": (
        on_lines(lambda: Lines(masked=False, second=True)),
        "through padding, first at `attention` (MultiheadAttention)",
    ),
    "positions from the right": (
        on_lines(lambda: Lines(from_right=True)),
        "through padding, first in the model's own forward (Lines)",
    ),
    "normalised by collate": (
        an_experiment(around, squares, vectors(), collate=normalised),
        "in collate, which shows an example otherwise in another batch",
    ),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("plan", [Plan(2, 2, 2), Plan((3, 1), 2, 2)], ids=str)
@pytest.mark.parametrize("case", EXPERIMENTS)
def test_explained_and_named(case: str, plan: Plan) -> None:
    experiment, where = EXPERIMENTS[case]
    found = explained(experiment, plan)
    (row,) = found.rows
    assert found.within
    assert (row.source, row.where, row.claimed) == ("source.coupling", where, True)
    assert row.share == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("model", [*CORRECT_ON_VECTORS, *CORRECT_ON_LINES])
def test_nothing_is_found_where_examples_do_not_meet(model: str) -> None:
    if model in CORRECT_ON_VECTORS:
        experiment = on_vectors(CORRECT_ON_VECTORS[model])
    else:
        experiment = on_lines(CORRECT_ON_LINES[model])
    assert coupling.detect(a_scene(experiment), ()) == []


@pytest.mark.parametrize("loss", [of_the_mean, decayed])
def test_a_total_that_is_no_sum_couples_no_examples(loss: Any) -> None:
    """The split is wrong, and by a mistake of the experiment: no source may excuse it."""
    found = explained(on_vectors(around, loss))
    assert not found.within
    assert not found.rows
    said = "has not the gradient that its microbatches add up to"
    assert any(said in note for note in found.notes) == (loss is decayed)


def test_code_between_modules_is_isolated_without_them() -> None:
    """All of the model in microbatches would isolate BatchNorm and dropout as well."""
    found = explained(on_vectors(CentredBetween))
    assert found.within
    assert [(row.source, row.where) for row in found.rows if row.claimed] == [
        ("source.batchnorm", "first at `norm` (BatchNorm1d)"),
        ("source.dropout", "first at `drop` (Dropout)"),
        ("source.coupling", "first in the model's own forward (CentredBetween)"),
    ]


def test_a_case_expects_it() -> None:
    verdict = check(on_vectors(Towers, negatives), Plan(2, 2, 2), expect="source.coupling")
    assert verdict.passed, verdict.explain()
    assert verdict.status == "explained"


def test_negatives_of_four_unit_vectors() -> None:
    """Four orthogonal unit vectors, each its own positive, in two microbatches of two.

    An anchor scores 1 with its own and 0 with others. Among n of them softmax gives each other
    1 / (e + n - 1): the gradient of anchor i is (n - 1, -1 for each other) over -(e + n - 1). With
    n = 4 and n = 2 the cosine is (3 + 1) / (sqrt(9 + 3) sqrt(1 + 1)) = 0.8165.
    """
    experiment = an_experiment(Anchors, anchored, list(enumerate(torch.eye(4))))
    scene = a_scene(experiment, Plan(2, 2, 1))
    split, whole = (
        torch.stack([g for g in x.gradients if g is not None]).flatten()
        for x in (scene.cut, scene.oracle)
    )
    assert float(F.cosine_similarity(split, whole, dim=0)) == pytest.approx(0.8165, abs=5e-5)
    assert explained(experiment, Plan(2, 2, 1)).within


class Anchors(nn.Module):
    """Four trained vectors that start as orthogonal unit vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.eye(4))

    def forward(self, at: Tensor) -> Tensor:
        return self.table[at]


def anchored(model: nn.Module, batch: Any) -> Loss:
    at, positives = batch
    scores = model(at) @ positives.T
    return Loss(F.cross_entropy(scores, torch.arange(len(at)), reduction="sum"), count=len(at))


def less_the_others(x: Tensor) -> Tensor:
    """Less the mean of the other examples, of which there must be one."""
    return x - (x.sum(0) - x) * (1 / (len(x) - 1))


class LessTheOthers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return less_the_others(x)


def from_the_others(model: nn.Module, batch: Any) -> Loss:
    x, y = batch
    assert len(x) > 1, "nothing to compare with"
    return Loss(less_the_others(model(x) - y).square().sum(), count=len(x))


class Deviations(nn.Module):
    """In units of the batch's deviation: of a single example it is NaN."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.std(0) + 1)


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize(
    ("made", "where"),
    [
        (on_vectors(lambda: around(LessTheOthers())), "first at `1` (LessTheOthers)"),
        (on_vectors(around, from_the_others), "in the loss"),
        (on_vectors(lambda: around(Deviations())), "first at `1` (Deviations)"),
    ],
)
def test_what_refuses_a_single_example_is_isolated(made: Any, where: str) -> None:
    verdict = check(made, Plan(2, 2, 2), expect="source.coupling")
    assert verdict.passed, verdict.explain()
    assert [row.where for row in verdict.source_rows] == [where]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_scripted_layer_that_couples_is_isolated_with_the_code_around_it() -> None:
    def model() -> nn.Module:
        return around(torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))))

    assert explained(on_vectors(model)).within
