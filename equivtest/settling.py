"""A finding with two readings, settled by a rerun on a probe plan.

Where A = D, say, a factor 1/2 is one division by A too many or one by D: with microbatch size,
accumulations and replicas pairwise different every factor names its cause.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

from equivtest.causes import Cause
from equivtest.compare.verdict import Finding, Verdict, status_of
from equivtest.diagnose import naming
from equivtest.experiment import Experiment
from equivtest.plan import Plan

Run = Callable[[Experiment, Plan], Verdict]


def settled(verdict: Verdict, experiment: Experiment, plan: Plan, run: Run) -> Verdict:
    """The verdict with the reading that the same loop shows on a probe plan as well.

    As it was where nothing is open, no probe plan fits the data, or the probe does not tell.
    """
    probe = probe_plan(plan, len(experiment.data))
    if probe is None or not any(map(_open, verdict.findings)):
        return verdict
    probed = run(replace(experiment, updates=1, last_group="drop"), probe)
    findings = tuple(_settled(finding, probed, probe) for finding in verdict.findings)
    return replace(
        verdict,
        findings=findings,
        status=status_of(findings) or verdict.status,
        notes=_notes(verdict, findings),
    )


def probe_plan(plan: Plan, examples: int) -> Plan | None:
    """A plan with as many replicas and another A, its sizes pairwise different; None if none fits.

    Args:
        examples: how many there are: the plan must fit them.
    """
    for A, m in product((3, 2, 4, 5), (5, 4, 3, 2, 1)):
        if len({m, A, plan.D}) == 3 and A != plan.A and m * A * plan.D <= examples:
            return replace(plan, m=m, A=A)
    return None


def _open(finding: Finding) -> bool:
    """A probe of one full group may tell; what becomes of a tail shows in no such group."""
    return bool(finding.alternatives) and finding.cause != Cause.TAIL_DROPPED


def _settled(finding: Finding, probed: Verdict, probe: Plan) -> Finding:
    readings = [finding.cause, *finding.alternatives] if _open(finding) else []
    shown = [cause for cause in readings if cause in probed.causes]
    if len(shown) != 1:
        return finding
    others = " and ".join(cause for cause in readings if cause != shown[0])
    ruled_out = f"{others} would give the same here, and a rerun on {probe} ruled that out"
    if shown[0] == finding.cause:
        return replace(finding, text=f"{finding.text}; {ruled_out}", alternatives=())
    # The sentence is of the reading that came first: the probe's own stands for it.
    there = next(f for f in probed.findings if f.cause == shown[0])
    text = f"{ruled_out}: there, {there.text}"
    return replace(finding, cause=shown[0], text=text, alternatives=())


def _notes(verdict: Verdict, findings: tuple[Finding, ...]) -> tuple[str, ...]:
    """Notes that name a cause name those that are left."""
    gone = {f.cause for f in verdict.findings} - {f.cause for f in findings}
    kept = [note for note in verdict.notes if note.partition(": ")[0] not in gone]
    return (*kept, *naming.notes(f for f in findings if f.cause not in verdict.causes))
