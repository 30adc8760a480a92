"""All families of causes, and what is left of the findings when they have spoken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from equivtest.causes import Cause, Kind
from equivtest.compare.verdict import Finding
from equivtest.diagnose.clip import before_unscale, too_early
from equivtest.diagnose.counter import counter_frozen
from equivtest.diagnose.data import data
from equivtest.diagnose.decay import decay_per_microbatch
from equivtest.diagnose.diagnosis import Diagnosis
from equivtest.diagnose.evidence import Evidence
from equivtest.diagnose.gradient import gradient
from equivtest.diagnose.logs import loss_factor
from equivtest.diagnose.memory import costs
from equivtest.diagnose.per_microbatch import update_per_microbatch
from equivtest.diagnose.schedule import schedule
from equivtest.diagnose.skip import rank_local_decision
from equivtest.diagnose.state import average
from equivtest.diagnose.windows import windows

Family = Callable[[Evidence], Iterator[Diagnosis]]

FAMILIES: tuple[Family, ...] = (
    data,
    windows,
    gradient,
    before_unscale,
    too_early,
    update_per_microbatch,
    decay_per_microbatch,
    rank_local_decision,
    counter_frozen,
    schedule,
    average,
    loss_factor,
    costs,
)
"""Those that need no tensors, in the order in which a loop comes to what they speak of; the others
speak while an update is judged."""

FOLLOWS = {Cause.NONFINITE: Cause.RANK_LOCAL_DECISION}
"""Causes that say nothing beside another: where ranks decide apart, one applies what is not finite
because it did not hear of it."""


def diagnosed(evidence: Evidence, seen: Sequence[Diagnosis]) -> list[Diagnosis]:
    """What all families say, ``seen`` while updates were judged first; each cause once."""
    told = [*seen, *(one for family in FAMILIES for one in family(evidence))]
    kept: dict[str, Diagnosis] = {}
    for one in told:
        first = kept.setdefault(one.cause, one)
        if first is not one:
            kept[one.cause] = replace(first, covers=(*first.covers, *one.covers))
    return [one for one in kept.values() if not _follows(one, kept)]


def _follows(one: Diagnosis, told: Mapping[str, Diagnosis]) -> bool:
    before = told.get(FOLLOWS.get(one.cause, ""))
    return before is not None and before.update == one.update


def named(findings: Iterable[Finding], diagnoses: Sequence[Diagnosis]) -> list[Finding]:
    """The findings with names for those that a cause accounts for."""
    covers = [one for diagnosis in diagnoses for one in diagnosis.covers]
    left = [finding for finding in findings if not any(one.holds(finding) for one in covers)]
    return left + [
        Finding(
            one.cause,
            one.text,
            update=one.update,
            rank=one.rank,
            tensor=one.tensor,
            alternatives=tuple(map(str, one.alternatives)),
        )
        for one in diagnoses
        if not one.cause.kind.quiet
    ]


def notes(named: Iterable[Diagnosis | Finding]) -> Iterator[str]:
    """A note on each cause that is no mistake: its name first, and what to change of a cost."""
    for one in named:
        known = Cause.named(one.cause)
        if known and (known.kind.quiet or known.kind is Kind.CONVENTION):
            yield f"{known}: {one.text}" + (f". {known.change}" if known.kind.quiet else "")
