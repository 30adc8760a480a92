"""The one-process arms of a case, with what plans of one experiment share kept between cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from equivtest.arms.bench import Bench
from equivtest.arms.build import build
from equivtest.arms.candidate import counter, group_counts
from equivtest.arms.case import Case
from equivtest.arms.keeping import Kept, fingerprint
from equivtest.arms.oracle import Cut, Whole
from equivtest.arms.replay import Replay, Start, replay
from equivtest.arms.synchronised import as_one, for_each, rounds
from equivtest.batches import Batches, Counts, added
from equivtest.calling import ExperimentError
from equivtest.experiment import Experiment
from equivtest.observe.trace import MicrobatchTrace, State, Trace
from equivtest.plan import GroupLayout


class Reference:
    """Oracle, large batch and replay of one case.

    Benches and counts are kept per experiment, oracles per (ids of the group, parameters): plans
    that start from the same parameters share the oracle of their first update.

    Args:
        cache: what this process keeps between cases.
        note: told which arm runs, where it survives the death of this process.

    Attributes:
        batches64: batches in float64, of inputs as they are stored.
        seed: the experiment's.
    """

    def __init__(
        self,
        cache: dict[Any, Any],
        experiment: Experiment,
        case: Case,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._experiment, self._case, self._note = experiment, case, note
        self.seed = experiment.seed
        self._kept = Kept(cache, f"{case.digest} on {case.device}")
        stored = case.precision.parameters
        self._count = counter(experiment, self._kept.held, case.digest, stored)
        self._batches = Batches(experiment, stored, device=case.device)
        self.batches64 = Batches(experiment, stored, torch.float64, device=case.device)
        self._printed: tuple[Start, tuple[bytes, ...]] | None = None

    @property
    def bench(self) -> Bench:
        """The model in the case's precision."""
        precision, device = self._case.precision, self._case.device
        return self._bench(
            precision.name,
            precision.parameters,
            lambda: precision.context(device),
            watch_dtypes=precision.autocast is not None,
        )

    @property
    def bench64(self) -> Bench:
        """The model in float64."""
        return self._bench("oracle", torch.float64, nullcontext)

    def initial(self) -> State:
        """What ``model()`` gives, in the case's dtype; built twice, to be sure of it.

        Raises:
            ExperimentError: two calls give different parameters, or share one.
        """
        dtype = self._case.precision.parameters
        return self._kept.once(("initial", dtype), lambda: self._built_twice(dtype))

    def module(self) -> nn.Module:
        """A model in the case's dtype and as it was built, for optimizers to move."""
        dtype, device = self._case.precision.parameters, self._case.device
        bench = self._kept.once(
            ("module", dtype), lambda: Bench(self._experiment, dtype, device=device)
        )
        if not bench.intact():  # what an optimizer's factory may do to a model stays with that one
            bench = self._kept.held["module", dtype] = Bench(self._experiment, dtype, device=device)
        initial = self.initial()
        bench.load(initial.parameters, initial.buffers)
        return bench.module

    def counts(self, group: GroupLayout) -> tuple[tuple[Counts, ...], ...]:
        """Supervised elements by replica and microbatch."""
        return group_counts(self._count, group)

    def total(self, group: GroupLayout) -> Counts:
        """Supervised elements that the group's loss is divided by."""
        if group.counted:
            group = replace(group, ids=((group.counted,),), counted=())
        return added([c for replica in self.counts(group) for c in replica])

    def replay(
        self,
        group: GroupLayout,
        start: Start,
        traces: Sequence[Trace],
        update: int,
        loss_scale: float,
        keep: bool = False,
        apart: bool = False,
        as_built: bool = False,
    ) -> Replay:
        """The plan's microbatches in the case's precision, with the candidate's root factors.

        Args:
            as_built: in the modes that ``model()`` leaves its modules in, whatever the loop's.
        """
        self._note(f"the replay of update {update}")
        seen: Any = [trace.updates[update].microbatches for trace in traces]
        if as_built:
            seen = [[replace(m, switched=frozenset()) for m in replica] for replica in seen]
        run = rounds(self.bench.module, group)
        if run is not group:
            start, seen = as_one(start, seen)
        found = replay(
            self.bench,
            self._batches,
            run,
            self.total(group),
            start,
            seen,
            loss_scale,
            keep,
            apart=apart,
        )
        return found if run is group else for_each(found, len(group.ids))

    def split(
        self, group: GroupLayout, start: Start, seen: Sequence[Sequence[MicrobatchTrace]]
    ) -> Cut:
        """The plan's microbatches in float64: plans that cut the same ones share it.

        Such plans differ in the order of a sum. A group of one microbatch is not cut at all. Where
        a forward may leave something for the next one, each plan is replayed in its own order;
        where it drew random numbers, with those that the candidate's microbatches ``seen`` drew: a
        rare draw may change one update only.
        """
        oracle = self.oracle(group, start)
        group = rounds(self.bench64.module, group)
        if [ids for replica in group.ids for ids in replica if ids] == [group.flat]:
            return oracle.cut((group.flat,))
        if oracle.drew or any(m.rng is not None for replica in seen for m in replica):
            return self._replayed64(group, start, seen)
        if not any(start.buffers):
            return oracle.cut(tuple(sorted(ids for replica in group.ids for ids in replica)))
        key = ("split", group.ids, group.counted, self._fingerprints(start))
        return self._kept.recent(key, lambda: self._replayed64(group, start))

    def _replayed64(
        self,
        group: GroupLayout,
        start: Start,
        seen: Sequence[Sequence[MicrobatchTrace]] | None = None,
    ) -> Cut:
        self._note("the replay in float64")
        counts = self.total(group)
        whole = replay(self.bench64, self.batches64, group, counts, start.shared, drawn(seen))
        return Cut(whole.expected, whole.scale, whole.loss)

    def oracle(self, group: GroupLayout, start: Start) -> Whole:
        """The whole group in float64, from the candidate's parameters and inputs as stored."""
        key = ("oracle", group.flat, group.counted, self._fingerprints(start)[:2])
        return self._kept.recent(
            key, lambda: self._whole(self.bench64, self.batches64, group, start)
        )

    def large(self, group: GroupLayout, start: Start, loss_scale: float) -> Whole:
        """The whole group in one batch in the case's precision."""
        name = self._case.precision.name
        key = ("large", name, group.flat, group.counted, self._fingerprints(start)[:2], loss_scale)
        return self._kept.recent(
            key, lambda: self._whole(self.bench, self._batches, group, start, loss_scale)
        )

    @property
    def scheduler_unit(self) -> str | None:
        """In which the experiment's schedule counts; None where it has none."""
        return None if self._experiment.scheduler is None else self._experiment.scheduler_unit

    def try_whole(self, group: GroupLayout) -> None:
        """Run the whole group in float64 from the initial state, for what it raises."""
        whole = self.oracle(group, self._initial_start(group))
        _ = whole.gradients  # what the loss raises here, the candidate's traceback says better
        whole.check()
        whole.check_finite()

    def try_microbatches(self, group: GroupLayout) -> None:
        """Run the group's microbatches in the case's precision, for what they raise."""
        start = self._initial_start(group)
        replay(self.bench, self._batches, group, self.total(group), start)

    def try_no_examples(self) -> None:
        """Run a batch without examples in the case's precision, for what it raises."""
        initial = self.initial()
        self.bench.load(initial.parameters, initial.buffers)
        self.bench.run(self._batches(()), lambda *_: 1.0)

    def _initial_start(self, group: GroupLayout) -> Start:
        initial = self.initial()
        return Start(initial.parameters, tuple(initial.buffers for _ in group.ids))

    def _whole(
        self,
        bench: Bench,
        batches: Batches,
        group: GroupLayout,
        start: Start,
        loss_scale: float = 1.0,
    ) -> Whole:
        state = State(
            {n: p.clone() for n, p in start.parameters.items()},
            {n: b.clone() for n, b in start.buffers[0].items()},
        )
        counted_by = "count" if self._experiment.count else "Loss.count"
        return Whole(
            bench,
            batches,
            state,
            group.flat,
            self.total(group),
            loss_scale,
            counted_by,
            self._note,
        )

    def _bench(
        self,
        name: str,
        dtype: torch.dtype,
        context: Callable[[], Any],
        watch_dtypes: bool = False,
    ) -> Bench:
        return self._kept.once(
            ("bench", name),
            lambda: Bench(self._experiment, dtype, context, self._case.device, watch_dtypes),
        )

    def _built_twice(self, dtype: torch.dtype) -> State:
        first, second = (build(self._experiment, dtype, self._case.device) for _ in range(2))
        if {id(p) for p in first.parameters()} & {id(p) for p in second.parameters()}:
            raise ExperimentError(
                "model() gives the same parameters on each call: pass a factory that builds a new "
                "module, not one that returns a ready one"
            )
        state = _state_of(first)
        other = _state_of(second).parameters
        odd = [n for n, p in state.parameters.items() if not _equal(p, other.get(n))]
        if odd:
            raise ExperimentError(
                f"model() builds different parameters on each call under one seed ({odd[0]!r} "
                "differs): draw them from torch's, numpy's or random's global generators, which "
                "are seeded before each call"
            )
        return state

    def _fingerprints(self, start: Start) -> tuple[bytes, ...]:
        """Hashes of the parameters, and of the buffers of each replica."""
        if self._printed is None or self._printed[0] is not start:
            stored = self._case.precision.parameters
            prints = tuple(fingerprint(t, stored) for t in (start.parameters, *start.buffers))
            self._printed = start, prints
        return self._printed[1]


def drawn(
    seen: Sequence[Sequence[MicrobatchTrace]] | None,
) -> list[list[MicrobatchTrace]] | None:
    """What the microbatches drew and were sent, without the loop's own factors and modes."""
    if seen is None:
        return None
    plain: dict[str, Any] = {"factors": (), "switched": frozenset()}
    return [[replace(m, **plain) for m in replica] for replica in seen]


def _state_of(module: nn.Module) -> State:
    """Copies on the host, as those of a trace are."""
    return State(
        {n: p.detach().to("cpu", copy=True) for n, p in module.named_parameters()},
        {n: b.detach().to("cpu", copy=True) for n, b in module.named_buffers()},
    )


def _equal(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and torch.equal(a, b)
