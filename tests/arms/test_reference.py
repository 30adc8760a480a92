"""What plans and updates share of the reference arms, and what they must not."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equivtest import Experiment, Loss, Plan
from equivtest.arms.case import case_of
from equivtest.arms.reference import Reference
from equivtest.arms.replay import Start


class Warming(nn.Module):
    """Multiplies by a buffer that each forward raises by a quarter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("factor", torch.ones(()))
        self.register_buffer("unused", torch.zeros(0, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        self.factor.mul_(1.25)  # type: ignore[operator]
        return self.linear(x) * self.factor.clone()  # type: ignore[operator]


def total(model: nn.Module, x: Tensor) -> Loss:
    return Loss(model(x).sum(), len(x))


def a_reference(plan: Plan) -> tuple[Reference, Start]:
    experiment = Experiment(
        model=Warming,
        data=list(torch.randn(8, 3, generator=torch.Generator().manual_seed(0))),
        loss=total,
        count=len,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.0),
        updates=1,
    )
    case = case_of(experiment, plan, precision="fp64", loop=None, wrap=None, device="cpu")
    reference = Reference({}, experiment, case)
    initial = reference.initial()
    return reference, Start(initial.parameters, (initial.buffers,) * plan.D)


def later(start: Start, *factors: float) -> Start:
    """The same parameters, and other buffers in each replica: an update of learning rate 0."""
    pairs = zip(start.buffers, factors, strict=True)
    return Start(start.parameters, tuple({**b, "factor": torch.tensor(f)} for b, f in pairs))


def test_arms_are_shared_where_parameters_and_buffers_are_equal() -> None:
    reference, start = a_reference(Plan(2, 2, 2))
    group = reference._case.groups[0]
    again = Start({n: p.clone() for n, p in start.parameters.items()}, start.buffers)
    assert reference.oracle(group, again) is reference.oracle(group, start)
    assert reference.large(group, again, 1.0) is reference.large(group, start, 1.0)
    assert reference.split(group, again, ()) is reference.split(group, start, ())


def test_no_arm_is_shared_where_buffers_differ() -> None:
    reference, start = a_reference(Plan(2, 2, 2))
    group = reference._case.groups[0]
    first, second = reference.oracle(group, start), reference.oracle(group, later(start, 2.0, 2.0))
    weight = reference.bench64.names.index("linear.weight")
    assert torch.allclose(second.gradients[weight], 2 * first.gradients[weight])  # type: ignore
    assert reference.large(group, later(start, 2.0, 2.0), 1.0).loss == 2 * first.loss
    one, other = (reference.split(group, later(start, 2.0, f), ()) for f in (2.0, 4.0))
    assert one.loss != other.loss  # only the second replica's differ
