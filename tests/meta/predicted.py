"""What a planted fault does to the gradient, worked out in plain float64 torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from drawn import Drawn, experiment
from torch import Tensor

from equivtest import Experiment
from equivtest.arms.build import build
from equivtest.arms.case import groups_of

STORED = {"fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtype of parameters and gradients; float32 in the others."""

ROUNDOFF = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}

Key = tuple[int, int]
Parts = Mapping[Key, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Counted:
    """Supervised elements of one group by replica and microbatch."""

    counts: tuple[tuple[int, ...], ...]

    @property
    def total(self) -> int:
        return sum(map(sum, self.counts))

    def weights(self, given: Callable[[Counted, int, int], float]) -> dict[Key, float]:
        """How often each microbatch that has any supervised element counts; 1 is right."""
        return {
            (r, k): given(self, r, k)
            for r, replica in enumerate(self.counts)
            for k, n in enumerate(replica)
            if n
        }


class Predicted:
    """Counts of every group of a drawn case, and the microbatches' gradients in its first."""

    def __init__(self, drawn: Drawn) -> None:
        self.drawn = drawn
        self.experiment: Experiment = experiment(drawn)
        self.groups = groups_of(self.experiment, drawn.plan)
        self.dtype = STORED.get(drawn.precision, torch.float32)
        self.tolerance = 4 * math.sqrt(drawn.plan.A * drawn.plan.D) * ROUNDOFF[self.dtype]

    @cached_property
    def counted(self) -> list[Counted]:
        supervised = [int((e["target"] != -100).sum()) for e in self.experiment.data]
        return [
            Counted(
                tuple(
                    tuple(sum(supervised[i] for i in ids) for ids in replica)
                    for replica in group.ids
                )
            )
            for group in self.groups
        ]

    @cached_property
    def parts(self) -> Parts:
        """Each microbatch's contribution to the right gradient of the first update."""
        return self._parts(1.0)

    def _parts(self, factor: float) -> Parts:
        with torch.random.fork_rng(devices=[]):
            module = build(self.experiment, self.dtype).double()
        named = dict(module.named_parameters())
        parts: dict[Key, dict[str, Tensor]] = {}
        collate = self.experiment.collate or torch.utils.data.default_collate
        for r, replica in enumerate(self.groups[0].ids):
            for k, ids in enumerate(replica):
                if not ids:
                    continue
                batch = {
                    key: value.to(self.dtype).double() if value.is_floating_point() else value
                    for key, value in collate([self.experiment.data[i] for i in ids]).items()
                }
                total = self.experiment.loss(module, batch).total * factor / self.counted[0].total
                grads = torch.autograd.grad(total, list(named.values()))
                parts[r, k] = {n: g / factor for n, g in zip(named, grads, strict=True)}
        return parts

    @cached_property
    def gradient(self) -> dict[str, Tensor]:
        return {n: sum(part[n] for part in self.parts.values()) for n in self._names}

    @property
    def _names(self) -> list[str]:
        return list(next(iter(self.parts.values())))

    @cached_property
    def scale(self) -> dict[str, float]:
        """By tensor, the sum of the norms of what is added."""
        return {n: sum(float(p[n].norm()) for p in self.parts.values()) for n in self._names}

    @property
    def norm(self) -> float:
        """Norm of the whole right gradient."""
        return math.sqrt(sum(float(g.norm()) ** 2 for g in self.gradient.values()))

    def share(self, key: Key) -> float:
        """The largest share of a tensor's scale that one microbatch has."""
        part = self.parts.get(key)
        if part is None:
            return 0.0
        return max(float(g.norm()) / self.scale[n] for n, g in part.items() if self.scale[n] > 0)

    def replica(self, r: int, name: str) -> Tensor:
        """What replica ``r`` alone would give for the whole, averaged wrapper or not."""
        own = [part[name] for (of, _), part in self.parts.items() if of == r]
        return self.drawn.plan.D * sum(own, start=torch.zeros_like(self.gradient[name]))

    @cached_property
    def noise(self) -> set[str]:
        """Tensors whose gradient is rounding and nothing else: a third of the loss moves it all."""
        third = self._parts(1 / 3)
        return {
            n
            for n in self._names
            if sum(float((third[k][n] - part[n]).norm()) for k, part in self.parts.items())
            > 1e-6 * self.scale[n]
        }

    def beyond(self, name: str, wrong: Tensor) -> bool:
        """``wrong`` in place of tensor ``name`` is more than twice the tolerance away."""
        if not self.scale[name] > 0 or name in self.noise:
            return False
        distance = float((wrong - self.gradient[name]).norm()) / self.scale[name]
        return distance > 2 * self.tolerance
