"""Microbatches and updates while they are open: filled in as things happen, frozen at the end."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.amp import GradScaler

from equivtest.observe.operations import OpenCollective, OpenOperation
from equivtest.observe.rng import RandomState
from equivtest.observe.trace import (
    Gradients,
    MicrobatchTrace,
    OptimizerTrace,
    Reduction,
    State,
    Tensors,
    UpdateTrace,
)


@dataclass(eq=False)
class OpenMicrobatch:
    """A microbatch while it is open.

    Attributes:
        forwards: of the model, so far; ``bare``: of the module past its wrapper.
        hidden: what its forward saved was not seen.
        contents: ids of what its forwards received, told by contents, where ``ids`` is None.
        losses: totals and counts; no more of a ``Loss``, or its graph would be kept.
        roots: scalars that its backwards started from; ``odd_root`` where one did from another.
        scale: a tensor where it lies on a GPU: reading it would wait.
    """

    ids: tuple[int, ...] | None
    rng: RandomState
    held_bytes: int = 0
    held_nodes: int = 0
    held_graphs: int = 0
    reduces: bool = False
    flag: bool = False
    forwards: int = 0
    bare: int = 0
    broadcasts: list[int] = field(default_factory=list)
    losses: list[tuple[Tensor, Tensor | float]] = field(default_factory=list)
    factors: list[float | None] = field(default_factory=list)
    roots: list[Tensor] = field(default_factory=list)
    odd_root: bool = False
    scale: Tensor | float | None = None
    backward: int | None = None
    backwards: int = 0
    drew: frozenset[str] = frozenset()
    switched: frozenset[str] = frozenset()
    awaited: bool = False
    reached: bool = False
    ended: bool = False
    hidden: bool = False
    reduction: Reduction | None = None
    dtypes: set[torch.dtype] = field(default_factory=set)
    peak_bytes: int = 0
    nodes: int = 0
    contents: tuple[int, ...] | None = None

    def also(self, contents: tuple[int, ...] | None) -> None:
        """Another forward of it received these: a model may be shown a batch in parts."""
        if self.contents is None or contents is None:
            self.contents = self.contents if contents is None else contents
        else:
            self.contents += tuple(i for i in contents if i not in self.contents)

    def freeze(self) -> MicrobatchTrace:
        return MicrobatchTrace(
            ids=self.contents if self.ids is None else self.ids,
            by_contents=self.ids is None and bool(self.contents),
            totals=tuple(float(total) for total, _ in self.losses),
            counts=tuple(float(count) for _, count in self.losses),
            factors=tuple(self.factors),
            rng=self.rng if self.drew else None,
            drew=self.drew,
            switched=self.switched,
            dtypes=() if self.hidden else tuple(sorted(str(dtype) for dtype in self.dtypes)),
            reduces=self.reduces,
            reduction=self.reduction,
            broadcasts=tuple(self.broadcasts),
            peak_bytes=self.peak_bytes,
            nodes=self.nodes,
            root=self._root(),
            scale=None if self.scale is None else float(self.scale),
            flag=self.flag,
            wrapped=0 == self.bare < self.forwards,
            backward=self.backward,
            backwards=self.backwards,
            held_bytes=self.held_bytes,
            held_nodes=self.held_nodes,
            held_graphs=self.held_graphs,
        )

    def _root(self) -> float | None:
        if self.odd_root or not self.roots:
            return None
        return sum(float(root) for root in self.roots)


@dataclass
class OpenUpdate:
    """An update while it is open; ``unseen`` if it had a gradient from no forward that was seen."""

    number: int
    microbatches: list[OpenMicrobatch] = field(default_factory=list)
    start: State | None = None
    accumulated: Gradients | None = None
    normed: Gradients | None = None
    gradient: Gradients | None = None
    clipped: dict[str, Tensor | None] = field(default_factory=dict)
    before: dict[str, Tensor] = field(default_factory=dict)
    after: Tensors = field(default_factory=dict)
    optimizers: dict[int, OptimizerTrace] = field(default_factory=dict)
    attempted: bool = False
    unseen: bool = False
    ran: set[int] = field(default_factory=set)
    scaler: GradScaler | None = None
    scale: float | None = None
    scale_after: float | None = None
    scaler_after: dict[str, float] = field(default_factory=dict)
    unscaled: bool = False
    clip_bounds: list[float] = field(default_factory=list)
    clipped_scaled: bool = False
    operations: list[OpenOperation] = field(default_factory=list)
    collectives: list[OpenCollective] = field(default_factory=list)
    reported: list[Tensor | float] = field(default_factory=list)
    comm_hook: str = ""
    unwrapped: frozenset[str] = frozenset()

    def used(self) -> dict[int, OpenMicrobatch]:
        """By place the microbatches that a gradient came from, or may have come from."""
        return {k: m for k, m in enumerate(self.microbatches) if m.reached or not m.awaited}

    def freeze(self, end: State, averages: Tensors) -> UpdateTrace:
        """The update as a trace, with the state in which the next one finds it."""
        assert self.start is not None, "an attempted update has a start"
        gradient = self.gradient or self.normed
        used = self.used()
        if gradient is None and self.accumulated is not None:
            gradient = self.accumulated
            if self.scale is not None:  # unscaling takes out the scale of the last backward
                scales = [m.scale for m in used.values() if m.scale is not None]
                gradient = divided(gradient, float(scales[-1] if scales else self.scale))
        return UpdateTrace(
            microbatches=tuple(m.freeze() for m in used.values()),
            start=self.start,
            gradient=self.clipped if gradient is None else gradient,
            clipped=self.clipped,
            before=self.before,
            after=self.after or self.before,
            end=end,
            averages=averages,
            optimizers=tuple(self.optimizers.values()),
            applied=all(optimizer.applied for optimizer in self.optimizers.values()),
            scale=self.scale,
            scale_after=self.scale_after,
            scaler_after=self.scaler_after,
            clip_bounds=tuple(self.clip_bounds),
            clipped_scaled=self.clipped_scaled,
            norm_taken=self.normed is not None,
            observed=bool(used) or not self.unseen,
            operations=tuple(one.freeze(list(used)) for one in self.operations),
            collectives=tuple(one.freeze(list(used)) for one in self.collectives),
            reported=tuple(map(float, self.reported)),
            comm_hook=self.comm_hook,
            unwrapped=self.unwrapped,
        )


def divided(gradients: Gradients, scale: float) -> dict[str, Tensor | None]:
    """Times the inverse, as ``unscale_`` computes it."""
    inverse = 1.0 / scale
    return {n: None if g is None else g * inverse for n, g in gradients.items()}
