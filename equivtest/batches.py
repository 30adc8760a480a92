"""From examples to batches: collate, cast to the precision's dtype, empty batches, counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.data import default_collate

from equivtest import arguments
from equivtest.calling import ExperimentError, calling, named
from equivtest.experiment import Experiment, Loss, LossResult
from equivtest.observe.rng import RandomState
from equivtest.precision import unit_roundoff

Counts = dict[str, float]
"""Supervised elements by term; the only term of a plain ``Loss`` is called ``""``."""


class Batches:
    """The batches of one experiment: floats rounded to ``stored``, then held in ``dtype``.

    The oracle holds float64 copies of what the candidate stored (``stored`` bfloat16, say): it must
    start from the candidate's inputs, not from better ones.
    """

    def __init__(
        self,
        experiment: Experiment,
        stored: torch.dtype,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        self._data = experiment.data
        self._collate: Callable[[list[Any]], Any] = experiment.collate or default_collate
        self._collate_name = "collate" if experiment.collate else "torch's default_collate"
        self._stored = stored
        self._dtype = dtype or stored
        self._device = device

    def __call__(self, ids: Sequence[int]) -> Any:
        """The batch of the examples ``ids``; with no ids, a batch with no example in it."""
        batch = self._collated(ids) if ids else self._empty()
        return tree_map(self._cast, batch)

    def _collated(self, ids: Sequence[int]) -> Any:
        at = 0
        try:
            examples = [self._data[at := i] for i in ids]
        except Exception as error:
            raise named(f"data[{at}]", error, instead=_DATA) from error
        with calling(self._collate_name, _examples(ids), _COLLATE):
            batch = self._collate(examples)
        if batch is None:
            raise ExperimentError(f"collate returned None for {_examples(ids)}: return the batch")
        return batch

    def _cast(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.is_complex():
            return leaf.to(self._stored.to_complex()).to(self._device, self._dtype.to_complex())
        if leaf.is_floating_point():
            return leaf.to(self._stored).to(self._device, self._dtype)
        return leaf.to(self._device)

    def _empty(self) -> Any:
        """A batch of no examples: the batch axis is the one that grows when an example is added."""
        one, spec = tree_flatten(self._collated([0]))
        two, spec_two = tree_flatten(self._collated([0, 0]))
        if spec != spec_two:
            raise ExperimentError(
                "collate gives another structure for two examples than for one, so a batch without "
                "examples cannot be made for the last group: return tensors with a batch axis"
            )
        return tree_unflatten(
            [_without_examples(a, b) for a, b in zip(one, two, strict=True)], spec
        )


def _without_examples(one: Any, two: Any) -> Any:
    if not isinstance(one, Tensor) or one.shape == two.shape:
        return one
    axis = next(a for a, (x, y) in enumerate(zip(one.shape, two.shape, strict=True)) if x != y)
    return one.narrow(axis, 0, 0)


_DATA = "every index below len(data) must give an example"
_COLLATE = "pass a collate that makes one batch of a list of examples (pads ragged ones, say)"


def _examples(ids: Sequence[int]) -> str:
    shown = ", ".join(map(str, ids[:4]))
    return f"example{'s' if len(ids) > 1 else ''} {shown}{', …' if len(ids) > 4 else ''}"


def as_counts(counted: Any) -> Counts:
    """What ``Experiment.count`` returned, as plain numbers by term.

    Raises:
        ExperimentError: it is neither a number of at least 0 nor a mapping of such.
    """
    if isinstance(counted, Mapping):
        return {str(term): _number(f"count of term {term!r}", n) for term, n in counted.items()}
    return {"": _number("count", counted)}


def by_term(loss: LossResult) -> dict[str, Loss]:
    """The loss by term.

    Raises:
        ExperimentError: it is neither a ``Loss`` nor a mapping of them.
    """
    if isinstance(loss, Loss):
        return {"": loss}
    given = arguments.a(loss)
    if isinstance(loss, Mapping):
        odd = [
            f"{name!r}: {arguments.a(term)}"
            for name, term in loss.items()
            if not isinstance(term, Loss)
        ]
        if loss and not odd:
            return {str(name): term for name, term in loss.items()}
        given += f" with {odd[0]}" if odd else " without any term"
    raise ExperimentError(
        f"loss returned {given}: return Loss(total=..., count=...), or a mapping from term to Loss"
    )


def counted(losses: Mapping[str, Loss]) -> Counts:
    """The counts of a loss by term.

    Raises:
        ExperimentError: one is no number of at least 0.
    """
    return {
        name: _number(f"Loss.count{f' of term {name!r}' if name else ''}", loss.count)
        for name, loss in losses.items()
    }


def denominator(counts: Counts, term: str) -> float:
    """What the total of ``term`` is divided by.

    Raises:
        ExperimentError: nothing was counted for it.
    """
    if term not in counts:
        found = f"the terms {sorted(counts)}" if set(counts) != {""} else "one number"
        wanted = f"a term {term!r}" if term else "one total"
        raise ExperimentError(
            f"count gives {found}, and the loss has {wanted}: use the same terms in both"
        )
    return counts[term]


def agree(a: float, b: float, examples: int) -> bool:
    """Whether two counts of the same examples are one number.

    Whole numbers are compared exactly. Weights are added up in another order, in float32 it may be:
    one rounding of it for each example is no disagreement.
    """
    if float(a).is_integer() and float(b).is_integer():
        return a == b
    allowed = examples * unit_roundoff(torch.float32) * max(abs(a), abs(b))
    return math.isfinite(allowed) and abs(a - b) <= allowed


def added(counts: Sequence[Counts]) -> Counts:
    """Sums by term."""
    total: Counts = {}
    for one in counts:
        for term, value in one.items():
            total[term] = total.get(term, 0.0) + value
    return total


def plain(counts: Counts) -> Any:
    """Counts as a loop sees them: one number, or a mapping by term; whole numbers as ``int``."""
    numbers = {t: int(v) if float(v).is_integer() else v for t, v in counts.items()}
    return numbers[""] if set(numbers) == {""} else numbers


class Counter:
    """Counts of microbatches, by ``Experiment.count`` or by a dry forward of the loss.

    Counted is what the forwards receive, floats as ``stored``: a sum of weights depends on it.
    Results are kept in ``known`` by example ids.
    """

    def __init__(
        self,
        experiment: Experiment,
        known: dict[tuple[int, ...], Counts],
        dry_model: Callable[[], torch.nn.Module],
        stored: torch.dtype = torch.float64,
    ) -> None:
        self._experiment = experiment
        self._known = known
        self._dry_model = dry_model
        self._model: torch.nn.Module | None = None
        self._batches = Batches(experiment, stored, torch.float64)

    def __call__(self, ids: tuple[int, ...]) -> Counts:
        if ids not in self._known:
            self._known[ids] = self._counted(ids)
        return self._known[ids]

    def _counted(self, ids: tuple[int, ...]) -> Counts:
        batch = self._batches(ids)
        if self._experiment.count is not None:
            with calling("count", f"the batch of {_examples(ids)}"):
                given = self._experiment.count(batch)
            return as_counts(given)
        # On a model of its own and with the random numbers put back: counting must not move state.
        # With gradients, since a loss may take some itself (a gradient penalty).
        self._model = self._model or self._dry_model()
        rng = RandomState.now()
        try:
            with torch.enable_grad(), calling("loss", f"{_DRY} of {_examples(ids)}", _GIVE_COUNT):
                terms = by_term(self._experiment.loss(self._model, batch))
        finally:
            rng.restore()
        return counted(terms)


_DRY = "a dry forward in float64, to count the supervised elements"
_GIVE_COUNT = "pass count, a function of the batch, and none is needed"


def _number(argument: str, given: Any) -> float:
    value = given.detach() if isinstance(given, Tensor) else given
    scalar = getattr(value, "ndim", 0) == 0 and hasattr(value, "__float__")
    if not (scalar and math.isfinite(value) and value >= 0):
        raise ExperimentError(
            f"{argument} is {given!r}: return the number of supervised elements, at least 0"
        )
    return float(value)
