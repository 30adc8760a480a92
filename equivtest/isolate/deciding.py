"""Every operator of a forward that decides a branch: a sign, a maximum, an order, a comparison.

On either side of a decision the value is the same to the last bits (0 or 1e-17 behind a ReLU), and
the gradient is another. What decides is the operator's input, so that is what is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from equivtest.isolate.calls import tensors
from equivtest.isolate.places import Place, running

_SIGNS = "relu relu6 leaky_relu prelu elu celu selu hardtanh hardswish hardsigmoid threshold"
_SHRINKS = "hardshrink softshrink clamp clamp_min clamp_max clip abs absolute sign sgn heaviside"
_EXTREMES = "max min amax amin aminmax maximum minimum fmax fmin argmax argmin cummax cummin"
_ORDERS = "topk sort argsort kthvalue median nanmedian mode bucketize searchsorted"
_POOLS = "max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d"
_INDEXED = "max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool3d"
_COMPARES = "gt lt ge le eq ne greater less greater_equal less_equal floor ceil round trunc"
_LOSSES = "l1_loss smooth_l1_loss huber_loss hinge_embedding_loss margin_ranking_loss"

DECIDING = frozenset(
    " ".join((_SIGNS, _SHRINKS, _EXTREMES, _ORDERS, _POOLS, _INDEXED, _COMPARES, _LOSSES)).split()
)
"""Operators by name, without the mark of an in-place one."""


@dataclass(frozen=True)
class Decision:
    """One call of a deciding operator.

    Attributes:
        name: of the operator.
        place: whose forward makes it.
        inputs: its floating tensors, as given.
        again: the operator with other inputs in their place.
    """

    name: str
    place: Place
    inputs: tuple[Tensor, ...]
    again: Callable[[Sequence[Tensor]], Any]

    def kept(self) -> Decision:
        """With copies of its inputs."""
        copies = tuple(x.detach().clone() for x in self.inputs)
        return Decision(self.name, self.place, copies, self.again)


STEEPER = 1e-6
"""Of the largest: a difference of slopes that no rounding of the input gives where it decides
nothing."""

Given = Callable[[Decision], Sequence[Tensor]]
"""The inputs that an operator is to decide by."""


class _Deciding(TorchFunctionMode):
    def __init__(self, given: Given, place: Callable[[], Place]) -> None:
        super().__init__()
        self._given, self._place = given, place

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        at = [i for i, arg in enumerate(args[:2]) if _is_floating(arg)]
        if name.strip("_") not in DECIDING or not at:
            return func(*args, **named)

        def again(inputs: Sequence[Tensor]) -> Any:
            others = list(args)
            for i, x in zip(at, inputs, strict=True):
                others[i] = x
            return func(*others, **named)

        decision = Decision(name.strip("_"), self._place(), tuple(args[i] for i in at), again)
        inputs = list(self._given(decision))
        if (name.endswith("_") and not name.startswith("__")) or named.get("inplace"):
            for i, x in zip(at, inputs, strict=True):
                args[i].data = x.data
            return func(*args, **named)
        return again(inputs)


@contextmanager
def deciding(model: nn.Module, given: Given) -> Iterator[None]:
    """Let ``given`` say what each operator decides by, in the order in which they are called."""
    with running(model) as place, _Deciding(given, place):
        yield


def flipped(decision: Decision, inputs: Sequence[Tensor]) -> bool:
    """By these inputs, which differ by rounding, the operator decides otherwise.

    A truth or an index is another, or a slope is by more than ``STEEPER``.
    """
    pairs = zip(_taken(decision, decision.inputs), _taken(decision, inputs), strict=True)
    return any(bool(((a - b).abs() > STEEPER * a.abs().max()).any()) for a, b in pairs)


def _taken(decision: Decision, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Results that are no floats, and slopes of those that are."""
    with torch.enable_grad():
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        results = tensors([decision.again([leaf * 1 for leaf in leaves])])
    whole = [x.double() for x in results if not x.is_floating_point()]
    smooth = [x.sum() for x in results if x.requires_grad]
    if not smooth:
        return whole
    slopes = torch.autograd.grad(smooth, leaves, allow_unused=True)
    return [*whole, *(slope for slope in slopes if slope is not None)]


def _is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.numel() > 0
