"""How small a fault would have been seen on this experiment, plan and precision: the record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from equivtest.compare import figures


class Outcome(StrEnum):
    """What became of one planted fault."""

    NAMED = "named"
    CAUGHT = "caught"
    """But by another name."""
    NOT_SEEN = "not seen"
    NOT_JUDGED = "not judged"
    """It ran, and could not be judged: no answer, and no good one."""
    CANNOT_SHOW = "cannot show"


SEEN = (Outcome.NAMED, Outcome.CAUGHT)


@dataclass(frozen=True)
class PlantedRun:
    """One planted fault in the user's own experiment.

    Attributes:
        name: of the planted fault (``equivtest.faults``), its cause and perhaps a variant.
        cause: what it was to be named.
        text: what it was called instead, or why it cannot show or was not judged.
    """

    name: str
    cause: str
    outcome: Outcome
    text: str = ""


@dataclass(frozen=True)
class Sensitivity:
    """What ``check(..., sensitivity=True)`` adds to a verdict.

    Attributes:
        runs: the planted faults, in the order of the registry.
        smallest_weight_seen: the smallest error tried of one microbatch's weight, relative to it,
            that was seen; None where none was.
        largest_weight_unseen: the largest one tried below it that was not.
        weighed: the microbatch whose weight it was, in words.
        reason: why nothing was planted; empty where something was.
    """

    runs: tuple[PlantedRun, ...] = ()
    smallest_weight_seen: float | None = None
    largest_weight_unseen: float | None = None
    weighed: str = ""
    reason: str = ""

    @property
    def tried(self) -> tuple[str, ...]:
        """The kinds (causes) that can show here and ran, in at least one way of writing them."""
        return _kinds(run for run in self.runs if run.outcome is not Outcome.CANNOT_SHOW)

    @property
    def caught(self) -> tuple[str, ...]:
        """Those of ``tried`` that would be caught, in whatever way they are written."""
        return self._always(SEEN)

    @property
    def named(self) -> tuple[str, ...]:
        """Those of ``tried`` that would be named, in whatever way they are written."""
        return self._always((Outcome.NAMED,))

    def of(self, *outcomes: Outcome) -> list[PlantedRun]:
        """The planted faults with one of these outcomes."""
        return [run for run in self.runs if run.outcome in outcomes]

    def _always(self, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
        lacking = {
            run.cause for run in self.runs if run.outcome not in (*outcomes, Outcome.CANNOT_SHOW)
        }
        return tuple(kind for kind in self.tried if kind not in lacking)


def sentence(found: Sensitivity) -> str:
    """The answer in one sentence."""
    if found.reason:
        return f"not measured: {found.reason}"
    tried, caught, named = len(found.tried), len(found.caught), len(found.named)
    kinds = f"{caught} of {figures.several(tried, 'kind')} would be caught here"
    also = "" if named == caught else f", {named} of them by name"
    if found.smallest_weight_seen is None:
        return f"{kinds}{also}; no error of one microbatch's weight is seen, not even 100 %"
    error = figures.per_cent(found.smallest_weight_seen)
    return f"{kinds}{also}; the smallest weight error seen is {error}"


def details(found: Sensitivity) -> list[tuple[str, str]]:
    """What lies behind the sentence: a label and its text, the most alarming first."""
    told = [
        ("runs, and is not seen", _names(found.of(Outcome.NOT_SEEN))),
        ("runs, and cannot be judged", _with_text(found.of(Outcome.NOT_JUDGED))),
        ("caught, by another name", _with_text(found.of(Outcome.CAUGHT))),
    ]
    reasons = dict.fromkeys(run.text for run in found.of(Outcome.CANNOT_SHOW))
    told += [
        (f"cannot show: {reason}", _names(r for r in found.runs if r.text == reason))
        for reason in reasons
    ]
    if found.largest_weight_unseen is not None:
        unseen = figures.per_cent(found.largest_weight_unseen)
        told.append(("weight error not seen", f"{unseen} of {found.weighed}"))
    return [(label, text) for label, text in told if text]


def _kinds(runs: Iterable[PlantedRun]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(run.cause for run in runs))


def _names(runs: Iterable[PlantedRun]) -> str:
    return ", ".join(run.name for run in runs)


def _with_text(runs: Iterable[PlantedRun]) -> str:
    return ", ".join(f"{run.name} ({run.text})" for run in runs)
