"""Find how the draws of a forward hold a batch, by forwards on copies of one example.

Sizes that grow with the number of copies tell the axis. Copies are alike, so which of them gets
which numbers cannot matter to a loss that is symmetric in its examples, whatever they do to each
other (BatchNorm, a contrastive loss): that tells in which order an axis holds its examples.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import nn

from equivtest.isolate.random.fields import (
    PERMUTES,
    Layout,
    Layouts,
    NoLayoutError,
    Order,
    Site,
    Untied,
    examples_axis,
)
from equivtest.isolate.random.keyed import Keyed

Forward = Callable[[Sequence[int]], float]
"""Forward the batch of these examples from one state, and give the sum of the loss totals."""

_KEYS, _TURNED = (0, 1, 2), (1, 2, 0)

ROUNDING = 1e-11
"""What float64 may move a loss by, of its own size."""
TRIES = 8
"""Keys under which to look for a difference: with a few coins, wrong layouts give right numbers."""
NO_ORDER = "one axis holds the numbers of all examples, and which are whose cannot be told"
NO_PLACE = (
    "one axis holds the numbers of all examples and of their padding, and which are whose cannot "
    "be told"
)
OTHER_GENERATORS = "numpy's or Python's generator is asked for more numbers by more examples"
ORDERS: tuple[Order, ...] = ("major", "minor")


def probe(
    module: nn.Module, forward: Forward, lengths: Mapping[int, int], key: tuple[int, ...]
) -> Layouts:
    """The layouts of the draws of ``forward``.

    Args:
        lengths: by example of the group, elements of its batch when it is alone.
    """
    return _Probe(module, forward, lengths, key).layouts()


class _Probe:
    def __init__(
        self, module: nn.Module, forward: Forward, lengths: Mapping[int, int], key: tuple[int, ...]
    ) -> None:
        self.module, self.forward, self.lengths, self.key = module, forward, lengths, key

    def layouts(self) -> Layouts:
        ids = list(self.lengths)
        # The longest: of a line of one token, axes with several entries look like those with one.
        one = max(ids, key=self.lengths.__getitem__)
        two, three, group = (self._recorded(examples) for examples in ([one] * 2, [one] * 3, ids))
        odd = [*two.unkeyed, *three.unkeyed]
        if two.others != three.others:
            odd.append(Untied(None, OTHER_GENERATORS))
        found: dict[Site, Layout] = {}
        for site in two.sizes | three.sizes:
            try:
                found[site] = examples_axis(two.sizes.get(site), three.sizes.get(site))
            except NoLayoutError as error:
                why = PERMUTES if site in two.permuted & three.permuted else str(error)
                odd.append(Untied(site.place, why))
        for site in two.packed & three.packed & set(found):
            found[site] = replace(found[site], order="minor")
        folded = {
            site: layout.axis
            for site, layout in found.items()
            if layout.axis is not None
            and (two.sizes[site][layout.axis] > 2 or _longer(group, site, layout.axis, len(ids)))
        }
        layouts = Layouts(
            found,
            entries=self._entries(folded),
            first=group.first or two.first,
            odd=tuple(dict.fromkeys(odd)),
        )
        return self._anchored(self._ordered(layouts, two.packed))

    def _entries(self, folded: Mapping[Site, int]) -> dict[Site, dict[int, int]]:
        """By example, its entries on axes that have several for an example."""
        entries: dict[Site, dict[int, int]] = {site: {} for site in folded}
        for example in self.lengths if folded else ():
            sizes = self._recorded([example] * 2).sizes
            for site, axis in folded.items():
                if len(sizes.get(site, ())) > axis:
                    entries[site][example] = sizes[site][axis] // 2
        return entries

    def _ordered(self, layouts: Layouts, known: Collection[Site]) -> Layouts:
        """With an order for each draw whose axis has several entries for an example, but ``known``.

        All in one order or all in the other, and only then each by itself. An order that symmetry
        does not tell (where capacity is given to the first who come, say) is the usual one.
        """
        folded = {site: held for site, held in layouts.entries.items() if site not in known}
        if not folded:
            return layouts
        most = max(self.lengths, key=lambda i: sum(held.get(i, 0) for held in folded.values()))
        fits = partial(self._symmetric, most)
        together = [_with_orders(layouts, dict.fromkeys(folded, order)) for order in ORDERS]
        told = self._told(together, fits)
        if told is not None:
            return told
        alike = _with_orders(layouts, dict.fromkeys(layouts.by_site, "alike"))
        for site in folded:
            told = self._told([_with_orders(alike, {site: order}) for order in ORDERS], fits)
            if told is None:
                layouts = _doubting(layouts, Untied(site.place, NO_ORDER))
            else:
                layouts = _with_orders(layouts, {site: told.by_site[site].order})
        return layouts

    def _told(
        self, candidates: Sequence[Layouts], fits: Callable[[Layouts, int], bool]
    ) -> Layouts | None:
        """The candidate that fits, the first where several always do; None if none does."""
        left = list(candidates)
        for attempt in range(TRIES):
            left = [layouts for layouts in left if fits(layouts, attempt)]
            if len(left) < 2:
                break
        return left[0] if left else None

    def _symmetric(self, one: int, layouts: Layouts, attempt: int) -> bool:
        """Which of three copies of an example draws which numbers does not matter."""
        loss, turned = (self._loss([one] * 3, layouts, attempt, keys) for keys in (_KEYS, _TURNED))
        return abs(turned - loss) <= ROUNDING * abs(loss)

    def _anchored(self, layouts: Layouts) -> Layouts:
        """Counted from the end, if only so a short example draws what it draws without padding."""
        short = min(self.lengths, key=self.lengths.__getitem__)
        long = max(self.lengths, key=self.lengths.__getitem__)
        if self._recorded([short] * 2).sizes == self._recorded([long] * 2).sizes:
            return layouts
        candidates = [layouts, replace(layouts, from_end=True)]
        told = self._told(candidates, partial(self._adds_up, short, long))
        if told is not None:
            return told
        ragged = [s for s, held in layouts.entries.items() if len(set(held.values())) > 1]
        return _doubting(layouts, *(Untied(site.place, NO_PLACE) for site in ragged))

    def _adds_up(self, short: int, long: int, layouts: Layouts, attempt: int) -> bool:
        both = self._loss([short, long], layouts, attempt)
        apart = [self._loss([example] * 2, layouts, attempt) / 2 for example in (short, long)]
        return abs(both - sum(apart)) <= ROUNDING * sum(map(abs, apart))

    def _recorded(self, examples: Sequence[int]) -> Keyed:
        with Keyed(self.module, examples, self.key) as keyed:
            self.forward(examples)
        return keyed

    def _loss(
        self,
        examples: Sequence[int],
        layouts: Layouts,
        attempt: int,
        keys: Sequence[int] | None = None,
    ) -> float:
        with Keyed(self.module, keys or examples, (*self.key, attempt), layouts):
            return self.forward(examples)


def _doubting(layouts: Layouts, *doubts: Untied) -> Layouts:
    return replace(layouts, odd=tuple(dict.fromkeys([*layouts.odd, *doubts])))


def _longer(group: Keyed, site: Site, axis: int, examples: int) -> bool:
    size = group.sizes.get(site, ())
    return len(size) > axis and size[axis] > examples


def _with_orders(layouts: Layouts, orders: Mapping[Site, Order]) -> Layouts:
    ordered = {s: replace(layouts.by_site[s], order=order) for s, order in orders.items()}
    return replace(layouts, by_site={**layouts.by_site, **ordered})
