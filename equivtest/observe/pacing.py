"""What is watched around the gradients: collectives, schedulers, averages, and what is reported."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from equivtest.loops import several
from equivtest.observe.backwards import BackwardRecording
from equivtest.observe.collectives import WATCHED, call_of
from equivtest.observe.operations import OpenCollective
from equivtest.observe.patch import outermost, watched

_SCHEDULERS = tuple(
    kind
    for kind in vars(lr_scheduler).values()
    if inspect.isclass(kind) and issubclass(kind, LRScheduler) and "step" in vars(kind)
)
"""Classes of torch with a way of their own to move on; some move others."""


class PacingRecording(BackwardRecording):
    """Records what a loop does between updates and between replicas."""

    # -- schedulers and averages

    def _watch_pacing(self) -> list[AbstractContextManager[None]]:
        schedulers = [(kind, "step") for kind in _SCHEDULERS]
        schedulers += [
            (kind, "step") for s in several(self._rank.scheduler) for kind in _defining(s, "step")
        ]
        averages: list[tuple[type, str]] = [(AveragedModel, "update_parameters")]
        averages += [
            (kind, "update_parameters")
            for kind in _defining(self._rank.average, "update_parameters")
        ]
        return [
            outermost(schedulers, self._on_schedule, heed=_moves),
            outermost(averages, lambda *_, **__: self._event("average")),
        ]

    def _on_schedule(self, scheduler: Any, *_: Any, **__: Any) -> None:
        groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", None)
        lr = groups[0].get("lr") if groups else None
        self._event("scheduler", f"lr {lr:g}" if isinstance(lr, (int, float)) else "")

    # -- collectives

    def _watch_collectives(self) -> Iterator[AbstractContextManager[None]]:
        for method in WATCHED:
            before = partial(self._on_collective, method)
            yield watched(dist.ProcessGroup, method, before=before)

    def _on_collective(self, method: str, _: Any, *args: Any, **__: Any) -> None:
        call = None if self._again else call_of(method, args, self._model, self._rank.D)
        if call is None:
            return
        update, phase = self._open, self._phase()
        update.collectives.append(
            OpenCollective(call, len(update.microbatches), phase, update.attempted)
        )
        if call.adds_gradients and phase != "backward":
            self._operation("collective", parameters=call.parameters)
            self._clipped_too_early()
        self._event("collective", call.detail)

    def _clipped_too_early(self) -> None:
        """A clip before this was not the update's: its gradient is what comes out of this."""
        update = self._open
        if update.clip_bounds and not update.attempted:
            update.gradient = update.accumulated = update.normed = None
            update.clip_bounds, update.clipped_scaled = [], False

    def _phase(self) -> str:
        if self._running:
            return "backward"
        microbatches = self._open.microbatches
        forward = bool(microbatches) and not microbatches[-1].ended
        return "forward" if forward and not self._open.attempted else "after"

    # -- what the loop reports

    def _on_report(self, loss: Any) -> None:
        held = loss.detach().clone() if isinstance(loss, Tensor) else float(loss)
        self._open.reported.append(held)


def _defining(held: Any, method: str) -> list[type]:
    """The class that an object has a method from."""
    return [kind for kind in type(held).__mro__ if method in vars(kind)][:1]


def _moves(scheduler: Any, *_: Any, **__: Any) -> bool:
    """A scheduler is moved once as it is made, to where it begins."""
    return not getattr(scheduler, "_is_initial", False)
