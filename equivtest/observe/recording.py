"""What an observer holds while it watches: open and closed updates, events, the trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from equivtest.experiment import Rank
from equivtest.observe.building import OpenMicrobatch, OpenUpdate
from equivtest.observe.contents import Search
from equivtest.observe.handed import HandedOut
from equivtest.observe.memory import DevicePeak, GraphMemory, LivingGraphs
from equivtest.observe.operations import OpenOperation
from equivtest.observe.snapshot import ModelState, hyperparameters
from equivtest.observe.trace import Event, OptimizerState, ParamGroups, Tensors, Trace, UpdateTrace
from equivtest.source import lines_in

OF_A_MICROBATCH = frozenset({"forward", "backward", "collective"})
"""Kinds of events that belong to one microbatch; the others belong to the update."""


class Recording:
    """The record of one rank.

    Args:
        rank: what the loop is handed.
        planned: microbatches of this replica in each group.
        note: told each event, where it survives the death of this process.
        search: tells examples by their contents, where there are any to search.
        file: of the loop, whose lines are told; empty if none is known.
    """

    def __init__(
        self,
        rank: Rank,
        planned: Sequence[int],
        note: Callable[[str], None],
        search: Search | None = None,
        file: str = "",
    ) -> None:
        self._rank = rank
        self._search = search
        self._file = file
        self._note = note
        self._planned = planned
        self._model = ModelState(rank.module)
        self._memory = GraphMemory()
        self._graphs = LivingGraphs()
        self._device = DevicePeak(rank.device)
        self._events: list[Event] = []
        self._closed: list[UpdateTrace] = []
        self._open = OpenUpdate(0)
        self._handed = HandedOut()
        self._again = False
        self._attempted: dict[int, Optimizer] = {}
        self._groups_after: tuple[ParamGroups, ...] = ()
        self._state_after: dict[frozenset[str], OptimizerState] = {}
        self._averages_after: Tensors = {}

    def __deepcopy__(self, memo: Any) -> Recording:
        """The same: a loop may copy what it was handed, and the copy holds ``rank.loss``."""
        return self

    def trace(self) -> Trace:
        """What was seen, after the loop has ended."""
        left_over = len(self._open.used())
        if self._open.attempted:
            self._close()
            left_over = 0
        return Trace(
            rank=self._rank.dp_rank,
            updates=tuple(self._closed),
            events=tuple(self._events),
            left_over=left_over,
            groups_after=self._groups_after,
            state_after=self._state_after,
            averages_after=self._averages_after,
            twins=() if self._search is None else self._search.twins,
            untold="" if self._search is None else self._search.left_out,
        )

    def loop_ended(self, optimizers: Sequence[Optimizer]) -> None:
        """Note what the loop leaves; ``optimizers`` are those whose schedule is judged.

        In their place the loop may have moved others, of its own.
        """
        names = self._model.names()
        ended = {self._own(o): o for o in (*optimizers, *self._attempted.values())}
        self._groups_after = tuple(hyperparameters(o, names) for o in ended.values())
        for optimizer in self._attempted.values():
            self._state_after[self._own(optimizer)] = self._model.optimizer_state(optimizer)
        self._averages_after = self._model.averages(self._rank.average)

    def _own(self, optimizer: Optimizer) -> frozenset[str]:
        """Names of the parameters that the optimizer updates."""
        names = self._model.names()
        return frozenset(
            names[id(p)] for g in optimizer.param_groups for p in g["params"] if id(p) in names
        )

    def _settle(self, microbatch: OpenMicrobatch) -> None:
        """Note what the forward left, up to its backward, or else up to the next forward."""
        microbatch.drew = microbatch.rng.drawn()
        if microbatch is self._open.microbatches[-1]:
            microbatch.dtypes |= self._memory.dtypes
        if not self._device.measures:
            microbatch.peak_bytes = self._memory.peak_bytes
        microbatch.nodes = self._memory.peak_tensors

    def _settle_last(self) -> None:
        """A backward by ``torch.autograd.grad`` is not watched: a loss may use it in itself."""
        if not self._open.microbatches:
            return
        last = self._open.microbatches[-1]
        if not last.ended:
            self._settle(last)
        if self._device.measures:  # only here is its backward over, and the update after it
            last.peak_bytes = self._device.peak_bytes()

    def _close(self) -> None:
        self._settle_last()
        state = self._model
        self._closed.append(self._open.freeze(state.now(), state.averages(self._rank.average)))
        self._open = OpenUpdate(self._open.number + 1)
        self._handed.forget_received()

    def _operation(self, kind: str, **how: Any) -> OpenOperation:
        """Something happens to gradients; an optimizer's repeated closure is left out."""
        update = self._open
        made = OpenOperation(kind, len(update.microbatches), update.attempted, **how)
        if not self._again:
            update.operations.append(made)
        return made

    def _event(self, kind: str, detail: str = "") -> None:
        current = len(self._open.microbatches) - 1
        microbatch = current if kind in OF_A_MICROBATCH and current >= 0 else None
        event = Event(
            kind,
            self._open.number,
            microbatch,
            detail,
            begun=current + 1,
            attempted=self._open.attempted,
            at_s=time.perf_counter(),
            lines=lines_in(self._file),
        )
        self._events.append(event)
        where = "" if microbatch is None else f" of microbatch {microbatch}"
        self._note(f"{kind}{where} in update {event.update}" + (f" ({detail})" if detail else ""))
