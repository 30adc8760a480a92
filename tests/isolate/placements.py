"""Overflows planted in one replica, one microbatch and one tensor, at the first attempt or later.

Every tensor has its own branch, a sum of products: its gradient is the factor on the loss times the
sum of its inputs. The factor is ``64 D`` for the loop and 64 for the large batch: ``scale = 64 N``,
over a count of ``N`` examples. A large input of one example is then all that can overflow, and what
its gradient reaches is known.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import equivtest
from equivtest import Experiment, Loss, Plan
from equivtest.compare.verdict import Verdict
from equivtest.plan import layout

TENSORS = ("a.weight", "b.weight", "c.weight")
FACTOR = 64.0
LARGEST = 65504.0
"""Of float16: (2 - 2^-10) 2^15 (IEEE 754-2019, table 3.5)."""


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 1, bias=False) for _ in range(3))
        for parameter in self.parameters():
            nn.init.constant_(parameter, 2.0**-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x[:, 0]) + self.b(x[:, 1]) + self.c(x[:, 2])


def total(model: nn.Module, x: Tensor) -> Loss:
    return Loss(model(x).float().sum(), count=len(x))


@dataclass(frozen=True)
class Placement:
    """Where an overflow is planted.

    Attributes:
        update: in which it is; the ones before are applied.
        grown: the scale has grown just before, and held until then.
        both: the large batch overflows as well.
    """

    plan: Plan
    update: int
    rank: int
    microbatch: int
    tensor: str
    grown: bool
    both: bool

    @property
    def size(self) -> float:
        """The large input: twice what overflows in both arms, or 1.5 times what the split holds."""
        return 2 * LARGEST / FACTOR if self.both else 1.5 * LARGEST / FACTOR / self.plan.D

    @property
    def reached(self) -> float:
        """What the planted gradient reaches; the other inputs are at most 1 in size."""
        return FACTOR * self.plan.D * self.size

    def experiment(self) -> Experiment:
        N = self.plan.examples
        updates = self.update + 1
        data = torch.rand(updates * N, 3, 4, generator=torch.Generator().manual_seed(0))
        example = layout(self.plan, len(data), updates=updates)[self.update].ids[self.rank][
            self.microbatch
        ][-1]
        data[example, TENSORS.index(self.tensor), 2] = self.size
        scale, interval = FACTOR * N, 2000
        if self.grown:
            scale, interval = scale / 2.0**self.update, 1
        return Experiment(
            model=Branches,
            data=list(data),
            loss=total,
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
            scaler=lambda: torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval),
            updates=updates,
        )

    def verdict(self) -> Verdict:
        return equivtest.check(self.experiment(), self.plan, precision="fp16-mixed")


def placements(n: int, seed: int) -> list[Placement]:
    """``n`` of them, drawn."""
    r = random.Random(seed)
    return [_placement(r) for _ in range(n)]


def _placement(r: random.Random) -> Placement:
    plan = Plan(r.randint(1, 3), r.randint(1, 4), r.randint(1, 4))
    update = r.choice([0, 1, 2])
    return Placement(
        plan=plan,
        update=update,
        rank=r.randrange(plan.D),
        microbatch=r.randrange(plan.A),
        tensor=r.choice(TENSORS),
        grown=update > 0 and r.random() < 0.7,
        both=plan.D == 1 or r.random() < 0.3,
    )


def named(placement: Placement) -> list[str]:
    """What the verdict on ``placement`` says that is not so; nothing if all is right."""
    verdict = placement.verdict()
    when = "a scale that held before" if placement.update else "first attempt"
    when = "later growth" if placement.grown else when
    arm = "skips it as well" if placement.both else "applies it"
    texts = verdict.notes if placement.both else [f.text for f in verdict.findings]
    text = next((t for t in texts if " was skipped, " in t), "")
    gradient = f"the gradient of {placement.tensor!r} reaches "
    wanted = [
        f"update {placement.update} of AdamW was skipped, and the large batch {arm}",
        f": rank {placement.rank}, microbatch {placement.microbatch}: {gradient}",
        "float16 holds 65504;",
        f"({when}: ",
        "parameters, optimizer state and its counters stayed",
        "the learning rate, by updates applied, stayed at ",
    ]
    if not placement.both:
        wanted.append(f"what decides is the factor D={placement.plan.D} ")
    wrong = [f"{part!r} is not in {text!r}" for part in wanted if part not in text]
    if gradient in text:
        reached = float(text.split(gradient)[1].split(",")[0])
        beside = FACTOR * placement.plan.D * placement.plan.examples
        if not abs(reached - placement.reached) <= beside:
            wrong.append(f"reaches {reached}, expected {placement.reached} +- {beside}")
    alone = placement.update == 0  # then there is no update that could be judged
    status = ("inconclusive" if alone else "equivalent") if placement.both else "explained"
    causes = () if placement.both else ("source.scaler_skip",)
    if (verdict.status, verdict.causes) != (status, causes):
        wrong.append(f"{verdict.status} {verdict.causes}, expected {status}: {verdict.explain()}")
    if not placement.both and verdict.sources != {"source.scaler_skip": 1.0}:
        wrong.append(f"shares {verdict.sources}")
    if [row.applied for row in verdict.updates] != [True] * placement.update + [False]:
        wrong.append("other updates were applied")
    return [f"{placement}: {one}" for one in wrong]
