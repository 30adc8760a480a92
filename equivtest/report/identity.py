"""What a case is called, where it ran, and how to run it again."""

from __future__ import annotations

import os
import platform
import shlex
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from equivtest.devices import Machine
from equivtest.experiment import Experiment

RECIPE = "recipe"
DEFAULT_WRAP = "DistributedDataParallel"


def experiment_name(experiment: Experiment, module_names: Mapping[str, Any]) -> str:
    """Its own name, or what the test's module calls it, or its model's name."""
    if experiment.name:
        return experiment.name
    for name, value in module_names.items():
        if value is experiment:
            return name
    return callable_name(experiment.model)


def loop_name(loop: Callable[..., Any] | None) -> str:
    """The loop's name; ``recipe`` for equivtest's own."""
    return RECIPE if loop is None else callable_name(loop)


def wrap_name(wrap: Callable[..., Any] | None) -> str:
    """The wrapper's name; DDP where the case brings none."""
    return DEFAULT_WRAP if wrap is None else callable_name(wrap)


def callable_name(function: Any) -> str:
    """A name without addresses, so that it is the same in every process."""
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).replace("<locals>.", "")


def rerun_command(
    nodeid: str,
    *,
    device: str = "cpu",
    share_gpus: bool = False,
    timeout_s: float | None = None,
) -> str:
    """The shell command that runs this test alone, from pytest's root folder."""
    options = [f"--equiv-device={device}"] if device != "cpu" else []
    options += ["--equiv-share-gpus"] if share_gpus else []
    if timeout_s is not None:
        options.append(f"--equiv-timeout={timeout_s:g}")
    return shlex.join(["pytest", nodeid, *options])


def environment(machine: Machine | None = None) -> dict[str, str]:
    """Versions and hardware, as text; nothing that tells one run or one user from another.

    Imports torch: call it once a case has run.

    Args:
        machine: the GPUs, for cases that run there; None for the CPU.
    """
    import torch

    from equivtest import __version__

    return {
        "torch": torch.__version__,
        "device": _device(machine),
        **(machine.facts if machine is not None else {}),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": str(_cpus()),
        "equivtest": __version__,
    }


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _device(machine: Machine | None) -> str:
    """From what was asked once: asking torch would initialise CUDA in this process."""
    if machine is None:
        return "CPU"
    models = Counter(gpu.name for gpu in machine.gpus)
    found = " and ".join(f"{count} × {model}" for model, count in models.items())
    return found or "no CUDA device"
