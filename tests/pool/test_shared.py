import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from equivtest.pool import Pool, Seat, Shared
from equivtest.pool.shared import KEPT, Ledger


def add_one(seat: Seat, arguments: dict[str, torch.Tensor]) -> float:
    arguments["x"].add_(1)
    return arguments["x"][0].item()


def test_a_job_in_the_ranks_cannot_change_it_for_the_next(pool: Pool) -> None:
    for size in (10, 100_000):
        shared = Shared({"x": torch.zeros(size)})
        assert [pool.run(add_one, shared, D=2) for _ in range(3)] == [[1.0, 1.0]] * 3
        assert shared.obj["x"][0] == 0.0


def test_the_single_process_keeps_the_object(pool: Pool) -> None:
    shared = Shared({"x": torch.zeros(10)})
    assert [pool.solo(add_one, shared) for _ in range(3)] == [1.0, 2.0, 3.0]


def test_it_arrives_unwrapped_wherever_it_stands_in_the_arguments(pool: Pool) -> None:
    shared = Shared([1, 2])
    assert pool.solo(lambda seat, a, b: a["deep"] is b, {"deep": shared}, shared)


def test_the_bytes_are_sent_once(pool: Pool) -> None:
    shared = Shared(torch.zeros(100_000))
    pool.run(lambda seat, x: None, shared, D=2)
    blob = shared.blob
    pool.run(lambda seat, x: None, shared, D=2)
    assert shared.blob is blob
    ledger = Ledger()
    assert ledger.plan([shared]) == ([shared], [])
    assert ledger.plan([shared, Shared(torch.zeros(100_000))]) == ([], [])


def test_a_process_keeps_the_last_ones_only(pool: Pool) -> None:
    many = [Shared(i) for i in range(KEPT + 2)]
    ledger = Ledger()
    for shared in many:
        ledger.plan([shared])
    assert ledger.plan([many[0]]) == ([many[0]], [many[2].digest])
    for _ in range(2):
        assert [pool.solo(lambda seat, x: x, shared) for shared in many] == list(range(KEPT + 2))
    assert pool.solo(lambda seat, xs: xs, many) == list(range(KEPT + 2))


def test_equal_contents_have_equal_digests() -> None:
    assert Shared([1, 2]).digest == Shared([1, 2]).digest
    assert Shared([1, 2]).digest != Shared([1, 3]).digest


class Scaled(nn.Module):
    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.factor == 0.0 else self.inner(x) * self.factor

    @functools.cached_property
    def width(self) -> int:
        return self.inner.in_features


class Example:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


@dataclass
class Experiment:
    model: Callable[..., nn.Module]
    data: list[Example]
    loss: Callable[..., torch.Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]
    others: tuple[Any, ...] = ()


def make_sgd(model: nn.Module, lr: float = 0.5) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def an_experiment() -> Experiment:
    weight, large = torch.ones(2), torch.arange(50_000.0)

    class Local(Scaled):
        pass

    def loss(model: nn.Module, example: Example) -> torch.Tensor:
        return F.relu(model(example.x) * weight).sum() + large[0]

    return Experiment(
        model=Scaled,
        data=[Example(torch.full((3,), float(i))) for i in range(4)],
        loss=loss,
        optimizer=functools.partial(make_sgd, lr=0.1),
        others=(Local, lambda: Scaled(3.0), Scaled(), Local(), large[3:], {"a", "b", "c"}),
    )


def test_what_is_used_between_two_checks_keeps_its_digest() -> None:
    experiment = an_experiment()
    before = Shared(experiment).digest
    assert Shared(experiment).digest == before
    model = experiment.model()
    copy.deepcopy([model, experiment.data])
    experiment.loss(model, experiment.data[0]).backward()
    experiment.optimizer(model).step()
    for kind in (Scaled, Example, *experiment.others[:1]):
        assert isinstance(kind.__annotations__, dict)  # which Python makes when it is asked for
    assert vars(experiment.optimizer) == {}
    inspect.signature(experiment.optimizer)
    again = replace(experiment, data=copy.deepcopy(experiment.data))
    assert [Shared(e).digest for e in (experiment, again)] == [before] * 2
    experiment.data[2].x[1] += 1
    assert Shared(experiment).digest != before


def test_an_equal_object_is_not_sent_again(pool: Pool) -> None:
    experiment = an_experiment()
    ledger = Ledger()
    first, second = Shared(experiment), Shared(experiment)
    assert ledger.plan([first]) == ([first], [])
    assert ledger.plan([second]) == ([], [])

    def width(seat: Seat, received: Experiment) -> tuple[int, float]:
        model = received.model()
        return model.width, float(received.loss(model, received.data[1]))

    results = [pool.run(width, Shared(experiment), D=2) for _ in range(2)]
    assert results[0] == results[1]
    assert results[0][0][0] == 3
