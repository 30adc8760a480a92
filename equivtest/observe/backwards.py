"""What is watched of a backward: what it starts from, what it reaches, what the wrapper reduces."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from equivtest.experiment import Loss
from equivtest.observe.building import OpenMicrobatch
from equivtest.observe.hooks import in_transform, recomputing
from equivtest.observe.operations import OpenOperation, root_of
from equivtest.observe.reducing import Reductions
from equivtest.observe.updates import UpdateRecording


class BackwardRecording(UpdateRecording):
    """Records what happens from the end of a forward to the end of its backward."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._reductions = Reductions(self._rank)
        self._reached = False
        self._reaching: list[OpenMicrobatch] = []
        self._running: list[OpenOperation] = []
        self._root: list[Tensor] | None = None
        self._versions: list[tuple[int, int] | None] | None = None

    def _training(self) -> bool:
        """Neither an evaluation without gradients nor a repetition of a closure or a checkpoint."""
        return torch.is_grad_enabled() and not self._again and not recomputing()

    # -- hooks that a backward comes to

    def _on_loss(self, loss: Loss) -> None:
        if not self._open.microbatches or not self._training() or in_transform(loss.total):
            return
        microbatch = self._open.microbatches[-1]
        index = len(microbatch.losses)
        count = loss.count.detach().clone() if isinstance(loss.count, Tensor) else loss.count
        microbatch.losses.append((loss.total.detach().clone(), count))
        microbatch.factors.append(None)
        if loss.total.requires_grad:

            def reached(gradient: Tensor) -> None:
                self._note_reached(microbatch)
                before = microbatch.factors[index] or 0.0
                microbatch.factors[index] = before + float(gradient)

            loss.total.register_hook(reached)

    def _on_forward_end(self, args: Any, output: Any) -> None:
        """Await a gradient at the outputs: a forward that no backward follows is no microbatch."""
        if not self._training() or not self._open.microbatches:
            return
        microbatch = self._open.microbatches[-1]

        def reached(_: Tensor) -> None:
            microbatch.reached = True
            self._note_reached(microbatch)

        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad and not in_transform(leaf):
                microbatch.awaited = True
                microbatch.dtypes.add(leaf.dtype)
                leaf.register_hook(reached)
                self._graphs.mark(leaf)

    def _note_reached(self, microbatch: OpenMicrobatch) -> None:
        self._reached = True
        if microbatch not in self._reaching:
            self._reaching.append(microbatch)

    # -- a backward

    def _on_backward(
        self,
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: Any = None,
        create_graph: Any = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        if self._again:
            return
        waiting = [m for m in self._open.microbatches if not m.ended]
        self._note_scale()
        for microbatch in waiting:
            microbatch.ended = True
            microbatch.scale = self._scale_now()
            microbatch.flag = self._reductions.flag
            self._settle(microbatch)
        self._reached = False
        self._versions = None if waiting else self._model.gradient_versions()
        self._reductions.backward_begins()
        if not self._running:  # else a checkpoint's own, inside one
            self._reaching = []
            given = grad_variables if grad_tensors is None else grad_tensors
            self._root = root_of(tensors, given)
        self._reaching += [m for m in waiting if not (m.awaited or m.losses)]  # has no hook to tell
        self._running.append(self._running[0] if self._running else self._operation("backward"))
        self._event("backward")

    def _on_backward_end(self, *_: Any, **__: Any) -> None:
        if self._again:
            return
        self._note_unseen()
        if len(self._running) == 1:
            self._note_backward(self._running[0])
        update = self._open
        reduction = self._reductions.backward_ended(self._model.names, bool(self._reaching))
        if update.microbatches and self._reductions.reduced:
            last = update.microbatches[-1]
            last.reduction = reduction
            self._operation("reduce", parameters=self._reduced())
            self._event("collective")
        update.gradient, update.clip_bounds, update.clipped_scaled = None, [], False
        update.normed = None
        planned = self._planned[min(update.number, len(self._planned) - 1)]
        complete = len(update.microbatches) >= planned or update.unseen
        if self._clips and complete:
            # A clip written by hand may be seen by no hook: keep what it would start from.
            update.accumulated = self._model.gradients()

    def _reduced(self) -> frozenset[str] | None:
        names = self._model.names()
        left_out = self._reductions.left_out(names)
        return frozenset(names.values()) - left_out if left_out else None

    def _on_backward_over(self) -> None:
        """Also where it raised: the loop may catch that and go on."""
        self._running = self._running[:-1]

    def _note_backward(self, operation: OpenOperation) -> None:
        """Which microbatches of the open update it reached, and from what value."""
        update = self._open
        backwards = [one for one in update.operations if one.kind == "backward"]
        for place, microbatch in enumerate(update.microbatches):
            if microbatch not in self._reaching:
                continue
            operation.reached.append(place)
            microbatch.backward = backwards.index(operation)
            microbatch.backwards += 1
            microbatch.odd_root |= self._root is None
            microbatch.roots += self._root or []

    def _note_unseen(self) -> None:
        """A gradient that came through no forward that was seen: ``module.forward`` was called."""
        before, self._versions = self._versions, None
        if before is None or self._reached or before == self._model.gradient_versions():
            return
        if self._open.attempted:
            self._close()
            self._note_scale()
        self._open.unseen = True
        if self._open.start is None:
            self._open.start = self._model.now()

    def _close(self) -> None:
        """The next update may begin inside a backward, which is then its own."""
        running = self._running[0] if self._running else None
        if running is None or running not in self._open.operations:
            super()._close()
        elif any(microbatch in self._reaching for microbatch in self._open.microbatches):
            self._note_backward(running)
            super()._close()
        else:
            self._open.operations.remove(running)
            super()._close()
            running.begun, running.attempted = 0, False
            self._open.operations.append(running)

    def _attempt(self, optimizer: Optimizer) -> None:
        super()._attempt(optimizer)
        if self._open.attempted:
            self._open.comm_hook = self._reductions.comm_hook()
            self._open.unwrapped = self._reductions.unwrapped(self._model.names())
