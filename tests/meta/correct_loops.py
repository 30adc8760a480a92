"""Loops that are right and written otherwise than the recipe: none may be called a fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from drawn import PRECISIONS, VOCABULARY, Drawn
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from equivtest import Experiment, Group, Loss, Plan, Rank
from equivtest.faults.hooks import summing
from equivtest.faults.pieces import (
    accumulated,
    averaged,
    backward,
    bare,
    finish,
    reducing_last,
    right,
)
from equivtest.loops import advance

SGD_AND_ADAM = ("sgd", "momentum", "nesterov", "adam", "adamw")
BUT_SCALED = tuple(p for p in PRECISIONS if p != "fp16-mixed")


def _as_drawn(drawn: Drawn) -> Drawn:
    return drawn


def _unclipped(drawn: Drawn) -> Drawn:
    return replace(drawn, clip=None)


def _clipped(drawn: Drawn) -> Drawn:
    return replace(drawn, clip=drawn.clip or 0.01)


def _dense(drawn: Drawn) -> Drawn:
    plan = Plan(max(drawn.plan.sizes), drawn.plan.A, drawn.plan.D)
    return replace(drawn, plan=plan, ragged=False, examples=plan.examples, last_group=None)


# -- where the normalisation is applied


def divided_by_hand(rank: Rank) -> None:
    """Backward on the sums; the gradient is divided before the update."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                with rank.autocast():
                    total = rank.loss(rank.model, batch).total
                backward(rank, total)
        if rank.scaler is not None:
            rank.scaler.unscale_(rank.optimizer)
        for parameter in rank.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(rank.D / group.count)
        _update(rank)


def mean_times_share(rank: Rank) -> None:
    """Each microbatch's mean, weighted by its share of the group's elements."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                with rank.autocast():
                    loss = rank.loss(rank.model, batch)
                mean = loss.total / loss.count.clamp(min=1)
                backward(rank, mean * (float(loss.count) / group.count) * rank.D)
        finish(rank)


def microbatch_means(rank: Rank) -> None:
    """1/A of each microbatch's mean: right where all count as much."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                with rank.autocast():
                    loss = rank.loss(rank.model, batch)
                backward(rank, loss.total / loss.count / len(group))
        finish(rank)


def summed_losses(rank: Rank) -> None:
    """One backward on the group's summed losses: right, and costs A times the memory."""
    for group in rank.groups:
        backward(rank, sum(right(rank, group, batch) for batch in group))  # type: ignore[arg-type]
        finish(rank)


def own_loss(rank: Rank) -> None:
    """The loop computes its loss itself, from the logits, and builds no ``Loss``."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                with rank.autocast():
                    total = _summed(rank.model(batch["x"]), batch)
                backward(rank, total / group.count * rank.D)
        finish(rank)


def own_loss_of_means(rank: Rank) -> None:
    """As above, by the mean of each microbatch times its count over the group's."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                with rank.autocast():
                    n = (batch["target"] != -100).sum()
                    mean = _summed(rank.model(batch["x"]), batch) / n.clamp(min=1)
                backward(rank, mean * n * rank.D / group.count)
        finish(rank)


def own_loss_function(rank: Rank) -> None:
    """A loss function of the loop's own, of the same form as the experiment's."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                with rank.autocast():
                    total = _summed(rank.model(batch["x"]), batch)
                    loss = Loss(total=total, count=(batch["target"] != -100).sum())
                backward(rank, loss.total * rank.D / group.count)
        finish(rank)


def _summed(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(
        logits.reshape(-1, VOCABULARY),
        batch["target"].reshape(-1),
        ignore_index=-100,
        reduction="sum",
    )


# -- what is reduced, and when


def every_microbatch_reduced(rank: Rank) -> None:
    for group in rank.groups:
        for batch in group:
            backward(rank, right(rank, group, batch))
        finish(rank)


def flag_by_hand(rank: Rank) -> None:
    for group in rank.groups:
        for k, batch in enumerate(group):
            rank.model.require_backward_grad_sync = k == len(group) - 1
            backward(rank, right(rank, group, batch))
        finish(rank)


def reduced_by_hand(rank: Rank) -> None:
    """No wrapper: gradients averaged tensor by tensor before the update."""
    for group in rank.groups:
        for batch in group:
            backward(rank, right(rank, group, batch))
        averaged(rank)
        finish(rank)


def summed_by_hand(rank: Rank) -> None:
    """No wrapper: a sum over ranks, so the loss is not multiplied by D."""
    for group in rank.groups:
        for batch in group:
            with rank.autocast():
                loss = rank.loss(rank.model, batch)
            backward(rank, loss.total / group.count)
        for parameter in rank.module.parameters():
            dist.all_reduce(parameter.grad, group=rank.dp_group)
        finish(rank)


def reduced_flat(rank: Rank) -> None:
    """No wrapper: one flat buffer for all gradients."""
    for group in rank.groups:
        for batch in group:
            backward(rank, right(rank, group, batch))
        grads = [p.grad for p in rank.module.parameters() if p.grad is not None]
        flat = torch.cat([grad.reshape(-1) for grad in grads]) / rank.D
        dist.all_reduce(flat, group=rank.dp_group)
        for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(part.view_as(grad))
        finish(rank)


def autograd_grad(rank: Rank) -> None:
    """``torch.autograd.grad`` and sums of one's own in the gradients' dtype; no wrapper."""
    parameters = list(rank.module.parameters())
    for group in rank.groups:
        sums = [torch.zeros_like(p) for p in parameters]
        for batch in group:
            objective = right(rank, group, batch)
            if rank.scaler is not None:
                objective = rank.scaler.scale(objective)
            grads = torch.autograd.grad(objective, parameters)
            for total, grad in zip(sums, grads, strict=True):
                total += grad
        for parameter, total in zip(parameters, sums, strict=True):
            parameter.grad = total
        averaged(rank)
        finish(rank)


def wide_accumulators(rank: Rank) -> None:
    """Sums in float64 beside ``.grad``, no wrapper: better than the precision promises."""
    parameters = list(rank.module.parameters())
    for group in rank.groups:
        sums = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
        for batch in group:
            backward(rank, right(rank, group, batch))
            for total, parameter in zip(sums, parameters, strict=True):
                total += parameter.grad  # type: ignore[arg-type]
                parameter.grad = None
        for parameter, total in zip(parameters, sums, strict=True):
            dist.all_reduce(total, group=rank.dp_group)
            parameter.grad = (total / rank.D).to(parameter.dtype)
        finish(rank)


def summed_by_hook(rank: Rank) -> None:
    """A hook sums over the replicas, so the loss is not multiplied by D."""
    rank.model.register_comm_hook(rank.dp_group, summing)
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                with rank.autocast():
                    loss = rank.loss(rank.model, batch)
                backward(rank, loss.total / group.count)
        finish(rank)


# -- how often backward runs


def in_parts(rank: Rank) -> None:
    """Two backward calls for each microbatch, on parts of its loss; no wrapper."""
    for group in rank.groups:
        for batch in group:
            share = right(rank, group, batch)
            _backward_in_parts(rank, share)
        averaged(rank)
        finish(rank)


def in_parts_but_last(rank: Rank) -> None:
    """The same, but for the last microbatch: its backward reduces, and can do so once."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                share = right(rank, group, batch)
                if k < len(group) - 1:
                    _backward_in_parts(rank, share)
                else:
                    backward(rank, share)
        finish(rank)


def _backward_in_parts(rank: Rank, share: Tensor) -> None:
    first, rest = 0.25 * share, 0.75 * share
    (rank.scaler.scale(first) if rank.scaler else first).backward(retain_graph=True)
    backward(rank, rest)


# -- order and clearing


def reversed_order(rank: Rank) -> None:
    for group in rank.groups:
        for k in range(len(group)):
            with reducing_last(rank, group, k):
                backward(rank, right(rank, group, group[len(group) - 1 - k]))
        finish(rank)


def zeros_kept(rank: Rank) -> None:
    for group in rank.groups:
        rank.optimizer.zero_grad(set_to_none=False)
        accumulated(rank, group)
        _clip_and_update(rank)


def cleared_first(rank: Rank) -> None:
    for group in rank.groups:
        rank.module.zero_grad()
        accumulated(rank, group)
        _clip_and_update(rank)


def prefetched(rank: Rank) -> None:
    """One microbatch is read ahead, over the ends of groups too."""
    ahead = _ahead(rank.groups)
    for group in rank.groups:
        for k in range(len(group)):
            with reducing_last(rank, group, k):
                backward(rank, right(rank, group, next(ahead)))
        finish(rank)


def _ahead(groups: Any) -> Iterator[Any]:
    waiting: list[Any] = []
    for group in groups:
        for batch in group:
            waiting.append(batch)
            if len(waiting) == 2:
                yield waiting.pop(0)
    yield from waiting


def whole_group_loaded(rank: Rank) -> None:
    for group in rank.groups:
        batches = list(group)
        for k, batch in enumerate(batches):
            with reducing_last(rank, group, k):
                backward(rank, right(rank, group, batch))
        finish(rank)


def looks_on_the_way(rank: Rank) -> None:
    """Validates without gradients between microbatches and updates, and logs the loss."""
    logged = []
    for group in rank.groups:
        for k, batch in enumerate(group):
            with torch.no_grad(), rank.autocast():
                logged.append(float(rank.loss(rank.module, batch).total))
            with reducing_last(rank, group, k):
                objective = right(rank, group, batch)
                logged.append(objective.item())
                backward(rank, objective)
        finish(rank)
        with torch.no_grad():
            rank.module(group[0]["x"])


# -- clip and update


def clipped_by_hand(rank: Rank, epsilon: float) -> None:
    for group in rank.groups:
        accumulated(rank, group)
        if rank.scaler is not None:
            rank.scaler.unscale_(rank.optimizer)
        grads = [p.grad for p in rank.module.parameters() if p.grad is not None]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        assert rank.clip_norm is not None
        factor = (rank.clip_norm / (norm + epsilon)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(factor)
        _update(rank)


def reduced_and_clipped_by_hand(rank: Rank) -> None:
    """No wrapper: averaged, then clipped, both by hand."""
    for group in rank.groups:
        for batch in group:
            backward(rank, right(rank, group, batch))
        averaged(rank)
        if rank.scaler is not None:
            rank.scaler.unscale_(rank.optimizer)
        _clip_by_squares(rank)
        _update(rank)


def divided_and_clipped_by_hand(rank: Rank, narrow: bool = False) -> None:
    """Backward on the bare sum; divided, then clipped, both by hand."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k), rank.autocast():
                loss = rank.loss(rank.model, batch)
                loss.total.backward()
        for parameter in rank.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(rank.D / group.count)
        _clip_by_squares(rank, narrow)
        _update(rank)


def _clip_by_squares(rank: Rank, narrow: bool = False) -> None:
    """A clip in which no function called a norm appears; ``narrow``: in the gradients' dtype."""
    assert rank.clip_norm is not None
    grads = [p.grad for p in rank.module.parameters() if p.grad is not None]
    squares = [(grad if narrow else grad.double()).square().sum() for grad in grads]
    factor = (rank.clip_norm / (torch.stack(squares).sum().sqrt() + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(float(factor))


def clipped_by_hand_with_if(rank: Rank) -> None:
    """The branch that many write: nothing is multiplied where the norm is within the bound."""
    for group in rank.groups:
        accumulated(rank, group)
        if rank.scaler is not None:
            rank.scaler.unscale_(rank.optimizer)
        grads = [p.grad for p in rank.module.parameters() if p.grad is not None]
        norm = sum(float(grad.double().norm()) ** 2 for grad in grads) ** 0.5
        assert rank.clip_norm is not None
        if norm > rank.clip_norm:
            for grad in grads:
                grad.mul_(rank.clip_norm / norm)
        _update(rank)


def clipped_each_way(rank: Rank, foreach: bool) -> None:
    """torch's clip by one implementation or the other."""
    for group in rank.groups:
        accumulated(rank, group)
        if rank.scaler is not None:
            rank.scaler.unscale_(rank.optimizer)
        assert rank.clip_norm is not None
        clip_grad_norm_(rank.module.parameters(), rank.clip_norm, foreach=foreach)
        _update(rank)


def other_implementation(rank: Rank, foreach: bool) -> None:
    for held in rank.optimizer.param_groups:
        held["foreach"] = foreach
    for group in rank.groups:
        accumulated(rank, group)
        finish(rank)


@dataclass(frozen=True)
class Fused:
    """The optimizer built by the loop, fused."""

    build: Callable[[nn.Module], torch.optim.Optimizer]

    def __call__(self, rank: Rank) -> None:
        given = self.build(rank.module)
        values = {k: v for k, v in given.defaults.items() if k not in ("fused", "foreach")}
        values.pop("decoupled_weight_decay", None)
        rank.optimizer = type(given)(rank.module.parameters(), fused=True, **values)
        for group in rank.groups:
            accumulated(rank, group)
            finish(rank)


def closure(rank: Rank) -> None:
    """The whole group runs inside ``optimizer.step(closure)``."""
    for group in rank.groups:

        def run(group: Group = group) -> Tensor:
            rank.optimizer.zero_grad()
            value = torch.zeros(())
            for k, batch in enumerate(group):
                with reducing_last(rank, group, k):
                    objective = right(rank, group, batch)
                    objective.backward()
                value += objective.detach()
            if rank.clip_norm is not None:
                clip_grad_norm_(rank.module.parameters(), rank.clip_norm)
            return value

        rank.optimizer.step(run)
        advance(rank, "applied")


def last_in_closure(rank: Rank) -> None:
    """The last forward and backward run inside ``optimizer.step(closure)``."""
    for group in rank.groups:
        rank.optimizer.zero_grad()
        for k, batch in enumerate(group):

            def run(batch: Any = batch, k: int = k, group: Group = group) -> Tensor:
                with reducing_last(rank, group, k):
                    objective = right(rank, group, batch)
                    objective.backward()
                if k == len(group) - 1 and rank.clip_norm is not None:
                    clip_grad_norm_(rank.module.parameters(), rank.clip_norm)
                return objective

            if k < len(group) - 1:
                run()
            else:
                rank.optimizer.step(run)
        advance(rank, "applied")


def scaler_by_hand(rank: Rank) -> None:
    """The scaler unscales inside its own ``step``."""
    for group in rank.groups:
        accumulated(rank, group)
        if rank.scaler is None:
            rank.optimizer.step()
        else:
            rank.scaler.step(rank.optimizer)
            rank.scaler.update()
        if rank.scheduler is not None:
            rank.scheduler.step()
        rank.optimizer.zero_grad()


def static_scale(rank: Rank) -> None:
    """A fixed loss scale of 1024, taken out of the gradients by hand."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                (right(rank, group, batch) * 1024.0).backward()
        for parameter in rank.module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(1024.0)
        _update(rank)


def disabled_scaler(rank: Rank) -> None:
    """A scaler that is switched off, used as if it were on."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                scaler.scale(right(rank, group, batch)).backward()
        scaler.unscale_(rank.optimizer)
        if rank.clip_norm is not None:
            clip_grad_norm_(rank.module.parameters(), rank.clip_norm)
        scaler.step(rank.optimizer)
        scaler.update()
        if rank.scheduler is not None:
            rank.scheduler.step()
        rank.optimizer.zero_grad()


def _clip_and_update(rank: Rank) -> None:
    """The recipe's end without its clearing."""
    if rank.scaler is not None:
        rank.scaler.unscale_(rank.optimizer)
    if rank.clip_norm is not None:
        clip_grad_norm_(rank.module.parameters(), rank.clip_norm)
    _step(rank)


def _update(rank: Rank) -> None:
    """Update, schedule and clear; unscaled and clipped already."""
    _step(rank)
    rank.optimizer.zero_grad()


def _step(rank: Rank) -> None:
    applied = True
    if rank.scaler is None:
        rank.optimizer.step()
    else:
        before = rank.scaler.get_scale()
        rank.scaler.step(rank.optimizer)
        rank.scaler.update()
        applied = rank.scaler.get_scale() >= before
    if applied:
        advance(rank, "applied")


def recipe(rank: Rank) -> None:
    """As the recipe, for wrappers that are configured otherwise."""
    for group in rank.groups:
        accumulated(rank, group)
        finish(rank)


def _ddp(module: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module, **options)


@dataclass(frozen=True)
class Correct:
    """A right loop, its wrapper, and what a drawn case must have for it."""

    name: str
    loop: Callable[[Rank], None] | None = None
    wrap: Callable[[Any], Any] | None = None
    precisions: tuple[str, ...] = PRECISIONS
    shaped: Callable[[Drawn], Drawn] = _as_drawn
    make: Callable[[Experiment], Callable[[Rank], None]] | None = None

    def made(self, experiment: Experiment) -> Callable[[Rank], None] | None:
        return self.loop if self.make is None else self.make(experiment)


def _fusable(drawn: Drawn) -> Drawn:
    """Only Adam in bfloat16: torch 2.13's fused SGD is wrong in half precision on CPU."""
    names = ("adam", "adamw") if drawn.precision == "bf16" else SGD_AND_ADAM
    optimizer = drawn.optimizer if drawn.optimizer in names else "adamw"
    return replace(drawn, optimizer=optimizer, schedule=False)


CORRECT = (
    Correct("divided_by_hand", divided_by_hand, shaped=_unclipped),
    Correct("mean_times_share", mean_times_share),
    Correct("microbatch_means", microbatch_means, shaped=_dense),
    Correct("summed_losses", summed_losses),
    Correct("own_loss", own_loss),
    Correct("own_loss_of_means", own_loss_of_means),
    Correct("own_loss_function", own_loss_function),
    Correct("every_microbatch_reduced", every_microbatch_reduced),
    Correct("flag_by_hand", flag_by_hand),
    Correct("reduced_by_hand", reduced_by_hand, bare),
    Correct("summed_by_hand", summed_by_hand, bare),
    Correct("reduced_flat", reduced_flat, bare),
    Correct("summed_by_hook", summed_by_hook),
    Correct("in_parts", in_parts, bare),
    Correct("in_parts_but_last", in_parts_but_last),
    Correct("autograd_grad", autograd_grad, bare),
    Correct("wide_accumulators", wide_accumulators, bare),
    Correct("reversed_order", reversed_order),
    Correct("zeros_kept", zeros_kept),
    Correct("cleared_first", cleared_first),
    Correct("prefetched", prefetched),
    Correct("whole_group_loaded", whole_group_loaded),
    Correct("looks_on_the_way", looks_on_the_way),
    Correct("clipped_by_hand", partial(clipped_by_hand, epsilon=0.0), shaped=_clipped),
    Correct("clipped_by_hand_1e-6", partial(clipped_by_hand, epsilon=1e-6), shaped=_clipped),
    Correct("clipped_by_hand_with_if", clipped_by_hand_with_if, shaped=_clipped),
    Correct("reduced_and_clipped_by_hand", reduced_and_clipped_by_hand, bare, shaped=_clipped),
    Correct(
        "divided_and_clipped_by_hand",
        divided_and_clipped_by_hand,
        shaped=_clipped,
        precisions=BUT_SCALED,
    ),
    Correct(
        "divided_and_clipped_in_half_precision",
        partial(divided_and_clipped_by_hand, narrow=True),
        shaped=_clipped,
        precisions=("bf16", "fp16"),
    ),
    Correct("clip_foreach", partial(clipped_each_way, foreach=True), shaped=_clipped),
    Correct("clip_not_foreach", partial(clipped_each_way, foreach=False), shaped=_clipped),
    Correct("foreach", partial(other_implementation, foreach=True)),
    Correct("not_foreach", partial(other_implementation, foreach=False)),
    Correct(
        "fused",
        make=lambda e: Fused(e.optimizer),
        shaped=_fusable,
        precisions=tuple(p for p in PRECISIONS if p != "fp16"),
    ),
    Correct("closure", closure, precisions=BUT_SCALED),
    Correct("last_in_closure", last_in_closure, precisions=BUT_SCALED),
    Correct("scaler_by_hand", scaler_by_hand, shaped=_unclipped),
    Correct(
        "static_scale", static_scale, precisions=("fp64", "fp32", "bf16-mixed"), shaped=_unclipped
    ),
    Correct("disabled_scaler", disabled_scaler, precisions=BUT_SCALED),
    Correct("tiny_buckets", recipe, partial(_ddp, bucket_cap_mb=0.0005)),
    Correct("bucket_view", recipe, partial(_ddp, gradient_as_bucket_view=True)),
    Correct("find_unused", recipe, partial(_ddp, find_unused_parameters=True)),
    Correct("no_broadcast", recipe, partial(_ddp, broadcast_buffers=False)),
)


__all__ = ["CORRECT", "Correct"]
