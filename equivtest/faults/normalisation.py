"""Loss normalisation: what the loss is divided by."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from equivtest.causes import Cause
from equivtest.experiment import Group, Loss, Rank
from equivtest.faults.pieces import (
    backward,
    finish,
    forward,
    over,
    own_count,
    reducing_last,
    right,
    summed,
)
from equivtest.faults.planting import Planted
from equivtest.faults.setting import (
    Counted,
    Setting,
    accumulates,
    not_overflowing,
    replicates,
    unlike,
    weighs,
)
from equivtest.loops import normalised


def mean_of_means_accum(rank: Rank) -> None:
    """Each microbatch over its own count of all replicas, the means averaged over A."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                loss = forward(rank, batch)
                count = summed(rank, own_count(loss))
                backward(rank, over(loss, count) * rank.D / len(group))
        finish(rank)


def local_denominator_dp(rank: Rank) -> None:
    """Each replica over its own count, averaged over D by the wrapper."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                backward(rank, over(forward(rank, batch), group.local_count))
        finish(rank)


def mean_of_means_both(rank: Rank) -> None:
    """The mean of each microbatch, averaged over A by the loop and over D by the wrapper."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                loss = forward(rank, batch)
                backward(rank, over(loss, own_count(loss)) / len(group))
        finish(rank)


def mean_of_means_by_torch(rank: Rank) -> None:
    """As most loops are written: torch's mean of each microbatch, and no ``Loss`` anywhere."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                with rank.autocast():
                    logits = rank.model(batch["x"])
                    mean = F.cross_entropy(
                        logits.reshape(-1, logits.shape[-1]),
                        batch["target"].reshape(-1),
                        ignore_index=-100,
                    )
                backward(rank, mean / len(group))
        finish(rank)


def missing_world_size(rank: Rank) -> None:
    """Over the count of all replicas, and the wrapper averages over them once more."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                backward(rank, normalised(forward(rank, batch), group))
        finish(rank)


def non_autograd_reduce(rank: Rank) -> None:
    """The global loss by a collective that has no gradient."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                loss = normalised(forward(rank, batch), group)
                dist.all_reduce(loss.data, group=rank.dp_group)
                backward(rank, loss)
        finish(rank)


def double_accum_division(rank: Rank) -> None:
    """Over the group's count, and over A as if it were a microbatch's mean."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                backward(rank, right(rank, group, batch) / len(group))
        finish(rank)


def missing_accum_division(rank: Rank) -> None:
    """The means of the microbatches, added up."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                loss = forward(rank, batch)
                backward(rank, over(loss, own_count(loss)))
        finish(rank)


def missing_division(rank: Rank) -> None:
    """A loss with reduction="sum", and nothing else."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                loss = forward(rank, batch)
                terms = [loss] if isinstance(loss, Loss) else list(loss.values())
                backward(rank, torch.stack([term.total for term in terms]).sum())
        finish(rank)


def miscounted(rank: Rank) -> None:
    """The denominator has one position of each row that the label shift removes."""
    for group in rank.groups:
        rows = summed(rank, sum(map(len, group.examples)))
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                loss = forward(rank, batch)
                backward(rank, over(loss, _and_rows(group.count, rows)) * rank.D)
        finish(rank)


def _and_rows(count: Any, rows: float) -> Any:
    if isinstance(count, dict):
        return {name: n + rows for name, n in count.items()}
    return count + rows


def weight_denominator_mismatch(rank: Rank) -> None:
    """Means over supervised elements, weighted by the microbatch's share of the examples."""
    for group in rank.groups:
        examples = summed(rank, sum(map(len, group.examples)))
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                loss = forward(rank, batch)
                share = len(group.examples[k]) / examples
                backward(rank, over(loss, own_count(loss)) * share * rank.D)
        finish(rank)


def sum_convention(rank: Rank) -> None:
    """Times D once more: the sum of the replicas' gradients where others take the mean."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                backward(rank, right(rank, group, batch) * rank.D)
        finish(rank)


def sum_convention_by_batch(rank: Rank) -> None:
    """Times the examples of each microbatch on all replicas: m D."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                m = len(group.examples[k])
                backward(rank, right(rank, group, batch) * (m * rank.D))
        finish(rank)


def empty_microbatch(rank: Rank) -> None:
    """A mean, weighted rightly by its count: 0/0 where there is nothing to take it of."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                loss = forward(rank, batch)
                backward(rank, _weighted_means(loss, group) * rank.D)
        finish(rank)


def _weighted_means(loss: Any, group: Group) -> Tensor:
    if isinstance(loss, Loss):
        return loss.total / loss.count * (loss.count / group.count)
    shares = [
        term.total / term.count * (term.count / group.count[name]) for name, term in loss.items()
    ]
    return torch.stack(shares).sum()


# -- the weights that they give, 1 being right


def by_accumulation(c: Counted, r: int, k: int) -> float:
    return c.total / c.accumulations / sum(replica[k] for replica in c.supervised)


def by_replica(c: Counted, r: int, k: int) -> float:
    return c.total / c.replicas / sum(c.supervised[r])


def by_microbatch(c: Counted, r: int, k: int) -> float:
    return c.total / c.accumulations / c.replicas / c.supervised[r][k]


def sums_averaged(c: Counted, r: int, k: int) -> float:
    return c.total / c.replicas


def by_examples(c: Counted, r: int, k: int) -> float:
    return c.total * c.examples[r][k] / c.rows / c.supervised[r][k]


# -- where they show


def counts_elements(setting: Setting) -> str:
    """Counts do not go by examples: then it is the examples that count unequally."""
    shares = {n / m for n, m in _pairs(setting) if m}
    return "" if len(shares) > 1 else f"here it is {Cause.MEAN_OF_MEANS_SAMPLES}"


def counts_examples(setting: Setting) -> str:
    if all(n == m for n, m in _pairs(setting)):
        return ""
    return "the supervised elements are not the examples"


def more_than_rows(setting: Setting) -> str:
    if all(n == m for n, m in _pairs(setting)):
        return "an example is one supervised element: a label shift would leave none"
    return ""


def has_empty(setting: Setting) -> str:
    if any(n == 0 for n, _ in _pairs(setting)):
        return ""
    return "every microbatch has a supervised element"


def none_empty(setting: Setting) -> str:
    if any(n == 0 for n, _ in _pairs(setting)):
        return f"a microbatch is empty: here it is {Cause.EMPTY_MICROBATCH}"
    return ""


def of_classes(setting: Setting) -> str:
    first = setting.experiment.data[0]
    if isinstance(first, dict) and {"x", "target"} <= set(first):
        return ""
    return "it is written for batches of x and target"


def _pairs(setting: Setting) -> list[tuple[float, int]]:
    """Supervised elements and examples of every microbatch."""
    return [
        pair
        for counted in setting.counted
        for replica in zip(counted.supervised, counted.examples, strict=True)
        for pair in zip(*replica, strict=True)
    ]


_ACCUM = str(Cause.MEAN_OF_MEANS_ACCUM)
_LOCAL = str(Cause.LOCAL_DENOMINATOR_DP)

_BOTH = (
    accumulates,
    replicates,
    weighs(by_microbatch),
    counts_elements,
    unlike(by_microbatch, _ACCUM, by_accumulation),
    unlike(by_microbatch, _LOCAL, by_replica),
)

FAULTS = (
    Planted(
        "norm.mean_of_means_accum",
        Cause.MEAN_OF_MEANS_ACCUM,
        "transformers #34191",
        mean_of_means_accum,
        conditions=(accumulates, weighs(by_accumulation), counts_elements),
    ),
    Planted(
        "norm.local_denominator_dp",
        Cause.LOCAL_DENOMINATOR_DP,
        "transformers #34242",
        local_denominator_dp,
        conditions=(replicates, weighs(by_replica), counts_elements),
    ),
    Planted(
        "norm.mean_of_means_both",
        Cause.MEAN_OF_MEANS_BOTH,
        "torchtitan #1842",
        mean_of_means_both,
        conditions=_BOTH,
    ),
    Planted(
        "norm.mean_of_means_both/by_torch",
        Cause.MEAN_OF_MEANS_BOTH,
        "torchtitan #1842",
        mean_of_means_by_torch,
        conditions=(of_classes, none_empty, *_BOTH),
    ),
    Planted(
        "norm.missing_world_size",
        Cause.MISSING_WORLD_SIZE,
        "torchtune #2172",
        missing_world_size,
        conditions=(replicates,),
    ),
    Planted(
        "norm.non_autograd_reduce",
        Cause.NON_AUTOGRAD_REDUCE,
        "verl-SpeCo #29",
        non_autograd_reduce,
        conditions=(replicates,),
    ),
    Planted(
        "norm.double_accum_division",
        Cause.DOUBLE_ACCUM_DIVISION,
        "ms-swift #10117",
        double_accum_division,
        conditions=(accumulates,),
    ),
    Planted(
        "norm.missing_accum_division",
        Cause.MISSING_ACCUM_DIVISION,
        "transformers #46731, fastai #3023",
        missing_accum_division,
        conditions=(accumulates,),
    ),
    Planted(
        "norm.missing_division",
        Cause.MISSING_DIVISION,
        "",
        missing_division,
        conditions=(weighs(sums_averaged), not_overflowing),
    ),
    Planted(
        "norm.miscounted",
        Cause.MISCOUNTED,
        "transformers #46204",
        miscounted,
        conditions=(more_than_rows,),
    ),
    Planted(
        "norm.weight_denominator_mismatch",
        Cause.WEIGHT_DENOMINATOR_MISMATCH,
        "verl #5625",
        weight_denominator_mismatch,
        conditions=(
            weighs(by_examples),
            unlike(by_examples, str(Cause.MEAN_OF_MEANS_BOTH), by_microbatch),
            unlike(by_examples, _ACCUM, by_accumulation),
            unlike(by_examples, _LOCAL, by_replica),
        ),
    ),
    Planted(
        "norm.sum_convention",
        Cause.SUM_CONVENTION,
        "espnet #4136",
        sum_convention,
        conditions=(replicates,),
    ),
    Planted(
        "norm.sum_convention/by_batch",
        Cause.SUM_CONVENTION,
        "espnet #4136",
        sum_convention_by_batch,
        conditions=(replicates,),
    ),
    Planted(
        "norm.mean_of_means_samples",
        Cause.MEAN_OF_MEANS_SAMPLES,
        "pytorch #67253",
        mean_of_means_both,
        conditions=(counts_examples, weighs(by_microbatch)),
    ),
    Planted(
        "norm.empty_microbatch",
        Cause.EMPTY_MICROBATCH,
        "OLMo-core #657",
        empty_microbatch,
        conditions=(has_empty,),
    ),
)
