"""Forwards in which examples of any number and shape can be compared: constants are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from equivtest.arms.build import seed_everything
from equivtest.isolate.normalising import Use, normalising

_DRAWN = {
    "bernoulli": 1.0,
    "rand": 0.5,
    "rand_like": 0.5,
    "uniform": 0.5,
    "exponential": 1.0,
    "normal": 0.0,
    "normal_functional": 0.0,
    "randn": 0.0,
    "randn_like": 0.0,
}
"""What an operator draws instead, by its name without the mark of an in-place one. Others are left
alone: the tag that marks random operators is on attention as well, which draws only with dropout.
"""


class _Constant(TorchDispatchMode):
    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.rstrip("_")
        if name == "native_dropout":
            kept, mask = result
            kept.copy_(args[0])
            mask.fill_(True)
        elif name == "randperm":  # each in its neighbour's place, in a microbatch as in a batch
            result.copy_(result.sort().values.roll(1))
        elif name in _DRAWN:
            result.fill_(_DRAWN[name])
        return result


@contextmanager
def still() -> Iterator[None]:
    """Every random operator draws a constant while the context lasts."""
    seed_everything(0)
    with _Constant():
        yield


Statistics = Mapping[str, tuple[Tensor, Tensor]]
"""Mean and variance by the name of the module that takes them."""


def statistics(model: nn.Module, forward: Callable[[], object]) -> Statistics:
    """What the batch of ``forward`` gives the first use that each module makes of it."""
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def noted(use: Use) -> Tensor:
        rows = use.input.detach().transpose(0, 1).flatten(1)
        found.setdefault(use.place.name, (rows.mean(1), rows.var(1, correction=0)))
        return use.normalised(use.input)

    with still(), normalising(model, noted):
        forward()
    return found


@contextmanager
def batchnorm_aside(model: nn.Module, known: Statistics) -> Iterator[None]:
    """Batches are normalised by constants while the context lasts: ``known`` ones, else 0 and 1.

    Their statistics couple examples in a way that is known, and would hide what couples them
    behind it. The large batch's own leave as many units alive behind them as there are. By module
    and not by use, so that a recomputed forward has the same.
    """

    def fixed(use: Use) -> Tensor:
        features = use.input.shape[1]
        unit = use.input.new_zeros(features), use.input.new_ones(features)
        mean, variance = known.get(use.place.name, unit)
        return use.by_fixed(*((mean, variance) if len(mean) == features else unit))

    with normalising(model, fixed):
        yield
