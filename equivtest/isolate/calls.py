"""What goes into and comes out of every module in a forward, in the order of completion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from equivtest.isolate.places import Place, places

_OWN = frozenset(vars(nn.Module()))
"""What every module holds: parameters, buffers, modules, hooks, its mode."""

Slot = tuple[nn.Module, str]


@dataclass(frozen=True)
class Call:
    """One call of a module.

    Attributes:
        place: the module.
        nth: of its calls in this forward, from 0.
        inputs: the tensors among its arguments.
        outputs: the tensors of its result, then those that it left as attributes of its own or of
            modules in it.
    """

    place: Place
    nth: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    @property
    def key(self) -> tuple[str, int]:
        return self.place.name, self.nth


@dataclass
class _Watching:
    calls: list[Call] = field(default_factory=list)
    _open: list[tuple[nn.Module, tuple[Tensor, ...], set[int]]] = field(default_factory=list)

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        ids = {id(leaf) for leaf in tensors(list(held(module).values()))}
        self._open.append((module, _copies((args, kwargs)), ids))

    def after(self, place: Place, module: nn.Module, result: Any) -> None:
        while self._open and self._open[-1][0] is not module:
            self._open.pop()  # a forward that raised inside, and was caught
        _, inputs, before = self._open.pop()
        left = [x for x in tensors(list(held(module).values())) if id(x) not in before]
        nth = sum(call.place == place for call in self.calls)
        outputs = _copies([result, left])
        self.calls.append(Call(place, nth, inputs, outputs))


@contextmanager
def watching(model: nn.Module) -> Iterator[list[Call]]:
    """The calls of all its modules while the context lasts, with copies of their tensors."""
    seen = _Watching()
    with ExitStack() as hooks:
        for module, place in places(model):

            def after(module: nn.Module, _: Any, result: Any, place: Place = place) -> None:
                seen.after(place, module, result)

            before = module.register_forward_pre_hook(seen.before, with_kwargs=True)
            hooks.callback(before.remove)
            hooks.callback(module.register_forward_hook(after).remove)
        yield seen.calls


def held(module: nn.Module, *, deep: bool = True) -> dict[Slot, Any]:
    """Tensors, and collections that may hold some, which a module keeps as plain attributes.

    Collections are copies of now.

    Args:
        deep: with those of the modules in it, after its own.
    """
    return {
        (part, key): _copy(value)
        for part in (module.modules() if deep else [module])
        for key, value in vars(part).items()
        if key not in _OWN and isinstance(value, (Tensor, list, dict, tuple, type(None)))
    }


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, (list, dict)) else value


def tensors(tree: Any) -> list[Tensor]:
    """The tensors among the leaves of a tree."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def elements(tree: Any) -> int:
    """Of all tensors of a tree."""
    return sum(leaf.numel() for leaf in tensors(tree))


def _copies(tree: Any) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return tuple(leaf.detach().clone() for leaf in tensors(tree))


def by_key(calls: Sequence[Call]) -> dict[tuple[str, int], Call]:
    return {call.key: call for call in calls}
