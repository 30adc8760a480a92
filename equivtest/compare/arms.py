"""The arms of one update, run as far as is asked for: the candidate's traces, and others beside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from equivtest.arms.case import Case
from equivtest.arms.oracle import Cut, Whole
from equivtest.arms.reference import Reference
from equivtest.arms.replay import Replay, Start
from equivtest.batches import Counts
from equivtest.compare.continuity import all_same
from equivtest.distance import MaybeTensors, finite
from equivtest.observe.trace import MicrobatchTrace, Tensors, Trace, UpdateTrace
from equivtest.plan import GroupLayout


@dataclass(frozen=True)
class UpdateArms:
    """The candidate's update ``u``, and the reference arms of the same examples and state.

    Attributes:
        traces: by rank.
        between: parameters at each microbatch, where the loop moves them during accumulation.
    """

    reference: Reference
    case: Case
    traces: Sequence[Trace]
    u: int
    between: tuple[Tensors, ...] = ()

    @property
    def group(self) -> GroupLayout:
        return self.case.groups[self.u]

    @cached_property
    def seen(self) -> list[UpdateTrace]:
        """The update by rank."""
        return [trace.updates[self.u] for trace in self.traces]

    @property
    def microbatches(self) -> list[tuple[MicrobatchTrace, ...]]:
        """The update's by rank."""
        return [update.microbatches for update in self.seen]

    @property
    def microbatches_before(self) -> list[tuple[MicrobatchTrace, ...]]:
        """Those of the update before, by rank; empty in the first."""
        if self.u == 0:
            return []
        return [trace.updates[self.u - 1].microbatches for trace in self.traces]

    @property
    def drew(self) -> bool:
        """A forward drew random numbers: what they changed here may be this update's alone."""
        return any(m.rng is not None for replica in self.microbatches for m in replica)

    @property
    def switched(self) -> frozenset[str]:
        """Modules that ran in another mode than ``model()`` left them in."""
        return frozenset().union(*(m.switched for replica in self.microbatches for m in replica))

    @cached_property
    def names(self) -> list[str]:
        """Of the parameters, by position."""
        return self.reference.bench.names

    @cached_property
    def start(self) -> Start:
        """The candidate's own state before the group, buffers as before its first broadcast."""
        initial = self.reference.initial().buffers
        buffers = [
            trace.updates[self.u - 1].end.buffers if self.u else initial for trace in self.traces
        ]
        own = () if self.between else self.own_parameters
        return Start(self.seen[0].start.parameters, tuple(buffers), self.between, own)

    @cached_property
    def own_parameters(self) -> tuple[Tensors, ...]:
        """Each rank's at the start, where they are not the same on all; empty where they are."""
        held = tuple(update.start.parameters for update in self.seen)
        same = all(all_same(held[0], other) for other in held[1:])
        return () if same or len({frozenset(one) for one in held}) > 1 else held

    @cached_property
    def loss_scale(self) -> float:
        return self.seen[0].scale or 1.0

    @cached_property
    def counts(self) -> Counts:
        """Supervised elements of the group, by term."""
        return self.reference.total(self.group)

    @cached_property
    def replay(self) -> Replay:
        return self.replayed()

    def replayed(
        self, *, keep: bool = False, apart: bool = False, as_built: bool = False
    ) -> Replay:
        """The replay again: with its microbatches' gradients kept, with its sums taken apart, or
        in the modes that ``model()`` leaves its modules in."""
        return self.reference.replay(
            self.group,
            self.start,
            self.traces,
            self.u,
            self.loss_scale,
            keep=keep,
            apart=apart,
            as_built=as_built,
        )

    @property
    def split(self) -> Cut:
        return self.reference.split(self.group, self.start, self.microbatches)

    @cached_property
    def oracle(self) -> Whole:
        return self.reference.oracle(self.group, self.start)

    @cached_property
    def large(self) -> Whole:
        return self.large_times(1.0)

    def large_times(self, factor: float) -> Whole:
        """The large batch in the case's precision, its loss times ``factor``."""
        return self.reference.large(self.group, self.start, self.loss_scale * factor)

    def finite(self, gradients: Sequence[MaybeTensors]) -> dict[str, bool]:
        """By parameter, whether its gradient is finite in all of ``gradients``."""
        by_rank = [finite(gradient) for gradient in gradients]
        return {name: all(r) for name, *r in zip(self.names, *by_rank, strict=True)}
