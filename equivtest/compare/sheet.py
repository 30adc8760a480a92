"""The final sheet of a case, in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from equivtest.compare import figures
from equivtest.compare.verdict import Verdict


def sheet(verdict: Verdict) -> Iterable[tuple[str, str]]:
    """Each entry of the card with its text; an empty text is one that does not apply."""
    card = verdict.card
    yield "plan, m × A × D", f"{card.m} × {card.A} × {card.D} = {card.examples:,} examples"
    processes = figures.several(card.processes, "process", "processes")
    yield "data-parallel group", f"{figures.rank_names(card.dp_group)} of {processes}"
    yield "precision", card.precision
    yield "device, backend", ", ".join(filter(None, (card.device, card.backend)))
    yield "optimizer", card.optimizer
    yield "normalisation", card.normalisation
    yield "microbatches", figures.quantity(card.microbatches)
    attempted, applied = map(figures.quantity, (card.updates_attempted, card.updates_applied))
    yield "updates", f"{attempted} attempted, {applied} applied"
    yield "examples seen", figures.quantity(card.examples_seen)
    yield "supervised elements", figures.quantity(card.supervised)
    yield "scheduler follows", card.scheduler_unit
    yield "last group", _last_group(verdict)
    yield "peak bytes, first update", figures.size(card.first_peak_bytes)
    yield "peak bytes, later", figures.size(card.later_peak_bytes)
    yield "null tensors", _counted(card.null_tensors)
    yield "blind tensors", _counted(card.blind_tensors)
    seen = card.smallest_weight_seen
    yield "smallest weight error seen", "" if seen is None else figures.distance(seen)
    yield "not judged", _counted(card.not_judged)
    yield "duration", figures.duration(verdict.duration_s)


def _last_group(verdict: Verdict) -> str:
    card = verdict.card
    parts = [card.last_group or "none"]
    if card.last_group_examples:
        parts.append(f"examples {_few(card.last_group_examples)}")
    if card.dropped_examples:
        parts.append(f"dropped {_few(card.dropped_examples)}")
    return ", ".join(parts)


def _few(numbers: Sequence[int], limit: int = 8) -> str:
    if not numbers:
        return "–"
    return ", ".join(map(str, numbers[:limit])) + (
        f", … ({len(numbers)})" if len(numbers) > limit else ""
    )


def _counted(names: Sequence[str], limit: int = 4) -> str:
    if not names:
        return "none"
    return f"{len(names)}: " + ", ".join(names[:limit]) + (", …" if len(names) > limit else "")
