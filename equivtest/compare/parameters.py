"""Parameters, state and averages after each update, judged on the candidate's own gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from equivtest.arms.case import Case
from equivtest.arms.reference import Reference
from equivtest.causes import Cause
from equivtest.compare import implementation
from equivtest.compare import optimizer as replayed
from equivtest.compare.average import ExpectedAverage
from equivtest.compare.clip import clip_of, judge_clip
from equivtest.compare.continuity import same_values
from equivtest.compare.optimizer import ExpectedOptimizers
from equivtest.compare.planned import scheduler_calls
from equivtest.compare.skips import untouched
from equivtest.compare.tables import TensorRow
from equivtest.compare.verdict import About, Finding
from equivtest.distance import distance, norm, ratio
from equivtest.experiment import Experiment
from equivtest.observe.trace import (
    COUNTER,
    Gradients,
    OptimizerTrace,
    ParamGroups,
    Tensors,
    Trace,
    UpdateTrace,
    by_name,
)
from equivtest.precision import unit_roundoff


class ParameterJudge:
    """Judges the updates of one rank in order; ``finish`` what the loop leaves."""

    def __init__(
        self, reference: Reference, experiment: Experiment, case: Case, trace: Trace
    ) -> None:
        self._experiment, self._case, self._trace = experiment, case, trace
        self._clip = clip_of(experiment, case.device)
        module = reference.module()
        self._expected = ExpectedOptimizers(experiment, module)
        self._module = module
        self._dtypes = {name: p.dtype for name, p in module.named_parameters()}
        self._average = ExpectedAverage(experiment, module)
        self._measured: dict[tuple[int, str], dict[str, Any]] = {}
        self._first = self._wanted()
        self._clipped = self._clip is None
        # Whether the schedule may move behind the update that ends a microbatch's turn.
        self._behind = experiment.scheduler_unit == "microbatch"
        self.notes: list[str] = []

    def judge(self, u: int, update: UpdateTrace, oracle: Gradients | None) -> list[Finding]:
        """Clip, hyperparameters, parameters, state and averages of update ``u``.

        Args:
            update: the update of the rank, with the gradient that was judged.
            oracle: the oracle's gradient, where it was computed.
        """
        self._advance(u, update)
        found = list(judge_clip(u, update, self._clip)) if update.applied else []
        if self._clip is not None:
            self._clipped |= bool(found) or self._clip.active(update)
        for seen in update.optimizers:
            optimizer = self._expected.matching(seen)
            if optimizer is None:
                found.append(_other_optimizer(u, seen))
                continue
            wanted = self._expected.hyperparameters(optimizer)
            found += _hyperparameters(u, seen.groups, wanted, optimizer)
            if seen.applied:
                found += self._applied(u, update, seen, optimizer, oracle)
            else:
                found += untouched(u, update, seen)
        missing = [
            o
            for o in self._expected.optimizers
            if not any(self._expected.matching(seen) is o for seen in update.optimizers)
        ]
        if missing:
            found.append(
                Finding(
                    Cause.COUNTERS,
                    f"{type(missing[0]).__name__} of the experiment was not called for update {u}: "
                    "its step() is missing in the loop",
                    update=u,
                )
            )
        found += self._average.judge(u, update)
        return found

    def finish(self) -> list[Finding]:
        """The hyperparameters that the loop leaves: the schedule after its last update.

        A loop that sets them at the top of an update leaves those of its last one, which nothing
        uses any more: they are right too, but where the schedule had not moved until then and
        no call was seen: nothing tells such a loop from one that never calls it.
        """
        updates = self._trace.updates
        if self._clip is not None and not self._clipped and updates:
            self.notes.append(
                f"{self._clip.size(updates[0])} in update 0, the bound {self._clip.bound:g}: no "
                "update is clipped, and what may be wrong with the clip cannot be seen"
            )
        if len(updates) != len(self._case.groups):
            return []
        last = self._wanted()
        moved = any(_odd(a, b) for a, b in zip(self._first, last, strict=True)) or any(
            event.kind == "scheduler" for event in self._trace.events
        )
        self._advance(len(updates))
        found: list[Finding] = []
        for groups in self._trace.groups_after:
            for optimizer, before in zip(self._expected.optimizers, last, strict=True):
                wanted = self._expected.hyperparameters(optimizer)
                if by_name(wanted).keys() != by_name(groups).keys():
                    continue
                if moved and not _odd(groups, before):
                    continue
                found += _hyperparameters(len(updates) - 1, groups, wanted, optimizer, "after")
        return found

    def _wanted(self) -> list[ParamGroups]:
        """Hyperparameters as the schedule has them now, by the experiment's optimizer."""
        return [self._expected.hyperparameters(o) for o in self._expected.optimizers]

    def _advance(self, u: int, update: UpdateTrace | None = None) -> None:
        """Move the schedulers to where they are when ``update`` is attempted, or the loop ends.

        One that counts microbatches is called with each before the update or, at the end of each
        turn, with the last behind it.
        """
        unit = self._experiment.scheduler_unit
        calls = scheduler_calls(unit, self._trace, self._case.groups, u)
        if self._behind and update is not None:
            self._expected.advance(calls - 1)
            self._behind = all(self._as_scheduled(seen) for seen in update.optimizers)
            if self._behind:
                return
        self._expected.advance(calls)

    def _as_scheduled(self, seen: OptimizerTrace) -> bool:
        optimizer = self._expected.matching(seen)
        return optimizer is not None and not _odd(
            seen.groups, self._expected.hyperparameters(optimizer)
        )

    @cached_property
    def decay(self) -> dict[str, float]:
        """The experiment's weight decay by the names of parameters."""
        return self._expected.decay()

    def measured(self, row: TensorRow) -> TensorRow:
        """``row`` with the distances of its parameter."""
        return replace(row, **self._measured.get((row.update, row.tensor), {}))

    def _applied(
        self,
        u: int,
        update: UpdateTrace,
        seen: OptimizerTrace,
        optimizer: Optimizer,
        oracle: Gradients | None,
    ) -> list[Finding]:
        """What ``optimizer`` makes of the gradient and state, against what the loop's left."""
        if replayed.evaluates(seen):
            self.notes.append(
                f"{seen.kind.__name__} evaluated its closure {seen.closures} times: parameters "
                "are not judged"
            )
            return []
        cast = [n for n in sorted(seen.names) if update.before[n].dtype != self._dtypes[n]]
        if cast:
            return [_cast(u, cast, update, self._dtypes)]
        try:
            after, state = self._expected.updated(optimizer, update.before, update.clipped, seen)
        except Exception as error:
            if seen.kind is type(optimizer):
                raise
            return [_refused(u, seen, optimizer, error)]  # SparseAdam a dense gradient, say
        exact = self._in_float64(update.before, update.clipped, seen, optimizer)
        found = list(self._update(u, update, seen, optimizer, after, state, exact))
        far = self._measure(u, update, seen, optimizer, exact, oracle)
        if far and not found:
            self.notes.append(
                f"{type(optimizer).__name__}'s own arithmetic leaves {len(far)} parameters further "
                f"from float64 than the rounding of their dtype ({far[0]} first)"
            )
        return found

    def _measure(
        self,
        u: int,
        update: UpdateTrace,
        seen: OptimizerTrace,
        optimizer: Optimizer,
        exact: Tensors,
        oracle: Gradients | None,
    ) -> list[str]:
        """The third level: the same update in float64, and that of the oracle's gradient.

        Returns:
            Names of the parameters that are further from the first than rounding is.
        """
        ideal = None
        if oracle is not None and not any(_sparse(g) for g in update.clipped.values()):
            gradient = oracle if self._clip is None else self._clip.clipped(oracle)
            ideal = self._in_float64(update.before, gradient, seen, optimizer)
        far = []
        for name in sorted(seen.names):
            after, before = update.after[name], update.before[name]
            measured: dict[str, Any] = {
                "parameter_distance": replayed.parameter_distance(after, exact[name], before),
                "parameter_tolerance": replayed.KAPPA * unit_roundoff(after.dtype),
            }
            if measured["parameter_distance"] > measured["parameter_tolerance"]:
                far.append(name)
            if ideal is not None:
                measured["oracle_parameter_distance"] = replayed.parameter_distance(
                    after, ideal[name], before
                )
            self._measured[u, name] = measured
        return far

    def _in_float64(
        self, before: Tensors, gradient: Gradients, seen: OptimizerTrace, optimizer: Optimizer
    ) -> dict[str, Tensor]:
        groups, device = self._expected.hyperparameters(optimizer), self._expected.device
        return replayed.float64_updated(before, gradient, seen, optimizer, groups, device)

    def _update(
        self,
        u: int,
        update: UpdateTrace,
        seen: OptimizerTrace,
        optimizer: Optimizer,
        after: Tensors,
        state: Mapping[str, Mapping[str, Any]],
        exact: Tensors,
    ) -> Iterator[Finding]:
        before = update.before
        odd = [n for n in sorted(seen.names) if not same_values(update.after.get(n), after[n])]
        wanted = self._expected.hyperparameters(optimizer)
        other = implementation.other(seen, optimizer, wanted)
        if odd and other and implementation.moved_alike(seen.names, update.after, after, before):
            odd = implementation.far(odd, update.after, exact, before)
        if odd:
            off = ratio(distance(update.after[odd[0]], after[odd[0]]), norm(after[odd[0]]))
            yield Finding(
                Cause.PARAMETERS,
                f"parameter {odd[0]!r} is {off:.3g} of its norm away from what the experiment's "
                f"{type(optimizer).__name__} makes of the same gradient and state in update {u} "
                f"({len(odd)} of {len(seen.names)} parameters){self._own_clone(update, seen)}",
                update=u,
                tensor=odd[0],
                distance=off,
                tolerance=0.0,
            )
            return
        yield from self._state(u, seen, state, other)

    def _own_clone(self, update: UpdateTrace, seen: OptimizerTrace) -> str:
        """Whether a clone of the loop's own optimizer gives its parameters, in a clause."""
        try:
            after, _ = replayed.real_clone_updated(
                update.before, update.clipped, seen, self._expected.device
            )
        except Exception as error:  # whatever a user's class does when it is rebuilt
            return f"; its own {seen.kind.__name__} could not be cloned ({error})"
        if all(same_values(update.after.get(n), after[n]) for n in seen.names):
            return f"; the loop's own {seen.kind.__name__} does give them: it is another optimizer"
        return (
            f"; the loop's own {seen.kind.__name__} does not give them either: code beside it "
            "moved them"
        )

    def _state(
        self,
        u: int,
        seen: OptimizerTrace,
        expected: Mapping[str, Mapping[str, Any]],
        other: bool,
    ) -> Iterator[Finding]:
        """State after the update bit for bit; within rounding from another implementation."""
        for name in sorted(expected):
            for key, wanted in expected[name].items():
                found = seen.state_after.get(name, {}).get(key)
                if same_values(wanted, found):
                    continue
                if other and implementation.close_state(key, wanted, found):
                    continue
                yield Finding(
                    Cause.COUNTERS if key == COUNTER else Cause.STATE,
                    f"optimizer state {key!r} of {name!r} after update {u} is not what "
                    "the experiment's optimizer leaves",
                    update=u,
                    tensor=name,
                    about=About.COUNTER if key == COUNTER else "",
                )
                return


def _odd(groups: ParamGroups, wanted: ParamGroups) -> dict[str, str]:
    """What differs, in words, by the first parameter of each difference."""
    found = by_name(groups)
    told: dict[str, str] = {}
    for name, values in by_name(wanted).items():
        odd = "; ".join(replayed.same_hyperparameters(found.get(name, {}), values)[:3])
        if odd and odd not in told.values():
            told[name] = odd
    return told


def _hyperparameters(
    u: int, groups: ParamGroups, wanted: ParamGroups, optimizer: Optimizer, when: str = "at"
) -> Iterator[Finding]:
    for name, odd in _odd(groups, wanted).items():
        yield Finding(
            Cause.HYPERPARAMETERS,
            f"{type(optimizer).__name__} has {odd} for {name!r} {when} update {u}",
            update=u,
            tensor=name,
            about=About.DECAY if odd.startswith("weight_decay=") and ";" not in odd else "",
        )


def _other_optimizer(u: int, seen: OptimizerTrace) -> Finding:
    return Finding(
        Cause.HYPERPARAMETERS,
        f"{seen.kind.__name__} holds {len(seen.names)} parameters that no optimizer of the "
        f"experiment holds together in update {u}",
        update=u,
    )


def _cast(
    u: int, names: Sequence[str], update: UpdateTrace, dtypes: Mapping[str, torch.dtype]
) -> Finding:
    first = names[0]
    return Finding(
        Cause.PARAMETERS,
        f"parameter {first!r} is {str(update.before[first].dtype)[6:]} in update {u}, and "
        f"{str(dtypes[first])[6:]} in this precision ({len(names)} parameters): the loop cast the "
        "model",
        update=u,
        tensor=first,
    )


def _refused(u: int, seen: OptimizerTrace, optimizer: Optimizer, error: Exception) -> Finding:
    return Finding(
        Cause.PARAMETERS,
        f"the experiment's {type(optimizer).__name__} refuses the gradient of update {u} "
        f"({error}), and the loop's {seen.kind.__name__} took it: it is another optimizer",
        update=u,
    )


def _sparse(gradient: Tensor | None) -> bool:
    return gradient is not None and gradient.layout is not torch.strided
