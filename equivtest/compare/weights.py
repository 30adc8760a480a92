"""Contribution weights by microbatch: what multiple of each microbatch's share the gradient holds.

The residual ``G - E`` is fitted by the microbatches' own contributions, all tensors at once, each
over its scale: ``min || r - sum_k d_k b_k ||``, minimum norm on the identifiable subspace (the
eigenvectors of the Gram matrix above 1e-12 of its largest eigenvalue). Weight k is ``1 + d_k``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equivtest.compare.tolerance import WEIGHT_ROUNDOFFS, WEIGHT_SIGMAS
from equivtest.distance import MaybeTensors, dense, norm, ratio, wide
from equivtest.precision import unit_roundoff

IDENTIFIABLE = 1e-12
"""Eigenvalue, over the largest, from which a direction is told: a direction of 1e-6 of the longest
one. The Gram matrix itself is good to some 1e-15 (u times a few roundings)."""

TOLD = 1e-4
"""Share of the squared distance that weights may leave where they are what the loop did. Planted
weights left 2e-5 or less in 58 of 60 updates (the others in float16), faults of another kind 0.7 or
more in 64. It chooses words, never a status."""

EXPLAINED = 0.25
"""Share that they may leave where forwards share no bits: half of the distance in norm.
Means of means left less in most updates under autocast (36 of 45), right loops, where they were
beyond comparison A at all (6 updates in 165 cases), 0.53 or more."""


DETERMINED = 2
"""Elements of the gradient for each weight that can be told apart, from which on a fit that leaves
little is no accident: with as many as weights it leaves nothing, whatever the gradient."""


@dataclass(frozen=True)
class Weights:
    """Weights found for one update.

    Attributes:
        found: weight by replica and microbatch; 1 is what the plan asks for.
        sigma: uncertainty of each.
        initial: by tensor, the distance over its scale.
        residual: the distance that the weights leave.
        u: unit roundoff of the gradient's dtype.
        determined: the gradient has elements enough for the weights that can be told apart.
    """

    found: Mapping[tuple[int, int], float]
    sigma: Mapping[tuple[int, int], float]
    initial: Sequence[float]
    residual: Sequence[float]
    u: float
    determined: bool

    def tell(self) -> bool:
        """The weights leave next to nothing of the distance: they are what the loop did."""
        before, after = (sum(d**2 for d in ds) for ds in (self.initial, self.residual))
        return after <= TOLD * before

    def explain(self, rounding: float) -> bool:
        """Weights that differ by more than ``rounding`` explain most of the distance.

        For forwards that share no bits, where what weights leave is rounding of the forward and not
        within comparison A's tolerance: half of the distance in norm, three quarters in square.
        """
        largest = max((abs(self.found[key] - 1.0) for key in self.differ()), default=0.0)
        before, after = (sum(d**2 for d in ds) for ds in (self.initial, self.residual))
        return largest > rounding and after <= EXPLAINED * before and math.isfinite(before)

    def differ(self) -> list[tuple[int, int]]:
        """Microbatches whose weight is not 1, beyond what rounding and dependence explain.

        None where there are hardly more elements than weights: those explain any gradient.
        """
        if not self.determined:
            return []
        return [
            key
            for key, weight in self.found.items()
            if abs(weight - 1.0) > max(WEIGHT_SIGMAS * self.sigma[key], WEIGHT_ROUNDOFFS * self.u)
        ]


def fit(
    parts: Mapping[tuple[int, int], MaybeTensors],
    expected: MaybeTensors,
    gradient: MaybeTensors,
    scale: Sequence[float],
    null: Sequence[bool] = (),
) -> Weights:
    """Fit the gradient by the microbatches' contributions.

    Args:
        parts: contribution to ``expected`` by replica and microbatch, in float64.
        scale: by tensor; tensors of scale 0 carry no information and are left out.
        null: by tensor, zero in exact arithmetic: left out too, any weights give some rounding.
    """
    rounding = null or [False] * len(scale)
    keys = list(parts)
    u = max((unit_roundoff(g.dtype) for g in gradient if g is not None), default=2.0**-53)
    usable = [
        t
        for t, s in enumerate(scale)
        if 0 < s < math.inf
        and not rounding[t]
        and expected[t] is not None
        and _same_shape(gradient[t], expected[t])
    ]
    gram = torch.zeros(len(keys), len(keys), dtype=torch.float64)
    moment = torch.zeros(len(keys), dtype=torch.float64)
    for t in usable:
        basis, residual = _columns(parts, keys, expected, gradient, t)
        gram += basis @ basis.T / scale[t] ** 2
        moment += basis @ residual / scale[t] ** 2
    inverse, resolved = _pseudo_inverse(gram)
    deltas = inverse @ moment
    # What the gradient does not tell may hide in a weight, up to the length of what it does tell.
    hidden = (1.0 - resolved).clamp(min=0).sqrt() * deltas.norm()
    initial = [
        0.0 if rounding[t] else ratio(norm(_difference(gradient[t], expected[t])), s)
        for t, s in enumerate(scale)
    ]
    left = list(initial)
    for t in usable:
        basis, residual = _columns(parts, keys, expected, gradient, t)
        left[t] = norm(residual - deltas @ basis) / scale[t]
    # The residual is noise of the gradient's elements: what it makes of the weights (regression).
    elements = sum(_size(expected[t]) for t in usable)
    noise = math.sqrt(sum(left[t] ** 2 for t in usable) / max(elements - len(keys), 1))
    unit = inverse.diagonal().clamp(min=0).sqrt()
    spread = torch.maximum(max(u, noise) * unit, hidden)
    return Weights(
        found={key: 1.0 + float(d) for key, d in zip(keys, deltas, strict=True)},
        sigma={
            key: max(float(s), WEIGHT_ROUNDOFFS * u / WEIGHT_SIGMAS)
            for key, s in zip(keys, spread, strict=True)
        },
        initial=initial,
        residual=left,
        u=u,
        determined=elements >= DETERMINED * round(float(resolved.sum())),
    )


def _columns(
    parts: Mapping[tuple[int, int], MaybeTensors],
    keys: Sequence[tuple[int, int]],
    expected: MaybeTensors,
    gradient: MaybeTensors,
    t: int,
) -> tuple[Tensor, Tensor]:
    wanted = expected[t]
    assert wanted is not None
    basis = torch.stack([_real(parts[key][t], wanted) for key in keys])
    return basis, _real(_difference(gradient[t], wanted), wanted)


def _real(tensor: Tensor | None, like: Tensor) -> Tensor:
    """A flat float64 vector; a complex number counts as two."""
    value = torch.zeros_like(like) if tensor is None else tensor.to(like.dtype)
    flat = torch.view_as_real(value).reshape(-1) if value.is_complex() else value.reshape(-1)
    return flat.double()


def _difference(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None:
        return None if b is None else -b
    widened = dense(a).to(wide(a.dtype))
    return widened if b is None else widened - b


def _size(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel()


def _same_shape(a: Tensor | None, b: Tensor | None) -> bool:
    return a is None or b is None or a.shape == b.shape


def _pseudo_inverse(gram: Tensor) -> tuple[Tensor, Tensor]:
    """On the identifiable subspace, and the share of each unit vector that lies in it."""
    values, vectors = torch.linalg.eigh(gram)
    kept = values > IDENTIFIABLE * values.max().clamp(min=1e-300)
    basis = vectors[:, kept]
    share = torch.ones_like(values) if kept.all() else basis.square().sum(1)
    return (basis / values[kept]) @ basis.T, share
