"""Arguments that cannot be: told before anything runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from inputs import DATA, GOOD, an_experiment, check, sgd, squared_error
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel

from equivtest import Experiment, Plan, plans

READY = torch.amp.GradScaler("cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": nn.Linear(3, 1)}, "model is a ready Linear: pass what builds it"),
        ({"averages": AveragedModel(nn.Linear(3, 1))}, "averages is a ready AveragedModel: pass"),
        ({"model": lambda size: nn.Linear(size, 1)}, "model is <lambda>(size), and is called as m"),
        ({"model": squared_error}, "model is squared_error(model, batch), and is called as model("),
        ({"loss": lambda m: m}, "loss is <lambda>(m), and is called as loss(model, batch): too"),
        ({"optimizer": torch.optim.SGD}, "optimizer is the class SGD: pass a function of the m"),
        ({"optimizer": "sgd"}, "optimizer='sgd' is a str: pass a function"),
        ({"collate": lambda: 1}, "collate is <lambda>(), and is called as collate(examples): too"),
        ({"count": 3}, "count=3 is an int: pass a function"),
        ({"scheduler": StepLR}, "scheduler is StepLR(optimizer, step_size, "),
        (
            {"scaler": READY},
            "is a GradScaler: pass a function (for a ready object x, lambda *_: x)",
        ),
        ({"data": iter(DATA)}, "data is a list_iterator: pass the dataset itself"),
        ({"updates": 0}, "updates=0: pass a whole number of at least 1"),
        ({"updates": 1.5}, "updates=1.5: pass a whole number of at least 1"),
        ({"seed": 1.5}, "seed=1.5: pass a whole number"),
        ({"seed": None}, "seed=None: pass a whole number"),
        ({"clip_norm": -1.0}, "clip_norm=-1.0: pass a positive bound, or None"),
        ({"clip_norm": float("nan")}, "clip_norm=nan: pass a positive bound, or None"),
        ({"clip_norm": True}, "clip_norm=True: pass a positive bound, or None"),
        ({"shuffle": "yes"}, "shuffle='yes': pass one of False, True"),
        ({"last_group": ["drop"]}, "last_group=['drop']: pass one of 'process', 'drop', None"),
        ({"scheduler_unit": "epoch"}, "scheduler_unit='epoch': pass one of 'applied', 'attempted'"),
        ({"name": 3}, "name=3 is an int: pass a string, or leave it out"),
    ],
)
def test_an_experiment_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        an_experiment(**change)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            {"experiment": None},
            "experiment=None is None: pass Experiment(model=..., data=..., ...)",
        ),
        ({"experiment": Experiment}, "is the class Experiment: pass Experiment(model=..., "),
        ({"plan": (2, 2, 2)}, "plan=(2, 2, 2) is a tuple: pass Plan(m, A, D)"),
        ({"plan": "m2-A2-D2"}, "plan='m2-A2-D2' is a str: pass Plan(m, A, D)"),
        ({"precision": "half"}, "precision='half': pass one of fp64, fp32, tf32, bf16, fp16, "),
        ({"precision": ["fp32"]}, "precision=['fp32']: pass one of fp64, fp32, tf32, "),
        ({"precision": torch.float32}, "precision=torch.float32: pass one of fp64, fp32, "),
        ({"loop": "mine"}, "loop='mine' is a str: pass a function"),
        ({"loop": lambda: None}, "loop is <lambda>(), and is called as loop(rank): too many"),
        ({"loop": lambda a, b: None}, "loop is <lambda>(a, b), and is called as loop(rank): miss"),
        ({"wrap": 3}, "wrap=3 is an int: pass a function"),
        ({"wrap": lambda: None}, "wrap is <lambda>(), and is called as wrap(module): too many"),
        ({"expect": "fine"}, "expect='fine': pass a status (equivalent, "),
        ({"expect": None}, "expect=None: pass a status (equivalent, "),
        ({"expect": ()}, "expect=(): pass a status (equivalent, "),
        ({"device": "tpu"}, "device='tpu': pass 'cpu' or 'cuda'"),
        ({"timeout_s": 0}, "timeout_s=0: pass a number of seconds above 0, or None"),
        ({"timeout_s": "60"}, "timeout_s='60': pass a number of seconds above 0, or None"),
        ({"timeout_s": float("nan")}, "timeout_s=nan: pass a number of seconds above 0, or None"),
        ({"timeout_s": float("inf")}, "timeout_s=inf: pass a number of seconds above 0, or None"),
        ({"pool": 4}, "pool=4 is an int: pass an equivtest.pool.Pool, or None"),
    ],
)
def test_a_case_that_cannot_be(how: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        check(**{"experiment": GOOD, **how})
    assert message in str(error.value)


def test_a_precision_that_the_device_lacks_is_not_run_and_says_so() -> None:
    verdict = check(GOOD, precision="tf32")
    assert verdict.status == "not-run"
    assert "tf32 needs a CUDA device" in verdict.explain()


def test_bounds_of_plans_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="max_D=0: pass a whole number of at least 1"):
        plans(32, max_D=0)


# -- what cannot be carried to a rank

LOCK = threading.Lock()


def a_loss_with(captured: Any) -> Callable[..., Any]:
    return lambda model, batch: (captured, squared_error(model, batch))[1]


class Locked(list):  # type: ignore[type-arg]
    lock = None


def a_locked_dataset() -> Locked:
    data = Locked(DATA)
    data.lock = threading.Lock()  # type: ignore[assignment]
    return data


IN_EACH_RANK = "make it inside the function, where each rank calls it"


def test_an_experiment_that_cannot_be_sent_names_the_argument_and_what_is_in_it(
    tmp_path: Any,
) -> None:
    with open(tmp_path / "log", "w") as file:
        cases: list[tuple[dict[str, Any], str, str]] = [
            (
                {"loss": a_loss_with(threading.Lock())},
                "loss's variable 'captured' (a lock)",
                "lock",
            ),
            ({"loss": a_loss_with(file)}, "loss's variable 'captured' (a TextIOWrapper)", "file"),
            (
                {"model": (lambda g: lambda: nn.Linear(next(g), 1))(i for i in (3, 3))},
                "model's variable 'g' (a generator)",
                "generator",
            ),
            ({"optimizer": lambda m: (LOCK, sgd(m))[1]}, "optimizer's global 'LOCK' (a lock)", "l"),
            ({"data": a_locked_dataset()}, "data.lock (a lock)", "lock"),
            ({"data": [(x, y, threading.Lock()) for x, y in DATA]}, "data[0][2] (a lock)", "lock"),
        ]
        for change, where, why in cases:
            with pytest.raises(TypeError) as error:
                check(an_experiment(**change))
            text = str(error.value)
            assert text.startswith(f"{where} cannot be sent to another process: "), text
            assert why in text.partition(": ")[2]
            assert text.endswith(IN_EACH_RANK)


@pytest.mark.parametrize("argument", ["loop", "wrap"])
def test_a_loop_or_wrapper_that_cannot_be_sent_is_named(argument: str) -> None:
    def made() -> Callable[[Any], Any]:
        held = {"locks": [threading.Lock()]}
        return lambda given: held

    with pytest.raises(TypeError) as error:
        check(GOOD, **{argument: made()})
    assert f"{argument}'s variable 'held'['locks'][0] (a lock) cannot be sent" in str(error.value)


def test_a_plan_of_more_processes_than_replicas_is_not_run_with_the_arithmetic() -> None:
    verdict = check(GOOD, Plan(2, 2, 2, tp=2))
    assert verdict.status == "not-run"
    assert "m2-A2-D2-tp2 spans 2 processes a replica" in verdict.explain()
