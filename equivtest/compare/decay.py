"""Parameters that were decayed by hand: multiplied by ``1 - lr * weight_decay``, once or often."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from equivtest.compare.continuity import same_values
from equivtest.distance import distance, norm
from equivtest.observe.trace import Tensors, UpdateTrace
from equivtest.precision import unit_roundoff

ROUNDOFFS = 2.0
"""Units by which each multiplication may be off, in another way to write it (``p -= lr * wd * p``
rounds twice)."""


def rates(update: UpdateTrace, decay: Mapping[str, float]) -> dict[str, float]:
    """What one decay multiplies a parameter by, by name.

    Args:
        decay: the experiment's weight decay by name; where there is none, the optimizer's own.
    """
    found = {}
    for optimizer in update.optimizers:
        for names, values in optimizer.groups:
            for name in names:
                own = decay.get(name, 0.0) or values.get("weight_decay", 0.0)
                found[name] = 1.0 - float(values.get("lr", 0.0)) * float(own)
    return found


def times(before: Tensor, after: Tensor, rate: float, most: int) -> int | None:
    """How often ``before`` was multiplied by ``rate`` to give ``after``; None if it was not."""
    if same_values(before, after):
        return 0
    if rate in (0.0, 1.0) or not before.is_floating_point():
        return None
    size, u = norm(before), unit_roundoff(before.dtype)
    wide = before.double() if not before.is_complex() else before.to(torch.complex128)
    for n in range(1, most + 1):
        off = distance(wide * rate**n, after.to(wide.dtype))
        if off <= ROUNDOFFS * n * u * size and 4 * off < abs(1 - rate) * size:
            return n
    return None


def decayed_between(
    update: UpdateTrace, microbatches: int, decay: Mapping[str, float]
) -> tuple[Tensors, ...]:
    """The parameters at each microbatch, where each but the first found them decayed once more.

    Empty where nothing moved during accumulation, or in another way.

    Args:
        decay: the experiment's weight decay by name.
    """
    start, before, rate = update.start.parameters, update.before, rates(update, decay)
    moved = [n for n in start if n in before and not same_values(start[n], before[n])]
    if microbatches < 2 or not moved:
        return ()
    often = {times(start[n], before[n], rate.get(n, 1.0), microbatches) for n in moved}
    if len(often) != 1 or not often <= {microbatches - 1, microbatches}:
        return ()
    states = [dict(start)]
    for _ in range(microbatches - 1):
        last = states[-1]
        states.append({n: p * rate[n] if n in moved else p for n, p in last.items()})
    return tuple(states)
