"""What the isolated large batch computes, by arithmetic of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import normalised as made
import pytest
import torch
from normalised import FLAT, an_experiment, dense
from torch import Tensor, nn
from torch.nn import functional as F

from equivtest import Experiment, Plan
from equivtest.arms.case import case_of
from equivtest.arms.reference import Reference
from equivtest.arms.replay import Start
from equivtest.causes import Cause
from equivtest.compare import noise
from equivtest.isolate import batchnorm, explaining
from equivtest.isolate.explained import Explained
from equivtest.isolate.explaining import explain
from equivtest.isolate.isolation import Isolation, Run
from equivtest.isolate.normalising import Use, normalising
from equivtest.isolate.scene import Scene, scene_of

TOLERANCE = 64 * 4 * 2.0**-53
"""Comparison B's least."""


def a_scene(experiment: Experiment, plan: Plan) -> Scene:
    """The first update from the initial state."""
    case = case_of(experiment, plan, precision="fp64", loop=None, wrap=None, device="cpu")
    reference = Reference({}, experiment, case)
    initial = reference.initial()
    start = Start(initial.parameters, (initial.buffers,) * plan.D)
    scene = scene_of(reference, case.groups[0], start, [])
    return replace(scene, seen=None)


def explained(scene: Scene) -> Explained:
    names = scene.bench.names
    null = noise.null(scene.oracle, range(len(names)))  # a bias before BatchNorm
    return explain(scene, names, null, [TOLERANCE] * len(names))


def test_one_pair_of_arms_is_run_for_one_source() -> None:
    found = explained(a_scene(an_experiment(lambda: dense(nn.BatchNorm1d(8))), Plan(4, 2, 2)))
    assert found.within
    assert found.reruns == 1  # of the 2^1 + 3 that may be


def test_statistics_as_constants_do_not_isolate_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient through the statistics is left out: the distance is that of plain autograd."""

    class Constants(Isolation):
        cause = Cause.BATCHNORM

        @contextmanager
        def whole(self, run: Run) -> Iterator[None]:
            def handle(use: Use) -> Tensor:
                parts = use.input.split([len(chunk) for chunk in run.chunks])
                return torch.cat(
                    [replace(use, input=p).by_fixed(*batchnorm._statistics(p)) for p in parts]
                )

            with normalising(run.module, handle):
                yield

    scene = a_scene(an_experiment(lambda: dense(nn.BatchNorm1d(8, affine=False))), Plan(4, 2, 2))
    monkeypatch.setattr(explaining, "FORWARD", (lambda _, __: [Constants()],))
    found = explained(scene)
    assert not found.within
    assert found.findings == ()

    # The first layer's gradient by hand, with the statistics in the graph and without.
    first, _, _, last = scene.bench.module
    scene.bench.load(scene.start.parameters)
    gradients = []
    for constant in (False, True):
        total = torch.zeros((), dtype=torch.float64)
        for k in range(4):
            rows = FLAT[4 * k : 4 * k + 4]
            x, y = (torch.stack([e[key] for e in rows]) for key in ("x", "y"))
            hidden = first(x.double())
            mean, variance = hidden.mean(0), hidden.var(0, correction=0)
            if constant:
                mean, variance = mean.detach(), variance.detach()
            z = (hidden - mean) / torch.sqrt(variance + 1e-5)
            total = total + F.cross_entropy(last(z.tanh()), y, reduction="sum") / 16
        gradients.append(torch.autograd.grad(total, first.weight)[0])
    weight = scene.bench.names.index("0.weight")
    expected = float((gradients[0] - gradients[1]).norm()) / scene.oracle.scale[weight]
    assert expected > 0.1
    assert found.left[weight] == pytest.approx(expected, rel=1e-12)


def test_detection_leaves_model_and_random_numbers_as_they_were() -> None:
    spectral = nn.utils.parametrizations.spectral_norm  # each forward moves its buffers
    scene = a_scene(
        an_experiment(lambda: dense(spectral(nn.Linear(8, 8)), nn.Dropout(0.5), nn.BatchNorm1d(8))),
        Plan(4, 2, 2),
    )
    torch.manual_seed(7)
    drawn = torch.rand(1)
    torch.manual_seed(7)
    (isolation,) = batchnorm.detect(scene, [])
    start = scene.start.buffers[0]
    assert all(torch.equal(b, start[n]) for n, b in scene.bench.buffers().items())
    run = scene.run(scene.group.flat)
    with isolation.whole(run):
        assert all(torch.equal(b, start[n]) for n, b in scene.bench.buffers().items())
        assert torch.equal(torch.rand(1), drawn)
    assert torch.batch_norm is F.batch_norm.__globals__["torch"].batch_norm
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in run.module.modules())


def test_what_is_frozen_or_does_not_use_its_batch_is_not_detected() -> None:
    kinds = (lambda: nn.LayerNorm(8), lambda: nn.GroupNorm(2, 8), lambda: made.NeverTrains(8))
    for kind in kinds:
        scene = a_scene(an_experiment(lambda kind=kind: dense(kind()).train()), Plan(4, 2, 2))
        assert batchnorm.detect(scene, []) == []


def test_a_plan_of_one_microbatch_has_nothing_to_isolate() -> None:
    scene = a_scene(an_experiment(lambda: dense(nn.BatchNorm1d(8))), Plan(16, 1, 1))
    assert batchnorm.detect(scene, []) == []


class Ghost(nn.Module):
    """Normalises no more than eight examples together."""

    def __init__(self) -> None:
        super().__init__()
        self.net = dense(nn.BatchNorm1d(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.net(part) for part in x.split(8)])


def test_uses_that_a_microbatch_makes_fewer_of_are_said_and_nothing_is_claimed() -> None:
    found = explained(a_scene(an_experiment(Ghost), Plan(4, 2, 2)))
    assert not found.within
    assert found.findings == ()
    assert found.notes == (
        "not every use of the batch's statistics could be isolated: the large batch makes 2 of "
        "them, a microbatch 1",
    )


@pytest.mark.parametrize("model", [nn.BatchNorm1d(2), made.Functional()], ids=["module", "own"])
def test_a_handler_is_asked_for_a_single_example_too(model: nn.Module) -> None:
    # By mean 1 and variance 4: (3 - 1) / 2, where torch would refuse to take statistics of one.
    def handle(use: Use) -> Tensor:
        one = torch.ones(use.input.shape[1])
        return use.by_fixed(one, 4 * one)

    features = next(model.parameters()).shape[0]
    with normalising(model, handle):
        found = model(3 * torch.ones(1, features))
    assert found.flatten().tolist() == pytest.approx([1.0] * features, abs=1e-5)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        model(3 * torch.ones(1, features))
