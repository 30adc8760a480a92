"""A module, or the loss behind a model, run microbatch by microbatch inside a large batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from equivtest.arms.bench import Bench
from equivtest.batches import by_term
from equivtest.experiment import Loss, LossResult
from equivtest.isolate.axes import Layout, fits, joined, rows
from equivtest.isolate.forwards import instead
from equivtest.isolate.keyed import in_turn
from equivtest.isolate.watch import Slot, held, tensors

_inside: ContextVar[bool] = ContextVar("inside a module that runs in chunks", default=False)


class NotCuttable(RuntimeError):
    """A tensor's examples are not where its layout has them."""


@dataclass(frozen=True)
class Anatomy:
    """Where the examples lie in the tensors of a module's call, by position among its leaves."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]


@contextmanager
def in_chunks(
    module: nn.Module,
    anatomy: Sequence[Anatomy],
    sizes: Sequence[int],
    weights: Sequence[float],
    refused: Callable[[], None],
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
            return _in_chunks(inner, module, (args, kwargs), this, sizes, weights)
        except NotCuttable:
            refused()
            return inner(*args, **kwargs)
        finally:
            _inside.reset(token)

    with instead({module: forward}):
        yield


def _in_chunks(
    inner: Callable[..., Any],
    module: nn.Module,
    arguments: Any,
    anatomy: Anatomy,
    sizes: Sequence[int],
    weights: Sequence[float],
) -> Any:
    before = held(module)
    results, left = [], []
    cuts = cut(arguments, anatomy.inputs, sizes)
    for (args, kwargs), _ in zip(cuts, in_turn(sizes), strict=True):
        _put_back(before)
        results.append(inner(*args, **kwargs))
        left.append(_new(before, held(module)))
    slots = [slot for slot in left[0] if all(slot in one for one in left)]
    trees = [
        (result, [one[slot] for slot in slots]) for result, one in zip(results, left, strict=True)
    ]
    result, values = _together(trees, anatomy.outputs, sizes, weights)
    _put_back(before)
    for (part, key), value in zip(slots, values, strict=True):
        _put(part, key, value)
    return result


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


def _together(
    trees: Sequence[Any], layouts: Sequence[Layout], sizes: Sequence[int], weights: Sequence[float]
) -> Any:
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


# -- the loss


@contextmanager
def loss_in_chunks(
    bench: Bench,
    batch_layouts: Sequence[Layout],
    anatomy: Mapping[tuple[str, int], Anatomy],
    sizes: Sequence[int],
    refused: Callable[[], None],
) -> Iterator[None]:
    """Run the model on the large batch and the loss on one microbatch after the other.

    The loss runs once for the model's outputs, then for each microbatch with its rows of the batch
    and of those outputs, in the order in which it asks for them.
    """
    inner = bench.loss

    def loss(model: Any, batch: Any) -> Any:
        outer = _Outermost(model, anatomy, sizes)
        with outer.recorded():
            whole = inner(model, batch)
        try:
            parts = zip(cut(batch, batch_layouts, sizes), in_turn(sizes, anew=True), strict=True)
            return _added(outer, inner, model, (part for part, _ in parts))
        except NotCuttable:
            refused()
            return whole

    bench.loss = loss
    try:
        yield
    finally:
        bench.loss = inner


def _added(
    outer: _Outermost, inner: Callable[..., LossResult], model: Any, parts: Iterator[Any]
) -> LossResult:
    added: dict[str, Loss] = {}
    found: LossResult = added
    for k, part in enumerate(parts):
        with outer.played(k):
            found = inner(model, part)
        for term, one in by_term(found).items():
            added[term] = _plus(added[term], one) if term in added else one
    return added[""] if isinstance(found, Loss) else added


def _plus(a: Loss, b: Loss) -> Loss:
    return Loss(a.total + b.total, count=a.count + b.count)


class _Outermost:
    """The modules that a loss calls itself: their results, recorded whole and played by chunk."""

    def __init__(
        self, model: nn.Module, anatomy: Mapping[tuple[str, int], Anatomy], sizes: Sequence[int]
    ) -> None:
        self._modules = dict(model.named_modules())
        self._anatomy, self._sizes = anatomy, sizes
        self._results: dict[str, list[Any]] = {}
        self._depth = 0

    @contextmanager
    def recorded(self) -> Iterator[None]:
        def record(name: str, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            self._depth += 1
            try:
                result = inner(*args, **kwargs)
            finally:
                self._depth -= 1
            if self._depth == 0:
                self._results.setdefault(name, []).append(result)
            return result

        with self._instead(self._modules, record):
            yield

    @contextmanager
    def played(self, k: int) -> Iterator[None]:
        calls: dict[str, int] = {}

        def play(name: str, _: Any, args: Any, kwargs: Any) -> Any:
            nth = calls[name] = calls.get(name, -1) + 1
            results = self._results[name]
            if nth >= len(results) or (name, nth) not in self._anatomy:
                raise NotCuttable
            result = results[nth]
            layouts = self._anatomy[name, nth].outputs[: len(tensors(result))]
            return next(islice(cut(result, layouts, self._sizes), k, None))

        with self._instead(self._results, play):
            yield

    def _instead(
        self, names: Iterable[str], call: Callable[..., Any]
    ) -> AbstractContextManager[None]:
        modules = {name: self._modules[name] for name in names}
        return instead({m: _calling(call, name, m.forward) for name, m in modules.items()})


def _calling(call: Callable[..., Any], name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: call(name, inner, args, kwargs)
