"""Random numbers by example: every random operator of a forward draws what a key says.

A number's key is the seed, the update, the module that draws, which of its draws it is, the example
and the place within that example; never a stream, whose numbers depend on what was drawn before. So
a batch and its microbatches draw the same numbers for an example, however they are cut and padded.
"""

from __future__ import annotations

import hashlib
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from equivtest.arms.build import seed_everything
from equivtest.isolate.places import IN_THE_LOSS, Place, places
from equivtest.isolate.random.draws import arguments_of, draw, field_of, may_draw, permutes
from equivtest.isolate.random.fields import (
    Layout,
    Layouts,
    NoLayoutError,
    Site,
    Untied,
    coordinates,
)
from equivtest.isolate.random.hashing import key_of, uniforms
from equivtest.isolate.random.packing import Packing, packing_of
from equivtest.observe.rng import RandomState


@dataclass(frozen=True)
class _Drawn:
    """A draw, the examples that it is for, and the packed sequences at hand where it is made."""

    site: Site
    ids: tuple[int, ...]
    packing: Packing | None


class Keyed(TorchDispatchMode):
    """While entered, one forward of ``module`` and its backward draw keyed numbers.

    numpy's and Python's global generators start from the key: what they draw is the same for every
    batch. All generators are as before when it ends.

    A draw is known by the state of its generator: activation checkpointing puts the state back
    before it computes again, and so finds the numbers of the first time.

    Args:
        ids: the examples of the batch, in order.
        key: of all numbers (seed and update).
        layouts: how draws hold the batch; no number is by example without.

    Attributes:
        sizes: of the field of each draw, in order.
        first: where it drew first, by whatever generator.
        permuted: the draws that are permutations.
        packed: those of a recurrent module between its layers, on packed sequences.
        unkeyed: what could not be given by example, and why.
        others: digest of the states that numpy's and Python's generators were left in.
    """

    def __init__(
        self,
        module: nn.Module,
        ids: Sequence[int],
        key: tuple[int, ...],
        layouts: Layouts | None = None,
    ) -> None:
        super().__init__()
        self._places = {id(m): place for m, place in places(module)}
        self._ids, self._key, self._layouts = tuple(ids), key, layouts
        self._open: list[nn.Module] = []
        self._calls: Counter[Place] = Counter()
        self._packings: list[Packing | None] = [None]  # of the loss, then of each that is open
        self._sorted: dict[tuple[float, ...], tuple[int, ...]] = {}  # order by sorted values
        self._drawn: dict[bytes, _Drawn] = {}
        self._left: set[bytes] = set()
        self._given: dict[int, tuple[torch.Generator, Tensor]] = {}
        self._exits = ExitStack()
        self.sizes: dict[Site, torch.Size] = {}
        self.first: Place | None = None
        self.permuted: set[Site] = set()
        self.packed: set[Site] = set()
        self.unkeyed: list[Untied] = []
        self.others = b""

    def __enter__(self) -> Self:
        self._exits.callback(RandomState.now().restore)
        seed_everything(key_of(*self._key) % 2**32)
        self._left.add(_state(torch.default_generator))
        self.others = _others()
        for handle in (
            register_module_forward_pre_hook(self._enter_module),
            # Also where checkpointing ends a forward by an exception.
            register_module_forward_hook(self._leave_module, always_call=True),
        ):
            self._exits.callback(handle.remove)
        _entered.append(self)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        _entered.remove(self)
        self._watch_others()
        self.others = _others()
        if _state(torch.default_generator) not in self._left:
            self._say(None, "something draws that is no operator of torch")
        for generator, state in self._given.values():
            generator.set_state(state)
        self._exits.close()

    def _enter_module(self, module: nn.Module, inputs: Any) -> None:
        self._watch_others()
        given = self._packing(inputs)
        self._packings[-1] = given or self._packings[-1]
        self._open.append(module)
        self._packings.append(given if isinstance(module, nn.RNNBase) else self._packings[-1])

    def _leave_module(self, module: nn.Module, _: Any, result: Any) -> None:
        self._watch_others()
        if self._open and self._open[-1] is module:
            self._open.pop()
            self._packings.pop()
            self._packings[-1] = self._packing(result) or self._packings[-1]

    def _packing(self, values: Any) -> Packing | None:
        found = packing_of(values)
        if found is None or found.order is not None:
            return found
        return replace(found, order=self._sorted.get(found.lengths))

    def _watch_others(self) -> None:
        """Note the first module where numpy's or Python's generator has moved."""
        if self.first is None and _others() != self.others:
            self.first = self._place()

    def __torch_dispatch__(
        self,
        operator: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if operator.overloadpacket is torch.ops.aten.sort:
            return self._watched_sort(operator(*args, **kwargs))
        if not may_draw(operator):
            return operator(*args, **kwargs)
        given = arguments_of(operator, args, kwargs)
        size = field_of(operator, given)
        if size is None:
            return self._by_itself(operator, args, kwargs)
        if size.numel() == 0:
            return operator(*args, **kwargs)
        device = _device(given)
        drawn = self._draw(self._generator(given.get("generator"), device))
        # A permutation puts each entry in any place: it is no number for each of them.
        self.sizes.setdefault(drawn.site, size + size if permutes(operator) else size)
        if permutes(operator):
            self.permuted.add(drawn.site)
        return draw(operator, given, partial(self._uniforms, drawn, device))

    def _watched_sort(self, result: Any) -> Any:
        """Remember in which order a forward puts its examples: it may pack them in it."""
        values, order = result
        if values.ndim == 1 and len(values) == len(self._ids):
            self._sorted[tuple(values.tolist())] = tuple(order.tolist())
        return result

    def _by_itself(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator that is not known here, and remember it if it draws."""
        before = RandomState.now()
        result = operator(*args, **kwargs)
        if before.moved() or kwargs.get("generator") is not None:
            self.first = self.first or self._place()
            self._say(self._place(), f"the numbers of {operator} cannot be made from a key")
            self._left.add(_state(torch.default_generator))
        return result

    def _place(self) -> Place:
        return self._places.get(id(self._open[-1]), IN_THE_LOSS) if self._open else IN_THE_LOSS

    def _generator(self, given: torch.Generator | None, device: torch.device) -> torch.Generator:
        if given is not None:
            self._given.setdefault(id(given), (given, given.get_state()))
            return given
        if device.type == "cuda":
            return torch.cuda.default_generators[torch.cuda.current_device()]
        return torch.default_generator

    def _draw(self, generator: torch.Generator) -> _Drawn:
        """Which draw this is, and for whom; the generator moves on, by a number nobody sees."""
        state = _state(generator)
        if state not in self._drawn:
            place = self._place()
            self.first = self.first or place
            site, packing = Site(place, self._calls[place]), self._packings[-1]
            self._drawn[state] = _Drawn(site, self._ids, packing)
            self._calls[place] += 1
            if packing is not None and self._open and isinstance(self._open[-1], nn.RNNBase):
                self.packed.add(site)
        torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator)
        self._left.add(_state(generator))
        return self._drawn[state]

    def _uniforms(self, drawn: _Drawn, device: torch.device, size: torch.Size, bits: int) -> Tensor:
        site = drawn.site
        name = None if site.place == IN_THE_LOSS else site.place.name
        key = key_of(*self._key, name, site.call)
        at = [index.to(device) for index in self._coordinates(drawn, size)]
        return uniforms(key, at, bits)

    def _coordinates(self, drawn: _Drawn, size: torch.Size) -> list[Tensor]:
        site, ids, layouts = drawn.site, drawn.ids, self._layouts
        if layouts is not None:
            try:
                layout, unpadded = layouts.of(site), layouts.unpadded(site, ids)
                return coordinates(size, layout, ids, layouts.from_end, unpadded, drawn.packing)
            except NoLayoutError as error:
                self._say(site.place, str(error))
        return coordinates(size, Layout(None), ids)

    def _say(self, place: Place | None, why: str) -> None:
        untied = Untied(place, why)
        if untied not in self.unkeyed:
            self.unkeyed.append(untied)


_entered: list[Keyed] = []


def in_turn(sizes: Sequence[int]) -> Iterator[None]:
    """Draw for one part of the batch after the other, each as if it were the first.

    For a module that is run part by part inside a large batch: the parts draw what they draw when
    the module runs once, on each of them alone.

    Args:
        sizes: examples of each part.
    """
    keyed = _entered[-1] if _entered else None
    if keyed is None:
        yield from (None for _ in sizes)
        return
    ids, at = keyed._ids, 0
    calls = keyed._calls.copy()
    try:
        for size in sizes:
            keyed._ids, keyed._calls = ids[at : at + size], calls.copy()
            at += size
            yield
    finally:
        keyed._ids = ids


def marked() -> Callable[[], None]:
    """A way back to here: what is drawn from there on is what would have been drawn from here."""
    keyed = _entered[-1] if _entered else None
    if keyed is None:
        return lambda: None
    calls = keyed._calls.copy()

    def back() -> None:
        keyed._calls = calls

    return back


def _others() -> bytes:
    now = RandomState.now()
    return hashlib.blake2b(pickle.dumps((now.numpy, now.python)), digest_size=16).digest()


def _device(given: Mapping[str, Any]) -> torch.device:
    tensor = next((v for v in given.values() if isinstance(v, Tensor)), None)
    if given.get("device") is not None:
        return torch.device(given["device"])
    return tensor.device if tensor is not None else torch.device("cpu")


def _state(generator: torch.Generator) -> bytes:
    return hashlib.blake2b(generator.get_state().numpy().data, digest_size=16).digest()
