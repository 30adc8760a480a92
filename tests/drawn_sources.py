"""Drawn experiments with one to three known sources planted, and verdicts that must name them.

Sources are planted where they act: a layer whose input they change and whose output is used.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from drawn import Drawn, drawn, experiment
from drawn_table import Tally
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import equivtest
from equivtest import Experiment, Plan
from equivtest.batches import Batches
from equivtest.compare.verdict import Status, Verdict
from equivtest.plan import layout
from equivtest.precision import precision

PRECISIONS = ("fp64", "fp32", "bf16-mixed", "fp16-mixed")
SOURCES = ("source.batchnorm", "source.dropout", "source.coupling")
WHAT = "drawn sources"


@dataclass(frozen=True)
class Planted:
    """A drawn case with ``sources`` in it; ``seed`` chooses the kind of each."""

    case: Drawn
    sources: tuple[str, ...]
    seed: int


class ChannelNorm(nn.Module):
    """BatchNorm over the last axis."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, -1)).transpose(1, -1)


class Skewed(nn.Module):
    """Each example bent by the batch's mean cube: BatchNorm beside it takes only lines away."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * torch.tanh(x * (x**3).mean(0, keepdim=True))


class Gate(nn.Module):
    """Each example weighed by its share of a softmax over the batch."""

    def forward(self, x: Tensor) -> Tensor:
        share = x.flatten(1).mean(1).softmax(0)
        return x * (1 + share.view(-1, *[1] * (x.ndim - 1)))


class Keep(nn.Module):
    """Stochastic depth by example, written with torch.rand."""

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.rand(len(x), *[1] * (x.ndim - 1), device=x.device, dtype=x.dtype) < 0.7
        return x * kept / 0.7


class Noise(nn.Module):
    """Noise on every element."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 0.3 * torch.randn_like(x))


def _normalising(case: Drawn, _: random.Random) -> nn.Module:
    if case.architecture == "conv":
        return nn.BatchNorm2d(case.width)
    return ChannelNorm(case.width) if case.tokens else nn.BatchNorm1d(case.width)


def _random(_: Drawn, r: random.Random) -> nn.Module:
    kinds: list[Callable[[], nn.Module]] = [lambda: nn.Dropout(0.3), Keep, Noise]
    return r.choice(kinds)()


def _coupling(_: Drawn, r: random.Random) -> nn.Module:
    kinds: list[Callable[[], nn.Module]] = [Skewed, Gate]
    return r.choice(kinds)()


PLANT = dict(zip(SOURCES, (_normalising, _random, _coupling), strict=True))


def planted_experiment(planted: Planted, draws: bool = True) -> Experiment:
    """The drawn experiment, its model with the sources before and behind its blocks.

    Args:
        draws: with the layers that draw, else with the others alone.
    """
    base = experiment(planted.case)

    def model() -> nn.Module:
        net = base.model()
        r = random.Random(planted.seed)
        for source in r.sample(planted.sources, len(planted.sources)):
            layer = PLANT[source](planted.case, r)
            if source == "source.dropout" and not draws:
                layer = nn.Identity()
            if r.random() < 0.5:
                net.embed = nn.Sequential(net.embed, layer)
            else:
                net.blocks = nn.Sequential(net.blocks, layer)
        return net

    return replace(base, model=model, name=f"sources_{planted.case.architecture}")


def with_sources(stream: int = 0) -> st.SearchStrategy[Planted]:
    """Strategy of cases with one to three sources."""
    numbers = st.integers(0, 2**40)
    plain = drawn(PRECISIONS, stream=stream)
    return st.tuples(plain, numbers).map(lambda two: _planted(two[0], random.Random(two[1])))


def _planted(case: Drawn, r: random.Random) -> Planted:
    sources = tuple(sorted(r.sample(SOURCES, r.choice([1, 1, 2, 3]))))
    plan = Plan(r.choice([2, 3, 4, 5]), *r.choice([(1, 2), (2, 1), (2, 2), (3, 2), (1, 4)]))
    tokens = (
        case.tokens and case.architecture != "lstm"
    )  # padding joins the statistics of BatchNorm
    case = replace(
        case,
        architecture=case.architecture if case.architecture != "lstm" else "embedding",
        depth=min(case.depth, 4) if case.architecture != "lstm" else 1,
        plan=plan,
        examples=plan.examples * case.updates,
        last_group=None,
        ragged=case.ragged and tokens and sources == ("source.dropout",),
        normalised=case.normalised and case.architecture != "conv",
        updates=min(case.updates, 2),
        trained=min(case.trained, 5),
        init_scale=2.0**7,
    )
    return Planted(case, sources, r.randrange(2**32))


def check(planted: Planted) -> Verdict:
    """The verdict on equivtest's own recipe."""
    made = planted_experiment(planted)
    case = planted.case
    return equivtest.check(
        made, case.plan, precision=case.precision, expect=planted.sources, timeout_s=120
    )


def check_sources(examples: int, stream: int) -> tuple[Tally, list[str]]:
    """Draw and check ``examples`` cases; what is wrong with the verdicts, one by one."""
    tally, wrong = Tally(), []

    @settings(max_examples=examples)
    @given(with_sources(stream))
    def judged(planted: Planted) -> None:
        verdict = check(planted)
        tally.add(WHAT, planted.case.precision, verdict)
        wrong.extend(_wrong(planted, verdict))

    judged()
    return tally, wrong


def acts(planted: Planted) -> bool:
    """The split changes the gradient in plain float64, where dead units leave a layer an effect.

    Without random numbers: what acts through them alone, no held-still probe can see.
    """
    made, case = planted_experiment(planted, draws=False), planted.case
    torch.manual_seed(case.seed)
    net = made.model().double()
    batches = Batches(made, precision(case.precision).parameters, torch.float64)
    groups = layout(case.plan, case.examples, updates=case.updates, shuffle=case.shuffle)

    def gradient(ids: Sequence[int]) -> Tensor:
        found = torch.autograd.grad(made.loss(net, batches(ids)).total, list(net.parameters()))
        return torch.cat([g.flatten() for g in found])

    for group in groups:
        whole = gradient(group.flat)
        split = sum((gradient(ids) for replica in group.ids for ids in replica), 0 * whole)
        if float((whole - split).norm()) > 1e-12 * float(whole.norm()):
            return True
    return False


def _wrong(planted: Planted, verdict: Verdict) -> list[str]:
    if verdict.status in (Status.UNEXPLAINED, Status.EQUIVALENT):
        # Dead units: a layer acts on nothing, or on nothing but what is drawn before it.
        others = [source for source in planted.sources if source != "source.dropout"]
        draws = len(others) < len(planted.sources)
        idle = bool(others) and (verdict.status == Status.UNEXPLAINED) == draws
        if idle and not acts(planted):
            return []
    total = sum(verdict.sources.values()) + (verdict.remainder or 0.0)
    if verdict.status == Status.EXPLAINED and verdict.passed and abs(total - 1) <= 1e-6:
        return []
    failure = "" if verdict.failure is None else verdict.failure.text
    told = "; ".join(f.text for f in verdict.findings[:3]) or failure or "no finding"
    found = f"{verdict.status} {verdict.causes}, shares {verdict.sources}, left {verdict.remainder}"
    return [f"{found}, planted {planted.sources}: {told}\n    {planted}"]
