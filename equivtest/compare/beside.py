"""What an update is judged on beside its gradient: buffers and losses. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from equivtest.arms.replay import Replay
from equivtest.causes import Cause
from equivtest.compare.continuity import same_values
from equivtest.compare.tolerance import (
    FORWARD_UNITS,
    SPLIT,
    oracle_tolerance,
    sum_tolerance,
)
from equivtest.compare.verdict import Finding
from equivtest.distance import distance, norm, ratio
from equivtest.observe.trace import UpdateTrace
from equivtest.precision import Precision, unit_roundoff


def buffers(
    u: int, replay: Replay, seen: Sequence[UpdateTrace], A: int, precision: Precision
) -> Iterator[Finding]:
    """Each rank's buffers after the update's last forward against those predicted for it.

    Statistics of a forward whose bits are not the replay's may be off by that forward's rounding.
    """
    for rank, (update, predicted) in enumerate(zip(seen, replay.buffers, strict=True)):
        for name, found in update.end.buffers.items():
            wanted = predicted.get(name)
            if wanted is None or same_values(found, wanted):
                continue
            moved = ratio(distance(found, wanted), norm(wanted))
            floating = found.is_floating_point()
            allowed = sum_tolerance(A, found.dtype) if floating else 0.0
            if floating and not replay.shared:
                allowed = max(allowed, FORWARD_UNITS * precision.u)
            if replay.alike and floating:  # statistics by another kernel: as B allows
                allowed = max(allowed, SPLIT * 4 * unit_roundoff(found.dtype))
            if moved > allowed:
                yield Finding(
                    Cause.BUFFERS,
                    f"buffer {name!r} of rank {rank} is {moved:.3g} of its norm away from what "
                    f"its forwards and broadcasts give in update {u}",
                    update=u,
                    rank=rank,
                    tensor=name,
                    distance=moved,
                    tolerance=allowed,
                )
                break


def candidate_loss(
    seen: Sequence[UpdateTrace], replay: Replay, counts: Mapping[str, float]
) -> float | None:
    """The candidate's normalised loss, where its losses are those that the replay made."""
    total = 0.0
    if not all(update.observed for update in seen):
        return None
    for rank, update in enumerate(seen):
        for k, microbatch in enumerate(update.microbatches):
            terms = replay.terms.get((rank, k))
            if terms is None or replay.counts[rank, k] != microbatch.counts:
                return None
            total += sum(
                value / counts[term]
                for value, term in zip(microbatch.totals, terms, strict=True)
                if term is not None
            )
    return total


@dataclass(frozen=True)
class Losses:
    """Normalised losses of one update.

    Attributes:
        found: the candidate's, None where it could not be matched.
        replayed, scale: the replay's, and the sum of its microbatches' magnitudes.
        oracle, large: of the whole group in float64 and in the case's precision, where they were
            computed.
        nudged: the large batch's with parameters moved in their last bits: in float64 the large
            batch is the oracle, and its distance from it no measure of noise.
        split_right: the split is right, so that the oracle's is what the candidate's should be.
    """

    found: float | None
    replayed: float
    scale: float
    oracle: float | None = None
    large: float | None = None
    nudged: Sequence[float] = ()
    split_right: bool = True


def losses(u: int, values: Losses, precision: Precision) -> tuple[list[Finding], list[str]]:
    """``|L - L_o| <= kappa max(f_L, c u) sum |L_i|``: what is beyond it, and what was left out."""
    if values.found is None:
        text = "the loop has a loss of its own: gradients are compared, its losses are not"
        return [], [text]
    floor, wanted, notes = 0.0, [("the replay's", values.replayed)], []
    if values.oracle is not None and values.large is not None:
        moved = [abs(values.large - values.oracle), *(abs(n - values.large) for n in values.nudged)]
        noise = ratio(max(moved), values.scale)
        if noise <= precision.cap:
            floor = noise
            if values.split_right:
                wanted.append(("the oracle's", values.oracle))
        elif values.split_right:
            notes.append(
                f"update {u}: the loss of the large batch is noise in {precision.name}: the loss "
                "is not compared with the oracle's"
            )
    allowed = oracle_tolerance(precision, floor)
    for whose, value in wanted:
        off = ratio(abs(values.found - value), values.scale)
        if off > allowed:
            text = (
                f"the loss of update {u} is {values.found:.6g} and {whose} {value:.6g}: "
                f"{off:.3g} of its scale, allowed {allowed:.3g}"
            )
            found = Finding(Cause.LOSS, text, update=u, distance=off, tolerance=allowed)
            return [found], notes
    return [], notes
