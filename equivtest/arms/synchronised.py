"""SyncBatchNorm: the replicas' microbatches of one number are normalised together, as if one.

Backward goes through the statistics on every replica, so the replicas' gradients add up to that of
the microbatches in one. The reference arms run them so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from equivtest.arms.replay import Replay, Start
from equivtest.observe.trace import MicrobatchTrace
from equivtest.plan import GroupLayout


def rounds(module: nn.Module, group: GroupLayout) -> GroupLayout:
    """The group as its arms run it: one replica if ``module`` normalises over all of them."""
    spans = any(
        isinstance(part, nn.SyncBatchNorm) and part.training and part.process_group is None
        for part in module.modules()
    )
    if not spans or len(group.ids) == 1:
        return group
    at_once = zip(*group.ids, strict=True)
    return replace(group, ids=(tuple(tuple(i for ids in at for i in ids) for at in at_once),))


def as_one(
    start: Start, seen: Sequence[Sequence[MicrobatchTrace]]
) -> tuple[Start, list[list[MicrobatchTrace]]]:
    """Where one replica starts that stands for all, and what is known of its microbatches.

    A factor that all replicas gave a loss, over their number, for their average is undone so;
    another is not known.
    """
    joined = [_joined(at) for at in zip(*seen, strict=False)]
    return replace(start, buffers=start.buffers[:1]), [joined]


def for_each(replay: Replay, D: int) -> Replay:
    """What one replica's replay says of ``D``."""
    replay.alike = True
    replay.buffers = replay.buffers * D
    return replay


def _joined(at: Sequence[MicrobatchTrace]) -> MicrobatchTrace:
    same = all(m.factors == at[0].factors for m in at)
    factors = tuple(None if f is None else f / len(at) for f in at[0].factors) if same else ()
    return MicrobatchTrace(ids=None, factors=factors)
