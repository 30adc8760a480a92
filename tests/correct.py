"""Check drawn correct cases, and say what is wrong with each verdict that is not as it must be."""

from __future__ import annotations

from drawn import PRECISIONS, Drawn, drawn, experiment, refusal, wrap
from hypothesis import given, settings
from tally import Tally

import equivtest
from equivtest.compare.verdict import Status, Verdict

WHAT = "drawn correct loops"
SCALED = "drawn correct loops, loss times 2^k"
SCALABLE = ("fp64", "fp32", "bf16", "bf16-mixed")
"""Precisions in which a power of two on the loss changes no margin."""


def check(case: Drawn) -> Verdict:
    """The verdict on equivtest's own recipe."""
    return equivtest.check(experiment(case), case.plan, precision=case.precision, wrap=wrap(case))


def check_correct(examples: int, stream: int) -> tuple[Tally, list[str]]:
    """Draw and check ``examples`` correct cases; what is wrong with the verdicts, one by one."""
    tally, wrong = Tally(), []

    @settings(max_examples=examples)
    @given(drawn(PRECISIONS, everything=True, stream=stream))
    def judged(case: Drawn) -> None:
        verdict = check(case)
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
        fine = verdict.status in (Status.EQUIVALENT, Status.INCONCLUSIVE)
    if fine:
        return []
    told = "; ".join(f.text for f in verdict.findings[:3]) or failure or "no finding"
    expected = "equivalent" if reason is None else f"not-run ({reason})"
    return [f"{verdict.status}, expected {expected}: {told}\n    {case}"]
