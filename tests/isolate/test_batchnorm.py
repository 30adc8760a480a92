"""BatchNorm of every kind is isolated and named; what does not use its batch is left alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import normalised as made
import pytest
import torch
from normalised import CUBE, FLAT, IMAGE, LINE, an_experiment, cube, dense, image, line
from torch import nn

from equivtest import Plan, Rank, Verdict, check

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
    "before a scripted layer": (
        lambda: dense(nn.BatchNorm1d(8), torch.jit.script(nn.Linear(8, 8))),
        FLAT,
        "first at `1` (BatchNorm1d)",
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


LAST_GROUPS = {  # examples beyond the first group of eight, and a kind that runs them
    "a microbatch of one beside one without": (1, "2d"),
    "two replicas of one": (2, "2d"),
    "three and two": (5, "1d"),
    "five": (5, "folded, in turns"),
}


@pytest.mark.parametrize("last", LAST_GROUPS)
def test_it_is_isolated_in_a_last_group(last: str) -> None:
    beyond, kind = LAST_GROUPS[last]
    model, data, where = KINDS[kind]
    made = an_experiment(model, data[: 8 + beyond], updates=2, last_group="process")
    verdict = check(made, Plan(4, 1, 2), precision="fp64")
    explained(verdict, where)
    isolated = {row.update for row in verdict.rows if row.isolated_margin is not None}
    assert isolated == ({0, 1} if beyond > 1 else {0})


PLANS = (Plan(8, 2, 1), Plan(2, 2, 4), Plan((3, 5), 2, 2), Plan((2, 3, 3), 3, 2))


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16-mixed"])
def test_it_is_isolated_under_any_plan_and_precision(plan: Plan, precision: str) -> None:
    model, data, where = KINDS["folded, in turns"]
    explained(check(an_experiment(model, data), plan, precision=precision), where)


# Two nearly equal rows magnify rounding by 1 / sqrt(variance + eps), block by block: the isolated
# arms are up to 2e-8 apart where the large batch's own noise allows 3e-14. (blocks, eps, apart)
MAGNIFIED = [(4, 1e-5, 1e-6), (1, 1e-12, 1e-6), (8, 1e-5, 1e-3)]


@pytest.mark.parametrize(("blocks", "eps", "apart"), MAGNIFIED)
def test_rounding_that_pairs_magnify_is_rounding(blocks: int, eps: float, apart: float) -> None:
    model = partial(made.deep, blocks, eps)
    verdict = check(an_experiment(model, made.pairs(apart)), Plan(2, 4, 2), precision="fp64")
    explained(verdict, "first at `1` (BatchNorm1d)")


@pytest.mark.parametrize(("blocks", "eps", "apart"), MAGNIFIED)
def test_a_coupling_of_a_millionth_does_not_hide_in_it(
    blocks: int, eps: float, apart: float
) -> None:
    model = partial(made.deep, blocks, eps, 1e-6)
    verdict = check(an_experiment(model, made.pairs(apart)), Plan(2, 4, 2), precision="fp64")
    assert verdict.status in ("explained", "unexplained"), verdict.explain()
    assert verdict.causes != ("source.batchnorm",), verdict.explain()


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


# -- what torch refuses


@pytest.mark.parametrize(
    "plan", [Plan(1, 4, 2), Plan((1, 3), 2, 2), Plan(1, 1, 1), Plan(1, 1, 2)], ids=str
)
def test_a_microbatch_of_one_is_not_run_for_torchs_reason(plan: Plan) -> None:
    verdict = check(an_experiment(lambda: dense(nn.BatchNorm1d(8))), plan, precision="fp64")
    assert verdict.status == "not-run", verdict.explain()
    assert "Expected more than 1 value per channel when training" in verdict.explain()


def test_a_last_microbatch_of_one_is_not_run_either() -> None:
    whole = an_experiment(
        lambda: dense(nn.BatchNorm1d(8)), FLAT[:9], updates=2, last_group="process"
    )
    verdict = check(whole, Plan(2, 2, 2), precision="fp64")  # 9 examples: the last group has 1
    assert verdict.status == "not-run", verdict.explain()
    assert "Expected more than 1 value per channel when training" in verdict.explain()


def test_one_image_has_many_values_per_channel_and_is_run() -> None:
    made = an_experiment(lambda: image(nn.BatchNorm2d(4)), IMAGE)
    explained(check(made, Plan(1, 2, 2), precision="fp64"), "first at `1` (BatchNorm2d)")
    assert check(made, Plan(1, 1, 1), precision="fp64").status == "equivalent"


def calls_it_itself(rank: Rank) -> None:
    for group in rank.groups:
        for batch in group:
            rank.loss(rank.module, batch).total.backward()


@pytest.mark.parametrize("how", [{}, {"loop": calls_it_itself, "wrap": lambda module: module}])
def test_synchronised_statistics_are_not_run_without_a_gpu(how: dict[str, Any]) -> None:
    made = an_experiment(lambda: dense(nn.SyncBatchNorm(8)))
    verdict = check(made, Plan(4, 2, 2), precision="fp64", **how)
    assert verdict.status == "not-run", verdict.explain()
    assert "SyncBatchNorm" in verdict.explain()
    assert "GPU" in verdict.explain()
