"""The largest magnitudes of one forward and backward, point by point: where an overflow enters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from equivtest.arms.oracle import Whole
from equivtest.arms.replay import Start, replay
from equivtest.distance import dense
from equivtest.observe.trace import MicrobatchTrace
from equivtest.plan import GroupLayout

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
        if isinstance(part, torch.jit.ScriptModule):
            continue  # takes no hooks
        handles.append(part.register_forward_hook(called(name, type(part).__name__)))
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            handles.append(parameter.register_hook(note(GRADIENT_OF, name, "", 0)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def reached(
    arms: tuple[Whole, Whole],
    group: GroupLayout,
    start: Start,
    seen: Sequence[Sequence[MicrobatchTrace]],
    loss_scale: float,
    place: tuple[int, int],
) -> Extremes:
    """What one microbatch reaches, by its replica and its number there.

    Args:
        arms: the large batch in the case's precision and in float64: the benches to run on.
        seen: the candidate's microbatches by replica.
    """
    r, k = place
    ids = group.ids[r][k]

    def run(whole: Whole, found: list[Extreme]) -> None:
        def around(own: Sequence[int]) -> AbstractContextManager[None]:
            return watching(whole.bench.module, found) if own == ids else nullcontext()

        given = seen
        if whole is arms[1]:  # where a factor overflows as well, the one that it should be
            given = [tuple(map(_with_finite_factors, replica)) for replica in seen]
        replay(
            whole.bench,
            whole.batches,
            group,
            whole.counts,
            start,
            given,
            loss_scale,
            around=around,
        )

    return _in_both(arms, run)


def reached_by_large(arms: tuple[Whole, Whole], loss_scale: float) -> Extremes:
    """What the large batch reaches."""

    def run(whole: Whole, found: list[Extreme]) -> None:
        watched = replace(
            whole,
            loss_scale=loss_scale,
            around=lambda _: watching(whole.bench.module, found),
            _runs={},
            _cuts={},
        )
        _ = watched.gradients

    return _in_both(arms, run)


def _in_both(arms: tuple[Whole, Whole], run: Callable[[Whole, list[Extreme]], None]) -> Extremes:
    low: list[Extreme] = []
    exact: list[Extreme] = []
    run(arms[0], low)
    run(arms[1], exact)
    return low, exact


def _with_finite_factors(microbatch: MicrobatchTrace) -> MicrobatchTrace:
    kept = (f if f is not None and math.isfinite(f) else None for f in microbatch.factors)
    return replace(microbatch, factors=tuple(kept))


def _largest(value: Tensor) -> float:
    values = dense(value)
    return float(values.abs().max()) if values.numel() else 0.0
