"""The plugin's parts that need no session: names."""

from __future__ import annotations

import functools
from typing import Any

from equivtest.experiment import Experiment
from equivtest.report import identity


def experiment(**more: Any) -> Experiment:
    return Experiment(model=Model, data=[], loss=len, optimizer=len, **more)  # type: ignore[arg-type]


class Model:
    """Stands for a module."""


def test_an_experiment_is_called_by_its_name_then_its_variable_then_its_model() -> None:
    made = experiment()
    assert identity.experiment_name(experiment(name="mine"), {}) == "mine"
    assert identity.experiment_name(made, {"other": 1, "ragged": made}) == "ragged"
    assert identity.experiment_name(made, {}) == "Model"


def test_names_of_loops_hold_no_address() -> None:
    def loop() -> None: ...

    assert identity.loop_name(None) == "recipe"
    assert identity.loop_name(functools.partial(loop)) == (
        "test_names_of_loops_hold_no_address.loop"
    )
    assert identity.loop_name(Model()) == "Model"
    assert identity.wrap_name(None) == "DistributedDataParallel"


def test_the_rerun_command_survives_a_shell() -> None:
    command = identity.rerun_command("t.py::test[a b'c]", device="cuda", timeout_s=90.0)
    assert command == """pytest 't.py::test[a b'"'"'c]' --equiv-device=cuda --equiv-timeout=90"""
