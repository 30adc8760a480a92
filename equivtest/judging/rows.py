"""An update and its tensors as rows of the verdict. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from equivtest.arms.replay import Replay
from equivtest.compare.continuity import same_values
from equivtest.compare.gradient import AgainstOracle, AgainstReplay
from equivtest.compare.tables import TensorRow, UpdateRow
from equivtest.distance import MaybeTensors, norm
from equivtest.isolate.explained import Explained
from equivtest.observe.trace import UpdateTrace
from equivtest.plan import GroupLayout


def tensor_row(
    u: int,
    t: int,
    name: str,
    state: str,
    held: Tensor | None,
    a: AgainstReplay,
    c: AgainstOracle | None,
) -> TensorRow:
    """Tensor ``t`` of update ``u`` under the comparisons that were made.

    Args:
        held: the gradient of the rank that is furthest from the replay.
    """
    row = TensorRow(
        update=u,
        tensor=name,
        shape=() if held is None else tuple(held.shape),
        dtype="none" if held is None else str(held.dtype)[6:],
        state=state,
        worst_rank=a.rank,
    )
    if a.skipped:
        return row
    row = replace(row, replay_distance=a.distance, replay_tolerance=a.tolerance, norm=norm(held))
    return row if c is None else c.written_into(row, t)


def isolated(rows: Sequence[TensorRow], explained: Explained) -> list[TensorRow]:
    """``rows``, by position, with what is left of the split's distance where sources explain it."""
    if not (explained.diverges and explained.within):
        return list(rows)
    left = zip(rows, explained.left, explained.tolerances, explained.null, strict=True)
    return [
        replace(row, isolated_distance=d, isolated_tolerance=tolerance, null=row.null or null)
        for row, d, tolerance, null in left
    ]


def update_row(
    group: GroupLayout,
    update: UpdateTrace,
    gradient: MaybeTensors,
    replay: Replay,
    supervised: float,
    loss: float | None,
    oracle_loss: float | None,
) -> UpdateRow:
    """One attempted update as rank 0 saw it.

    Args:
        gradient: rank 0's, in the order of the replay's tensors.
        supervised: elements of the whole group.
    """
    lr = update.optimizers[0].groups[0][1].get("lr") if update.optimizers else None
    squared = sum(norm(g) ** 2 for g in gradient)
    return UpdateRow(
        update=group.update,
        epoch=group.epoch,
        examples=len(group.flat),
        supervised=supervised,
        applied=update.applied,
        loss=loss,
        oracle_loss=oracle_loss,
        lr=None if lr is None else float(lr),
        loss_scale=update.scale,
        grad_norm=math.sqrt(squared) if math.isfinite(squared) else None,
        clipped=bool(update.clip_bounds),
        peak_bytes=max((m.peak_bytes for m in update.microbatches), default=None),
        replay_bits_equal=all(
            same_values(g, e) for g, e in zip(gradient, replay.reduced, strict=True)
        ),
    )
