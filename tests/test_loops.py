"""The recipe: how to accumulate, without any process group."""

from collections.abc import Callable

import pytest
import torch
from ranks import a_rank, weight
from torch import nn

from equivtest import Group, Loss
from equivtest.loops import accumulate, normalised, several


class Calls:
    """A scheduler or an average that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def step(self) -> None:
        self.calls += 1

    def update_parameters(self, module: nn.Module) -> None:
        self.calls += 1


def groups(*updates: list[list[float]]) -> list[Group]:
    """Groups of microbatches of numbers; the count is the number of numbers."""
    made = []
    for u, microbatches in enumerate(updates):
        batches = [torch.tensor(m).reshape(-1, 1) for m in microbatches]
        n = sum(map(len, batches))
        ids = tuple(tuple(range(len(b))) for b in batches)
        made.append(Group(batches.__getitem__, count=n, local_count=n, examples=ids, update=u))
    return made


def test_unequal_microbatches_are_divided_by_the_count_of_the_group() -> None:
    # Loss w * x, examples 1, 2, 3, 6 of mean 3: w moves from 0 to -3 with a learning rate of 1.
    # The mean of the microbatches' means would be (2 + 6) / 2 = 4.
    module = weight()
    accumulate(a_rank(module, groups=groups([[1.0, 2.0, 3.0], [6.0]])))
    assert module.weight.item() == -3.0


def test_only_the_last_forward_and_backward_of_a_group_reduce() -> None:
    rank = a_rank(weight(), groups=groups([[1.0], [2.0], [3.0]], [[1.0], [2.0], [3.0]]))
    accumulate(rank)
    assert rank.model.forwards == [False, False, True] * 2  # type: ignore[union-attr]


def test_the_loss_is_multiplied_by_the_replicas_that_the_wrapper_averages_over() -> None:
    module = weight()
    accumulate(a_rank(module, groups=groups([[1.0], [1.0]]), D=4))
    assert module.weight.item() == -4.0  # 4 x the mean 1, which the wrapper would divide by 4


def test_gradients_are_cleared_between_groups() -> None:
    module = weight()
    accumulate(a_rank(module, groups=groups([[1.0]], [[2.0]])))
    assert module.weight.item() == -3.0  # -1 - 2; carried over it would be -1 - 3
    assert module.weight.grad is None


def test_the_clip_bounds_the_accumulated_gradient() -> None:
    # Gradient (3 + 5) / 2 = 4, bound 2: the update is 2 (torch divides by 4 + 1e-6).
    module = weight()
    accumulate(a_rank(module, groups=groups([[3.0], [5.0]]), clip_norm=2.0))
    assert module.weight.item() == pytest.approx(-2.0, rel=1e-6)
    assert module.weight.item() != -4.0


def test_the_clip_by_value_bounds_each_element_of_the_accumulated_gradient() -> None:
    # The same gradient of 4, and its only element is bounded by 2.5.
    module = weight()
    accumulate(a_rank(module, groups=groups([[3.0], [5.0]]), clip_value=2.5))
    assert module.weight.item() == -2.5


def test_the_clip_sees_gradients_without_the_loss_scale() -> None:
    # Gradient 0.5 under bound 1: untouched. Clipped while scaled by 1024 it would be 1/1024.
    module = weight()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    accumulate(a_rank(module, groups=groups([[0.5]]), clip_norm=1.0, scaler=scaler))
    assert module.weight.item() == -0.5


@pytest.mark.parametrize(
    ("unit", "calls"),
    # Three groups of two microbatches, of which the second overflows.
    [("applied", 2), ("attempted", 3), ("microbatch", 6)],
)
def test_the_schedule_moves_in_its_unit(unit: str, calls: int) -> None:
    scheduler = Calls()
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    accumulate(
        a_rank(
            weight(),
            groups=groups([[1.0], [1.0]], [[1.0], [float("inf")]], [[1.0], [1.0]]),
            scheduler=scheduler,
            scheduler_unit=unit,
            scaler=scaler,
        )
    )
    assert scheduler.calls == calls


def test_a_skipped_update_moves_neither_weights_nor_averages() -> None:
    module, average = weight(1.0), Calls()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    accumulate(a_rank(module, groups=groups([[float("inf")]]), average=average, scaler=scaler))
    assert module.weight.item() == 1.0
    assert average.calls == 0
    assert scaler.get_scale() == 2.0  # torch's backoff factor is 0.5


def test_averages_move_once_for_each_applied_update() -> None:
    average = Calls()
    accumulate(a_rank(weight(), groups=groups([[1.0], [2.0]], [[1.0], [2.0]]), average=average))
    assert average.calls == 2


def test_several_optimizers_are_all_moved_and_cleared() -> None:
    module = nn.Sequential(weight(1.0), weight(1.0))
    optimizers = {
        "first": torch.optim.SGD(module[0].parameters(), lr=1.0),
        "second": torch.optim.SGD(module[1].parameters(), lr=0.5),
    }
    accumulate(a_rank(module, groups=groups([[2.0]]), optimizer=optimizers))
    # w2 * w1 * x at w1 = w2 = 1, x = 2: both gradients are 2.
    assert [p.item() for p in module.parameters()] == [-1.0, 0.0]
    assert [p.grad for p in module.parameters()] == [None, None]


def test_terms_are_divided_by_their_own_counts() -> None:
    counts = {"tokens": 4, "images": 2}
    group = Group(list, count=counts, local_count=counts, examples=((0,),), update=0)
    loss = {"tokens": Loss(torch.tensor(6.0), 3), "images": Loss(torch.tensor(1.0), 2)}
    assert float(normalised(loss, group)) == 2.0  # 6/4 + 1/2


def test_one_object_or_a_mapping_of_them_are_several() -> None:
    one: Callable[[], None] = lambda: None  # noqa: E731
    assert several(one) == [one]
    assert several({"a": 1, "b": 2}) == [1, 2]
