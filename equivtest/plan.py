"""Plans: how the examples of one update are cut into microbatches, accumulations and replicas.

Pure arithmetic, no torch: the same functions tell the ranks, the reference arms and the report
which example goes where.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from equivtest.arguments import a, is_whole

LastGroup = Literal["process", "drop"]


class PlanError(ValueError):
    """A plan that cannot be: a size below 1, or products that differ."""


@dataclass(frozen=True)
class Plan:
    """``m`` examples a microbatch, ``A`` accumulations, ``D`` replicas: one update, cut.

    Args:
        m: examples of one forward pass on one replica; a tuple of ``A`` sizes where the
            microbatches of a replica are unequal.
        A: microbatches per replica per update.
        D: data-parallel replicas. Each may span ``tp * pp`` processes, which share its examples.
        tp, pp: tensor- and pipeline-parallel processes of one replica.

    Raises:
        PlanError: a size is not a whole number of at least 1, or ``m`` has not ``A`` entries.
    """

    m: int | tuple[int, ...]
    A: int
    D: int
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.m, list):
            object.__setattr__(self, "m", tuple(self.m))
        for name in ("A", "D", "tp", "pp"):
            _positive(name, getattr(self, name))
        for size in self.m if isinstance(self.m, tuple) else (self.m,):
            _positive("m", size)
        if isinstance(self.m, tuple) and len(self.m) != self.A:
            raise PlanError(
                f"m={self.m} gives {len(self.m)} microbatch sizes, but A={self.A}: "
                "pass one size for each accumulation, or one number for all"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Examples of each of the ``A`` microbatches of a replica."""
        return self.m if isinstance(self.m, tuple) else (self.m,) * self.A

    @property
    def examples(self) -> int:
        """Examples per update: ``m * A * D`` (never the number of processes times anything)."""
        return sum(self.sizes) * self.D

    @property
    def processes(self) -> int:
        """Processes that the plan needs: ``D * tp * pp``."""
        return self.D * self.tp * self.pp

    @property
    def arithmetic(self) -> str:
        """The product in figures, for messages: ``2 x 8 x 2 = 32``."""
        m = (
            f"({' + '.join(map(str, self.sizes))})"
            if isinstance(self.m, tuple)
            else f"{self.m} x {self.A}"
        )
        return f"{m} x {self.D} = {self.examples}"

    def __str__(self) -> str:
        m = "+".join(map(str, self.sizes)) if isinstance(self.m, tuple) else str(self.m)
        model = "".join(f"-{n}{v}" for n, v in (("tp", self.tp), ("pp", self.pp)) if v > 1)
        return f"m{m}-A{self.A}-D{self.D}{model}"


def plans(B: int, *, max_D: int | None = None, max_m: int | None = None) -> list[Plan]:
    """Every ``Plan(m, A, D)`` with ``m * A * D == B``, in a fixed order: by D, then by A.

    Args:
        B: examples per update.
        max_D: largest number of replicas; all divisors of ``B`` if left out.
        max_m: largest microbatch, for a model that would not fit.

    Raises:
        PlanError: ``B``, ``max_D`` or ``max_m`` is not a whole number of at least 1.
    """
    _positive("B", B)
    for name, bound in (("max_D", max_D), ("max_m", max_m)):
        if bound is not None:
            _positive(name, bound)
    return [
        Plan(B // D // A, A, D)
        for D in _divisors(B)
        if max_D is None or D <= max_D
        for A in _divisors(B // D)
        if max_m is None or B // D // A <= max_m
    ]


def smaller(plan: Plan) -> Plan | None:
    """The plan of the same product with the next smaller microbatch; None where m is 1 already.

    ``m`` is divided by its smallest prime factor, which ``A`` is multiplied by; of unequal sizes
    those above half of the largest are halved.
    """
    if isinstance(plan.m, int):
        m = max((d for d in _divisors(plan.m) if d < plan.m), default=0)
        return replace(plan, m=m, A=plan.A * plan.m // m) if m else None
    half = (max(plan.m) + 1) // 2
    cut = [(size,) if size <= half else (size - size // 2, size // 2) for size in plan.m]
    sizes = tuple(part for parts in cut for part in parts)
    if len(sizes) == plan.A:
        return None
    return replace(plan, m=sizes if len(set(sizes)) > 1 else sizes[0], A=len(sizes))


def comparable(candidates: Iterable[Plan]) -> int:
    """The examples per update that all plans share.

    Raises:
        PlanError: two products differ; names both with their arithmetic.
    """
    first: Plan | None = None
    for plan in candidates:
        first = first or plan
        if plan.examples != first.examples:
            raise PlanError(
                f"{first} is {first.arithmetic} examples per update and {plan} is "
                f"{plan.arithmetic}: different products are different experiments; compare plans "
                "of one product"
            )
    if first is None:
        raise PlanError("no plan was given: pass at least one Plan(m, A, D)")
    return first.examples


@dataclass(frozen=True)
class GroupLayout:
    """Which example goes where in one update.

    Attributes:
        update: number of the update, from 0.
        epoch: pass over the data, from 0.
        ids: example ids by replica, microbatch and position.
        partial: the examples do not fill the plan's group.
        dropped: ids left out at the end of the epoch before this group (``last_group="drop"``).
        counted: ids whose supervised elements the loss is divided by, where they are not the
            group's: a loop may run several updates on what the plan has for one.
    """

    update: int
    epoch: int
    ids: tuple[tuple[tuple[int, ...], ...], ...]
    partial: bool = False
    dropped: tuple[int, ...] = ()
    counted: tuple[int, ...] = ()

    @property
    def flat(self) -> tuple[int, ...]:
        """All ids of the group, replica after replica: the order of the large batch."""
        return tuple(i for replica in self.ids for microbatch in replica for i in microbatch)

    @property
    def shape(self) -> tuple[tuple[int, ...], ...]:
        """Examples by replica and microbatch."""
        return tuple(tuple(len(ids) for ids in replica) for replica in self.ids)


def layout(
    plan: Plan,
    n: int,
    *,
    updates: int,
    shuffle: bool = False,
    last_group: LastGroup | None = None,
    seed: int = 0,
) -> tuple[GroupLayout, ...]:
    """The groups of ``updates`` attempted updates over ``n`` examples, epoch after epoch.

    A replica's examples are contiguous in the group, its microbatches contiguous in them. What is
    left at the end of an epoch is processed as a smaller group, or dropped and named.

    Raises:
        PlanError: ``n`` examples do not fill the groups and ``last_group`` does not say what to do,
            or dropping the last group would leave none.
    """
    _positive("updates", updates)
    if n < 1:
        raise PlanError(f"data has {n} examples: pass at least one")
    groups: list[GroupLayout] = []
    dropped: tuple[int, ...] = ()
    epoch = 0
    while len(groups) < updates:
        order = _epoch_order(n, epoch, shuffle, seed)
        for start in range(0, n, plan.examples):
            ids = order[start : start + plan.examples]
            partial = len(ids) < plan.examples
            if partial and last_group is None:
                raise PlanError(_unfilled(plan, n, len(ids)))
            if partial and last_group == "drop":
                if start == 0:
                    raise PlanError(
                        f'last_group="drop" leaves no group: {n} examples, and {plan} needs '
                        f"{plan.arithmetic}; pass more examples, a smaller plan or "
                        'last_group="process"'
                    )
                dropped = tuple(ids)
                break
            dealt = _deal_leftover(plan, ids) if partial else _deal_full(plan, ids)
            groups.append(GroupLayout(len(groups), epoch, dealt, partial, dropped))
            dropped = ()
            if len(groups) == updates:
                break
        epoch += 1
    return tuple(groups)


def _deal_full(plan: Plan, ids: Sequence[int]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    per_replica = sum(plan.sizes)
    return tuple(
        _cut(ids[r * per_replica : (r + 1) * per_replica], plan.sizes) for r in range(plan.D)
    )


def _deal_leftover(plan: Plan, ids: Sequence[int]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Deal ``ids`` so that replicas differ by at most one example, and have as many microbatches.

    Equal numbers of microbatches keep the replicas' reductions matched; a replica that has fewer
    examples than microbatches gets empty ones, with count 0.
    """
    base, extra = divmod(len(ids), plan.D)
    shares = [base + (r < extra) for r in range(plan.D)]
    microbatches = _needed(plan.sizes, shares[0])
    dealt, start = [], 0
    for share in shares:
        sizes = _spread(plan.sizes[:microbatches], share)
        dealt.append(_cut(ids[start : start + share], sizes))
        start += share
    return tuple(dealt)


def _needed(sizes: Sequence[int], share: int) -> int:
    """Microbatches that hold ``share`` examples, at least one."""
    room = 0
    for k, size in enumerate(sizes):
        room += size
        if room >= share:
            return k + 1
    return len(sizes)


def _spread(sizes: Sequence[int], share: int) -> list[int]:
    """Fill microbatches in order, keeping one example for each that follows while they last."""
    taken = []
    for k, size in enumerate(sizes):
        following = len(sizes) - k - 1
        take = min(size, max(share - following, min(share, 1)))
        taken.append(take)
        share -= take
    return taken


def _cut(ids: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    cut, start = [], 0
    for size in sizes:
        cut.append(tuple(ids[start : start + size]))
        start += size
    return tuple(cut)


def _epoch_order(n: int, epoch: int, shuffle: bool, seed: int) -> list[int]:
    order = list(range(n))
    if shuffle:
        random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


def _unfilled(plan: Plan, n: int, left: int) -> str:
    return (
        f"{n} examples do not fill the groups of {plan}: {plan.arithmetic} examples per update, "
        f'and {left} are left over; pass last_group="process" (a smaller last group with its own '
        'denominator) or last_group="drop"'
    )


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _positive(name: str, value: object) -> None:
    if not is_whole(value):
        raise PlanError(
            f"{name}={value!r} is {a(value)}: pass a whole number of at least 1, an int"
        )
    if value < 1:  # type: ignore[operator]
        raise PlanError(f"{name}={value!r}: pass a whole number of at least 1")
