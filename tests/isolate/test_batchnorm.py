"""BatchNorm of every kind is isolated and named; what does not use its batch is left alone."""

from __future__ import annotations

from typing import Any

import normalised as made
import pytest
from normalised import CUBE, FLAT, IMAGE, LINE, an_experiment, cube, dense, image, line
from torch import nn

from equivtest import Plan, Verdict, check

KINDS: dict[str, tuple[Any, Any, str]] = {
    "1d": (lambda: dense(nn.BatchNorm1d(8)), FLAT, "first at `1` (BatchNorm1d)"),
    "1d on lines": (lambda: line(nn.BatchNorm1d(4)), LINE, "first at `1` (BatchNorm1d)"),
    "2d": (lambda: image(nn.BatchNorm2d(4)), IMAGE, "first at `1` (BatchNorm2d)"),
    "3d": (lambda: cube(nn.BatchNorm3d(4)), CUBE, "first at `1` (BatchNorm3d)"),
    "lazy 1d": (
        lambda: made.materialised(dense(nn.LazyBatchNorm1d()), FLAT),
        FLAT,
        "first at `1` (BatchNorm1d)",
    ),
    "lazy 2d": (
        lambda: made.materialised(image(nn.LazyBatchNorm2d()), IMAGE),
        IMAGE,
        "first at `1` (BatchNorm2d)",
    ),
    "lazy 3d": (
        lambda: made.materialised(cube(nn.LazyBatchNorm3d()), CUBE),
        CUBE,
        "first at `1` (BatchNorm3d)",
    ),
    "cumulative": (
        lambda: dense(nn.BatchNorm1d(8, momentum=None)),
        FLAT,
        "first at `1` (BatchNorm1d)",
    ),
    "untracked": (
        lambda: dense(nn.BatchNorm1d(8, track_running_stats=False)),
        FLAT,
        "first at `1` (BatchNorm1d)",
    ),
    "untracked in evaluation": (
        lambda: made.frozen(dense(nn.BatchNorm1d(8, track_running_stats=False))),
        FLAT,
        "first at `1` (BatchNorm1d)",
    ),
    "no gain": (
        lambda: dense(nn.BatchNorm1d(8, affine=False)),
        FLAT,
        "first at `1` (BatchNorm1d)",
    ),
    "gain without gradient": (
        lambda: made.without_affine_gradient(dense(nn.BatchNorm1d(8))),
        FLAT,
        "first at `1` (BatchNorm1d)",
    ),
    "two": (
        lambda: dense(nn.BatchNorm1d(8), nn.GELU(), nn.BatchNorm1d(8)),
        FLAT,
        "first at `1` (BatchNorm1d), and 1 more",
    ),
    "called three times": (made.Shared, FLAT, "first at `norm` (BatchNorm1d)"),
    "functional": (lambda: dense(made.Functional()), FLAT, "first at `1` (Functional)"),
    "lower function": (
        lambda: dense(made.Functional(low=True)),
        FLAT,
        "first at `1` (Functional)",
    ),
    "folded, example after example": (
        lambda: made.Tokens(minor=False),
        LINE,
        "first at `norm` (BatchNorm1d)",
    ),
    "folded, in turns": (lambda: made.Tokens(minor=True), LINE, "first at `norm` (BatchNorm1d)"),
    "batch last": (made.BatchLast, LINE, "first at `norm` (BatchNorm1d)"),
    "some rows only": (made.Chosen, LINE, "first at `norm` (BatchNorm1d)"),
    "checkpointed": (
        lambda: made.Checkpointed(reentrant=False),
        LINE,
        "first at `blocks.0.1` (BatchNorm1d), and 2 more",
    ),
    "checkpointed, reentrant": (
        lambda: made.Checkpointed(reentrant=True),
        LINE,
        "first at `blocks.0.1` (BatchNorm1d), and 2 more",
    ),
    "half frozen": (
        lambda: made.FreezesItself(both=False),
        FLAT,
        "first at `last.1` (BatchNorm1d)",
    ),
}


def explained(verdict: Verdict, where: str) -> None:
    assert verdict.status == "explained", verdict.explain()
    assert verdict.causes == ("source.batchnorm",)
    assert verdict.sources["source.batchnorm"] >= 0.9999
    assert where in verdict.findings[0].text


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_isolated_and_its_module_named(kind: str) -> None:
    model, data, where = KINDS[kind]
    explained(check(an_experiment(model, data), Plan(4, 2, 2), precision="fp64"), where)


PLANS = (Plan(8, 2, 1), Plan(2, 2, 4), Plan((3, 5), 2, 2), Plan((2, 3, 3), 3, 2))


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16-mixed"])
def test_it_is_isolated_under_any_plan_and_precision(plan: Plan, precision: str) -> None:
    model, data, where = KINDS["folded, in turns"]
    explained(check(an_experiment(model, data), plan, precision=precision), where)


LEFT_ALONE: dict[str, tuple[Any, Any]] = {
    "group": (lambda: image(nn.GroupNorm(2, 4)), IMAGE),
    "instance": (lambda: image(nn.InstanceNorm2d(4, affine=True)), IMAGE),
    "layer": (lambda: dense(nn.LayerNorm(8)), FLAT),
    "evaluation": (lambda: made.frozen(dense(nn.BatchNorm1d(8))), FLAT),
    "frozen by its forward": (lambda: made.FreezesItself(both=True), FLAT),
    "frozen by a subclass": (lambda: dense(made.NeverTrains(8).train()), FLAT),
}


@pytest.mark.parametrize("kind", LEFT_ALONE)
def test_what_does_not_use_its_batch_is_left_alone(kind: str) -> None:
    model, data = LEFT_ALONE[kind]
    verdict = check(an_experiment(model, data), Plan(4, 2, 2), precision="fp64", isolate="always")
    assert verdict.status == "equivalent", verdict.explain()
    assert "source.batchnorm" not in verdict.sources
