"""How pytest is to be called on the GPUs at hand: what ``make gpu-matrix`` asks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from importlib.metadata import entry_points
from importlib.util import find_spec

from equivtest.devices import workers_for

NEEDED = {
    "torch": "torch",
    "cloudpickle": "cloudpickle",
    "jinja2": "jinja2",
    "numpy": "numpy",
    "pandas": "pandas",
    "pytest": "pytest",
    "sklearn": "scikit-learn",
}
"""Modules that the cases need, and what installs them."""


class MissingPackagesError(Exception):
    """The interpreter lacks packages; nothing is installed for it."""


def arguments(max_D: int) -> list[str]:
    """Arguments for pytest: the plugin, where it is not installed, and the number of workers.

    Raises:
        MissingPackagesError: says which packages this interpreter lacks.
    """
    check_packages(find_spec)
    installed = bool(entry_points(group="pytest11", name="equivtest"))
    return plugins(installed) + workers(gpus_at_hand(), max_D, find_spec("xdist") is not None)


def check_packages(find: Callable[[str], object]) -> None:
    """Raise ``MissingPackagesError`` for what ``find`` does not find."""
    missing = [package for module, package in NEEDED.items() if find(module) is None]
    if not missing:
        return
    text = f"this Python lacks {', '.join(missing)}"
    if "torch" in missing:
        text += ": install the build of torch for this machine's driver, which is not chosen here"
    others = [package for package in missing if package != "torch"]
    if others:
        text += f"; the rest comes with: pip install {' '.join(others)}"
    raise MissingPackagesError(text)


def plugins(installed: bool) -> list[str]:
    """The plugin by name, where pytest does not find it by itself."""
    return [] if installed else ["-p", "equivtest.plugin"]


def workers(gpus: int, max_D: int, has_xdist: bool) -> list[str]:
    """As many workers as have a GPU for each replica of the largest plan, or as can be without."""
    return ["-n", str(workers_for(gpus, max_D))] if has_xdist else []


def gpus_at_hand() -> int:
    """GPUs that this process sees; it must fork nothing that uses them."""
    import torch

    with contextlib.suppress(RuntimeError):  # a driver that does not work: the cases say how
        return torch.cuda.device_count()
    return 0
