"""A loop whose methods are its places, and faults that each override one of them.

Two of different places make one loop: ``type("Pair", (One, Other, Loop), {})``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from equivtest import Group, Loss, Rank
from equivtest.causes import Cause
from equivtest.faults import hooks, optimizer
from equivtest.faults.amp import own_scaler
from equivtest.faults.pieces import cleared, no_sync, own_count, summed


class Loop:
    """The recipe, a method for each place. The experiment's loss has one term."""

    rank: Rank

    def __call__(self, rank: Rank) -> None:
        self.rank = rank
        self.start()
        for group in self.groups():
            for k, batch in enumerate(self.batches(group)):
                self.before_microbatch(group, k)
                with self.reducing(group, k):
                    with rank.autocast():
                        loss = rank.loss(rank.model, batch)
                    share = self.normalised(loss, group, k)
                    self.before_backward(group, k)
                    self.scaled(share, k).backward()
                self.after_backward(group, k)
            self.clip()
            applied = self.scheduled_update()
            self.averaged(applied)
            self.clear()

    def start(self) -> None:
        pass

    def groups(self) -> Sequence[Group]:
        return self.rank.groups

    def batches(self, group: Group) -> Iterator[Any]:
        return iter(group)

    def before_microbatch(self, group: Group, k: int) -> None:
        pass

    def reducing(self, group: Group, k: int) -> AbstractContextManager[Any]:
        return nullcontext() if k == len(group) - 1 else no_sync(self.rank)

    def normalised(self, loss: Loss, group: Group, k: int) -> Tensor:
        return loss.total / group.count * self.rank.D

    def before_backward(self, group: Group, k: int) -> None:
        pass

    def scaled(self, share: Tensor, k: int) -> Tensor:
        return self.rank.scaler.scale(share) if self.rank.scaler else share

    def after_backward(self, group: Group, k: int) -> None:
        pass

    def clip(self) -> None:
        if self.rank.scaler:
            self.rank.scaler.unscale_(self.rank.optimizer)
        self.clip_to_bound()

    def clip_to_bound(self) -> None:
        if self.rank.clip_norm is not None:
            clip_grad_norm_(self.rank.module.parameters(), self.rank.clip_norm)

    def scheduled_update(self) -> bool:
        applied = self.update()
        if applied:
            self.move_schedule()
        return applied

    def update(self) -> bool:
        rank = self.rank
        if rank.scaler is None:
            rank.optimizer.step()
            return True
        before = rank.scaler.get_scale()
        rank.scaler.step(rank.optimizer)
        rank.scaler.update()
        return bool(rank.scaler.get_scale() >= before)

    def move_schedule(self) -> None:
        if self.rank.scheduler is not None:
            self.rank.scheduler.step()

    def averaged(self, applied: bool) -> None:
        if applied:
            self.move_average()

    def move_average(self) -> None:
        if self.rank.average is not None:
            self.rank.average.update_parameters(self.rank.module)

    def clear(self) -> None:
        self.rank.optimizer.zero_grad()


class Planted:
    """A fault of one place.

    Attributes:
        cause: what a verdict must name.
        place: faults of one place do not go together.
        needs: what the experiment must have: ``clip``, ``schedule``, ``average``, ``tail`` (a last
            group), ``stop`` (updates enough to stop before the end).
    """

    cause: ClassVar[Cause]
    place: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()


def _mean(loss: Loss) -> Tensor:
    return loss.total / own_count(loss)


# -- what the loss is divided by


class MeanOfMeansAccum(Planted, Loop):
    cause, place = Cause.MEAN_OF_MEANS_ACCUM, "denominator"

    def normalised(self, loss: Loss, group: Group, k: int) -> Tensor:
        return loss.total / summed(self.rank, own_count(loss)) * self.rank.D / len(group)


class LocalDenominator(Planted, Loop):
    cause, place = Cause.LOCAL_DENOMINATOR_DP, "denominator"

    def normalised(self, loss: Loss, group: Group, k: int) -> Tensor:
        return loss.total / group.local_count


class MeanOfMeansBoth(Planted, Loop):
    cause, place = Cause.MEAN_OF_MEANS_BOTH, "denominator"

    def normalised(self, loss: Loss, group: Group, k: int) -> Tensor:
        return _mean(loss) / len(group)


class MissingWorldSize(Planted, Loop):
    cause, place = Cause.MISSING_WORLD_SIZE, "denominator"

    def normalised(self, loss: Loss, group: Group, k: int) -> Tensor:
        return loss.total / group.count


class DoubleAccumDivision(Planted, Loop):
    cause, place = Cause.DOUBLE_ACCUM_DIVISION, "denominator"

    def normalised(self, loss: Loss, group: Group, k: int) -> Tensor:
        return super().normalised(loss, group, k) / len(group)


class MissingAccumDivision(Planted, Loop):
    cause, place = Cause.MISSING_ACCUM_DIVISION, "denominator"

    def normalised(self, loss: Loss, group: Group, k: int) -> Tensor:
        return _mean(loss)


class MissingDivision(Planted, Loop):
    cause, place = Cause.MISSING_DIVISION, "denominator"

    def normalised(self, loss: Loss, group: Group, k: int) -> Tensor:
        return loss.total


class Miscounted(Planted, Loop):
    """One element more for each example: the label shift removes it."""

    cause, place = Cause.MISCOUNTED, "denominator"

    def normalised(self, loss: Loss, group: Group, k: int) -> Tensor:
        examples = summed(self.rank, sum(map(len, group.examples)))
        return loss.total / (group.count + examples) * self.rank.D


class PartialDivisor(Planted, Loop):
    cause, place = Cause.PARTIAL_DIVISOR, "denominator"
    needs = frozenset({"tail"})

    def normalised(self, loss: Loss, group: Group, k: int) -> Tensor:
        most = max(map(len, self.rank.groups))
        return super().normalised(loss, group, k) * len(group) / most


# -- when it is reduced, and how


class InvertedBoundary(Planted, Loop):
    cause, place = Cause.INVERTED_BOUNDARY, "sync"

    def reducing(self, group: Group, k: int) -> AbstractContextManager[Any]:
        return nullcontext() if k == 0 else no_sync(self.rank)


class FlagAfterForward(Planted, Loop):
    cause, place = Cause.FLAG_AFTER_FORWARD, "sync"

    def reducing(self, group: Group, k: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def before_backward(self, group: Group, k: int) -> None:
        self.rank.model.require_backward_grad_sync = k == len(group) - 1


class NeverReduced(Planted, Loop):
    cause, place = Cause.NEVER_SYNCHRONISED, "sync"

    def reducing(self, group: Group, k: int) -> AbstractContextManager[Any]:
        return no_sync(self.rank)


class SummingHook(Planted, Loop):
    cause, place = Cause.HOOK_MISSING_DIVISION, "reduce"

    def start(self) -> None:
        super().start()
        self.rank.model.register_comm_hook(self.rank.dp_group, hooks.summing)


class DividingTwiceHook(Planted, Loop):
    cause, place = Cause.HOOK_DOUBLE_DIVISION, "reduce"

    def start(self) -> None:
        super().start()
        self.rank.model.register_comm_hook(self.rank.dp_group, hooks.dividing_twice)


class NarrowHook(Planted, Loop):
    cause, place = Cause.LOW_PRECISION_REDUCE, "reduce"

    def start(self) -> None:
        super().start()
        self.rank.model.register_comm_hook(self.rank.dp_group, hooks.in_bfloat16)


# -- what is cleared, between microbatches and between groups


class OnlyLast(Planted, Loop):
    cause, place = Cause.ONLY_LAST, "microbatch"

    def before_microbatch(self, group: Group, k: int) -> None:
        cleared(self.rank)


class StaleCarryover(Planted, Loop):
    cause, place = Cause.STALE_CARRYOVER, "clear"

    def clear(self) -> None:
        pass


# -- clip and loss scale


class ClipPerMicrobatch(Planted, Loop):
    cause, place = Cause.CLIP_PER_MICROBATCH, "after_backward"
    needs = frozenset({"clip"})

    def after_backward(self, group: Group, k: int) -> None:
        super().after_backward(group, k)
        if k < len(group) - 1:
            scale = self.rank.scaler.get_scale() if self.rank.scaler else 1.0
            assert self.rank.clip_norm is not None
            clip_grad_norm_(self.rank.module.parameters(), self.rank.clip_norm * scale)


class ClipMissing(Planted, Loop):
    cause, place = Cause.CLIP_MISSING, "clip"
    needs = frozenset({"clip"})

    def clip_to_bound(self) -> None:
        pass


class _Scaled(Planted, Loop):
    """With a scaler of the loop's own."""

    def start(self) -> None:
        super().start()
        self.rank.scaler = own_scaler(self.rank)


class ClipBeforeUnscale(_Scaled):
    cause, place = Cause.CLIP_BEFORE_UNSCALE, "clip"
    needs = frozenset({"clip"})

    def clip(self) -> None:
        self.clip_to_bound()


class DoubleUnscale(_Scaled):
    cause, place = Cause.DOUBLE_UNSCALE, "unscale"

    def clip(self) -> None:
        for parameter in self.rank.module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(self.rank.scaler.get_scale())
        super().clip()


class ScaleDiffers(Planted, Loop):
    """Each rank's scale is a quarter of the next one's."""

    cause, place = Cause.SCALE_DIFFERS, "scale"

    def start(self) -> None:
        super().start()
        scale = own_scaler(self.rank).get_scale() * 4.0 ** (self.rank.dp_rank + 1 - self.rank.D)
        self.rank.scaler = torch.amp.GradScaler(self.rank.device.type, init_scale=scale)


class ScaleChangesInside(_Scaled):
    cause, place = Cause.SCALE_CHANGES_INSIDE_GROUP, "scale"

    def before_microbatch(self, group: Group, k: int) -> None:
        super().before_microbatch(group, k)
        if k > 0:
            self.rank.scaler.update(new_scale=self.rank.scaler.get_scale() / 2)


# -- optimizer, schedule, average


class CounterFrozen(Planted, Loop):
    cause, place = Cause.COUNTER_FROZEN, "update"

    def start(self) -> None:
        super().start()
        self.rank.optimizer = optimizer._uncounted(self.rank.optimizer)
        if self.rank.scheduler is not None:
            self.rank.scheduler.optimizer = self.rank.optimizer


class DecayPerMicrobatch(Planted, Loop):
    cause, place = Cause.DECAY_PER_MICROBATCH, "after_backward"

    def after_backward(self, group: Group, k: int) -> None:
        super().after_backward(group, k)
        if k < len(group) - 1:
            optimizer.decay(self.rank)


class SchedulePerMicrobatch(Planted, Loop):
    cause, place = Cause.SCHED_PER_MICROBATCH, "schedule"
    needs = frozenset({"schedule"})

    def after_backward(self, group: Group, k: int) -> None:
        super().after_backward(group, k)
        self.rank.scheduler.step()

    def move_schedule(self) -> None:
        pass


class SchedulePerProcess(Planted, Loop):
    cause, place = Cause.SCHED_PER_PROCESS, "schedule"
    needs = frozenset({"schedule"})

    def move_schedule(self) -> None:
        for _ in range(self.rank.D):
            self.rank.scheduler.step()


class ScheduleBeforeUpdate(Planted, Loop):
    cause, place = Cause.SCHED_BEFORE_UPDATE, "schedule"
    needs = frozenset({"schedule"})

    def scheduled_update(self) -> bool:
        self.rank.scheduler.step()
        return self.update()


class ScheduleNever(Planted, Loop):
    cause, place = Cause.SCHED_NEVER, "schedule"
    needs = frozenset({"schedule"})

    def move_schedule(self) -> None:
        pass


class AveragePerMicrobatch(Planted, Loop):
    cause, place = Cause.EMA_PER_MICROBATCH, "average"
    needs = frozenset({"average"})

    def after_backward(self, group: Group, k: int) -> None:
        super().after_backward(group, k)
        if k < len(group) - 1:
            self.move_average()


class AverageBeforeUpdate(Planted, Loop):
    cause, place = Cause.EMA_BEFORE_UPDATE, "average"
    needs = frozenset({"average"})

    def update(self) -> bool:
        self.move_average()
        return super().update()

    def averaged(self, applied: bool) -> None:
        pass


class AverageNever(Planted, Loop):
    cause, place = Cause.EMA_NEVER, "average"
    needs = frozenset({"average"})

    def averaged(self, applied: bool) -> None:
        pass


# -- which groups there are, and what they hold


class StoppedEarly(Planted, Loop):
    """``max_steps`` is meant in updates and counted in microbatches."""

    cause, place = Cause.MICRO_VS_UPDATE, "groups"
    needs = frozenset({"stop"})

    def groups(self) -> Sequence[Group]:
        kept, seen = [], 0
        for group in self.rank.groups:
            if seen < len(self.rank.groups):
                kept.append(group)
            seen += len(group)
        return kept


class TailDropped(Planted, Loop):
    cause, place = Cause.TAIL_DROPPED, "groups"
    needs = frozenset({"tail"})

    def groups(self) -> Sequence[Group]:
        most = max(map(len, self.rank.groups))
        return [group for group in self.rank.groups if len(group) == most]


# -- what costs more than it must, and what is only told: right in value


class ReducedEachTime(Planted, Loop):
    cause, place = Cause.EXTRA, "sync"

    def reducing(self, group: Group, k: int) -> AbstractContextManager[Any]:
        return nullcontext()


class LossesKept(Planted, Loop):
    """A curve of losses, each with the graph that it came from."""

    cause, place = Cause.KEPT_GRAPH, "keeping"

    def start(self) -> None:
        super().start()
        self.curve: list[Tensor] = []

    def scaled(self, share: Tensor, k: int) -> Tensor:
        self.curve.append(share)
        return super().scaled(share, k)


class LossLoggedOverA(Planted, Loop):
    cause, place = Cause.LOSS_FACTOR, "logging"

    def start(self) -> None:
        super().start()
        self.shares: list[float] = []

    def scaled(self, share: Tensor, k: int) -> Tensor:
        self.shares.append(float(share.detach()))
        return super().scaled(share, k)

    def clip(self) -> None:
        mean = sum(self.shares) / len(self.shares)
        self.rank.report(summed(self.rank, mean) / self.rank.D)
        self.shares.clear()
        super().clip()


NOTED: tuple[type[Planted], ...] = (ReducedEachTime, LossesKept, LossLoggedOverA)

FAULTS: tuple[type[Planted], ...] = (
    MeanOfMeansAccum,
    LocalDenominator,
    MeanOfMeansBoth,
    MissingWorldSize,
    DoubleAccumDivision,
    MissingAccumDivision,
    MissingDivision,
    Miscounted,
    PartialDivisor,
    InvertedBoundary,
    FlagAfterForward,
    NeverReduced,
    SummingHook,
    DividingTwiceHook,
    NarrowHook,
    OnlyLast,
    StaleCarryover,
    ClipPerMicrobatch,
    ClipMissing,
    ClipBeforeUnscale,
    DoubleUnscale,
    ScaleDiffers,
    ScaleChangesInside,
    CounterFrozen,
    DecayPerMicrobatch,
    SchedulePerMicrobatch,
    SchedulePerProcess,
    ScheduleBeforeUpdate,
    ScheduleNever,
    AveragePerMicrobatch,
    AverageBeforeUpdate,
    AverageNever,
    StoppedEarly,
    TailDropped,
)
