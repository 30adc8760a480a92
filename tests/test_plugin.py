"""The plugin's parts that need no session: names."""

from __future__ import annotations

import functools
from typing import Any

from equivtest.devices import Gpu, Machine
from equivtest.experiment import Experiment
from equivtest.report import identity


def experiment(**more: Any) -> Experiment:
    return Experiment(
        model=Model,  # type: ignore[arg-type]
        data=[],
        loss=lambda model, batch: model,
        optimizer=lambda model: model,
        **more,
    )


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
    command = identity.rerun_command("t.py::test", device="cuda", share_gpus=True)
    assert command == "pytest t.py::test --equiv-device=cuda --equiv-share-gpus"


def test_the_environment_of_a_gpu_case_names_gpus_versions_and_settings() -> None:
    h100 = Gpu("0", "NVIDIA H100", (9, 0))
    machine = Machine((h100, h100), facts={"NCCL": "2.27.3", "algorithms": "deterministic"})
    found = identity.environment(machine)
    assert found["device"] == "2 × NVIDIA H100"
    assert (found["NCCL"], found["algorithms"]) == ("2.27.3", "deterministic")
    assert identity.environment(Machine())["device"] == "no CUDA device"
    assert identity.environment()["device"] == "CPU"  # whatever else the machine has
