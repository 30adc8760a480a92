"""Gradients as replicas add them up: microbatch by microbatch, then over the replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equivtest.arms.allreduce import ring_average
from equivtest.distance import MaybeTensors, accumulate, finite
from equivtest.observe.trace import MicrobatchTrace, Reduction


@dataclass(frozen=True)
class Apart:
    """One group's sum taken otherwise than the loop takes it, from the same addends.

    Attributes:
        exact: in float64.
        float32: as the loop takes it, with sums in float32 where the gradients' dtype has less.
        accumulated: each replica's own sum as the loop takes it, their average in float64.
    """

    exact: MaybeTensors
    float32: MaybeTensors
    accumulated: MaybeTensors


class Sums:
    """Each replica's sum so far, by parameter.

    Args:
        module: whose trained parameters ``names`` are.
        least: a dtype that sums are taken in where the gradients' own has less; without one they
            are taken in the gradients' own, as autograd does.
    """

    def __init__(
        self, module: nn.Module, names: Sequence[str], D: int, least: torch.dtype | None = None
    ) -> None:
        self._module, self._names, self._least = module, names, least
        self._held: list[list[Tensor | None]] = [[None] * len(names) for _ in range(D)]
        self.own = [list(held) for held in self._held]
        self.reduced = False

    def add(self, r: int, gradients: MaybeTensors) -> None:
        """Add a microbatch's to replica ``r``'s."""
        _add(self._held[r], [None if g is None else self._cast(g) for g in gradients])

    def reduce(self, reductions: Sequence[Reduction]) -> None:
        """Every replica's sums become their average, as the wrapper takes it."""
        self.own = [list(held) for held in self._held]
        at = {name: t for t, name in enumerate(self._names)}
        for bucket in reductions[0].buckets:
            inside = [at[name] for name in bucket]
            averaged = ring_average(
                [[held[t] for t in inside] for held in self._held],
                [self._cast(self._module.get_parameter(name).detach()) for name in bucket],
                [[name in reduction.in_place for name in bucket] for reduction in reductions],
            )
            for held in self._held:
                for t, average in zip(inside, averaged, strict=True):
                    held[t] = average
        self.reduced = True

    def average(self) -> list[Tensor | None]:
        """What the reductions left; where there was none, the average in the order of ranks."""
        if self.reduced:
            return self._held[0]
        self.own = self._held
        total: list[Tensor | None] = [None] * len(self._names)
        for held in self._held:
            _add(total, [None if g is None else g * (1.0 / len(self._held)) for g in held])
        return total

    def overflowing(self) -> int | None:
        """The first replica whose sum is not finite."""
        odd = (r for r, held in enumerate(self._held) if not all(finite(held)))
        return next(odd, None)

    def exact_average(self) -> list[Tensor | None]:
        """The average in float64 of the replicas' own sums before the last reduction."""
        total: list[Tensor | None] = [None] * len(self._names)
        for own in self.own:
            accumulate(total, own, 1.0 / len(self.own))
        return total

    def _cast(self, gradient: Tensor) -> Tensor:
        if self._least is None:
            return gradient
        return gradient.to(torch.promote_types(gradient.dtype, self._least))


def reductions_of(
    seen: Sequence[Sequence[MicrobatchTrace]] | None, names: Sequence[str]
) -> list[list[Reduction] | None] | None:
    """By microbatch each replica's reduction, or None where there was none.

    None for all unless the group ends with one that is known and holds every parameter.
    """
    if seen is None:
        return None
    found: list[list[Reduction] | None] = []
    for at_once in zip(*seen, strict=True):
        known = [m.reduction for m in at_once if m.reduction is not None]
        found.append(known if len(known) == len(at_once) else None)
    last = found[-1] if found else None
    held = [] if last is None else [name for bucket in last[0].buckets for name in bucket]
    return found if sorted(held) == sorted(names) else None


def _add(total: list[Tensor | None], part: MaybeTensors) -> None:
    """Add as autograd accumulates: in the gradient's own dtype."""
    for t, addend in enumerate(part):
        if addend is not None:
            held = total[t]
            total[t] = addend if held is None else held + addend
