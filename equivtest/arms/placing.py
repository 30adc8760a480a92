"""Where a case runs: its process group's backend and GPUs, or why there are none for it."""

from __future__ import annotations

from dataclasses import replace

from equivtest.arms.case import Case
from equivtest.devices import seated
from equivtest.pool import Pool
from equivtest.precision import refusal


def placed(pool: Pool, case: Case, share_gpus: bool) -> Case | str:
    """The case where it will run, or why it cannot."""
    plan = case.plan
    if plan.processes != plan.D:
        return f"{plan} spans {plan.processes // plan.D} processes a replica: only D is run here"
    if case.device == "cpu":
        return refusal(case.precision, case.device) or case
    machine = pool.machine()
    seating = seated(plan.D, machine, share_gpus)
    if isinstance(seating, str):
        return seating
    capability = machine.own[0].capability
    return refusal(case.precision, case.device, capability) or replace(case, seating=seating)
