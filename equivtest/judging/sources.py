"""The sources of one update, looked for where its arms are apart or the case asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from equivtest.compare.arms import UpdateArms
from equivtest.compare.gradient import AgainstOracle, AgainstReplay
from equivtest.compare.skips import Skips
from equivtest.compare.tables import SourceRow
from equivtest.compare.verdict import Finding
from equivtest.distance import MaybeTensors
from equivtest.isolate import scaler_skip
from equivtest.isolate.explained import Explained
from equivtest.isolate.explaining import explain
from equivtest.isolate.loop_sums import loop_sums
from equivtest.isolate.scene import scene_of
from equivtest.isolate.sums import LoopSums


@dataclass(frozen=True)
class Overflowed:
    """What a skip in one arm, or in both, makes of an update.

    Attributes:
        explained: where it tells the arms apart.
    """

    explained: Explained | None
    findings: Sequence[Finding]
    notes: Sequence[str]


def overflowed(arms: UpdateArms, skips: Skips) -> Overflowed:
    """What was skipped, and whether the large batch would be; and the other way around."""
    found = scaler_skip.detect(
        scaler_skip.Arms(
            names=arms.names,
            precision=arms.case.precision,
            group=arms.group,
            start=arms.start,
            seen=arms.microbatches,
            loss_scale=arms.loss_scale,
            replay=arms.replay,
            large=arms.large_times,
            oracle=lambda: arms.oracle,
        ),
        arms.traces[0].updates[: arms.u + 1],
        skips.optimizers,
        skips.applied,
    )
    isolate, unit = arms.case.isolate, arms.reference.scheduler_unit
    findings, notes = scaler_skip.told(found, arms.traces[0], unit, isolate)
    return Overflowed(scaler_skip.explained(found, arms.traces[0], isolate), findings, notes)


def in_sums(
    arms: UpdateArms, gradient: MaybeTensors, a: Sequence[AgainstReplay], c: AgainstOracle
) -> LoopSums | None:
    """What is beyond A and the rounding of a right loop's own sums.

    Args:
        gradient: the loop's.
    """
    comparable = not (c.split_failures or c.drew)
    return loop_sums(
        gradient,
        arms.replayed(apart=True),
        arms.large.gradients if comparable else None,
        [one.tolerance for one in a],
        arms.case.precision,
        arms.names,
    )


def explained(
    arms: UpdateArms,
    c: AgainstOracle,
    sums: LoopSums | None,
    *,
    beyond: bool,
    known: Sequence[SourceRow],
) -> Explained | None:
    """What the sources of the split and of the loop's sums are; None where none is looked for.

    Args:
        beyond: the split or the sums are beyond tolerance.
        known: sources as they were attributed in updates before.
    """
    wanted = arms.case.isolate == "always" or (arms.case.isolate == "auto" and beyond)
    if not (wanted and c.repeatable and len(arms.group.flat) > 1):
        return None
    scene = scene_of(arms.reference, arms.group, arms.start, arms.microbatches)
    return explain(scene, arms.names, c.null, c.split_tolerances, sums, known=known)
