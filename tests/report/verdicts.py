"""Verdicts and records made by hand, for tests of what is written about them."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from itertools import product
from typing import Any

from equivtest.compare.sensitivity import Outcome, PlantedRun, Sensitivity
from equivtest.compare.tables import (
    EventRow,
    ExampleRow,
    MicrobatchRow,
    SourceRow,
    TensorRow,
    UpdateRow,
)
from equivtest.compare.verdict import Card, Failure, Finding, Status, Verdict
from equivtest.plan import Plan
from equivtest.report.listing import Listing
from equivtest.report.record import Record

ENVIRONMENT = {"torch": "2.13.0", "device": "CPU", "python": "3.11.9"}
NAMES = ("embedding.weight", "blocks.0.attention.weight", "blocks.0.norm.bias", "head.weight")


def card(plan: Plan, precision: str = "fp32", **changes: Any) -> Card:
    values: dict[str, Any] = {
        "plan": str(plan),
        "m": "+".join(map(str, plan.sizes)) if isinstance(plan.m, tuple) else str(plan.m),
        "A": plan.A,
        "D": plan.D,
        "processes": plan.processes,
        "examples": plan.examples,
        "dp_group": tuple(range(plan.D)),
        "precision": precision,
        "device": "cpu",
        "backend": "gloo",
        "optimizer": "AdamW",
        "normalisation": "sum over the group's count",
        "last_group": "process",
        "last_group_examples": (),
        "dropped_examples": (),
        "microbatches": 2 * plan.A * plan.D,
        "updates_attempted": 2,
        "updates_applied": 2,
        "examples_seen": 2 * plan.examples,
        "supervised": 1234.0,
        "scheduler_unit": "applied",
        "smallest_weight_seen": 4.8e-7,
    }
    return Card(**(values | changes))


def tensor(name: str, update: int = 0, margin: float = 0.2, **changes: Any) -> TensorRow:
    values: dict[str, Any] = {
        "update": update,
        "tensor": name,
        "shape": (48, 96),
        "dtype": "torch.float32",
        "state": "equal" if margin <= 1 else "differs",
        "replay_distance": margin * 2.5e-7,
        "replay_tolerance": 2.5e-7,
        "split_distance": 1.2e-15,
        "split_tolerance": 2.8e-14,
        "oracle_distance": max(margin, 0.3) * 9e-7,
        "oracle_tolerance": 9e-7,
        "noise_floor": 2.2e-7,
        "parameter_distance": 3e-8,
        "parameter_tolerance": 2.4e-7,
        "norm": 0.31,
        "scale": 1.7,
    }
    return TensorRow(**(values | changes))


def update(number: int, **changes: Any) -> UpdateRow:
    values: dict[str, Any] = {
        "update": number,
        "epoch": 0,
        "examples": 32,
        "supervised": 617.0,
        "applied": True,
        "loss": 3.412345,
        "oracle_loss": 3.412346,
        "lr": 1e-3,
        "loss_scale": None,
        "grad_norm": 2.25,
        "clipped": True,
        "peak_bytes": None,
        "replay_bits_equal": True,
    }
    return UpdateRow(**(values | changes))


def equivalent(
    plan: Plan, precision: str = "fp32", margin: float = 0.25, **changes: Any
) -> Verdict:
    values: dict[str, Any] = {
        "status": Status.EQUIVALENT,
        "card": card(plan, precision),
        "rows": tuple(
            tensor(name, u, margin / (1 + k + u)) for u in (0, 1) for k, name in enumerate(NAMES)
        ),
        "updates": (update(0), update(1)),
        "ranks": ("agrees with rank 0",) * plan.D,
        "events": events(plan),
        "microbatches": microbatches(plan),
        "examples": examples(plan),
        "duration_s": 0.125,
    }
    return Verdict(**(values | changes))


def fault(plan: Plan, precision: str = "fp32", margin: float = 5.3e4, **changes: Any) -> Verdict:
    finding = Finding(
        "differs.gradient",
        "8 of 8 tensors are beyond tolerance: microbatch 1 of replica 0 counts 1.500, not 1.",
        update=0,
        rank=0,
        tensor=NAMES[0],
        distance=1.3e-2,
        tolerance=2.5e-7,
    )
    values: dict[str, Any] = {
        "status": Status.FAULT,
        "findings": (finding, Finding("clip.missing", "The norm is 2.25, the bound 1.", update=1)),
        "weight_rows": tuple(
            (0, r, k, 1.0, 1.5 if r == 0 else 1.0, 1e-7)
            for r in range(plan.D)
            for k in range(plan.A)
        ),
        "notes": ("A reduction ran with every microbatch; one a group is enough.",),
    }
    return equivalent(plan, precision, margin, **(values | changes))


def sensitivity() -> Sensitivity:
    """Three kinds that can show, one of them in two ways of which one is not seen."""
    return Sensitivity(
        runs=(
            PlantedRun("accum.only_last", "accum.only_last", Outcome.NAMED),
            PlantedRun("sync.never", "sync.never", Outcome.CAUGHT, "differs.ranks"),
            PlantedRun("sync.never/no_sync", "sync.never", Outcome.NAMED),
            PlantedRun("mem.kept_graph", "mem.kept_graph", Outcome.NOT_SEEN),
            PlantedRun("clip.missing", "clip.missing", Outcome.CANNOT_SHOW, "it does not clip"),
            PlantedRun("opt.frozen", "opt.frozen", Outcome.NOT_JUDGED, "error: rank 1 raised"),
        ),
        smallest_weight_seen=2e-4,
        largest_weight_unseen=1.5e-4,
        weighed="update 0, replica 1, microbatch 0",
    )


def error(plan: Plan, precision: str = "fp32") -> Verdict:
    text = (
        "rank 1 raised RuntimeError: boom\nTraceback (most recent call last):\n"
        '  File "loop.py", line 3, in my_loop\n    raise RuntimeError("boom")\nRuntimeError: boom'
    )
    return equivalent(
        plan,
        precision,
        status=Status.ERROR,
        rows=(),
        updates=(),
        failure=Failure(text, rank=1, what="raised"),
    )


def not_run(plan: Plan, precision: str = "tf32") -> Verdict:
    return equivalent(
        plan,
        precision,
        status=Status.NOT_RUN,
        rows=(),
        updates=(),
        events=(),
        microbatches=(),
        examples=(),
        failure=Failure("tf32 needs a CUDA device"),
    )


def events(plan: Plan) -> tuple[EventRow, ...]:
    """What a loop does that clips and has one reduction an update; at the lines of ``LISTING``."""
    happened = []
    for rank in range(plan.D):
        at_s = 0.001 * rank
        for number in (0, 1):
            of_microbatches = [
                (kind, k, line)
                for k in range(plan.A)
                for kind, line in (("forward", 14), ("backward", 15))
            ]
            of_update = [("clip", None, 16), ("update attempted", None, 17)]
            last = [("collective", plan.A - 1, 15), *of_update, ("update applied", None, 17)]
            for kind, k, line in of_microbatches + last:
                happened.append(EventRow(rank, number, k, kind, "", round(at_s, 6), (line,)))
                at_s += 0.002
    return tuple(happened)


def microbatches(plan: Plan) -> tuple[MicrobatchRow, ...]:
    """Of 20 and more supervised elements, and 1 KiB each."""
    return tuple(
        MicrobatchRow(u, r, k, 20.0 + 10 * r + k, 1024, 0)
        for r in range(plan.D)
        for u in (0, 1)
        for k in range(plan.A)
    )


def examples(plan: Plan) -> tuple[ExampleRow, ...]:
    """As planned: each id once, in order."""
    m = plan.examples // (plan.A * plan.D)
    rows = []
    for u, r, k in product((0, 1), range(plan.D), range(plan.A)):
        first = u * plan.examples + (r * plan.A + k) * m
        ids = tuple(range(first, first + m))
        rows.append(ExampleRow(u, r, k, ids, ids))
    return tuple(rows)


LISTING = Listing(
    "cases/test_loop.py",
    11,
    (
        "def my_loop(rank):",
        "    for group in rank.groups:",
        "        for batch in group:",
        "            loss = rank.loss(rank.model, batch)",
        "            (loss.total / group.local_count).backward()",
        "        clip_grad_norm_(rank.module.parameters(), 1.0)",
        "        rank.optimizer.step()",
    ),
)


def record(verdict: Verdict, experiment: str = "ragged", **changes: Any) -> Record:
    nodeid = f"cases/test_loop.py::test_it[{verdict.card.plan}-{verdict.card.precision}]"
    values: dict[str, Any] = {
        "id": nodeid,
        "nodeid": nodeid,
        "experiment": experiment,
        "loop": "my_loop",
        "wrap": "DistributedDataParallel",
        "rerun": f"pytest '{nodeid}'",
        "environment": ENVIRONMENT,
        "verdict": verdict,
        "listings": (LISTING,),
    }
    return Record(**(values | changes))


def nothing_finite(plan: Plan) -> Verdict:
    """A verdict with each float that JSON has no word for."""
    row = tensor(NAMES[0], replay_distance=math.nan, oracle_distance=math.inf, norm=-math.inf)
    return equivalent(plan, rows=(row,), updates=(update(0, loss=math.nan),))


HOSTILE = (
    "<script>window.owned = 1</script><img src=x onerror='window.owned = 2'>\"'&{{ 7*7 }}"
    "</style></script></pre></title><!--\u202e\udcff"
)
"""Ends what it may stand in, runs what it can, turns the writing round, and is no UTF-8."""


def _hostile(value: Any) -> Any:
    return HOSTILE if isinstance(value, str) else value


def everywhere_hostile() -> Record:
    """A record with the hostile text in every text field that reaches the page."""
    verdict = fault(Plan(4, 2, 2))
    values = {f.name: _hostile(getattr(verdict.card, f.name)) for f in fields(verdict.card)}
    names = dict.fromkeys(("null_tensors", "blind_tensors", "not_judged"), (HOSTILE,))
    card = replace(verdict.card, **(values | names))
    verdict = replace(
        verdict,
        status=Status.ERROR,
        card=card,
        findings=(Finding(HOSTILE, HOSTILE, tensor=HOSTILE, distance=1.0, tolerance=0.5),),
        notes=(HOSTILE,),
        rows=(tensor(HOSTILE, dtype=HOSTILE, state=HOSTILE),),
        ranks=(HOSTILE,),
        events=(EventRow(0, 0, 0, HOSTILE, HOSTILE),),
        failure=Failure(HOSTILE, 0, HOSTILE),
        expect=(HOSTILE,),
        source_rows=(SourceRow(HOSTILE, 1.0, HOSTILE, claimed=True),),
    )
    made = record(verdict)
    texts = {f.name: HOSTILE for f in fields(made) if isinstance(getattr(made, f.name), str)}
    listings = (Listing(HOSTILE, 1, (HOSTILE,)),)
    return replace(made, **texts, environment={HOSTILE: HOSTILE}, listings=listings)
