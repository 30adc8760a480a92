"""What one rank leaves behind: plain records of tensors and numbers, nothing that computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from equivtest.observe.rng import RandomState

Tensors = Mapping[str, Tensor]
Gradients = Mapping[str, Tensor | None]
"""Gradient by parameter name; None where autograd left none, which is not the same as zero."""

ParamGroups = tuple[tuple[tuple[str, ...], Mapping[str, Any]], ...]
"""For each param group of an optimizer the names of its parameters and its hyperparameters."""

OptimizerState = Mapping[str, Mapping[str, Any]]
"""State of an optimizer by parameter name and key."""

COUNTER = "step"
"""What torch's optimizers call the number of their updates in it."""


def by_name(groups: ParamGroups) -> dict[str, Mapping[str, Any]]:
    """Hyperparameters by the names of parameters: groups may be cut and ordered otherwise."""
    return {name: values for names, values in groups for name in names}


@dataclass(frozen=True)
class Event:
    """One thing that happened in a rank.

    Kinds: forward, backward, collective, broadcast, unscale, clip, update attempted, update
    applied, update skipped, scaler update, scheduler, average, zero_grad.

    Attributes:
        update: the one that is open: from its first forward, or what came before the first of all,
            until a next group's first forward.
        microbatch: of a forward, a backward or a collective, the one that it belongs to.
        begun: microbatches of the group that had begun.
        attempted: the update had been attempted.
        at_s: when it began, in seconds of a clock that all processes of a machine share.
        lines: of the loop's own file, from which it came, those of the innermost call first.
    """

    kind: str
    update: int
    microbatch: int | None = None
    detail: str = ""
    begun: int = 0
    attempted: bool = False
    at_s: float = field(default=0.0, compare=False)
    lines: tuple[int, ...] = ()


@dataclass(frozen=True)
class State:
    """Parameters and buffers by name."""

    parameters: Tensors
    buffers: Tensors


@dataclass(frozen=True)
class Reduction:
    """What ``DistributedDataParallel`` did at the end of a backward: divide by D, all-reduce.

    Attributes:
        buckets: parameter names by bucket, in the order in which they lie in its flat buffer.
        in_place: parameters whose gradient lay in its bucket before the backward and was divided
            there; the others' were multiplied by 1/D on their way into it.
    """

    buckets: tuple[tuple[str, ...], ...]
    in_place: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Collective:
    """A collective that was called from Python: by the loop or a communication hook.

    Attributes:
        name: ``all_reduce``, ``all_gather``, ``broadcast``, ...
        op: of a reduction, ``sum``, ``avg``, ``max``, ...; empty for others.
        dtype, elements: of what it sent (``float32``).
        parameters: names of those whose gradients it sent: in their own memory or, one after the
            other, as a copy, perhaps in another dtype or times a number.
        microbatch: the last one that had begun; None before the first.
        phase: ``forward`` (from a forward to its backward), ``backward`` (inside one: a hook) or
            ``after`` a backward.
        attempted: the update had been attempted: what the next group sends before its first
            forward comes here.
    """

    name: str
    op: str
    dtype: str
    elements: int
    parameters: frozenset[str] = frozenset()
    microbatch: int | None = None
    phase: str = "after"
    attempted: bool = False


@dataclass(frozen=True)
class GradientOperation:
    """One thing that happened to ``.grad`` in a group, in order.

    Attributes:
        kind: ``backward``, ``reduce`` (by the wrapper, at the end of a backward), ``zero``
            (``zero_grad`` of an optimizer or a module, where it found a gradient), ``clip`` (by
            norm), ``clamp`` (a clip by value), ``unscale``, or ``collective``: outside a backward
            Python called one that makes a sum or an average of gradients.
        microbatch: the last one that had begun; None before the first.
        microbatches: of a backward, those that it reached.
        factor: what a clip by norm or an unscale multiplied gradients by; 1 for others.
        parameters: names of those concerned; None for all that are trained.
        attempted: the update had been attempted: it came after it.
    """

    kind: str
    microbatch: int | None = None
    microbatches: tuple[int, ...] = ()
    factor: float = 1.0
    parameters: frozenset[str] | None = None
    attempted: bool = False


@dataclass(frozen=True)
class MicrobatchTrace:
    """One forward and what followed from it.

    Attributes:
        ids: example ids that the forward received, or None where that is unknown.
        totals, counts: of each ``Loss`` made, in order of making.
        factors: by what each total was multiplied before backward (the gradient that reached it),
            or None where none did.
        rng: the generators' state before the forward, where the forward drew from one; ``drew``
            are those that it drew from (names of attributes of ``rng``).
        switched: modules that ran in another mode (train or eval) than ``model()`` left them in.
        dtypes: floating dtypes that autograd saved in the forward and that it gave; empty where
            they were not seen.
        reduces: the wrapper would reduce with this microbatch's backward: it was called, and its
            flag (below) was up in the forward.
        reduction: how it did, where that is known to the bit.
        broadcasts: before which of its forwards buffers were broadcast, counted from 0: a loss may
            call the model several times.
        peak_bytes: most bytes that the autograd graph held, up to this microbatch's backward; on a
            GPU the most that were allocated there, from its forward to the next, or, for the last
            of a group, to the end of the update.
        nodes: most saved tensors that it held.
        root: value that its backward started from, with whatever the loop multiplied it by; of one
            backward for several microbatches, that of all of them; of several backwards for one,
            their sum. None where one started from no scalar, or none was seen.
        scale: loss scale at its backward, None without a scaler.
        flag: the wrapper's wish to reduce when the backward began (``reduces``: in the forward,
            which is what counts).
        by_contents: ``ids`` were told by what the forward received, not by the memory of a batch
            that the loop was handed.
        wrapped: all its forwards went through the wrapper.
        backward: number of the last backward that reached it, counted from 0 in the update; None
            where none did.
        backwards: how many reached it: each of its losses may have one of its own.
        held_bytes, held_nodes: saved tensors that the autograd graph still held of earlier
            microbatches when its first forward began: their bytes and their number.
        held_graphs: earlier microbatches whose graph was still alive then, with or without saved
            tensors. That of the one before is, in a loop that keeps its loss until the next.
    """

    ids: tuple[int, ...] | None
    totals: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()
    factors: tuple[float | None, ...] = ()
    rng: RandomState | None = None
    drew: frozenset[str] = frozenset()
    switched: frozenset[str] = frozenset()
    dtypes: tuple[str, ...] = ()
    reduces: bool = False
    reduction: Reduction | None = None
    broadcasts: tuple[int, ...] = ()
    peak_bytes: int = 0
    nodes: int = 0
    root: float | None = None
    scale: float | None = None
    flag: bool = False
    wrapped: bool = False
    backward: int | None = None
    backwards: int = 0
    held_bytes: int = 0
    held_nodes: int = 0
    by_contents: bool = False
    held_graphs: int = 0


@dataclass(frozen=True)
class OptimizerTrace:
    """One optimizer around one attempted update.

    Attributes:
        kind: its class.
        defaults: the defaults it was built with.
        groups: its param groups at the update.
        state_before, state_after: state by parameter name and key.
        on_host: keys whose tensors the optimizer had on the host before the update.
        closures: evaluations of a closure inside the update.
        applied: it ran, and neither a scaler nor a fused path skipped it.
    """

    kind: type[Optimizer]
    defaults: Mapping[str, Any]
    groups: ParamGroups
    state_before: OptimizerState
    state_after: OptimizerState
    on_host: frozenset[str] = frozenset()
    closures: int = 0
    applied: bool = False

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for group, _ in self.groups for name in group)


@dataclass(frozen=True)
class UpdateTrace:
    """One attempted update.

    Attributes:
        microbatches: the forwards since the update before.
        start: parameters and buffers at the first forward.
        gradient: after unscale and before clip.
        clipped: at the update, after clip.
        before: parameters when the update was attempted; ``after`` when it had ended.
        end: parameters and buffers when the next group began or the loop ended; ``averages``, the
            shadow of the weights, then.
        optimizers: those that were attempted.
        applied: every optimizer that was attempted was applied.
        scale: loss scale at the backward, None without a scaler; ``scale_after`` after its update.
        scaler_after: the numbers of the scaler's ``state_dict()`` after its update, the count of
            updates since the scale last moved (``_growth_tracker``) among them.
        clip_bounds: bounds of the clips that were seen between last backward and update.
        norm_taken: ``gradient`` is what a norm was last taken of, where no clip was seen.
        clipped_scaled: a clip was seen on gradients that were still scaled.
        observed: False where gradients came and no forward was seen (``module.forward`` called
            past the module's hooks): microbatches and examples are then unknown, not absent.
        operations: what happened to the gradients, in order.
        collectives: those called from Python.
        comm_hook: name of the wrapper's communication hook; empty where it has none.
        unwrapped: trained parameters that ``DistributedDataParallel`` does not hold, and was not
            told to ignore.
        reported: what the loop reported as its loss (``Rank.report``).
    """

    microbatches: tuple[MicrobatchTrace, ...]
    start: State
    gradient: Gradients
    clipped: Gradients
    before: Tensors
    after: Tensors
    end: State
    averages: Tensors
    optimizers: tuple[OptimizerTrace, ...]
    applied: bool
    scale: float | None = None
    scale_after: float | None = None
    scaler_after: Mapping[str, float] = field(default_factory=dict)
    clip_bounds: tuple[float, ...] = ()
    clipped_scaled: bool = False
    norm_taken: bool = False
    observed: bool = True
    operations: tuple[GradientOperation, ...] = ()
    collectives: tuple[Collective, ...] = ()
    comm_hook: str = ""
    unwrapped: frozenset[str] = frozenset()
    reported: tuple[float, ...] = ()


@dataclass(frozen=True)
class Trace:
    """All that one rank leaves behind.

    Attributes:
        updates: the attempted updates.
        left_over: microbatches that ran after the last attempted update.
        groups_after: by optimizer of the experiment, its param groups when the loop ended.
        state_after: state when the loop ended, by the names of an optimizer's parameters
            (``OptimizerTrace.names``), of every optimizer that was attempted.
        averages_after: the shadow of the weights when the loop ended.
        refusal: why torch cannot run the case here; nothing else was recorded then.
        twins: examples that nothing tells apart, of those told by contents; the first of each
            stands for all.
        untold: why examples in the data may not have been told by their contents.
    """

    rank: int
    updates: tuple[UpdateTrace, ...] = ()
    events: tuple[Event, ...] = ()
    left_over: int = 0
    groups_after: tuple[ParamGroups, ...] = ()
    state_after: Mapping[frozenset[str], OptimizerState] = field(default_factory=dict)
    averages_after: Tensors = field(default_factory=dict)
    refusal: str | None = None
    twins: tuple[tuple[int, ...], ...] = ()
    untold: str = ""
