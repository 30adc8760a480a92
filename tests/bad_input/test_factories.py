"""Factories that make nothing, something else, or something else each time."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from inputs import GOOD, an_experiment, check, own_loop, sgd, told
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel


def sgd_of(*given: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(given, lr=0.1)


def unseeded() -> nn.Module:
    module, generator = nn.Linear(3, 1), torch.Generator()
    generator.seed()
    nn.init.normal_(module.weight, generator=generator)
    return module


def a_ready(module: nn.Module) -> Callable[[], nn.Module]:
    return lambda: module


OPTIMIZER = "return a torch.optim.Optimizer, or a mapping from name to optimizer"
FOREIGN = "are not the model's, so no other arm can update them: build it from the parameters of"
GRADSCALER = "return a torch.amp.GradScaler"

BAD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "frozen": (
        {"model": lambda: nn.Linear(3, 1).requires_grad_(False)},
        ["model() returned a Linear without trainable parameters: return a module with"],
    ),
    "without parameters": ({"model": nn.ReLU}, ["model() returned a ReLU without trainable"]),
    "no model": ({"model": lambda: None}, ["model() returned None: return a torch.nn.Module"]),
    "a class": (
        {"model": lambda: nn.Linear},
        ["model() returned the class Linear: return a torch.nn.Module"],
    ),
    "lazy": (
        {"model": lambda: nn.LazyLinear(1)},
        ["model() returned a LazyLinear whose 'weight' has no shape yet: give lazy modules"],
    ),
    "model raises": (
        {"model": lambda: nn.Linear(3)},
        ["model() raised TypeError: ", "missing 1 required positional argument: 'out_features'"],
    ),
    "unseeded": (
        {"model": unseeded},
        ["model() builds different parameters on each call under one seed ('weight' differs)"],
    ),
    "the same each time": (
        {"model": a_ready(nn.Linear(3, 1))},
        ["model() gives the same parameters on each call: pass a factory that builds a new"],
    ),
    "no optimizer": ({"optimizer": lambda m: None}, ["optimizer returned None: ", OPTIMIZER]),
    "a list": ({"optimizer": lambda m: [sgd(m)]}, ["optimizer returned a list: ", OPTIMIZER]),
    "an empty mapping": (
        {"optimizer": lambda m: {}},
        ["optimizer returned an empty mapping: ", OPTIMIZER],
    ),
    "a mapping of something else": (
        {"optimizer": lambda m: {"all": m}},
        ["optimizer returned a Linear: ", OPTIMIZER],
    ),
    "an optimizer's class": (
        {"optimizer": lambda m: torch.optim.SGD},
        ["optimizer returned the class SGD: ", OPTIMIZER],
    ),
    "optimizer raises": (
        {"optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=-1.0)},
        ["optimizer raised ValueError: Invalid learning rate: -1.0"],
    ),
    "of another model": (
        {"optimizer": lambda m: sgd(nn.Linear(3, 1))},
        ["optimizer: 2 of the 2 parameters that SGD holds ", FOREIGN],
    ),
    "of a copy": (
        {"optimizer": lambda m: sgd(copy.deepcopy(m))},
        ["optimizer: 2 of the 2 parameters that SGD holds ", FOREIGN],
    ),
    "of something beside the model": (
        {"optimizer": lambda m: sgd_of(*m.parameters(), nn.Parameter(torch.zeros(1)))},
        ["optimizer: 1 of the 3 parameters that SGD holds ", FOREIGN],
    ),
    "no scheduler": ({"scheduler": lambda o: None}, ["scheduler returned None: return one with"]),
    "scheduler of another": (
        {"scheduler": lambda o: StepLR(sgd(nn.Linear(1, 1)), 1)},
        ["scheduler returned a StepLR of another optimizer: build it on the optimizer that"],
    ),
    "no shadow": (
        {"averages": lambda m: None},
        ["averages returned None without update_parameters()", "AveragedModel"],
    ),
    "a bare copy": (
        {"averages": copy.deepcopy},
        ["averages returned a Linear without update_parameters()", "AveragedModel"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_factory_that_is_none(name: str) -> None:
    change, parts = BAD[name]
    text = told(an_experiment(**change))
    assert all(part in text for part in parts), text


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("name", ["unseeded", "the same each time", "of another model"])
def test_it_is_told_without_count_and_under_a_loop_of_its_own(name: str, precision: str) -> None:
    change, parts = BAD[name]
    text = told(an_experiment(**change, count=None), precision=precision, loop=own_loop)
    assert all(part in text for part in parts), text


@pytest.mark.parametrize("made", [None, 3])
def test_a_scaler_that_is_none_where_one_is_needed(made: Any) -> None:
    given = "None" if made is None else "an int"
    text = told(an_experiment(scaler=lambda: made), precision="fp16-mixed")
    assert text == f"scaler returned {given}: {GRADSCALER}"


@pytest.mark.parametrize(
    ("wrap", "parts"),
    [
        (lambda m: None, ["wrap returned None: return the wrapped module"]),
        (lambda m: nn.ReLU(), ["wrap returned a ReLU without parameters: return the module that"]),
        (lambda m: m, ["wrap returned a Linear without no_sync()", "pass the loop that belongs"]),
        (lambda m: m.wrapped, ["wrap raised AttributeError: 'Linear' object has no attribute"]),
    ],
)
def test_a_wrapper_that_is_none(wrap: Any, parts: list[str]) -> None:
    text = told(GOOD, wrap=wrap)
    assert all(part in text for part in parts), text


# -- what looks odd and is right


def test_what_an_optimizer_leaves_out_is_frozen_by_omission_and_noted() -> None:
    experiment = an_experiment(
        model=lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)),
        optimizer=lambda m: sgd(m[0]),
    )
    verdict = check(experiment)
    assert verdict.status == "equivalent", verdict.explain()
    assert any("no optimizer holds '1.bias' (2)" in note for note in verdict.notes)
    assert verdict.card.not_judged == ("1.weight", "1.bias")


def decorated(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Gives the wrapped function one argument more than it is called with."""

    @functools.wraps(loss)
    def call(model: nn.Module, batch: Any) -> Any:
        return loss(model, batch, 1.0)

    return call


@decorated
def weighted(model: nn.Module, batch: Any, weight: float) -> Any:
    from equivtest import Loss

    return Loss(weight * (model(batch[0]) - batch[1]).square().sum(), len(batch[1]))


class Factory:
    def __call__(self, model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=lr)


def test_decorated_functions_partials_objects_and_classes_are_functions() -> None:
    experiment = an_experiment(
        model=functools.partial(nn.Linear, 3, 1),
        loss=weighted,
        optimizer=Factory(),
        averages=AveragedModel,
        scheduler=functools.partial(StepLR, step_size=1),
    )
    verdict = check(experiment, wrap=DistributedDataParallel)
    assert verdict.status == "equivalent", verdict.explain()
