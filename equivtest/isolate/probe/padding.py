"""Where what collate does to an example reaches it: padding that leaks, a normalised batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from equivtest.isolate.calls import by_key, tensors
from equivtest.isolate.cut.modules import NotCuttable
from equivtest.isolate.cut.parts import common
from equivtest.isolate.probe.entry import moved
from equivtest.isolate.probe.lab import Lab, alike

MOVED = 1e-9
"""Of a tensor's largest element: kernels of another shape round otherwise."""

LEADING, TRAILING = "leading", "trailing"


def where_padding_leaks(lab: Lab) -> str | None:
    """Where an example as a row of a larger batch is another than alone; None if it is not.

    The rows of the larger batch are run beside the batches that the same examples make, each in
    forwards of the same examples: nothing but collate is between them.
    """
    n = len(lab.examples)
    whole = lab.batch(lab.examples)
    begin, leaking = 0, False
    for chunk in lab.chunks:
        try:
            cut = lab.rows_of(whole, begin, begin + len(chunk), n)
        except NotCuttable:
            return None
        begin += len(chunk)
        own = lab.batch(chunk)
        if _equal(tensors(own), tensors(cut)):
            continue
        alone, as_rows = lab.gradient([chunk]), lab.gradient([chunk], batch=cut)
        leaking |= not alike(alone, as_rows)
    return _where(lab, whole) if leaking else None


def _where(lab: Lab, whole: object) -> str:
    """By the example that is padded most."""
    n = len(lab.examples)
    at = min(range(n), key=lambda i: lab.elements(lab.examples[i]))
    example = lab.examples[at : at + 1]
    cut, own = lab.rows_of(whole, at, at + 1, n), lab.batch(example)
    side = _side(tensors(own), tensors(cut))
    if side is None:
        return "in collate, which shows an example otherwise in another batch"
    try:
        runs = lab.forward([example], batch=own), lab.forward([example], batch=cut)
    except (RuntimeError, ValueError, IndexError):  # torch refuses a single example
        return "through padding"
    alone, as_rows = (by_key(run.calls) for run in runs)
    for key, call in alone.items():
        other = as_rows.get(key)
        if other is None:
            continue  # not called
        if _moves(call.outputs, other.outputs, side) and not _moves(
            call.inputs, other.inputs, side
        ):
            return f"through padding, first {call.place}"
    return "through padding, in the loss"


def _equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def _side(own: Sequence[Tensor], cut: Sequence[Tensor]) -> str | None:
    """Where an example's own elements stand in a row that is padded; None if it is changed."""
    sides = (side for side in (LEADING, TRAILING) if not _moves(own, cut, side))
    return next(sides, None)


def _moves(a: Sequence[Tensor], b: Sequence[Tensor], side: str) -> bool:
    return len(a) != len(b) or any(map(_moved, a, b, [side] * len(a)))


def _moved(a: Tensor, b: Tensor, side: str) -> bool:
    """The smaller tensor is not what stands at that side of the larger one."""
    if a.ndim != b.ndim:
        return True
    a, b = common(a, b, at_end=side == TRAILING)
    return bool(moved(b, a, MOVED).any())
