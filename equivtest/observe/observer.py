"""The observer of one rank: it watches torch around a loop and leaves a Trace.

The loop need not cooperate: hooks of modules and optimizers, and watched functions of torch, tell
what happened. Nothing that is watched is changed, and no random number is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves

from equivtest.experiment import Loss, LossResult, Rank
from equivtest.observe.building import OpenMicrobatch
from equivtest.observe.contents import Search
from equivtest.observe.hooks import ModuleHook, outside_transforms, recomputing
from equivtest.observe.pacing import PacingRecording
from equivtest.observe.patch import watched
from equivtest.observe.rng import RandomState
from equivtest.observe.updates import CLAMPS, NORMS


class Observer(PacingRecording):
    """Watches one rank while ``watching``; ``trace`` gives what it saw.

    Args:
        rank: what the loop will be handed; its ``loss`` is replaced by a watched one.
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
        super().__init__(rank, planned, note, search, file)
        self._in_loss = False
        self._broadcast = False
        self._wrapping: bool | None = None
        self._loss = rank.loss
        rank.loss = self.watched_loss
        rank._reported = self._on_report

    # -- what the loop is handed

    def fetched(self, batch: Any, ids: tuple[int, ...]) -> Any:
        """Remember which examples ``batch`` holds, and give it back."""
        return self._handed.remember(batch, ids)

    def watched_loss(self, model: Any, batch: Any) -> LossResult:
        """The experiment's loss, as the loop calls it."""
        if self._training():
            with outside_transforms():
                ids = self._handed.examples(tree_leaves(batch))
                self._begin_microbatch(ids)
                self._tell_contents(ids, batch, whole=True)
        self._in_loss = True
        try:
            return self._loss(model, batch)
        finally:
            self._in_loss = False

    # -- watching

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch torch until the context ends."""
        module = self._rank.module
        with ExitStack() as stack:
            for handle in (
                module.register_forward_pre_hook(
                    ModuleHook(module, self._on_forward), with_kwargs=True
                ),
                module.register_forward_hook(ModuleHook(module, self._on_forward_end)),
                register_optimizer_step_pre_hook(self._on_update),
                register_optimizer_step_post_hook(self._on_updated),
            ):
                stack.callback(handle.remove)
            for watch in self._watches():
                stack.enter_context(watch)
            stack.enter_context(self._memory.watching())
            Loss.observer = self._on_loss
            stack.callback(setattr, Loss, "observer", None)
            yield

    def _watches(self) -> list[Any]:
        return [
            watched(
                torch.autograd,
                "backward",
                before=self._on_backward,
                after=self._on_backward_end,
                over=self._on_backward_over,
            ),
            watched(
                DistributedDataParallel,
                "forward",
                before=self._on_wrapper,
                over=self._on_wrapper_end,
            ),
            watched(
                DistributedDataParallel,
                "_sync_buffers",
                before=self._before_broadcast,
                after=self._on_broadcast,
            ),
            watched(clip_grad, "_clip_grads_with_norm_", before=self._on_clip),
            *(watched(torch, name, before=self._on_clamp) for name in CLAMPS),
            *(watched(owner, name, before=self._on_norm) for owner, name in NORMS),
            watched(GradScaler, "scale", before=self._on_scale),
            watched(GradScaler, "unscale_", after=self._on_unscale),
            watched(GradScaler, "step", before=self._on_attempt, after=self._on_attempted),
            watched(GradScaler, "update", after=self._on_scaler_update),
            *self._watch_pacing(),
            *self._watch_collectives(),
            watched(
                Optimizer,
                "zero_grad",
                before=self._before_zero,
                after=lambda *_, **__: self._event("zero_grad"),
            ),
            watched(nn.Module, "zero_grad", before=self._before_zero, after=self._on_module_zero),
        ]

    # -- forward

    def _begin_microbatch(self, ids: tuple[int, ...] | None) -> None:
        """Open a microbatch, and the next update if this one has been attempted."""
        if self._open.attempted:
            self._close()
        self._settle_last()
        update = self._open
        if update.start is None:
            update.start = self._model.now()
        held_bytes, held_tensors = self._memory.held
        update.microbatches.append(
            OpenMicrobatch(
                ids=ids,
                rng=RandomState.now(),
                held_bytes=held_bytes,
                held_nodes=held_tensors,
                held_graphs=self._graphs.begin(),
            )
        )
        self._memory.restart()
        self._device.restart()

    def _on_wrapper(self, wrapper: DistributedDataParallel, *_: Any, **__: Any) -> None:
        if self._training():
            self._wrapping = bool(wrapper.require_backward_grad_sync)
            self._reductions.forwarded(wrapper)

    def _on_wrapper_end(self) -> None:
        self._wrapping = None

    @property
    def _inside_wrapper(self) -> bool:
        model = self._rank.model
        return self._wrapping is not None or not isinstance(model, DistributedDataParallel)

    def _on_forward(self, args: Any, kwargs: Any) -> None:
        if not self._training():
            return
        if not self._in_loss:
            ids = self._handed.examples(tree_leaves((args, kwargs)))
            if self._open.attempted or self._is_fresh(ids):
                self._begin_microbatch(ids)
            self._tell_contents(ids, (args, kwargs), whole=False)
        current = self._open.microbatches[-1]
        current.hidden |= not self._memory.sees()
        if self._broadcast:
            self._broadcast = False
            current.broadcasts.append(current.forwards)
            if len(self._open.microbatches) == 1 and not current.forwards:
                self._open.start = self._model.now()
        current.forwards += 1
        current.bare += not self._inside_wrapper
        current.reduces |= bool(self._wrapping)
        current.switched |= self._model.switched()
        self._event("forward")

    def _tell_contents(self, ids: tuple[int, ...] | None, received: Any, whole: bool) -> None:
        """Where memory does not tell which examples a forward received, their contents may."""
        if ids is None and self._search is not None:
            self._open.microbatches[-1].also(self._search.examples(received, whole))

    def _is_fresh(self, ids: tuple[int, ...] | None) -> bool:
        """Whether a forward begins a microbatch; a model may run several times in one."""
        if not self._open.microbatches:
            return True
        current = self._open.microbatches[-1]
        others = None not in (ids, current.ids) and ids != current.ids
        return current.ended or bool(current.losses) or others

    def _before_broadcast(self, *_: Any, **__: Any) -> None:
        if self._open.attempted and self._training():
            self._close()

    def _on_broadcast(self, *_: Any, **__: Any) -> None:
        if recomputing():
            return
        self._broadcast = not self._again
        self._event("broadcast")
