"""The loss behind a model, run microbatch by microbatch inside a large batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from equivtest.arms.bench import Bench
from equivtest.batches import by_term
from equivtest.experiment import Loss, LossResult
from equivtest.isolate.cut.axes import Layout
from equivtest.isolate.cut.modules import Anatomy, NotCuttable, between, cut


@contextmanager
def loss_in_chunks(
    bench: Bench,
    batch_layouts: Sequence[Layout],
    anatomy: Mapping[str, Sequence[Anatomy]],
    sizes: Sequence[int],
    refused: Callable[[], None],
) -> Iterator[None]:
    """Run the model on the large batch, and the loss on one microbatch after the other.

    Args:
        batch_layouts: of the tensors of a batch.
        anatomy: of the calls of each module, the model itself included.
        sizes: of the microbatches.
        refused: called where microbatches cannot be told apart; the loss then runs on the large
            batch.
    """
    inner = bench.loss
    weights = [size / sum(sizes) for size in sizes]

    def loss(model: Any, batch: Any) -> LossResult:
        modules = dict(model.named_modules())
        try:
            parts = list(cut(batch, batch_layouts, sizes))
            return _added(
                between(lambda k: inner(model, parts[k]), modules, anatomy, sizes, weights)
            )
        except NotCuttable:
            refused()
            return inner(model, batch)

    bench.loss = loss
    try:
        yield
    finally:
        bench.loss = inner


def _added(losses: Sequence[LossResult]) -> LossResult:
    added: dict[str, Loss] = {}
    for loss in losses:
        for term, one in by_term(loss).items():
            before = added.get(term)
            added[term] = one if before is None else _plus(before, one)
    return added[""] if isinstance(losses[0], Loss) else added


def _plus(a: Loss, b: Loss) -> Loss:
    return Loss(a.total + b.total, count=a.count + b.count)
