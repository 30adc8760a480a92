"""Watching changes not one bit: gradients, parameters, buffers, state, random numbers, D = 2."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from ranks import a_rank
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from watching import observed, unobserved

from equivtest import Rank
from equivtest.loops import accumulate
from equivtest.pool import Seat, current_pool

Left = list[Tensor]
"""What a loop leaves, in order: what it noted itself, and all state at its end."""


class Net(nn.Module):
    """Normalises, and drops by torch's random numbers and scales by numpy's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 16), nn.BatchNorm1d(16)
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.norm(self.first(x)).relu())
        return self.last(hidden) * float(np.random.uniform(0.9, 1.1))


def each(backward: Callable[[Rank, Tensor], None], end: Any = None) -> Callable[[Rank], None]:
    """A loop of microbatches by ``backward``, with ``end`` before each update."""

    def loop(rank: Rank) -> None:
        for group in rank.groups:
            for batch in group:
                backward(rank, batch)
            if end is not None:
                end(rank)
            noted(rank)
            rank.optimizer.step()
            rank.optimizer.zero_grad()

    return loop


def noted(rank: Rank) -> None:
    """Note gradients as the update finds them; ``rank.dataset`` carries them out."""
    rank.dataset.extend(p.grad.clone() for p in rank.module.parameters() if p.grad is not None)  # type: ignore[attr-defined]


def plainly(rank: Rank, batch: Tensor) -> None:
    rank.loss(rank.model, batch).total.backward()


def past_the_wrapper(rank: Rank, batch: Tensor) -> None:
    rank.loss(rank.module, batch).total.backward()


def two_roots(rank: Rank, batch: Tensor) -> None:
    output = rank.model(batch)
    torch.autograd.backward(
        [output.sum(), output], [torch.tensor(0.3), torch.full_like(output, 0.7)]
    )


def twice(rank: Rank, batch: Tensor) -> None:
    loss = rank.loss(rank.model, batch).total
    loss.backward(retain_graph=True)
    rank.module.zero_grad(set_to_none=False)
    loss.backward(gradient=torch.tensor(0.3))


def checkpointed(rank: Rank, batch: Tensor) -> None:
    checkpoint(rank.module, batch, use_reentrant=False).square().sum().backward()


def gathered(rank: Rank, batch: Tensor) -> None:
    outputs = differentiable.all_gather(rank.module(batch), group=rank.dp_group)
    (torch.cat(outputs).logsumexp(0).sum() / 3).backward()


def one_by_one(rank: Rank) -> None:
    for parameter in rank.module.parameters():
        dist.all_reduce(parameter.grad, group=rank.dp_group)
        parameter.grad /= rank.D


def flat(rank: Rank) -> None:
    held = [p.grad for p in rank.module.parameters()]
    buffer = torch.cat([g.flatten() for g in held]).to(torch.bfloat16)  # type: ignore[union-attr]
    dist.all_reduce(buffer, group=rank.dp_group, async_op=True).wait()
    for gradient, part in zip(held, buffer.split([g.numel() for g in held]), strict=True):  # type: ignore[union-attr]
        gradient.copy_(part.view_as(gradient) / rank.D)  # type: ignore[union-attr]


def clipped(rank: Rank) -> None:
    nn.utils.clip_grad_norm_(rank.module.parameters(), 0.5)
    nn.utils.clip_grad_value_(rank.module.parameters(), 0.05)
    rank.report(0.5)


def deferred(rank: Rank) -> None:
    for group in rank.groups:
        losses = [rank.loss(rank.module, batch).total for batch in group]
        (sum(losses) / len(losses)).backward()  # type: ignore[union-attr]
        noted(rank)
        rank.optimizer.step()
        rank.module.zero_grad()


def in_closure(rank: Rank) -> None:
    rank.optimizer = torch.optim.LBFGS(rank.module.parameters(), lr=0.1, max_iter=3)
    for group in rank.groups:

        def closure(batch: Tensor = group[0]) -> Tensor:
            rank.optimizer.zero_grad()
            loss = rank.loss(rank.module, batch).total
            loss.backward()
            return loss

        rank.optimizer.step(closure)
        noted(rank)


def scaled(rank: Rank) -> None:
    rank.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=1)
    rank.average = AveragedModel(rank.module)
    accumulate(rank)
    rank.dataset.extend(rank.average.state_dict().values())  # type: ignore[attr-defined]
    rank.dataset.append(torch.tensor(rank.scaler.get_scale()))  # type: ignore[attr-defined]


def in_the_backward(rank: Rank) -> None:
    """Updates each parameter as soon as its gradient is there."""
    for parameter in rank.module.parameters():
        own = torch.optim.SGD([parameter], lr=0.01)

        def update(parameter: Tensor, own: torch.optim.Optimizer = own) -> None:
            own.step()
            own.zero_grad()

        parameter.register_post_accumulate_grad_hook(update)
    for group in rank.groups:
        for batch in group:
            past_the_wrapper(rank, batch)


def plain_wrapper(module: nn.Module) -> nn.Module:
    return DistributedDataParallel(module)


def views(module: nn.Module) -> nn.Module:
    return DistributedDataParallel(module, gradient_as_bucket_view=True)


def hooked(module: nn.Module) -> nn.Module:
    def hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        work = dist.all_reduce(bucket.buffer().to(torch.bfloat16), async_op=True)
        return work.get_future().then(lambda done: done.value()[0].float() / 2)

    wrapper = DistributedDataParallel(module)
    wrapper.register_comm_hook(None, hook)
    return wrapper


LOOPS: dict[str, tuple[Callable[[Rank], None], Callable[[nn.Module], nn.Module]]] = {
    "recipe": (accumulate, plain_wrapper),
    "bucket views": (each(plainly, clipped), views),
    "hook": (each(plainly), hooked),
    "one by one": (each(past_the_wrapper, one_by_one), plain_wrapper),
    "flat": (each(past_the_wrapper, flat), plain_wrapper),
    "two roots": (each(two_roots), plain_wrapper),
    "twice": (each(twice, clipped), plain_wrapper),
    "checkpoint": (each(checkpointed), plain_wrapper),
    "gathered": (each(gathered), plain_wrapper),
    "deferred": (deferred, plain_wrapper),
    "closure": (in_closure, plain_wrapper),
    "scaler": (scaled, plain_wrapper),
    "in the backward": (in_the_backward, plain_wrapper),
}


def left(seat: Seat, name: str, run: Callable[..., Any]) -> Left:
    """What a loop leaves when it is run by ``run``."""
    loop, wrap = LOOPS[name]
    torch.manual_seed(3)
    np.random.seed(3)
    module = Net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    own: Left = []
    rank = a_rank(
        module,
        model=wrap(module),
        optimizer=optimizer,
        D=seat.size,
        dp_rank=seat.rank,
        dp_group=seat.group,
        dataset=own,
        clip_norm=0.5,
    )
    generator = torch.Generator().manual_seed(seat.rank)
    updates = [[torch.randn(3, 4, generator=generator) for _ in range(3)] for _ in range(3)]
    torch.manual_seed(11 + seat.rank)
    run(loop, rank, updates)
    own += module.state_dict().values()
    own += [p.grad for p in module.parameters() if p.grad is not None]
    held = rank.optimizer.state.values()
    own += [v for state in held for v in state.values() if isinstance(v, Tensor)]
    return [t.clone() for t in own] + [torch.rand(3), torch.tensor(np.random.rand(3))]


def both(seat: Seat, name: str) -> tuple[Left, Left]:
    return left(seat, name, observed), left(seat, name, unobserved)


@pytest.mark.parametrize("name", LOOPS)
def test_a_watched_loop_leaves_the_bits_of_an_unwatched_one(name: str) -> None:
    for seen, unseen in current_pool().run(both, name, D=2):
        assert len(seen) == len(unseen) >= 2 + 9  # the net's state has nine tensors
        assert all(torch.equal(a, b) for a, b in zip(seen, unseen, strict=True))


def drawing(loop: Callable[[Rank], None], rank: Rank, updates: Any) -> None:
    """A watcher that is not neutral: it draws one number."""
    torch.rand(())
    unobserved(loop, rank, updates)


def drawn_and_not(seat: Seat) -> tuple[Left, Left]:
    return left(seat, "one by one", drawing), left(seat, "one by one", unobserved)


def test_a_watcher_that_draws_one_number_would_be_found() -> None:
    for seen, unseen in current_pool().run(drawn_and_not, D=2):
        assert not all(torch.equal(a, b) for a, b in zip(seen, unseen, strict=True))
