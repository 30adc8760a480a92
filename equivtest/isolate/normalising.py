"""Every use that a forward makes of the statistics of its batch, whichever module makes it.

``BatchNorm1d`` to ``3d``, the lazy ones, ``SyncBatchNorm`` on one process and code that calls
``torch.nn.functional.batch_norm`` itself all come through one function of torch. Those that are
frozen, or normalise by example (GroupNorm, LayerNorm, InstanceNorm), do not use the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivtest.isolate.places import Place, running

_NAMES = (
    *("input", "weight", "bias", "running_mean", "running_var"),
    *("training", "momentum", "eps", "cudnn_enabled"),
)
"""The arguments of ``torch.batch_norm``, in order."""

_FUNCTIONAL = (
    *("input", "running_mean", "running_var", "weight", "bias"),
    *("training", "momentum", "eps"),
)
_DEFAULTS = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}
"""Those of ``torch.nn.functional.batch_norm``, which checks them and calls the other."""


@dataclass(frozen=True)
class Use:
    """One normalisation by the statistics of a batch.

    Attributes:
        number: of the use in its forward; recomputed under checkpointing it has a later one.
        place: whose forward makes it.
        input: shape ``(N, C, ...)``; statistics are taken over all axes but the second.
    """

    number: int
    place: Place
    input: Tensor
    _function: Callable[..., Tensor]
    _arguments: Mapping[str, Any]

    def normalised(self, rows: Tensor) -> Tensor:
        """``rows`` by statistics of their own; it moves the running statistics."""
        return self._function(**{**self._arguments, "input": rows})

    def by_fixed(self, mean: Tensor, variance: Tensor) -> Tensor:
        """By these statistics, which are constants; it moves nothing."""
        fixed = {"running_mean": mean, "running_var": variance, "training": False}
        return self._function(**{**self._arguments, "input": self.input, **fixed})

    def kept(self) -> Use:
        """The same without the graph of its input."""
        return replace(self, input=self.input.detach())


@contextmanager
def normalising(model: nn.Module, handle: Callable[[Use], Tensor]) -> Iterator[None]:
    """Let ``handle`` give what each use gives, in the order in which they are made.

    A single value per channel as well, which torch's functional interface would refuse: a handler
    may have other statistics for it. In torch's namespaces, not by a mode of torch's:
    ``torch.autograd.backward`` suspends those, and activation checkpointing computes a forward
    again inside it.
    """
    original, checked = torch.batch_norm, F.batch_norm
    uses = 0

    def batch_norm(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal uses
        arguments = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
        if not arguments["training"]:
            return original(*args, **kwargs)
        use = Use(uses, place(), arguments["input"], original, arguments)
        uses += 1
        return handle(use)

    def unchecked(*args: Any, **kwargs: Any) -> Tensor:
        cudnn = {"cudnn_enabled": torch.backends.cudnn.enabled}
        return batch_norm(
            **{**_DEFAULTS, **cudnn, **dict(zip(_FUNCTIONAL, args, strict=False)), **kwargs}
        )

    with running(model) as place:
        torch.batch_norm, F.batch_norm = batch_norm, unchecked
        try:
            yield
        finally:
            torch.batch_norm, F.batch_norm = original, checked
