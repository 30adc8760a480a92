"""What is rounding of the oracle and what is not: null tensors, and the floor of comparison B."""

from __future__ import annotations

from collections.abc import Sequence

from equivtest.arms.oracle import JITTERS, NULL, PERMUTATIONS, Whole
from equivtest.compare.tolerance import FLOAT64_CAP
from equivtest.distance import MaybeTensors, difference, ratio


def null(oracle: Whole, suspects: Sequence[int]) -> list[bool]:
    """Gradients that are zero in exact arithmetic: their float64 noise is of the size of S_t.

    Only suspects are looked at, and only rounding is asked (``Whole.unsteady``): were a split that
    comes out differently evidence as well, no difference that a split makes could fail B. Suspects
    may be beyond the precision's cap without any split's doing: null ones of which every example
    rounds alike.
    """
    found = [False] * len(oracle.scale)
    for t in suspects:
        found[t] = oracle.unsteady(t, oracle.scale[t])
    return found


def split_floor(oracle: Whole) -> list[float]:
    """Float64 noise of the oracle: permutations, and parameters moved in their last bits.

    Splits are left out: a source that splitting brings would raise its own tolerance. The same
    holds for a forward that draws random numbers or depends on the order of examples (beyond the
    cap of float64). Last bits stand in for them: a split runs other kernels, whose roundings in the
    forward a deep stack magnifies, and so does a last bit in its parameters. What they move is
    rounding however large it is, up to the null tensors: the elements of one example may cancel,
    and S_t does not count that (a scalar before a softmax that is nearly sure: 2e-7 of S_t).
    """
    floor = nudged(oracle, oracle.scale)
    for k in range(0 if oracle.drew else PERMUTATIONS):
        floor = _raised(floor, oracle.permuted(k), oracle, oracle.scale, FLOAT64_CAP)
    return floor


def nudged(oracle: Whole, scale: Sequence[float]) -> list[float]:
    """Float64 noise by the loss times 1/3 and by parameters moved in their last bits alone."""
    floor = [0.0] * len(scale)
    for run in (oracle.third(), *(oracle.jittered(k) for k in range(JITTERS))):
        floor = _raised(floor, run, oracle, scale, NULL)
    return floor


def _raised(
    floor: Sequence[float], run: MaybeTensors, oracle: Whole, scale: Sequence[float], cap: float
) -> list[float]:
    moved = relative(run, oracle.gradients, scale)
    return [max(f, m if m <= cap else 0.0) for f, m in zip(floor, moved, strict=True)]


def relative(run: MaybeTensors, truth: MaybeTensors, scale: Sequence[float]) -> list[float]:
    """Distance over scale, by tensor."""
    return [ratio(d, s) for d, s in zip(difference(run, truth), scale, strict=True)]
