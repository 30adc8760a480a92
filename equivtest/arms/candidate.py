"""The candidate arm: the loop under test, in one rank of a real process group, observed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from equivtest.arms.build import build, quiet_schedulers, seed_everything
from equivtest.arms.case import Case
from equivtest.arms.computing import computing, device_of
from equivtest.arms.keeping import Kept
from equivtest.arms.making import (
    average_for,
    optimizers_for,
    scaler_for,
    schedulers_for,
    wrapped,
)
from equivtest.batches import Batches, Counter, Counts, added, plain
from equivtest.calling import ExperimentError, blaming
from equivtest.experiment import Experiment, Group, Rank
from equivtest.loops import accumulate, several
from equivtest.observe import Trace
from equivtest.observe.contents import Contents
from equivtest.observe.observer import Observer
from equivtest.plan import GroupLayout
from equivtest.pool import Seat
from equivtest.precision import optimizer_refusal
from equivtest.source import file_of


def candidate(seat: Seat, experiment: Experiment, case: Case) -> Trace:
    """Run the case's loop in this rank and return what it left behind."""
    with computing(case):
        seat.note("building the model")
        module = build(experiment, case.precision.parameters, case.device)
        model = wrapped(case, module)
        optimizer = optimizers_for(experiment, module)
        for one in several(optimizer):
            refusal = optimizer_refusal(one)
            if refusal is not None:
                return Trace(rank=seat.rank, refusal=refusal)
        rank = _rank(seat, experiment, case, module, model, optimizer)
        planned = [len(group.ids[seat.rank]) for group in case.groups]
        search = _contents(seat, experiment, case).searching(
            i for group in case.groups for i in group.flat
        )
        observer = Observer(rank, planned, seat.note, search, file_of(case.loop))
        rank.groups = _groups(seat, experiment, case, observer.fetched)
        seed_everything(experiment.seed, 1 + seat.rank)
        # A schedule in microbatches moves before the first update, of which torch warns.
        quiet = quiet_schedulers if experiment.scheduler_unit == "microbatch" else nullcontext
        seat.note("running the loop")
        with blaming("loss", Observer.watched_loss), observer.watching(), quiet():
            (case.loop or accumulate)(rank)
        observer.loop_ended(several(optimizer))
        seat.note("the loop has ended")
        return observer.trace()


def _rank(
    seat: Seat, experiment: Experiment, case: Case, module: Any, model: Any, optimizer: Any
) -> Rank:
    assert seat.group is not None, "the candidate runs in a process group"
    return Rank(
        model=model,
        module=module,
        optimizer=optimizer,
        scheduler=schedulers_for(experiment, optimizer),
        scaler=scaler_for(experiment, case),
        average=average_for(experiment, module),
        groups=(),
        D=dist.get_world_size(seat.group),
        dp_rank=dist.get_rank(seat.group),
        dp_group=seat.group,
        device=device_of(case),
        loss=experiment.loss,
        dataset=experiment.data,
        scheduler_unit=experiment.scheduler_unit,
        clip_norm=experiment.clip_norm,
        clip_value=experiment.clip_value,
        _autocast=lambda: case.precision.context(case.device),
    )


def _contents(seat: Seat, experiment: Experiment, case: Case) -> Contents:
    """The examples by their contents; nothing is read until a batch is not known by its memory."""
    stored = case.precision.parameters

    def made() -> Contents:
        batches = Batches(experiment, stored)
        alone = None if experiment.collate is None else (lambda i: batches((i,)))
        return Contents(experiment.data, alone, stored)

    known: Contents = Kept(seat.cache, case.digest).once(("contents", stored), made)
    return known


def counter(
    experiment: Experiment, cache: dict[Any, Any], digest: str, stored: torch.dtype
) -> Counter:
    """A counter of supervised elements that remembers what this process has counted."""
    known = cache.setdefault(("counts", digest, stored), {})
    return Counter(experiment, known, lambda: build(experiment, torch.float64), stored)


def group_counts(count: Counter, group: GroupLayout) -> tuple[tuple[Counts, ...], ...]:
    """Counts by replica and microbatch."""
    return tuple(tuple(count(ids) for ids in replica) for replica in group.ids)


def _groups(
    seat: Seat,
    experiment: Experiment,
    case: Case,
    fetched: Callable[[Any, tuple[int, ...]], Any],
) -> Sequence[Group]:
    batches = Batches(experiment, case.precision.parameters, device=case.device)
    count = counter(experiment, seat.cache, case.digest, case.precision.parameters)
    groups = []
    for layout in case.groups:
        counts = group_counts(count, layout)
        whole = added([c for replica in counts for c in replica])
        _some_supervised("count" if experiment.count else "Loss.count", whole, layout)
        own = layout.ids[seat.rank]
        groups.append(
            Group(
                lambda k, own=own: fetched(batches(own[k]), own[k]),  # type: ignore[misc]
                count=plain(whole),
                local_count=plain(added(counts[seat.rank])),
                examples=own,
                update=layout.update,
            )
        )
    return groups


def _some_supervised(argument: str, counts: Mapping[str, float], layout: GroupLayout) -> None:
    for term, value in counts.items():
        if not value > 0:
            name = f" of term {term!r}" if term else ""
            raise ExperimentError(
                f"{argument}{name} is {value:g} over all {len(layout.flat)} examples of update "
                f"{layout.update}: there is nothing to divide the loss by; pass examples with "
                "supervised elements, or a count that sees them"
            )
