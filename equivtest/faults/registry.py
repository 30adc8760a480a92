"""All planted faults, in the order of the families."""

from __future__ import annotations

from equivtest.faults import (
    accumulation,
    amp,
    clip,
    counts,
    data,
    hooks,
    logs,
    losses,
    memory,
    normalisation,
    optimizer,
    precision,
    rng,
    schedule,
    skip,
    state,
    synchronisation,
    windows,
)
from equivtest.faults.planting import Planted

FAULTS: tuple[Planted, ...] = (
    *normalisation.FAULTS,
    *synchronisation.FAULTS,
    *accumulation.FAULTS,
    *hooks.FAULTS,
    *windows.FAULTS,
    *counts.FAULTS,
    *clip.FAULTS,
    *amp.FAULTS,
    *precision.FAULTS,
    *schedule.FAULTS,
    *skip.FAULTS,
    *optimizer.FAULTS,
    *state.FAULTS,
    *data.FAULTS,
    *rng.FAULTS,
    *losses.FAULTS,
    *memory.FAULTS,
    *logs.FAULTS,
)


def planted(name: str) -> Planted:
    """The entry of this name.

    Raises:
        ValueError: there is none; lists those there are.
    """
    found = next((one for one in FAULTS if one.name == name), None)
    if found is None:
        names = ", ".join(one.name for one in FAULTS)
        raise ValueError(f"planted fault {name!r}: pass one of {names}")
    return found
