"""How DistributedDataParallel reduced is known to the bit, or is not claimed to be."""

from collections.abc import Callable

import pytest
import torch
from ranks import a_rank
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from equivtest.observe.reducing import Reductions
from equivtest.observe.trace import Reduction
from equivtest.pool import Seat, current_pool


def three_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))


def seen(
    seat: Seat, wrap: Callable[[nn.Module], DistributedDataParallel], inner: bool
) -> list[Reduction | None]:
    """What three backwards of one wrapper left; ``inner`` calls the module past the wrapper."""
    module = three_layers()
    wrapper = wrap(module)
    watching = Reductions(a_rank(module, model=wrapper, D=seat.size, dp_rank=seat.rank))
    names = {id(p): name for name, p in module.named_parameters()}
    found = []
    for _ in range(3):
        if not inner:
            watching.forwarded(wrapper)
        out = (module if inner else wrapper)(torch.ones(1, 4))
        watching.backward_begins()
        out.sum().backward()
        found.append(watching.backward_ended(lambda: names))
    return found


def run(wrap: Callable[[nn.Module], DistributedDataParallel], inner: bool = False) -> list:
    first, second = current_pool().run(seen, wrap, inner, D=2)
    assert first == second
    return first


FORWARD = ("0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias")


def test_buckets_are_those_of_the_first_backward_and_then_of_the_order_of_gradients() -> None:
    # A layer has 80 bytes: with a limit of 100 two layers' gradients fill a bucket, weight after
    # bias, as they come. Before they have come once all of them are in one.
    first, second, third = run(lambda m: DistributedDataParallel(m, bucket_cap_mb=100 / 2**20))
    assert first == Reduction((FORWARD,))
    assert second == third
    assert [set(bucket) for bucket in second.buckets] == [
        {"2.bias", "2.weight", "1.bias", "1.weight"},
        {"0.bias", "0.weight"},
    ]


def test_a_gradient_in_its_bucket_is_divided_there() -> None:
    # It is new before the first backward and stays in the bucket from then on.
    found = run(lambda m: DistributedDataParallel(m, gradient_as_bucket_view=True))
    assert [one.in_place for one in found] == [frozenset(), *[frozenset(FORWARD)] * 2]


def hooked(module: nn.Module) -> DistributedDataParallel:
    wrapper = DistributedDataParallel(module)
    wrapper.register_comm_hook(None, default_hooks.allreduce_hook)
    return wrapper


def channels_last(module: nn.Module) -> DistributedDataParallel:
    module.register_parameter("kernel", nn.Parameter(torch.zeros(2, 3, 2, 2)))
    module.to(memory_format=torch.channels_last)
    return DistributedDataParallel(module, find_unused_parameters=True)


def sparse(module: nn.Module) -> DistributedDataParallel:
    module.add_module("words", nn.Embedding(3, 4, sparse=True))
    module.forward = lambda x: module.words(x[0].long()) @ module[2](module[1](module[0](x))).T
    return DistributedDataParallel(module)


@pytest.mark.parametrize("wrap", [hooked, channels_last, sparse])
def test_what_is_not_known_is_not_claimed(
    wrap: Callable[[nn.Module], DistributedDataParallel],
) -> None:
    assert run(wrap) == [None] * 3


def test_a_forward_past_the_wrapper_reduces_nothing() -> None:
    assert run(DistributedDataParallel, inner=True) == [None] * 3
