"""What happened in a group while it is open: to whose gradients, and between the replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from equivtest.observe.collectives import Call
from equivtest.observe.hooks import in_transform
from equivtest.observe.trace import Collective, GradientOperation

CLIP_EPSILON = 1e-6
"""What ``clip_grad_norm_`` adds to the norm that it divides by."""


@dataclass(eq=False)
class OpenOperation:
    """A ``GradientOperation`` before numbers are read: on a GPU, reading one waits for it.

    Attributes:
        begun: microbatches that had begun.
        reached: of a backward, places of those that it reached.
        factor: see ``GradientOperation``; a tensor is read at the end.
    """

    kind: str
    begun: int
    attempted: bool
    reached: list[int] = field(default_factory=list)
    factor: float | Tensor = 1.0
    parameters: frozenset[str] | None = None

    def freeze(self, used: Sequence[int]) -> GradientOperation:
        """The record; ``used`` are the places of the microbatches that the trace keeps."""
        begun = sum(place < self.begun for place in used)
        return GradientOperation(
            kind=self.kind,
            microbatch=begun - 1 if begun else None,
            microbatches=tuple(used.index(place) for place in self.reached if place in used),
            factor=float(self.factor),
            parameters=self.parameters,
            attempted=self.attempted,
        )


@dataclass(frozen=True)
class OpenCollective:
    """A ``Collective`` before the places of the microbatches are known that the trace keeps."""

    call: Call
    begun: int
    phase: str
    attempted: bool

    def freeze(self, used: Sequence[int]) -> Collective:
        call, begun = self.call, sum(place < self.begun for place in used)
        return Collective(
            name=call.name,
            op=call.op,
            dtype=call.dtype,
            elements=call.elements,
            parameters=call.parameters,
            microbatch=begun - 1 if begun else None,
            phase=self.phase,
            attempted=self.attempted,
        )


def clip_factor(max_norm: float, total_norm: Tensor) -> Tensor:
    """What ``clip_grad_norm_`` multiplies gradients by, as it computes it."""
    return torch.clamp(max_norm / (total_norm.detach() + CLIP_EPSILON), max=1.0)


def root_of(tensors: Any, gradients: Any) -> list[Tensor] | None:
    """What a backward starts from, as copies: a loop may add to its loss in place afterwards.

    Args:
        tensors, gradients: the first two arguments of ``torch.autograd.backward``.

    Returns:
        Scalars whose sum it is; None where one is no real scalar.
    """
    roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    listed = () if gradients is None else gradients
    factors = [listed] if isinstance(listed, Tensor) else list(listed)
    if not all(_is_scalar(root) for root in roots):
        return None
    found = [root.detach().clone() for root in roots]
    for k, factor in enumerate(factors[: len(found)]):
        if factor is not None:
            found[k] = found[k] * factor.detach()
    return found


def _is_scalar(root: Any) -> bool:
    return (
        isinstance(root, Tensor)
        and root.numel() == 1
        and root.is_floating_point()
        and not in_transform(root)
    )
