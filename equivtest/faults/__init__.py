"""The planted faults: kinds that the field reported, as small loops written the way people do.

``FAULTS`` has them all, in a fixed order. Importing this package does not import torch; the first
use of a name does.

* ``planting``  what an entry is, and the case that it makes of an experiment
* ``setting``   what an entry asks of an experiment and plan: groups, counts, what can show
* ``pieces``    what the loops share with the recipe
* ``registry``  all entries
* one module per family: its loops, and below them their entries
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from equivtest.faults.planting import Planted, Planting
    from equivtest.faults.registry import FAULTS, planted

__all__ = ["FAULTS", "Planted", "Planting", "planted"]

_HOMES = {
    "FAULTS": "registry",
    "Planted": "planting",
    "Planting": "planting",
    "planted": "registry",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
