"""What a case is called, where it ran, and how to run it again."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

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


def rerun_command(nodeid: str, *, device: str = "cpu", timeout_s: float | None = None) -> str:
    """The shell command that runs this test alone, from pytest's root folder."""
    options = [f"--equiv-device={device}"] if device != "cpu" else []
    if timeout_s is not None:
        options.append(f"--equiv-timeout={timeout_s:g}")
    return shlex.join(["pytest", nodeid, *options])


@cache
def environment() -> dict[str, str]:
    """Versions and hardware, as text; nothing that tells one run or one user from another.

    Imports torch: call it once a case has run.
    """
    import torch

    from equivtest import __version__

    return {
        "torch": torch.__version__,
        "device": _accelerator(torch),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": str(_cpus()),
        "equivtest": __version__,
    }


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _accelerator(torch: Any) -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} × {torch.cuda.get_device_name(0)}"
    return "CPU"
