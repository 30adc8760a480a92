"""A finding with two readings, settled by a rerun on a probe plan.

Where A = D, say, a factor 1/2 is one division by A too many or one by D: with microbatch size,
accumulations and replicas pairwise different every factor names its cause.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

from equivtest.causes import Kind, kind_of
from equivtest.compare.verdict import Finding, Status, Verdict
from equivtest.diagnose.naming import NOTED
from equivtest.experiment import Experiment
from equivtest.plan import Plan

Run = Callable[[Experiment, Plan], Verdict]


def settled(verdict: Verdict, experiment: Experiment, plan: Plan, run: Run) -> Verdict:
    """The verdict with the reading that the same loop shows on a probe plan as well.

    As it was where nothing is open, no probe plan fits the data, or the probe does not tell.
    """
    probe = probe_plan(plan, len(experiment.data))
    if probe is None or not any(finding.alternatives for finding in verdict.findings):
        return verdict
    causes = run(replace(experiment, updates=1, last_group="drop"), probe).causes
    findings = tuple(_settled(finding, causes, probe) for finding in verdict.findings)
    return replace(
        verdict,
        findings=findings,
        status=_status(verdict, findings),
        notes=_notes(verdict, findings),
    )


def probe_plan(plan: Plan, examples: int) -> Plan | None:
    """A plan with as many replicas, and m, A and D pairwise different; None where it is one itself.

    Args:
        examples: how many there are: the plan must fit them.
    """
    if plan.D == 1 or len({plan.m, plan.A, plan.D}) == 3:
        return None
    for A, m in product((3, 2, 4, 5), (5, 4, 3, 2, 1)):
        if len({m, A, plan.D}) == 3 and m * A * plan.D <= examples:
            return replace(plan, m=m, A=A)
    return None


def _settled(finding: Finding, causes: Sequence[str], probe: Plan) -> Finding:
    readings = [finding.cause, *finding.alternatives] if finding.alternatives else []
    shown = [cause for cause in readings if cause in causes]
    if len(shown) != 1:
        return finding
    others = " and ".join(cause for cause in readings if cause != shown[0])
    # What the loop does in words is of the reading that came first.
    told = finding.text if shown[0] == finding.cause else finding.text.partition(": as a loop")[0]
    text = f"{told}; {others} would give the same here, and a rerun on {probe} ruled that out"
    return replace(finding, cause=shown[0], text=text, alternatives=())


def _status(verdict: Verdict, findings: Sequence[Finding]) -> Status:
    """Another reading may be a convention where the first was a fault, and the other way around."""
    kinds = [kind_of(finding.cause) for finding in findings if finding.cause]
    if verdict.status in (Status.FAULT, Status.EXPLAINED) and len(kinds) == len(findings):
        return Status.FAULT if Kind.FAULT in kinds else Status.EXPLAINED
    return Status.FAULT if Kind.FAULT in kinds else verdict.status


def _notes(verdict: Verdict, findings: Sequence[Finding]) -> tuple[str, ...]:
    """Notes that name a cause name those that are left."""
    named = [f for f in findings if f.cause and kind_of(f.cause) in NOTED]
    gone = {f.cause for f in verdict.findings} - {f.cause for f in findings}
    kept = [note for note in verdict.notes if note.partition(": ")[0] not in gone]
    added = [f"{f.cause}: {f.text}" for f in named if f.cause not in verdict.causes]
    return (*kept, *added)
