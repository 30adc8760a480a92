"""The probe names the first module in which examples see each other, and no other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from couplings import (
    CORRECT_ON_LINES,
    CORRECT_ON_VECTORS,
    Centred,
    CentredSecond,
    Lines,
    Mixture,
    Scores,
    Standardised,
    Towers,
    balanced,
    by_the_mean,
    negatives,
)
from scenes import (
    WIDTH,
    a_scene,
    an_experiment,
    around,
    explained,
    on_lines,
    on_vectors,
    squares,
    vectors,
)
from torch import nn

from equivtest import Experiment, Loss
from equivtest.isolate.cut.axes import Layout
from equivtest.isolate.probe import lab as lab_module
from equivtest.isolate.probe.entry import first_coupling
from equivtest.isolate.probe.lab import Lab


def first(experiment: Experiment) -> str:
    return str(first_coupling(Lab.more(a_scene(experiment))))


COUPLED = {
    "statistics over the batch": (lambda: around(Centred()), squares, "at `1` (Centred)"),
    "not linear statistics": (lambda: around(Standardised()), squares, "at `1.spread` (Spread)"),
    "behind BatchNorm": (
        lambda: around(nn.BatchNorm1d(6), nn.Tanh(), Centred()),
        squares,
        "at `3` (Centred)",
    ),
    "balance as a result": (lambda: Mixture(False), balanced, "at `mixture` (Experts)"),
    "balance as an attribute": (lambda: Mixture(True), balanced, "at `mixture` (Experts)"),
    "negatives": (Towers, negatives, "None"),  # in the loss, where no module mixes
    "negatives from all pairs": (Scores, negatives, "None"),
    "residuals from their mean": (around, by_the_mean, "None"),
}


@pytest.mark.parametrize("case", COUPLED)
def test_first_module(case: str) -> None:
    model, loss, where = COUPLED[case]
    assert first(on_vectors(model, loss)) == where


def test_first_module_with_the_batch_second() -> None:
    model = lambda: Lines(second=True, middle=CentredSecond)  # noqa: E731
    assert first(on_lines(model)) == "at `middle` (CentredSecond)"


@pytest.mark.parametrize("model", CORRECT_ON_VECTORS)
def test_none_on_vectors(model: str) -> None:
    lab = Lab.more(a_scene(on_vectors(CORRECT_ON_VECTORS[model])))
    assert first_coupling(lab) is None
    assert lab.separable(())


@pytest.mark.parametrize("model", CORRECT_ON_LINES)
def test_none_on_lines(model: str) -> None:
    lab = Lab.more(a_scene(on_lines(CORRECT_ON_LINES[model])))
    assert first_coupling(lab) is None
    assert lab.separable(())


def test_the_balance_is_no_coupling_of_the_router_and_its_experts() -> None:
    """Rows are packed by expert: the same row of two runs is not the same example."""
    lab = Lab.more(a_scene(on_vectors(lambda: Mixture(False), balanced)))
    assert not lab.separable(())
    assert {name for name, _ in lab.anatomy} > {"mixture.router", "mixture.experts.0"}


def at_axis_0(shapes: Sequence[Any], copies: Sequence[int] = ()) -> Layout:
    return Layout((0,)) if len(shapes[0]) else Layout()


def test_a_probe_that_takes_axis_0_for_the_batch_is_caught(monkeypatch: Any) -> None:
    """Planted: with it a batch that has its examples second cannot be cut, and is not explained."""
    experiment = an_experiment(
        lambda: around(CentredSecond()),
        lambda model, x: Loss(model(x).square().sum(), count=x.shape[1]),
        [x.expand(3, WIDTH) * torch.tensor([[1.0], [2.0], [3.0]]) for x, _ in vectors()],
        collate=lambda examples: torch.stack(examples, 1),
    )
    assert explained(experiment).within
    monkeypatch.setattr(lab_module, "layout", at_axis_0)
    assert not explained(experiment).within
