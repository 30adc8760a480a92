"""Which example each number of a draw belongs to, and where it stands within that example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from equivtest.isolate.cut import axes
from equivtest.isolate.places import Place
from equivtest.isolate.random.packing import Packing

Order = Literal["major", "minor", "alike"]


PERMUTES = "a permutation of the batch cannot be drawn by example"
NOT_PROBED = (
    "the batch makes a draw that a batch of copies of one example does not make, so which numbers "
    "are whose is not known"
)
OTHER_AXES = "its numbers have fewer axes than those for copies of one example"
NO_ROWS = (
    "how many numbers each example gets depends on the other examples of its batch, so which are "
    "whose is not known"
)
NO_PACKING = (
    "the sequences were sorted before they were packed, so which are whose is not known "
    "(pack_padded_sequence(enforce_sorted=False) keeps their order)"
)
DEPENDS = "how often it draws depends on how many examples the batch has"


class NoLayoutError(ValueError):
    """A field's size does not follow from its batch."""


@dataclass(frozen=True)
class Untied:
    """Why random numbers could not be given by example.

    Attributes:
        place: that draws them; None where it is not known.
        why: in words.
    """

    place: Place | None
    why: str

    def __str__(self) -> str:
        where = "" if self.place is None else f"{self.place}, "
        return f"{where}not all random numbers could be tied to their examples: {self.why}"


@dataclass(frozen=True)
class Layout:
    """How the fields of one draw hold a batch.

    Attributes:
        axis: the one that holds the examples; None if a field has no example in it (one number for
            the whole batch, say).
        order: ``major`` where an example's entries follow each other (index ``b * c + j``: heads
            folded into the batch), ``minor`` where the examples take turns (``j * N + b``: a batch
            that was second, flattened). The same where an example has one entry. ``alike`` gives
            all entries of all examples one number.
    """

    axis: int | None
    order: Order = "major"


@dataclass(frozen=True)
class Site:
    """One draw of a forward: the ``call``-th at its place, from 0."""

    place: Place
    call: int


@dataclass(frozen=True)
class Layouts:
    """How the draws of a forward hold a batch, as a probe found it.

    Attributes:
        by_site: in the order in which a forward draws; those that could be told.
        from_end: positions are counted from the end of an axis: where padding comes first.
        entries: by example, what it has by itself on the axis of the examples, where that may be
            several.
        first: where it draws first, by whatever generator.
        odd: what could not be told, and why.
    """

    by_site: Mapping[Site, Layout] = field(default_factory=dict)
    from_end: bool = False
    entries: Mapping[Site, Mapping[int, int]] = field(default_factory=dict)
    first: Place | None = None
    odd: tuple[Untied, ...] = ()

    def of(self, site: Site) -> Layout:
        """The layout of a draw, or, for a later one than the probe saw, that of its place.

        Raises:
            NoLayoutError: the probe saw nothing like it.
        """
        if site in self.by_site:
            return self.by_site[site]
        like = {layout for s, layout in self.by_site.items() if s.place == site.place}
        if len(like) != 1:
            raise NoLayoutError(NOT_PROBED)
        return like.pop()

    def unpadded(self, site: Site, ids: Sequence[int]) -> list[int] | None:
        held = self.entries.get(site, {})
        return [held[i] for i in ids] if all(i in held for i in ids) else None


def coordinates(
    size: Sequence[int],
    layout: Layout,
    ids: Sequence[int],
    from_end: bool = False,
    unpadded: Sequence[int] | None = None,
    packing: Packing | None = None,
) -> list[Tensor]:
    """int64 that broadcast to ``size``: the example, then a coordinate for each axis.

    They are multi-indices, so that an axis made longer by padding moves no other number.

    Args:
        ids: the examples of the batch, in order.
        from_end: count positions from the end of each axis: where padding comes first.
        unpadded: entries that each example has by itself, where they are not all the same: they
            tell a padded axis from one in which the examples follow each other without padding.
        packing: of the sequences that the forward works on there, if it packed them.

    Raises:
        NoLayoutError: the axis of the examples is of another size.
    """
    if layout.axis is not None and layout.axis >= len(size):
        raise NoLayoutError(OTHER_AXES)
    indices = [torch.arange(n) - (n if from_end else 0) for n in size]
    example = torch.zeros((), dtype=torch.int64)
    if layout.axis is not None:
        n = size[layout.axis]
        if layout.order == "minor" and packing is not None and packing.rows == n:
            example, entry = _of_packing(packing, ids, unpadded)
        else:
            example, entry = _rows(n, layout.order, ids, from_end, unpadded)
        example = _along(example, layout.axis, len(size))
        indices[layout.axis] = entry
    return [example, *(_along(index, axis, len(size)) for axis, index in enumerate(indices))]


def _rows(
    size: int, order: Order, ids: Sequence[int], from_end: bool, unpadded: Sequence[int] | None
) -> tuple[Tensor, Tensor]:
    """The example of each index along its axis, and its entry within the example."""
    if order == "alike":
        return torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
    each, left = divmod(size, len(ids)) if ids else (0, size)
    padded = left == 0 and (unpadded is None or each >= max(unpadded))
    if not padded:
        return _packed(size, order, ids, from_end, unpadded)
    examples = torch.tensor(ids, dtype=torch.int64)
    entries = torch.arange(each) - (each if from_end else 0)
    if order == "major":
        return examples.repeat_interleave(each), entries.repeat(len(ids))
    return examples.repeat(each), entries.repeat_interleave(len(ids))


def _packed(
    size: int, order: Order, ids: Sequence[int], from_end: bool, unpadded: Sequence[int] | None
) -> tuple[Tensor, Tensor]:
    """No padding: examples one after the other, or entries in turn as in a ``PackedSequence``."""
    if unpadded is None or sum(unpadded) != size:
        raise NoLayoutError(NO_ROWS)
    examples, lengths = torch.tensor(ids, dtype=torch.int64), torch.tensor(unpadded)
    if order == "minor":
        sorted_by = _longest_first(unpadded)
        at, entries = _in_turn(lengths[sorted_by])
        return examples[sorted_by][at], entries - (lengths[sorted_by][at] if from_end else 0)
    starts = torch.cumsum(lengths, 0) - (0 if from_end else lengths)
    entries = torch.arange(size) - starts.repeat_interleave(lengths)
    return examples.repeat_interleave(lengths), entries


def _of_packing(
    packing: Packing, ids: Sequence[int], unpadded: Sequence[int] | None
) -> tuple[Tensor, Tensor]:
    """Positions are counted from the start, wherever padding is elsewhere: here there is none."""
    lengths, order = packing.lengths, packing.order
    if len(lengths) != len(ids):
        raise NoLayoutError(NO_ROWS)
    if order is None:  # they were sorted already, or as lengths are
        alone = unpadded or lengths
        order = tuple(_longest_first(alone).tolist())
        if order != tuple(range(len(ids))) and tuple(alone[i] for i in order) != lengths:
            raise NoLayoutError(NO_PACKING)
    at, entries = _in_turn(torch.tensor(lengths))
    return torch.tensor([ids[i] for i in order], dtype=torch.int64)[at], entries


def _longest_first(lengths: Sequence[int]) -> Tensor:
    """Sorted by the call that packs: equal lengths come out in the same order."""
    return torch.sort(torch.tensor(lengths), descending=True).indices


def _in_turn(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row the sequence and the position in it, of sequences with the longest first."""
    entries, at = (torch.arange(int(lengths[0])).unsqueeze(1) < lengths).nonzero(as_tuple=True)
    return at, entries


def _along(index: Tensor, axis: int, axes: int) -> Tensor:
    return index.reshape([-1 if a == axis else 1 for a in range(axes)])


def examples_axis(at_two: Sequence[int] | None, at_three: Sequence[int] | None) -> Layout:
    """From the sizes of one field for two and for three copies of an example; None without it.

    Raises:
        NoLayoutError: no axis, or more than one, has as many entries for each copy.
    """
    if at_two is None or at_three is None:
        raise NoLayoutError(DEPENDS)
    found = axes.layout([at_two, at_three], (2, 3))
    if not found.known or len(found.axes) > 1:
        raise NoLayoutError(
            f"a batch of two examples draws {_by(at_two)} numbers and one of three {_by(at_three)}"
            ", so no axis of them goes from example to example"
        )
    return Layout(found.axes[0] if found.axes else None)


def _by(size: Sequence[int]) -> str:
    return " by ".join(map(str, size)) if size else "1"
