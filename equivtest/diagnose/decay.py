"""``opt.decay_per_microbatch``: parameters shrink by lr times weight decay with every microbatch.

Between the first forward of a group and the next group's, beside what the optimizer does, they are
then multiplied by ``1 - lr * weight_decay`` once per microbatch, or once less where the optimizer
decays with the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from equivtest.causes import Cause
from equivtest.compare.decay import rates, times
from equivtest.compare.verdict import About, Finding
from equivtest.diagnose.diagnosis import Diagnosis, exactly
from equivtest.diagnose.evidence import Evidence
from equivtest.diagnose.expected import follows_its_groups, optimizers_of
from equivtest.observe.trace import Trace


@dataclass(frozen=True)
class _Shrunk:
    """How often parameters were decayed by hand in an update: those of a trace, by name."""

    u: int
    often: Mapping[str, int]
    microbatches: int

    @property
    def per_microbatch(self) -> bool:
        A = self.microbatches
        return bool(self.often) and set(self.often.values()) <= {A - 1, A}


def decay_per_microbatch(evidence: Evidence) -> Iterator[Diagnosis]:
    """Parameters that moved beside the update as decays would move them."""
    if not evidence.found(Cause.STATE):
        return
    decay = optimizers_of(evidence).decay()
    covered: list[Finding] = []
    shrunk: list[_Shrunk] = []
    for trace in evidence.traces:
        found = [one for one in _shrunk(trace, decay, len(evidence.updates)) if one.per_microbatch]
        shrunk += found
        covered += (f for f in evidence.found(Cause.STATE) if _of(f, trace.rank, found))
    first = next((one for one in shrunk if one.microbatches > 1), None)
    if not covered or first is None:
        return
    name, often = next(iter(first.often.items()))
    seen = evidence.traces[0].updates[first.u]
    text = (
        f"in update {first.u} {len(first.often)} parameters ({name!r} first) are multiplied "
        f"{often} times by 1 - lr * weight_decay = {rates(seen, decay)[name]:.6g} beside the "
        f"optimizer's own update, over {first.microbatches} microbatches"
    )
    covered += _left_to_the_loop(evidence)
    yield Diagnosis(Cause.DECAY_PER_MICROBATCH, text, exactly(covered), update=first.u, tensor=name)


def _shrunk(trace: Trace, decay: Mapping[str, float], n: int) -> Iterator[_Shrunk]:
    """By update, where all that moved beside it is decay."""
    for u, update in enumerate(trace.updates[:n]):
        A = len(update.microbatches)
        after = trace.updates[u + 1].start if u + 1 < len(trace.updates) else update.end
        spans = (update.start.parameters, update.before), (update.after, after.parameters)
        rate = rates(update, decay)
        often: dict[str, int] = {}
        for name in update.before:
            counts = [
                times(before[name], now[name], rate.get(name, 1.0), A)
                for before, now in spans
                if name in before and name in now
            ]
            total = sum(count for count in counts if count is not None)
            if None in counts:
                break
            if total:
                often[name] = total
        else:
            yield _Shrunk(u, often, A)


def _of(finding: Finding, rank: int, shrunk: list[_Shrunk]) -> bool:
    """It is about one of these parameters, before or after the update that shrank it."""
    return (
        finding.rank == rank
        and finding.about in (About.PARAMETER, About.BETWEEN_UPDATES)
        and any(
            finding.tensor in one.often
            and finding.update in (one.u, one.u + (finding.about == About.BETWEEN_UPDATES))
            for one in shrunk
        )
    )


def _left_to_the_loop(evidence: Evidence) -> Iterator[Finding]:
    """The optimizer's own decay may be left out for the one by hand."""
    only = [f for f in evidence.found(Cause.HYPERPARAMETERS) if f.about == About.DECAY]
    yield from only
    expected = optimizers_of(evidence)
    follows = {
        one.u
        for one in evidence.updates
        if all(follows_its_groups(expected, one.seen[0], o) for o in one.seen[0].optimizers)
    }
    updates = {f.update for f in only} & follows
    yield from (f for f in evidence.found(Cause.PARAMETERS) if f.update in updates)
