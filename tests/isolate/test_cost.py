"""Isolation costs nothing where nothing diverges, and one pair of arms for each set of sources."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from normalised import an_experiment, dense
from torch import nn

from equivtest import Experiment, Plan, Verdict
from equivtest.arms import candidate
from equivtest.arms.case import case_of
from equivtest.isolate.scene import Scene
from equivtest.judging import sources
from equivtest.judging.judge import judge
from equivtest.pool import Seat, Shared, current_pool

PLAN = Plan(4, 2, 2)

MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # and how many sources it has
    "batchnorm": (lambda: dense(nn.BatchNorm1d(8)), 1),
    "dropout": (lambda: dense(nn.Dropout(0.3)), 1),
    "both": (lambda: dense(nn.BatchNorm1d(8), nn.Dropout(0.3)), 2),
}


def judged(made: Experiment) -> Verdict:
    """As ``check`` does, but judged in this process, where it can be watched."""
    shared = Shared(made)
    case = case_of(made, PLAN, precision="fp64", loop=None, wrap=None, device="cpu")
    case = replace(case, digest=shared.digest)
    traces = current_pool().run(candidate, shared, case, D=PLAN.D)
    return judge(Seat(0, 1, None), made, case, traces)


def test_a_case_that_does_not_diverge_has_no_scene(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_scene(*_: object) -> None:
        raise AssertionError("a scene was made")

    monkeypatch.setattr(sources, "scene_of", no_scene)
    assert judged(an_experiment(dense)).status == "equivalent"


@pytest.mark.parametrize("model", MODELS)
def test_each_set_of_sources_is_run_once(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [0]
    pair = Scene.pair

    def counted(*given: object) -> object:
        asked[0] += 1
        return pair(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(Scene, "pair", counted)
    build, k = MODELS[model]
    verdict = judged(an_experiment(build, updates=1))
    assert verdict.status == "explained", verdict.explain()
    assert len(verdict.sources) == k
    assert asked[0] == 2**k  # each set of sources once, what was run to find them included
