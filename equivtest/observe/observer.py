"""The observer of one rank: it watches torch around a loop and leaves a Trace.

The loop need not cooperate: hooks of modules and optimizers, and watched functions of torch, tell
what happened. Nothing that is watched is changed, and no random number is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_leaves

from equivtest.experiment import Loss, LossResult, Rank
from equivtest.observe.building import OpenMicrobatch, OpenUpdate, divided
from equivtest.observe.handed import HandedOut
from equivtest.observe.memory import GraphMemory
from equivtest.observe.patch import watched
from equivtest.observe.rng import RandomState
from equivtest.observe.snapshot import ModelState, hyperparameters
from equivtest.observe.trace import Event, OptimizerTrace, Trace, UpdateTrace

NORMS = (
    (torch, "norm"),
    (torch, "_foreach_norm"),
    (torch.linalg, "norm"),
    (torch.linalg, "vector_norm"),
)
"""Functions that a clip written by hand takes the norm with (``Tensor.norm`` calls the first)."""

OF_A_MICROBATCH = frozenset({"forward", "backward", "collective"})
"""Kinds of events that belong to one microbatch; the others belong to the update."""


class Observer:
    """Watches one rank while ``watching``; ``trace`` gives what it saw.

    Args:
        rank: what the loop will be handed; its ``loss`` is replaced by a watched one.
        planned: microbatches of this replica in each group.
        note: told each event, where it survives the death of this process.
    """

    def __init__(self, rank: Rank, planned: Sequence[int], note: Callable[[str], None]) -> None:
        self._rank = rank
        self._note = note
        self._planned = planned
        self._model = ModelState(rank.module)
        self._memory = GraphMemory()
        self._events: list[Event] = []
        self._closed: list[UpdateTrace] = []
        self._open = OpenUpdate(0)
        self._handed = HandedOut()
        self._in_loss = False
        self._broadcast = False
        self._closures = 0
        self._again = False
        self._groups_after: tuple[Any, ...] = ()
        self._loss = rank.loss
        rank.loss = self._watched_loss

    # -- what the loop is handed

    def fetched(self, batch: Any, ids: tuple[int, ...]) -> Any:
        """Remember which examples ``batch`` holds, and give it back."""
        return self._handed.remember(batch, ids)

    def _watched_loss(self, model: Any, batch: Any) -> LossResult:
        if self._training():
            self._begin_microbatch(tree_leaves(batch))
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
                module.register_forward_pre_hook(self._on_forward, with_kwargs=True),
                module.register_forward_hook(self._on_forward_end),
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
                torch.autograd, "backward", before=self._on_backward, after=self._on_backward_end
            ),
            watched(
                DistributedDataParallel,
                "_sync_buffers",
                before=self._before_broadcast,
                after=self._on_broadcast,
            ),
            watched(clip_grad, "_clip_grads_with_norm_", before=self._on_clip),
            *(watched(owner, name, before=self._on_norm) for owner, name in NORMS),
            watched(GradScaler, "unscale_", after=self._on_unscale),
            watched(GradScaler, "step", before=self._on_attempt, after=self._on_attempted),
            watched(GradScaler, "update", after=self._on_scaler_update),
            watched(LRScheduler, "step", after=lambda *_, **__: self._event("scheduler")),
            watched(
                AveragedModel, "update_parameters", after=lambda *_, **__: self._event("average")
            ),
            watched(Optimizer, "zero_grad", after=lambda *_, **__: self._event("zero_grad")),
        ]

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
        )

    def loop_ended(self, optimizers: Sequence[Optimizer]) -> None:
        """Note the hyperparameters that the loop leaves."""
        names = self._model.names()
        self._groups_after = tuple(hyperparameters(o, names) for o in optimizers)

    # -- forward and backward

    def _training(self) -> bool:
        """Not an evaluation without gradients, and not a closure's second evaluation."""
        return torch.is_grad_enabled() and not self._again

    def _begin_microbatch(self, leaves: Sequence[Any]) -> None:
        """Open a microbatch, and the next update if this one has been attempted."""
        if self._open.attempted:
            self._close()
        self._settle_last()
        update = self._open
        if update.start is None:
            update.start = self._model.now()
        model = self._rank.model
        wrapped = isinstance(model, DistributedDataParallel)
        update.microbatches.append(
            OpenMicrobatch(
                ids=self._handed.examples(leaves),
                rng=RandomState.now(),
                reduces=bool(wrapped and model.require_backward_grad_sync),
                broadcast=False,
            )
        )
        self._memory.restart()

    def _settle(self, microbatch: OpenMicrobatch) -> None:
        """Note what the forward left, up to its backward, or else up to the next forward."""
        microbatch.rng_used = microbatch.rng.moved()
        microbatch.dtypes = set(self._memory.dtypes)
        microbatch.peak_bytes = self._memory.peak_bytes
        microbatch.nodes = self._memory.peak_tensors

    def _settle_last(self) -> None:
        """A backward by ``torch.autograd.grad`` is not watched: a loss may use it in itself."""
        if self._open.microbatches and not self._open.microbatches[-1].ended:
            self._settle(self._open.microbatches[-1])

    def _on_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._training():
            return
        current = self._open.microbatches[-1] if self._open.microbatches else None
        fresh = current is None or current.ended or bool(current.losses)
        if (fresh or self._open.attempted) and not self._in_loss:
            self._begin_microbatch(tree_leaves((args, kwargs)))
        current = self._open.microbatches[-1]
        if self._broadcast:
            current.broadcast, self._broadcast = True, False
            if len(self._open.microbatches) == 1:
                self._open.start = self._model.now()
        self._event("forward")

    def _before_broadcast(self, *_: Any, **__: Any) -> None:
        if self._open.attempted and not self._again:
            self._close()

    def _on_broadcast(self, *_: Any, **__: Any) -> None:
        self._broadcast = not self._again
        self._event("broadcast")

    def _on_loss(self, loss: Loss) -> None:
        if not self._open.microbatches or not self._training():
            return
        microbatch = self._open.microbatches[-1]
        index = len(microbatch.losses)
        microbatch.losses.append(loss)
        microbatch.factors.append(None)
        if loss.total.requires_grad:

            def reached(gradient: Tensor) -> None:
                before = microbatch.factors[index] or 0.0
                microbatch.factors[index] = before + float(gradient)

            loss.total.register_hook(reached)

    def _on_forward_end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Await a gradient at the outputs: a forward that no backward follows is no microbatch."""
        if not self._training() or not self._open.microbatches:
            return
        microbatch = self._open.microbatches[-1]

        def reached(_: Tensor) -> None:
            microbatch.reached = True

        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                microbatch.awaited = True
                leaf.register_hook(reached)

    def _on_backward(self, *_: Any, **__: Any) -> None:
        if self._again:
            return
        for microbatch in self._open.microbatches:
            if not microbatch.ended:
                microbatch.ended = True
                self._settle(microbatch)
        if self._open.scale is None and self._rank.scaler is not None:
            self._open.scale = float(self._rank.scaler.get_scale())
        self._event("backward")

    def _on_backward_end(self, *_: Any, **__: Any) -> None:
        if self._again:
            return
        update = self._open
        if update.microbatches and update.microbatches[-1].reduces:
            self._event("collective")
        update.gradient, update.clip_bounds, update.clipped_scaled = None, [], False
        update.normed = None
        planned = self._planned[min(update.number, len(self._planned) - 1)]
        if self._rank.clip_norm is not None and len(update.microbatches) >= planned:
            # A clip written by hand may be seen by no hook: keep what it would start from.
            update.accumulated = self._model.gradients()

    # -- update

    def _on_unscale(self, *_: Any, **__: Any) -> None:
        self._open.unscaled = True
        self._event("unscale")

    def _on_norm(self, tensors: Any, *_: Any, **__: Any) -> None:
        """A clip written by hand is seen by no hook, but it takes the gradient's norm first."""
        update = self._open
        if self._rank.clip_norm is None or not update.microbatches:
            return
        if update.microbatches[-1].ended and self._model.is_first_gradient(tensors):
            update.normed = self._model.gradients()
            if update.scale is not None and not update.unscaled:
                update.normed = divided(update.normed, update.scale)

    def _on_clip(self, parameters: Any, max_norm: float, *_: Any, **__: Any) -> None:
        update = self._open
        if update.gradient is None:
            update.gradient = self._model.gradients()
            if update.scale is not None and not update.unscaled:
                update.gradient = divided(update.gradient, update.scale)
                update.clipped_scaled = True
        update.clip_bounds.append(float(max_norm))
        self._event("clip", f"bound {float(max_norm):g}")

    def _on_attempt(self, scaler: GradScaler, optimizer: Optimizer, *_: Any, **__: Any) -> None:
        if scaler.is_enabled():
            self._attempt(optimizer)

    def _on_attempted(self, scaler: GradScaler, optimizer: Optimizer, *_: Any, **__: Any) -> None:
        if scaler.is_enabled() and id(optimizer) not in self._open.ran:
            self._open.after = self._model.parameters()
            self._event("update skipped")

    def _on_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            if id(optimizer) not in self._open.optimizers or id(optimizer) in self._open.ran:
                self._attempt(optimizer)
            else:
                self._refresh(optimizer)
            return None
        self._closures, self._again = 0, False

        def watched_closure(*a: Any, **k: Any) -> Any:
            result = closure(*a, **k)
            self._closures += 1
            if self._closures == 1:
                self._attempt(optimizer)
                self._again = True  # what it evaluates next is no microbatch of the plan
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": watched_closure}
        return (args[0], watched_closure, *args[2:]), kwargs

    def _attempt(self, optimizer: Optimizer) -> None:
        """The loop asks for an update: a second time by one optimizer makes another update."""
        if id(optimizer) in self._open.optimizers:
            self._close()
        names = self._model.names()
        if not any(id(p) in names for g in optimizer.param_groups for p in g["params"]):
            return
        update = self._open
        update.attempted = True
        if update.start is None:
            update.start = self._model.now()
        state = self._model.optimizer_state(optimizer)
        update.optimizers[id(optimizer)] = OptimizerTrace(
            kind=type(optimizer),
            defaults=dict(optimizer.defaults),
            groups=hyperparameters(optimizer, names),
            state_before=state,
            state_after=state,
        )
        own = {names[id(p)] for g in optimizer.param_groups for p in g["params"] if id(p) in names}
        if not update.before:
            update.before = self._model.parameters()
        self._take_gradients(own)
        self._event("update attempted", type(optimizer).__name__)

    def _refresh(self, optimizer: Optimizer) -> None:
        """The optimizer runs now: a scaler may have unscaled since the attempt."""
        seen = self._open.optimizers.get(id(optimizer))
        if seen is None:
            return
        self._take_gradients(seen.names)
        scale = getattr(optimizer, "grad_scale", None)
        if scale is not None:  # a fused optimizer is handed scaled gradients and takes it out
            held = {name: self._open.clipped.get(name) for name in seen.names}
            self._open.clipped.update(divided(held, float(scale)))

    def _take_gradients(self, own: Collection[str]) -> None:
        """Gradients at the update: an optimizer's own, and at the first attempt all others'."""
        clipped = self._open.clipped
        for name, gradient in self._model.gradients().items():
            if name in own or name not in clipped:
                clipped[name] = gradient

    def _on_updated(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._again = False
        update = self._open
        seen = update.optimizers.get(id(optimizer))
        if seen is None:
            return
        found_inf = getattr(optimizer, "found_inf", None)
        skipped = found_inf is not None and bool(found_inf)  # a fused optimizer skips inside
        update.optimizers[id(optimizer)] = replace(
            seen,
            state_after=self._model.optimizer_state(optimizer),
            closures=self._closures,
            applied=not skipped,
        )
        self._closures = 0
        update.ran.add(id(optimizer))
        update.after = self._model.parameters()
        self._event("update skipped" if skipped else "update applied", type(optimizer).__name__)

    def _on_scaler_update(self, scaler: GradScaler, *_: Any, **__: Any) -> None:
        if scaler.is_enabled():
            self._open.scale_after = float(scaler.get_scale())
            self._event("scaler update", f"scale {self._open.scale_after:g}")

    # -- state

    def _close(self) -> None:
        self._settle_last()
        state = self._model
        self._closed.append(self._open.freeze(state.now(), state.averages(self._rank.average)))
        self._open = OpenUpdate(self._open.number + 1)
        self._handed.forget_received()

    def _event(self, kind: str, detail: str = "") -> None:
        current = len(self._open.microbatches) - 1
        microbatch = current if kind in OF_A_MICROBATCH and current >= 0 else None
        event = Event(kind, self._open.number, microbatch, detail)
        self._events.append(event)
        where = "" if microbatch is None else f" of microbatch {microbatch}"
        self._note(f"{kind}{where} in update {event.update}" + (f" ({detail})" if detail else ""))
