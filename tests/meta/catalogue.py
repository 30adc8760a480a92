"""The planted faults: how each is planted in a drawn case, and where it shows at all."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from drawn import NO_EPS, PRECISIONS, Drawn
from meta import gradient_faults as g
from meta import update_faults as u
from meta.predicted import Counted, Predicted

from equivtest import Plan
from equivtest.faults import (
    accumulation,
    clip,
    normalisation,
    optimizer,
    precision,
    schedule,
    skip,
    synchronisation,
)
from equivtest.faults.pieces import bare
from equivtest.faults.weights import WeightError

BUT_BF16 = tuple(p for p in PRECISIONS if p != "bf16")
FLOAT32_GRADIENTS = ("fp32", "bf16-mixed", "fp16-mixed")


@dataclass(frozen=True)
class Plant:
    """A faulty loop, or wrapper, or both."""

    loop: Callable[[Any], None] | None = None
    wrap: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Fault:
    """One kind.

    Attributes:
        plant: the fault in a drawn case; None where it changes nothing there (judged by
            ``Predicted``, not by equivtest).
        precisions: where it must be seen.
        shaped: what the drawn case must have for the fault to be possible.
        causes: if given, one of them must be among the verdict's.
        seen: share of the draws that must be seen.
        right: the loop, where the fault can change nothing: it is right there, and called so.
    """

    name: str
    plant: Callable[[Predicted], Plant | None]
    precisions: tuple[str, ...] = PRECISIONS
    shaped: Callable[[Drawn], Drawn] = lambda drawn: drawn
    causes: tuple[str, ...] = ()
    seen: float = 1.0
    right: Callable[[Any], None] | None = None


# -- weights by count


def _weighs(
    loop: Callable[[Any], None], given: Callable[[Counted, int, int], float], wrap: Any = None
) -> Callable[[Predicted], Plant | None]:
    """Planted where some microbatch counts another number of times than 1."""

    def plant(p: Predicted) -> Plant | None:
        weights = [w for counted in p.counted for w in counted.weights(given).values()]
        off = any(not math.isclose(w, 1.0, rel_tol=1e-9) for w in weights)
        return Plant(loop, wrap) if off else None

    return plant


def _mean_of_means(c: Counted, r: int, k: int) -> float:
    return c.total / c.counts[r][k] / (len(c.counts) * len(c.counts[r]))


def _local_denominator(c: Counted, r: int, k: int) -> float:
    return c.total / sum(c.counts[r]) / len(c.counts)


def _double_division(c: Counted, r: int, k: int) -> float:
    return 1 / len(c.counts[r])


def _missing_world_size(c: Counted, r: int, k: int) -> float:
    return 1 / len(c.counts)


def _all_but_last(c: Counted, r: int, k: int) -> float:
    return float(k < len(c.counts[r]) - 1)


def _only_last(c: Counted, r: int, k: int) -> float:
    return float(k == len(c.counts[r]) - 1)


def _several(drawn: Drawn) -> Drawn:
    """At least two accumulations, and full groups only: a last group may have one microbatch."""
    plan = drawn.plan
    plan = Plan(plan.m, max(2, plan.A), plan.D)
    return replace(drawn, plan=plan, examples=plan.examples, last_group=None)


def _two_replicas(drawn: Drawn) -> Drawn:
    plan = Plan(drawn.plan.m, drawn.plan.A, max(2, drawn.plan.D))
    return replace(drawn, plan=plan, examples=plan.examples, last_group=None)


def _spare(p: Predicted) -> random.Random:
    """Random choices that belong to the drawn case."""
    return random.Random(p.drawn.seed)


def _weight_error(error: float, p: Predicted) -> Plant | None:
    heavy = [key for key in p.parts if p.share(key) >= 0.01]
    if not heavy:
        return None
    r, k = _spare(p).choice(heavy)
    return Plant(WeightError(0, r, k, error))


# -- single tensors


def _zeroed(p: Predicted) -> Plant | None:
    biases = [n for n in p.gradient if n.endswith("bias")]
    name = _spare(p).choice(biases)
    seen = p.beyond(name, 0 * p.gradient[name])
    return Plant(g.Edited(g.Zeroed(name))) if seen else None


def _swapped(p: Predicted) -> Plant | None:
    names = list(p.gradient)
    pairs = [
        (a, b)
        for i, a in enumerate(names)
        for b in names[i + 1 :]
        if p.gradient[a].shape == p.gradient[b].shape
    ]
    if not pairs:
        return None
    a, b = _spare(p).choice(pairs)
    seen = p.beyond(a, p.gradient[b]) or p.beyond(b, p.gradient[a])
    return Plant(g.Edited(g.Swapped(a, b))) if seen else None


def _unreduced(p: Predicted) -> Plant | None:
    name = _spare(p).choice(list(p.gradient))
    seen = any(p.beyond(name, p.replica(r, name)) for r in range(p.drawn.plan.D))
    return Plant(wrap=g.Unreduced(name)) if seen else None


def _wrong_replica(p: Predicted) -> Plant | None:
    name = _spare(p).choice(list(p.gradient))
    # The wrapper leaves it alone, so each rank holds its own; rank 0's goes everywhere.
    seen = p.beyond(name, p.replica(0, name))
    return Plant(g.WrongReplica(name), g.Unreduced(name)) if seen else None


def _ranks_apart(p: Predicted) -> bool:
    return any(p.beyond(n, p.replica(0, n)) for n in p.gradient)


def _if_apart(loop: Callable[[Any], None]) -> Callable[[Predicted], Plant | None]:
    return lambda p: Plant(loop) if _ranks_apart(p) else None


# -- clip, state, schedule


def _clipping(drawn: Drawn) -> Drawn:
    return replace(drawn, clip=0.01)


def _clip_active(p: Predicted) -> Plant | None:
    bound = p.experiment.clip_norm
    assert bound is not None
    return Plant(clip.missing) if p.norm > 1.05 * bound else None


def _always(loop: Callable[[Any], None]) -> Callable[[Predicted], Plant | None]:
    return lambda p: Plant(loop)


def _repeated(*names: str, updates: int = 2) -> Callable[[Drawn], Drawn]:
    """One of the named optimizers, no schedule, at least so many updates."""

    def shaped(drawn: Drawn) -> Drawn:
        fitting = [n for n in names if drawn.precision != "fp16" or n in NO_EPS]
        name = drawn.optimizer if drawn.optimizer in fitting else ""
        return replace(
            drawn,
            optimizer=name or random.Random(drawn.seed).choice(fitting or ["sgd"]),
            updates=max(updates, drawn.updates),
            schedule=False,
        )

    return shaped


COUNTING = ("adam", "adamw", "amsgrad", "fused-adamw", "rmsprop", "adagrad")
REMEMBERING = ("momentum", "nesterov", *COUNTING)
HALVED = ("momentum", "nesterov", "adam", "adamw", "amsgrad", "fused-adamw")
DECAYING = ("sgd", "adam", "adamw", "amsgrad", "fused-adamw")
BUT_FP16 = tuple(p for p in PRECISIONS if p != "fp16")


def _rebuilt(p: Predicted) -> Plant | None:
    return Plant(u.Rebuilt(p.experiment.optimizer))


def _scheduled(drawn: Drawn) -> Drawn:
    return replace(drawn, schedule=True)


def _unscheduled(drawn: Drawn) -> Drawn:
    return replace(drawn, schedule=False)


def _twice(drawn: Drawn) -> Drawn:
    return replace(drawn, updates=max(2, drawn.updates))


def _carried(drawn: Drawn) -> Drawn:
    return replace(drawn, updates=max(2, drawn.updates), clip=None, schedule=False)


FAULTS = (
    Fault(
        "mean_of_means",
        _weighs(normalisation.mean_of_means_both, _mean_of_means),
        right=normalisation.mean_of_means_both,
        precisions=BUT_BF16,
    ),
    Fault(
        "mean_of_means_by_torch",
        _weighs(normalisation.mean_of_means_by_torch, _mean_of_means),
        right=normalisation.mean_of_means_by_torch,
        precisions=BUT_BF16,
    ),
    Fault(
        "local_denominator",
        _weighs(normalisation.local_denominator_dp, _local_denominator),
        right=normalisation.local_denominator_dp,
        precisions=BUT_BF16,
    ),
    Fault(
        "double_division",
        _weighs(normalisation.double_accum_division, _double_division),
        right=normalisation.double_accum_division,
        precisions=BUT_BF16,
    ),
    Fault(
        "missing_world_size",
        _weighs(normalisation.missing_world_size, _missing_world_size),
        right=normalisation.missing_world_size,
        precisions=BUT_BF16,
    ),
    Fault(
        "last_never_fetched",
        _weighs(g.last_never_fetched, _all_but_last),
        shaped=_several,
    ),
    Fault(
        "last_never_backward",
        _weighs(g.last_never_backward, _all_but_last, bare),
        shaped=_several,
        precisions=BUT_BF16,
    ),
    Fault(
        "last_masked_out",
        _weighs(g.last_masked_out, _all_but_last),
        precisions=BUT_BF16,
    ),
    Fault(
        "only_last",
        _weighs(accumulation.only_last, _only_last),
        right=accumulation.only_last,
        precisions=BUT_BF16,
    ),
    Fault("weight_1e-4", partial(_weight_error, 1e-4), ("fp64", *FLOAT32_GRADIENTS), seen=0.99),
    Fault("weight_1e-12", partial(_weight_error, 1e-12), ("fp64",)),
    Fault(
        "low_precision_accumulator",
        _always(g.low_precision_accumulator),
        ("fp64", *FLOAT32_GRADIENTS),
    ),
    Fault("zeroed_bias", _zeroed),
    Fault("swapped", _swapped),
    Fault("unreduced", _unreduced, shaped=_two_replicas),
    Fault("wrong_replica", _wrong_replica, shaped=_two_replicas),
    Fault("never_synchronised", _if_apart(synchronisation.never), shaped=_two_replicas),
    Fault(
        "inverted_boundary",
        _if_apart(synchronisation.inverted_boundary),
        shaped=lambda d: _two_replicas(_several(d)),
    ),
    Fault("stale_carryover", _always(accumulation.stale_carryover), BUT_BF16, shaped=_carried),
    Fault("clip_left_out", _clip_active, shaped=_clipping, causes=("clip.missing",)),
    Fault(
        "autocast_left_out",
        _always(precision.autocast_left_out),
        ("bf16-mixed", "fp16-mixed"),
        causes=("prec.not_applied",),
    ),
    Fault("optimizer_rebuilt", _rebuilt, shaped=_repeated(*REMEMBERING)),
    Fault(
        "counter_frozen",
        _always(u.counter_frozen),
        BUT_FP16,
        shaped=_repeated(*COUNTING, updates=1),
    ),
    Fault("counter_reset", _always(u.counter_reset), BUT_FP16, shaped=_repeated(*COUNTING)),
    Fault(
        "momentum_halved",
        _always(u.momentum_halved),
        shaped=_repeated(*HALVED),
    ),
    Fault("learning_rate_off", _always(u.learning_rate_off)),
    Fault("learning_rate_off_inside", _always(u.learning_rate_off_inside), shaped=_unscheduled),
    Fault("decay_left_out", _always(u.decay_left_out), shaped=_repeated(*DECAYING, updates=1)),
    Fault("parameters_edited", _always(u.parameters_edited), shaped=_twice),
    Fault("scheduler_per_microbatch", _always(schedule.per_microbatch), shaped=_scheduled),
    Fault("extra_update", _always(u.extra_update)),
    Fault("update_per_microbatch", _always(optimizer.update_per_microbatch), shaped=_several),
    Fault(
        "skipped_by_one_rank",
        _always(skip.overflow_of_one_rank),
        ("fp16-mixed",),
        shaped=_two_replicas,
    ),
)

MEASURED = (
    *(
        replace(fault, name=f"{fault.name}_in_bf16", precisions=("bf16",), seen=0.0)
        for fault in FAULTS
        if fault.name
        in ("mean_of_means", "local_denominator", "double_division", "last_masked_out")
    ),
    Fault(
        "learning_rate_off_in_a_class",
        _always(u.InsideAClass("lr", 1.01)),
        shaped=_unscheduled,
        seen=0.0,
    ),
    Fault(
        "decay_left_out_in_a_class",
        _always(u.InsideAClass("weight_decay", 0.0)),
        shaped=_repeated(*DECAYING, updates=1),
        seen=0.0,
    ),
)
"""What cannot be seen in every precision: measured, not asked for."""
