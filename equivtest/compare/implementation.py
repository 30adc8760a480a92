"""Another implementation of an optimizer (foreach, fused, a class of one's own): told by rounding.

Two of them make one update of the same gradient and state, and round in other places.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from equivtest.compare.optimizer import FLAGS, KAPPA, parameter_distance
from equivtest.distance import distance, norm
from equivtest.observe.trace import COUNTER, OptimizerTrace, ParamGroups, Tensors
from equivtest.precision import half_subnormal, unit_roundoff

MOVED_APART = 0.25
"""Share of their movement that parameters may be apart in two implementations of one optimizer. In
half precision a movement is a few last bits, and ``KAPPA`` passes any: drawn updates reach 0.17,
all of it last bits. A learning rate up to a quarter off passes there with them."""

LAST_BITS = 2.0
"""Last bits of the largest parameter that do not count as movement apart; updates reach 1.2."""

STATE_UNITS = 16.0
"""Roundoffs that state may be off after one update by another implementation, each operation of
which rounds: 541 drawn tensors of state reach 2.2."""


def other(seen: OptimizerTrace, optimizer: Optimizer, wanted: ParamGroups) -> bool:
    """The loop's optimizer is the experiment's but for how the update is computed.

    Args:
        wanted: hyperparameters of ``optimizer``.
    """
    return seen.kind is not type(optimizer) or any(
        a.get(flag) != b.get(flag)
        for (_, a), (_, b) in zip(seen.groups, wanted, strict=False)
        for flag in FLAGS
    )


def far(names: Collection[str], after: Tensors, wanted: Tensors, before: Tensors) -> list[str]:
    """Parameters further from ``wanted`` than ``KAPPA`` u of their dtype."""
    return [
        name
        for name in sorted(names)
        if parameter_distance(after[name], wanted[name], before[name])
        > KAPPA * unit_roundoff(after[name].dtype)
    ]


def moved_alike(names: Collection[str], after: Tensors, wanted: Tensors, before: Tensors) -> bool:
    """All moved as ``wanted`` did, to ``MOVED_APART`` beside ``LAST_BITS``.

    In half precision an update is no larger than the rounding of a parameter, and ``far`` alone
    would pass none at all.
    """
    apart = math.hypot(*(distance(after[name], wanted[name]) for name in names))
    moved = math.hypot(*(distance(wanted[name], before[name]) for name in names))
    last_bit = max(
        (
            2 * unit_roundoff(after[name].dtype) * float(after[name].abs().max())
            for name in names
            if after[name].numel()
        ),
        default=0.0,
    )
    return apart <= MOVED_APART * moved + LAST_BITS * last_bit


def close_state(key: str, wanted: Any, found: Any) -> bool:
    """State may be rounded differently where parameters agree; a counter may not."""
    if not isinstance(wanted, Tensor) or not isinstance(found, Tensor):
        return False
    if key == COUNTER or wanted.shape != found.shape or not wanted.is_floating_point():
        return False
    near_zero = math.sqrt(found.numel()) * half_subnormal(found.dtype)
    allowed = unit_roundoff(found.dtype) * norm(wanted) + near_zero
    return distance(wanted, found) <= STATE_UNITS * allowed
