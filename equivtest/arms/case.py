"""A case: one experiment under one plan, precision, loop and wrapper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from equivtest.arguments import an_instance, callable_with
from equivtest.devices import ON_CPU, Seating
from equivtest.experiment import Experiment, Rank
from equivtest.plan import GroupLayout, Plan, layout
from equivtest.precision import Precision
from equivtest.precision import precision as precision_called

ISOLATE = ("auto", "always", "never")


@dataclass(frozen=True)
class Case:
    """What one run of ``check`` compares; travels to the ranks beside the experiment.

    Attributes:
        groups: which example goes where, for each attempted update.
        loop, wrap: the code under test, None for equivtest's recipe and DistributedDataParallel.
        device: ``cpu`` or ``cuda``.
        digest: identifies the experiment's bytes, for what processes keep of it; empty for a case
            that will not run.
        seating: backend and GPUs of its ranks.
        isolate: isolate sources where the case diverges (``auto``), ``always`` or ``never``.
    """

    plan: Plan
    precision: Precision
    groups: tuple[GroupLayout, ...]
    loop: Callable[[Rank], None] | None
    wrap: Callable[[Any], Any] | None
    device: str
    digest: str
    seating: Seating = ON_CPU
    isolate: str = "auto"


def case_of(
    experiment: Experiment,
    plan: Plan,
    *,
    precision: str,
    loop: Callable[[Rank], None] | None,
    wrap: Callable[[Any], Any] | None,
    device: str,
    digest: str = "",
    isolate: str = "auto",
) -> Case:
    """The case of what a user passes.

    Raises:
        TypeError, ValueError: an argument that cannot be.
        PlanError: the plan does not fit the data.
    """
    an_instance("experiment", experiment, Experiment, "Experiment(model=..., data=..., ...)")
    an_instance("plan", plan, Plan, "Plan(m, A, D)")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r}: pass 'cpu' or 'cuda'")
    if isolate not in ISOLATE:
        raise ValueError(f"isolate={isolate!r}: pass {', '.join(ISOLATE[:-1])} or {ISOLATE[-1]}")
    if loop is not None:
        callable_with("loop", loop, "rank")
    if wrap is not None:
        callable_with("wrap", wrap, "module")
    return Case(
        plan=plan,
        precision=precision_called(precision),
        groups=groups_of(experiment, plan),
        loop=loop,
        wrap=wrap,
        device=device,
        digest=digest,
        seating=Seating("gloo" if device == "cpu" else "nccl"),  # and on which GPUs, check finds
        isolate=isolate,
    )


def groups_of(experiment: Experiment, plan: Plan) -> tuple[GroupLayout, ...]:
    """The groups that ``plan`` makes of the experiment's data."""
    return layout(
        plan,
        len(experiment.data),
        updates=experiment.updates,
        shuffle=experiment.shuffle,
        last_group=experiment.last_group,
        seed=experiment.seed,
    )
