"""The largest magnitudes of one forward and backward, point by point: where an overflow enters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from equivtest.distance import dense

OUTPUT = "output"
GRADIENT_AT = "gradient at output"
GRADIENT_OF = "gradient"


@dataclass(frozen=True)
class Extreme:
    """The largest magnitude that was seen at one point.

    Attributes:
        kind: ``OUTPUT`` of a module, ``GRADIENT_AT`` it, or ``GRADIENT_OF`` a parameter.
        name: qualified, of the module or parameter.
        of: the module's class, or nothing.
        call: of the module in this forward, from 0.
        dtype: of the values, without ``torch.``.
        largest: not finite where one of them is not.
    """

    kind: str
    name: str
    of: str
    call: int
    dtype: str
    largest: float

    @property
    def point(self) -> tuple[str, str, int]:
        """The same in every precision."""
        return self.kind, self.name, self.call

    @property
    def finite(self) -> bool:
        return math.isfinite(self.largest)


Extremes = tuple[Sequence[Extreme], Sequence[Extreme]]
"""Of one forward and backward, in order: in the case's precision, and in float64."""


@contextmanager
def watching(module: nn.Module, seen: list[Extreme]) -> Iterator[None]:
    """Append to ``seen`` what passes through ``module``, in order.

    The output of every module's every call, then the gradients at these outputs and of the
    parameters as the backward comes to them.
    """
    calls: Counter[str] = Counter()
    handles: list[RemovableHandle] = []

    def note(kind: str, name: str, of: str, call: int) -> Callable[[Tensor], None]:
        def noted(value: Tensor) -> None:
            dtype = str(value.dtype).removeprefix("torch.")
            seen.append(Extreme(kind, name, of, call, dtype, _largest(value)))

        return noted

    def called(name: str, of: str) -> Callable[[nn.Module, object, object], None]:
        def hook(_: nn.Module, __: object, output: object) -> None:
            call = calls[name]
            calls[name] += 1
            for leaf in tree_leaves(output):
                if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                    continue
                note(OUTPUT, name, of, call)(leaf.detach())
                if leaf.requires_grad:
                    handles.append(leaf.register_hook(note(GRADIENT_AT, name, of, call)))

        return hook

    for name, part in module.named_modules():
        handles.append(part.register_forward_hook(called(name, type(part).__name__)))
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            handles.append(parameter.register_hook(note(GRADIENT_OF, name, "", 0)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _largest(value: Tensor) -> float:
    values = dense(value)
    return float(values.abs().max()) if values.numel() else 0.0
