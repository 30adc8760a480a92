"""What is watched of an update: loss scale, clip, the optimizer's attempt and its end."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from equivtest.distance import dense
from equivtest.loops import several
from equivtest.observe.building import divided
from equivtest.observe.operations import clip_factor
from equivtest.observe.recording import Recording
from equivtest.observe.snapshot import held_by, hyperparameters, keys_on_host
from equivtest.observe.trace import OptimizerTrace

NORMS = (
    (torch, "norm"),
    (torch, "_foreach_norm"),
    (torch.linalg, "norm"),
    (torch.linalg, "vector_norm"),
)
"""Functions that a clip written by hand takes the norm with (``Tensor.norm`` calls the first)."""

CLAMPS = ("_foreach_clamp_min_", "_foreach_clamp_max_")
"""Functions of torch that a clip by value calls, ``clip_grad_value_`` in this order."""


class UpdateRecording(Recording):
    """Records what happens between the last backward of a group and the end of its update."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._scaler: GradScaler | None = None
        self._closures = 0
        self._clears = False
        self._hooks: dict[int, dict[int, Callable[..., Any]]] = {}

    # -- loss scale

    def _on_scale(self, scaler: GradScaler, *_: Any, **__: Any) -> None:
        self._scaler = scaler

    def _note_scale(self) -> None:
        """The scale of a backward, by the scaler that the loop scales with, if it does."""
        update = self._open
        scaler = self._scaler
        if update.scaler is None and scaler is not None and scaler.is_enabled():
            update.scaler, update.scale = scaler, float(scaler.get_scale())

    def _scale_now(self) -> Tensor | float | None:
        """The scale as it stands, without waiting for a GPU; None without a scaler."""
        scaler = self._scaler
        if scaler is None or not scaler.is_enabled():
            return None
        held = scaler._scale
        return held.clone() if held is not None and held.is_cuda else float(scaler.get_scale())

    def _note_own(self, scaler: GradScaler) -> None:
        """A scaler that unscales and was not seen to scale: its class scales in its own way."""
        if self._scaler is None and scaler.is_enabled():
            self._scaler = self._open.scaler = scaler
            self._open.scale = float(scaler.get_scale())
            for microbatch in self._open.microbatches:
                microbatch.scale = self._open.scale

    def _on_unscale(self, scaler: GradScaler, optimizer: Optimizer, *_: Any, **__: Any) -> None:
        self._open.unscaled = True
        self._note_own(scaler)
        if scaler.is_enabled():
            self._operation(
                "unscale",
                factor=1.0 / float(scaler.get_scale()),
                parameters=self._model.concerned(held_by(optimizer)),
            )
        self._event("unscale")

    def _on_scaler_update(self, scaler: GradScaler, *_: Any, **__: Any) -> None:
        if scaler.is_enabled() and self._open.scaler in (None, scaler):
            self._open.scale_after = float(scaler.get_scale())
            self._open.scaler_after = {
                key: value
                for key, value in scaler.state_dict().items()
                if isinstance(value, (int, float))
            }
            self._event("scaler update", f"scale {self._open.scale_after:g}")

    # -- clip

    @property
    def _clips(self) -> bool:
        """The experiment clips."""
        return self._rank.clip_norm is not None or self._rank.clip_value is not None

    def _on_norm(self, tensors: Any, *_: Any, **__: Any) -> None:
        """A clip written by hand is seen by no hook, but it takes the gradient's norm first."""
        update = self._open
        if self._rank.clip_norm is None:
            return
        if self._accumulated() and self._model.is_first_gradient(tensors):
            update.normed = self._model.gradients()
            if update.scale is not None and not update.unscaled:
                update.normed = divided(update.normed, update.scale)

    def _accumulated(self) -> bool:
        """The last backward has ended."""
        update = self._open
        return update.microbatches[-1].ended if update.microbatches else update.unseen

    def _on_clip(self, parameters: Any, max_norm: float, total_norm: Tensor, *_: Any) -> None:
        given = [parameters] if isinstance(parameters, Tensor) else parameters
        listed = isinstance(given, (list, tuple))  # a generator is the clip's to read
        self._operation(
            "clip",
            factor=clip_factor(float(max_norm), total_norm),
            parameters=self._model.concerned(given) if listed else None,
        )
        self._note_clip(float(max_norm))

    def _note_clip(self, bound: float) -> None:
        update = self._open
        if update.gradient is None:
            update.gradient = self._model.gradients()
            if update.scale is not None and not update.unscaled:
                update.gradient = divided(update.gradient, update.scale)
                update.clipped_scaled = True
        update.clip_bounds.append(bound)
        self._event("clip", f"bound {bound:g}")

    def _on_clamp(self, tensors: Any, bound: Any = None, *_: Any, **__: Any) -> None:
        """Half of a clip by value: ``clip_grad_value_`` clamps from below and then from above."""
        if not isinstance(bound, (int, float)) or abs(float(bound)) in self._open.clip_bounds:
            return
        if self._accumulated() and self._model.has_gradients(tensors):
            self._operation("clamp", parameters=self._model.concerned_gradients(tensors))
            self._note_clip(abs(float(bound)))

    # -- clearing

    def _before_zero(self, owner: Optimizer | nn.Module, *_: Any, **__: Any) -> None:
        """Only where there is a gradient: a second clearing changes nothing."""
        parameters = held_by(owner)
        self._clears = any(p.grad is not None for p in parameters)
        if self._skips_by_hand():
            self._skip_by_hand(owner)
        if self._clears:
            self._operation("zero", parameters=self._model.concerned(parameters))

    def _skips_by_hand(self) -> bool:
        """A group's gradient is cleared that is not finite, and no update was attempted with it."""
        update = self._open
        planned = self._planned[update.number] if update.number < len(self._planned) else 0
        if not self._clears or update.attempted or not len(update.used()) == planned > 0:
            return False
        held = [g for g in self._model.gradients().values() if g is not None]
        return not all(bool(dense(g).isfinite().all()) for g in held)

    def _skip_by_hand(self, owner: Optimizer | nn.Module) -> None:
        skipped: list[Optimizer] = several(self._rank.optimizer)
        if isinstance(owner, Optimizer) and all(owner is not one for one in skipped):
            skipped = [owner]  # the loop's own
        for optimizer in skipped:
            self._attempt(optimizer)
        self._open.after = self._model.parameters()
        self._event("update skipped", "by hand")

    def _on_module_zero(self, *_: Any, **__: Any) -> None:
        if self._clears:
            self._event("zero_grad", "of a module")

    # -- attempt

    def _on_attempt(self, scaler: GradScaler, optimizer: Optimizer, *_: Any, **__: Any) -> None:
        if scaler.is_enabled():
            self._attempt(optimizer)
            self._note_own(scaler)

    def _on_attempted(self, scaler: GradScaler, optimizer: Optimizer, *_: Any, **__: Any) -> None:
        if scaler.is_enabled() and id(optimizer) not in self._open.ran:
            self._refresh(optimizer)  # the scaler may have unscaled before it skipped
            self._open.after = self._model.parameters()
            self._event("update skipped")

    def _on_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            if id(optimizer) not in self._open.optimizers or id(optimizer) in self._open.ran:
                self._attempt(optimizer)
            else:
                self._refresh(optimizer)
            self._refresh_behind_its_hooks(optimizer)
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
        own = self._own(optimizer)
        if not own:
            return
        self._attempted.pop(id(optimizer), None)
        self._attempted[id(optimizer)] = optimizer  # the last one attempted comes last
        update = self._open
        update.attempted = True
        if update.start is None:
            update.start = self._model.now()
        state = self._model.optimizer_state(optimizer)
        update.optimizers[id(optimizer)] = OptimizerTrace(
            kind=type(optimizer),
            defaults=dict(optimizer.defaults),
            groups=hyperparameters(optimizer, self._model.names()),
            state_before=state,
            state_after=state,
            on_host=keys_on_host(optimizer),
        )
        if not update.before:
            update.before = self._model.parameters()
        self._take_gradients(own)
        self._event("update attempted", type(optimizer).__name__)

    def _refresh_behind_its_hooks(self, optimizer: Optimizer) -> None:
        """Hooks of the optimizer's own run next, and one of them may clip or divide."""
        hooks = optimizer._optimizer_step_pre_hooks
        kept = self._hooks.setdefault(id(optimizer), {})
        for key, hook in hooks.items():
            if key not in kept:
                kept[key] = hook
                hooks[key] = partial(self._followed, hook)

    def _followed(self, hook: Callable[..., Any], optimizer: Optimizer, *given: Any) -> Any:
        changed = hook(optimizer, *given)
        self._refresh(optimizer)
        return changed

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
        hooks = optimizer._optimizer_step_pre_hooks
        hooks.update({k: h for k, h in self._hooks.pop(id(optimizer), {}).items() if k in hooks})
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
