"""A module run microbatch by microbatch inside a large batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from equivtest.isolate.calls import Slot, held, tensors
from equivtest.isolate.cut.axes import Layout, fits, joined, rows
from equivtest.isolate.cut.forwards import instead
from equivtest.isolate.random.keyed import in_turn, marked

_inside: ContextVar[bool] = ContextVar("inside a module that runs in chunks", default=False)


class NotCuttable(RuntimeError):
    """A tensor's examples are not where its layout has them."""


@dataclass(frozen=True)
class Anatomy:
    """Where the examples lie in the tensors of a module's call, by position among its leaves."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]

    def interleaved(self) -> Anatomy:
        """With examples that take turns where they are folded into an axis."""
        both = ((each.interleaved() for each in side) for side in (self.inputs, self.outputs))
        return Anatomy(*map(tuple, both))


@contextmanager
def in_chunks(
    module: nn.Module,
    anatomy: Sequence[Anatomy],
    sizes: Sequence[int],
    weights: Sequence[float],
    refused: Callable[[], None],
    inside: Mapping[str, Sequence[Anatomy]] | None = None,
) -> Iterator[None]:
    """Run ``module`` on one microbatch after the other while the context lasts.

    Arguments are cut along their batch axes and results put together along theirs, attributes that
    the forward leaves behind like results. Of tensors without a batch axis (a load-balancing term)
    the weighted sum over microbatches is taken.

    Args:
        anatomy: of the module's calls within one forward, in order.
        sizes, weights: of each microbatch.
        refused: called where a tensor's examples are not where its anatomy has them; the module
            then runs on the large batch.
        inside: the anatomy of the modules in it, by name within it, which run on the large batch
            then: only the module's own code sees microbatches.
    """
    inner = module.forward
    calls = 0

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if _inside.get():
            return inner(*args, **kwargs)
        this = anatomy[min(calls, len(anatomy) - 1)]
        calls += 1
        token = _inside.set(True)
        try:
            own = _Own(module, inner, this, sizes, weights, inside)
            return own.in_chunks((args, kwargs))
        except NotCuttable:
            refused()
            return inner(*args, **kwargs)
        finally:
            _inside.reset(token)

    with instead({module: forward}):
        yield


@dataclass(frozen=True)
class _Own:
    """A module's own code, with what is told of it in ``in_chunks``."""

    module: nn.Module
    inner: Callable[..., Any]
    anatomy: Anatomy
    sizes: Sequence[int]
    weights: Sequence[float]
    inside: Mapping[str, Sequence[Anatomy]] | None

    def in_chunks(self, arguments: Any) -> Any:
        before = self._held()
        cuts = list(cut(arguments, self.anatomy.inputs, self.sizes))

        def chunk(k: int) -> Any:
            _put_back(before)
            args, kwargs = cuts[k]
            result = self.inner(*args, **kwargs)
            return result, _new(before, self._held())

        if self.inside is None:
            found = [chunk(k) for k, _ in enumerate(in_turn(self.sizes))]
        else:
            modules = {name: self.module.get_submodule(name) for name in self.inside}
            found = between(chunk, modules, self.inside, self.sizes, self.weights)
        slots = [slot for slot in found[0][1] if all(slot in left for _, left in found)]
        trees = [(result, [left[slot] for slot in slots]) for result, left in found]
        result, values = together(trees, self.anatomy.outputs, self.sizes, self.weights)
        _put_back(before)
        for (part, key), value in zip(slots, values, strict=True):
            _put(part, key, value)
        return result

    def _held(self) -> dict[Slot, Any]:
        """Attributes of what runs in microbatches."""
        return held(self.module, deep=self.inside is None)


def cut(tree: Any, layouts: Sequence[Layout], sizes: Sequence[int]) -> Iterator[Any]:
    """The tree's tensors, cut into microbatches of these sizes.

    Raises:
        NotCuttable: there are others than those of the layouts, or they do not fit.
    """
    n = sum(sizes)
    leaves = tensors(tree)
    if len(leaves) != len(layouts) or not all(
        fits(leaf, layout, n) for leaf, layout in zip(leaves, layouts, strict=True)
    ):
        raise NotCuttable
    end = 0
    for size in sizes:
        begin, end = end, end + size
        following = iter(layouts)

        def part(leaf: Any, begin: int = begin, end: int = end, layouts: Any = following) -> Any:
            return rows(leaf, next(layouts), n, begin, end) if isinstance(leaf, Tensor) else leaf

        yield tree_map(part, tree)


def together(
    trees: Sequence[Any], layouts: Sequence[Layout], sizes: Sequence[int], weights: Sequence[float]
) -> Any:
    """The other way round, with the weighted sum of what has no rows.

    Raises:
        NotCuttable: the trees are not alike, or do not fit their layouts.
    """
    flat = [tree_flatten(tree) for tree in trees]
    spec = flat[0][1]
    if any(other != spec for _, other in flat):
        raise NotCuttable
    following = iter(layouts)
    leaves = []
    for parts in zip(*(leaves for leaves, _ in flat), strict=True):
        if not isinstance(parts[0], Tensor):
            leaves.append(parts[-1])
            continue
        layout = next(following, Layout(known=False))
        if layout.shared:
            leaves.append(_weighted(parts, weights))
        elif len(layout.axes) == 1 and all(map(fits, parts, [layout] * len(parts), sizes)):
            leaves.append(joined(parts, layout, sizes))
        else:
            raise NotCuttable
    return tree_unflatten(leaves, spec)


def _weighted(parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The weighted sum; what is the same on all of them (a mask, a parameter) is left as it is."""
    if all(part is parts[0] for part in parts) or not parts[0].is_floating_point():
        return parts[-1]
    if any(part.shape != parts[0].shape for part in parts):
        raise NotCuttable
    return torch.stack([p * w for p, w in zip(parts, weights, strict=True)]).sum(0)


def _new(before: Mapping[Slot, Any], after: Mapping[Slot, Any]) -> dict[Slot, Any]:
    """Attributes that hold other tensors than before."""
    return {
        slot: value
        for slot, value in after.items()
        if any(map(_is_not, *_padded(tensors([value]), tensors([before.get(slot)]))))
    }


def _padded(a: list[Tensor], b: list[Tensor]) -> tuple[list[Any], list[Any]]:
    longest = max(len(a), len(b))
    return a + [None] * (longest - len(a)), b + [None] * (longest - len(b))


def _is_not(a: Any, b: Any) -> bool:
    return a is not b


def _put_back(before: Mapping[Slot, Any]) -> None:
    for (part, key), value in before.items():
        _put(part, key, value)


def _put(part: nn.Module, key: str, value: Any) -> None:
    """In place where it is a collection: others may hold the same one."""
    now = vars(part).get(key)
    if isinstance(now, list) and isinstance(value, list):
        now[:] = value
    elif isinstance(now, dict) and isinstance(value, dict):
        now.clear()
        now.update(value)
    else:
        vars(part)[key] = value


# -- code between modules


def between(
    code: Callable[[int], Any],
    modules: Mapping[str, nn.Module],
    anatomy: Mapping[str, Sequence[Anatomy]],
    sizes: Sequence[int],
    weights: Sequence[float],
) -> list[Any]:
    """What ``code`` gives of each microbatch, by number, the modules that it calls run on all.

    The code runs until it asks for a module; with what all microbatches ask of it the module runs
    once, on the large batch. Then the code runs again, and is given its rows where it has asked
    before, until it asks for no other module.

    Raises:
        NotCuttable: microbatches ask for different modules, or with what cannot be put together.
    """
    given: list[tuple[str, list[Any]]] = []
    while True:
        back = marked()
        found = [_until_asked(code, k, modules, given) for k, _ in enumerate(in_turn(sizes))]
        asked = [one for one in found if isinstance(one, _Asked)]
        if not asked:
            return found
        back()
        name = asked[0].name
        nth = sum(name == before for before, _ in given)
        if len(asked) < len(found) or any(one.name != name for one in asked):
            raise NotCuttable
        if nth >= len(anatomy.get(name, ())):
            raise NotCuttable
        this = anatomy[name][nth]
        args, kwargs = together([one.arguments for one in asked], this.inputs, sizes, weights)
        result = modules[name](*args, **kwargs)
        given.append((name, list(cut(result, this.outputs[: len(tensors(result))], sizes))))


class _Asked(BaseException):
    """The code asks for a module; no exception that it may catch."""

    def __init__(self, name: str, arguments: Any) -> None:
        super().__init__(name)
        self.name, self.arguments = name, arguments


def _until_asked(
    code: Callable[[int], Any],
    k: int,
    modules: Mapping[str, nn.Module],
    given: Sequence[tuple[str, Sequence[Any]]],
) -> Any:
    """What the code gives, or the ``_Asked`` that ended it."""
    following = iter(given)

    def answering(name: str) -> Callable[..., Any]:
        def answer(*args: Any, **kwargs: Any) -> Any:
            before = next(following, None)
            if before is None:
                raise _Asked(name, (args, kwargs))
            if before[0] != name:
                raise NotCuttable
            return before[1][k]

        return answer

    try:
        with instead({m: answering(name) for name, m in modules.items()}, hooks=False):
            return code(k)
    except _Asked as asked:
        return asked
