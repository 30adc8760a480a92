"""Check drawn correct cases, and say what is wrong with each verdict that is not as it must be."""

from __future__ import annotations

from dataclasses import replace

import torch
from drawn import (
    PRECISIONS,
    Drawn,
    backward_range,
    drawn,
    experiment,
    refusal,
    scalable,
    wrap,
)
from drawn_table import MARGINS, Tally
from hypothesis import given, settings

import equivtest
from equivtest.compare.verdict import Status, Verdict
from equivtest.precision import precision

WHAT = "drawn correct loops"
SCALED = "drawn correct loops, loss times 2^k"
SCALED_OUT = f"{SCALED}, some element outside the normal range"


def check(case: Drawn, isolate: str = "auto") -> Verdict:
    """The verdict on equivtest's own recipe."""
    return equivtest.check(
        experiment(case), case.plan, precision=case.precision, wrap=wrap(case), isolate=isolate
    )


def check_correct(examples: int, stream: int, isolate: str = "auto") -> tuple[Tally, list[str]]:
    """Draw and check ``examples`` correct cases; what is wrong with the verdicts, one by one."""
    tally, wrong = Tally(), []

    @settings(max_examples=examples)
    @given(drawn(PRECISIONS, everything=True, stream=stream))
    def judged(case: Drawn) -> None:
        verdict = check(case, isolate)
        tally.add(WHAT, case.precision, verdict)
        wrong.extend(_wrong(case, verdict))

    judged()
    return tally, wrong


def _wrong(case: Drawn, verdict: Verdict) -> list[str]:
    reason = refusal(case)
    failure = "" if verdict.failure is None else verdict.failure.text
    if reason is not None:
        fine = verdict.status == Status.NOT_RUN and reason in failure
    else:
        fine = verdict.status in (Status.EQUIVALENT, Status.INCONCLUSIVE) and not verdict.causes
        # A drawn scale may be one at which only the loop overflows, for the factor D on its loss.
        skipped = not all(update.applied for update in verdict.updates)
        fine = fine or (skipped and verdict.causes == ("source.scaler_skip",))
    if fine:
        return []
    told = "; ".join(f.text for f in verdict.findings[:3]) or failure or "no finding"
    expected = "equivalent" if reason is None else f"not-run ({reason})"
    return [f"{verdict.status}, expected {expected}: {told}\n    {case}"]


def check_scaled(examples: int, stream: int) -> tuple[Tally, list[str]]:
    """Draw ``examples`` cases and check each with its loss as it is, and times a power of two."""
    tally, wrong = Tally(), []

    @settings(max_examples=examples)
    @given(scalable(stream=stream))
    def judged(drawn: tuple[Drawn, int]) -> None:
        case, power = drawn
        scaled = replace(case, loss_scale=2.0**power)
        plain, other = check(case), check(scaled)
        normal = stays_normal(case, power)
        tally.add(SCALED if normal else SCALED_OUT, case.precision, other)
        wrong.extend(_wrong(case, plain) + _wrong(scaled, other))
        if normal:
            wrong.extend(f"{odd}\n    times 2^{power}: {case}" for odd in _moved(plain, other))

    judged()
    return tally, wrong


def stays_normal(case: Drawn, power: int) -> bool:
    """No element that a backward computes is subnormal or infinite, as it is and times 2^power.

    A normal number times a power of two keeps its significand, and a sum or product of such numbers
    rounds alike. Below the normal range numbers have fewer bits.
    """
    limits = torch.finfo(precision(case.precision).parameters)
    smallest, largest = backward_range(case)
    factor = 2.0**power
    return (
        smallest * min(factor, 1.0) >= limits.smallest_normal
        and largest * max(factor, 1.0) <= limits.max
    )


def _moved(plain: Verdict, scaled: Verdict) -> list[str]:
    """Gradient margins that are other numbers, and tensors that are judged otherwise."""
    if len(plain.rows) != len(scaled.rows):
        return [f"{len(plain.rows)} rows became {len(scaled.rows)}"]
    names = (*MARGINS.values(), "state", "null", "blind")
    return [
        f"{name} of {a.tensor!r} is {getattr(a, name)!r} and became {getattr(b, name)!r}"
        for a, b in zip(plain.rows, scaled.rows, strict=True)
        for name in names
        if getattr(a, name) != getattr(b, name)
    ][:3]
