"""The optimizer replay: what the experiment's optimizer makes of the candidate's own gradient.

A gradient can be right and the update wrong (another learning rate, state that never counts), and
the first Adam update hides a scalar on the gradient. So, per update: the candidate's own optimizer,
cloned, gives its parameters bit for bit; so does the experiment's; and in float64 within rounding.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equivtest.arms.build import quiet_schedulers
from equivtest.distance import distance, norm, ratio
from equivtest.experiment import Experiment
from equivtest.loops import several
from equivtest.observe.snapshot import hyperparameters
from equivtest.observe.trace import Gradients, OptimizerTrace, ParamGroups, Tensors

FLAGS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Hyperparameters that choose how an update is computed, not what it is."""

NOT_JUDGED = FLAGS | {"initial_lr"}
"""A scheduler notes ``initial_lr`` for itself; no update reads it."""

KAPPA = 4.0
"""Roundoffs that parameters may be away from the same update in float64. Other implementations of
the experiment's optimizer reach 0.99 of one in 51 drawn updates."""


class ExpectedOptimizers:
    """The experiment's optimizers and schedulers, moved along with the candidate's counters."""

    def __init__(self, experiment: Experiment, module: nn.Module) -> None:
        self._module = module
        optimizers = experiment.optimizer(module)
        self.optimizers: list[Optimizer] = several(optimizers)
        self.schedulers = (
            [] if experiment.scheduler is None else several(experiment.scheduler(optimizers))
        )
        self._moved = 0
        self._names = {id(p): name for name, p in module.named_parameters()}

    @property
    def device(self) -> torch.device:
        """Where updates are replayed: another device's kernels round in another way."""
        return next(self._module.parameters()).device

    def advance(self, calls: int) -> None:
        """Move the schedulers until each has had ``calls`` calls."""
        with quiet_schedulers():
            while self._moved < calls:
                for scheduler in self.schedulers:
                    scheduler.step()
                self._moved += 1

    def matching(self, seen: OptimizerTrace) -> Optimizer | None:
        """The optimizer that holds the same parameters as ``seen``."""
        for optimizer in self.optimizers:
            if frozenset(n for g, _ in self.hyperparameters(optimizer) for n in g) == seen.names:
                return optimizer
        return None

    def hyperparameters(self, optimizer: Optimizer) -> ParamGroups:
        """As a trace has them: tensors on the host."""
        return tuple(
            (names, {k: v.cpu() if isinstance(v, Tensor) else v for k, v in values.items()})
            for names, values in hyperparameters(optimizer, self._names)
        )

    def decay(self) -> dict[str, float]:
        """Weight decay by the names of parameters."""
        return {
            name: float(values.get("weight_decay", 0.0))
            for optimizer in self.optimizers
            for names, values in self.hyperparameters(optimizer)
            for name in names
        }

    def updated(
        self, optimizer: Optimizer, before: Tensors, gradient: Gradients, seen: OptimizerTrace
    ) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
        """Parameters and state after one update from the candidate's state."""
        parameters = dict(self._module.named_parameters())
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(before[name])
                held = gradient.get(name)
                parameter.grad = None if held is None else held.to(parameter.device, copy=True)
        _set_state(optimizer, parameters, seen)
        optimizer.step()
        return _outcome(optimizer, parameters)


def evaluates(seen: OptimizerTrace) -> bool:
    """The update evaluates the loss in itself, so its gradient alone does not tell its outcome."""
    closure = inspect.signature(seen.kind.step).parameters.get("closure")
    return seen.closures > 1 or (closure is not None and closure.default is closure.empty)


def real_clone_updated(
    before: Tensors, gradient: Gradients, seen: OptimizerTrace, device: torch.device
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Parameters and state after one update by a clone of the candidate's own optimizer.

    The update runs on ``device``, what comes of it is on the host.

    Raises:
        Exception: whatever a class says that cannot be rebuilt from groups, defaults and state.
    """
    return _rebuilt_updated(before, gradient, seen, device, torch.Tensor.clone)


def float64_updated(
    before: Tensors,
    gradient: Gradients,
    seen: OptimizerTrace,
    like: Optimizer,
    groups: ParamGroups,
    device: torch.device,
) -> dict[str, Tensor]:
    """Parameters after one update by ``like``'s class in float64, on the host."""
    twin = replace(seen, kind=type(like), defaults=like.defaults, groups=groups, state_after={})
    return _rebuilt_updated(before, gradient, twin, device, _widened)[0]


def parameter_distance(after: Tensor, wanted: Tensor, before: Tensor) -> float:
    """``|p - p*|`` over ``|p| + |delta|`` in norms; rounding allows ``KAPPA`` u of the dtype."""
    return ratio(distance(after, wanted), norm(after) + distance(wanted, before))


def same_hyperparameters(seen: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Names of the hyperparameters that differ in value, as ``lr=0.0099, expected 0.01``."""
    return [
        f"{key}={seen.get(key)!r}, expected {wanted.get(key)!r}"
        for key in sorted(wanted)
        if key not in NOT_JUDGED and not _same_value(seen.get(key), wanted.get(key))
    ]


def _rebuilt_updated(
    before: Tensors,
    gradient: Gradients,
    seen: OptimizerTrace,
    device: torch.device,
    convert: Callable[[Tensor], Tensor],
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    parameters = {
        n: nn.Parameter(convert(p.detach()).to(device))
        for n, p in before.items()
        if n in seen.names
    }
    for name, parameter in parameters.items():
        held = gradient.get(name)
        parameter.grad = None if held is None else convert(held).to(device)
    optimizer: Optimizer = object.__new__(seen.kind)
    optimizer.__setstate__(
        {
            "defaults": dict(seen.defaults),
            "state": defaultdict(dict),
            "param_groups": [
                {"params": [parameters[n] for n in names], **copy.deepcopy(dict(values))}
                for names, values in seen.groups
            ],
        }
    )
    _set_state(optimizer, parameters, seen, convert)
    optimizer.step()
    return _outcome(optimizer, parameters)


def _set_state(
    optimizer: Optimizer,
    parameters: Mapping[str, nn.Parameter],
    seen: OptimizerTrace,
    convert: Callable[[Tensor], Tensor] = torch.Tensor.clone,
) -> None:
    """The state before the update, each tensor where the loop's optimizer had it."""
    optimizer.state.clear()
    for name, entries in seen.state_before.items():
        parameter = parameters[name]
        optimizer.state[parameter] = {
            key: convert(value).to("cpu" if key in seen.on_host else parameter.device)
            if isinstance(value, Tensor)
            else copy.deepcopy(value)
            for key, value in entries.items()
        }


def _outcome(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Parameters and state by name, on the host."""
    after = {n: p.detach().to("cpu", copy=True) for n, p in parameters.items()}
    names = {id(p): n for n, p in parameters.items()}
    state = {
        names[id(p)]: {k: v.cpu() if isinstance(v, Tensor) else v for k, v in entries.items()}
        for p, entries in optimizer.state.items()
    }
    return after, state


def _widened(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128, copy=True)
    return tensor.to(torch.float64, copy=True) if tensor.is_floating_point() else tensor.clone()


def _same_value(a: Any, b: Any) -> bool:
    held = next((value for value in (a, b) if isinstance(value, Tensor)), None)
    if held is not None:
        # A learning rate in a tensor is the number that its dtype makes of it.
        return (
            a is not None
            and b is not None
            and torch.equal(
                torch.as_tensor(a, dtype=held.dtype), torch.as_tensor(b, dtype=held.dtype)
            )
        )
    return bool(a == b) or (a != a and b != b)  # NaN, on both sides
