"""Copies of what must not be lost; a tensor that has not changed is held once."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equivtest.observe.hooks import in_transform, unwrapped
from equivtest.observe.trace import ParamGroups, State

Names = Mapping[int, str]
"""Parameter name by the parameter's ``id``."""


class Snapshots:
    """Copies by key; an unchanged tensor gives the object of its last copy, not another copy.

    Equality of two snapshots of one key is then identity, and a trace holds each value once. Copies
    are on the host: on a GPU they would count as memory of the loop.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], Tensor] = {}

    def tensor(self, kind: str, name: str, value: Tensor) -> Tensor:
        # Called five hundred times in an update of a small transformer.
        value = (unwrapped(value) if in_transform(value) else value).detach()
        host = value if value.is_cpu else value.cpu()
        last = self._last.get((kind, name))
        if last is not None and same_bits(last, host):
            return last
        copy = host.clone() if host is value else host
        self._last[kind, name] = copy
        return copy

    def tensors(self, kind: str, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        return {name: self.tensor(kind, name, value) for name, value in named}


class ModelState:
    """Snapshots of one module: its parameters, buffers and gradients, and what optimizes them."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._snapshots = Snapshots()
        self._known: dict[str, Tensor] = {}
        self._name()
        self._built = [(part, part.training) for part in self._tree]

    def _named(self) -> list[tuple[str, Tensor]]:
        """The parameters, named anew where a loop has replaced one, or a module."""
        held = self._holds()
        if len(held) != len(self._held) or not all(map(operator.is_, held, self._held)):
            self._name()
        return self._last_named

    def _name(self) -> None:
        self._tree = list(self._module.modules())
        self._held = self._holds()
        self._last_named = list(self._named_anew())

    def _holds(self) -> list[object]:
        """Every parameter and module that one of the modules holds, with its name there."""
        held: list[object] = []
        for module in self._tree:
            held += chain.from_iterable(module._parameters.items())
            held += chain.from_iterable(module._modules.items())
        return held

    def _named_anew(self) -> Iterator[tuple[str, Tensor]]:
        """Inside a ``functional_call`` the module holds the call's tensors in their place."""
        for name, parameter in self._module.named_parameters():
            if isinstance(parameter, nn.Parameter):
                self._known[name] = parameter
            yield name, self._known.get(name, parameter)

    def switched(self) -> frozenset[str]:
        """Names of modules in another mode (train or eval) than at first."""
        odd = {id(part) for part, training in self._built if part.training is not training}
        if not odd:
            return frozenset()
        named = self._module.named_modules(remove_duplicate=False)
        return frozenset(name for name, part in named if id(part) in odd)

    def names(self) -> dict[int, str]:
        """Parameter names by the parameter's ``id``."""
        return {id(p): name for name, p in self._named()}

    def concerned(self, parameters: Iterable[Tensor]) -> frozenset[str] | None:
        """Names of those of the model's parameters; None where they are all that are trained."""
        given = {id(p) for p in parameters}
        named = self._named()
        if all(id(p) in given for _, p in named if p.requires_grad):
            return None
        return frozenset(name for name, p in named if id(p) in given)

    def concerned_gradients(self, gradients: Iterable[Tensor]) -> frozenset[str] | None:
        """The same by their gradients."""
        given = {id(g) for g in gradients}
        return self.concerned(p for _, p in self._named() if id(p.grad) in given)

    def now(self) -> State:
        """Parameters and buffers."""
        return State(
            self.parameters(), self._snapshots.tensors("buffer", self._module.named_buffers())
        )

    def parameters(self) -> dict[str, Tensor]:
        return self._snapshots.tensors("parameter", self._named())

    def gradients(self) -> dict[str, Tensor | None]:
        """Gradients of the trained parameters; None stays None."""
        return {
            name: None if p.grad is None else self._snapshots.tensor("gradient", name, p.grad)
            for name, p in self._named()
            if p.requires_grad
        }

    def held_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The gradients themselves, not copies, of parameters as they were last named."""
        for name, p in self._last_named:
            if p.grad is not None:
                yield name, p.grad

    def gradient_versions(self) -> list[tuple[int, int] | None]:
        """What changes with every change of a gradient."""
        held = (p.grad for _, p in self._named())
        return [None if g is None else (id(g), g._version) for g in held]

    def is_first_gradient(self, tensors: Any) -> bool:
        """Whether ``tensors`` is, or begins with, the gradient of the first parameter with one."""
        first = tensors[0] if isinstance(tensors, (list, tuple)) and tensors else tensors
        if not isinstance(first, Tensor) or in_transform(first):
            return False
        if first.layout is not torch.strided:
            return False
        held = (p.grad for _, p in self._named() if p.grad is not None)
        gradient = next(held, None)
        return (
            gradient is not None
            and gradient.layout is torch.strided
            and gradient.data_ptr() == first.data_ptr()
        )

    def has_gradients(self, tensors: Any) -> bool:
        """Whether the first of a list of tensors is the gradient of some parameter."""
        first = tensors[0] if isinstance(tensors, (list, tuple)) and tensors else None
        return first is not None and any(p.grad is first for _, p in self._named())

    def averages(self, average: nn.Module | None) -> dict[str, Tensor]:
        """The tensors of a shadow of the weights."""
        if average is None:
            return {}
        held = [(k, v) for k, v in average.state_dict().items() if isinstance(v, Tensor)]
        return self._snapshots.tensors("average", held)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        """State by parameter name and key; tensors copied, other values as they are."""
        names = self.names()
        return {
            names[id(parameter)]: {
                key: self._snapshots.tensor(key, names[id(parameter)], value)
                if isinstance(value, Tensor)
                else value
                for key, value in state.items()
            }
            for parameter, state in optimizer.state.items()
            if id(parameter) in names
        }


def held_by(owner: Optimizer | nn.Module) -> list[Tensor]:
    """Parameters of an optimizer or a module."""
    if isinstance(owner, Optimizer):
        return [p for group in owner.param_groups for p in group["params"]]
    return list(owner.parameters())


def hyperparameters(optimizer: Optimizer, names: Names) -> ParamGroups:
    """For each param group the names of its parameters and a copy of its hyperparameters."""
    return tuple(
        (
            tuple(names.get(id(p), "?") for p in group["params"]),
            {
                key: value.detach().clone() if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key != "params"
            },
        )
        for group in optimizer.param_groups
    )


def keys_on_host(optimizer: Optimizer) -> frozenset[str]:
    """Keys of its state whose tensors are on the host: Adam counts there, whatever the device."""
    return frozenset(
        key
        for state in optimizer.state.values()
        for key, value in state.items()
        if isinstance(value, Tensor) and value.device.type == "cpu"
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in dtype, shape, layout and every element (NaN equals nothing, so it is copied)."""
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return False
    return torch.equal(a, b)
