"""What a verdict's tables hold: a row a tensor and update, an update, an event, a microbatch ..."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from equivtest.compare.figures import orderly


@dataclass(frozen=True)
class TensorRow:
    """One tensor in one update, under the three comparisons (distances relative to their scale).

    ``replay_*`` is comparison A, ``split_*`` B, ``oracle_*`` C; None where it was not computed.
    ``parameter_*`` is the parameter after the update against a float64 update from the candidate's
    own gradient, relative to ``|p| + |delta|``; ``oracle_parameter_distance`` the same against the
    update of the oracle's gradient, reported and not judged.
    ``exact_distance`` is A with the loop's own addends added exactly, where it does what the plan
    says to the bit and is beyond A all the same; ``replay_tolerance`` beside it.
    ``isolated_*`` is B with the sources isolated that explain it, where they do: what is left.
    ``state`` is ``equal``, ``rounding`` (beyond A, acquitted by C or by exact sums), ``differs`` or
    ``not judged``.
    """

    update: int
    tensor: str
    shape: tuple[int, ...]
    dtype: str
    state: str
    replay_distance: float | None = None
    replay_tolerance: float | None = None
    exact_distance: float | None = None
    split_distance: float | None = None
    split_tolerance: float | None = None
    isolated_distance: float | None = None
    isolated_tolerance: float | None = None
    oracle_distance: float | None = None
    oracle_tolerance: float | None = None
    noise_floor: float | None = None
    norm: float | None = None
    scale: float | None = None
    null: bool = False
    blind: bool = False
    worst_rank: int = 0
    parameter_distance: float | None = None
    parameter_tolerance: float | None = None
    oracle_parameter_distance: float | None = None

    @property
    def margin(self) -> float:
        """Largest distance over its tolerance among the comparisons that judge this tensor."""
        split = self.split_margin if self.isolated_distance is None else self.isolated_margin
        return max(self.loop_margin or 0.0, split or 0.0, key=orderly)

    @property
    def loop_margin(self) -> float | None:
        """That of the comparison which speaks of the loop: A, or C where that acquits."""
        if self.exact_distance is not None:
            return _ratio(self.exact_distance, self.replay_tolerance)
        return self.oracle_margin if self.state == "rounding" else self.replay_margin

    @property
    def replay_margin(self) -> float | None:
        return _ratio(self.replay_distance, self.replay_tolerance)

    @property
    def split_margin(self) -> float | None:
        return None if self.null else _ratio(self.split_distance, self.split_tolerance)

    @property
    def isolated_margin(self) -> float | None:
        return None if self.null else _ratio(self.isolated_distance, self.isolated_tolerance)

    @property
    def oracle_margin(self) -> float | None:
        return _ratio(self.oracle_distance, self.oracle_tolerance)


@dataclass(frozen=True)
class UpdateRow:
    """One attempted update of the candidate, as rank 0 saw it.

    Losses are normalised by the group's count; ``lr`` is the first param group's learning rate at
    the update, ``loss_scale`` the scaler's at the backward (None without a scaler).
    """

    update: int
    epoch: int
    examples: int
    supervised: float
    applied: bool
    loss: float | None
    oracle_loss: float | None
    lr: float | None
    loss_scale: float | None
    grad_norm: float | None
    clipped: bool
    peak_bytes: int | None
    replay_bits_equal: bool


@dataclass(frozen=True)
class SourceRow:
    """One source that was isolated.

    Attributes:
        source: its name.
        share: of the squared distance between the gradients of the split and the large batch, each
            as one vector, null tensors left out; averaged over the orders in which sources can be
            isolated, so that all shares and what is left add up to 1.
        where: where it enters, in words.
        claimed: it is among the fewest that bring the distance within tolerance.
    """

    source: str
    share: float
    where: str
    claimed: bool


@dataclass(frozen=True)
class EventRow:
    """One event of one rank, in the order in which it happened there.

    ``at_s`` counts from the first event of any rank; ``lines`` are those of the loop's own file
    that it came from, of the innermost call first. The same case has other times in each run:
    they do not count where rows are compared.
    """

    rank: int
    update: int
    microbatch: int | None
    kind: str
    detail: str = ""
    at_s: float = field(default=0.0, compare=False)
    lines: tuple[int, ...] = ()


@dataclass(frozen=True)
class MicrobatchRow:
    """What one microbatch of one replica held.

    Attributes:
        supervised: elements that its loss counted, or that the experiment's counts in it where the
            loop has a loss of its own; None where neither is known.
        peak_bytes: most bytes that the autograd graph held, up to its backward; on a GPU the most
            that were allocated there, from its forward to the next.
        held_bytes: bytes that the graph still held of earlier microbatches when it began.
    """

    update: int
    replica: int
    microbatch: int
    supervised: float | None
    peak_bytes: int
    held_bytes: int


@dataclass(frozen=True)
class ExampleRow:
    """Which examples one microbatch of one replica received.

    Attributes:
        ids: in the order of the batch; None where they are unknown.
        planned: ids that the plan deals to this microbatch; None where it has none there.
        by_contents: ``ids`` were told by their contents: the batch came from a loader of the
            loop's own, or was copied.
    """

    update: int
    replica: int
    microbatch: int
    ids: tuple[int, ...] | None
    planned: tuple[int, ...] | None
    by_contents: bool = False


def _ratio(distance: float | None, tolerance: float | None) -> float | None:
    if distance is None or tolerance is None:
        return None
    return distance / tolerance if tolerance > 0 else (math.inf if distance > 0 else 0.0)
