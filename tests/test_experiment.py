"""What a user hands over is refused at once, in words that say what to pass."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from equivtest import Experiment, Group, Loss
from equivtest.experiment import wants_device


def an_experiment(**changes) -> Experiment:
    given = {
        "model": lambda: nn.Linear(1, 1),
        "data": [torch.zeros(1)],
        "loss": lambda model, batch: Loss(model(batch).sum(), count=1),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    }
    return Experiment(**{**given, **changes})


def test_an_experiment_has_two_updates_in_order_under_seed_0_unless_told() -> None:
    made = an_experiment()
    assert (made.updates, made.shuffle, made.seed, made.scheduler_unit) == (2, False, 0, "applied")


@pytest.mark.parametrize(
    "argument",
    ["model", "loss", "optimizer", "collate", "count", "scheduler", "scaler", "averages"],
)
def test_a_ready_object_where_a_function_is_wanted_is_named_with_its_type(argument: str) -> None:
    with pytest.raises(TypeError, match=rf"{argument}=.*is a Tensor: pass a function.*lambda"):
        an_experiment(**{argument: torch.zeros(2)})


@pytest.mark.parametrize("argument", ["model", "loss", "optimizer"])
def test_model_loss_and_optimizer_cannot_be_none(argument: str) -> None:
    with pytest.raises(TypeError, match=f"{argument}=None"):
        an_experiment(**{argument: None})


def test_an_unknown_scheduler_unit_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        ValueError,
        match="scheduler_unit='update': pass one of 'applied', 'attempted', 'microbatch'",
    ):
        an_experiment(scheduler_unit="update")


def test_an_unknown_last_group_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="last_group='keep': pass one of 'process', 'drop', None"):
        an_experiment(last_group="keep")


@pytest.mark.parametrize("bound", [0, -1.0, float("nan")])
def test_a_clip_bound_that_is_not_positive_is_refused(bound: float) -> None:
    with pytest.raises(ValueError, match=f"clip_norm={bound!r}: pass a positive bound, or None"):
        an_experiment(clip_norm=bound)
    with pytest.raises(ValueError, match=f"clip_value={bound!r}: pass a positive bound, or None"):
        an_experiment(clip_value=bound)


def test_two_clips_are_refused_with_what_was_given() -> None:
    with pytest.raises(ValueError, match=r"clip_norm=1.0 and clip_value=0.5 are two .* pass one"):
        an_experiment(clip_norm=1.0, clip_value=0.5)


@pytest.mark.parametrize("updates", [0, -1, 1.5, True, "2"])
def test_updates_that_are_no_whole_number_of_at_least_one_are_refused(updates: object) -> None:
    with pytest.raises(ValueError, match=f"updates={updates!r}"):
        an_experiment(updates=updates)


def test_experiments_are_the_same_only_if_they_are_one_object() -> None:
    # Plans of one experiment must share a product: two experiments with equal fields are two.
    assert an_experiment() != an_experiment()


# -- Loss


def test_a_loss_that_lost_its_graph_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Loss.total is a float.*no .item\(\)"):
        Loss(total=3.5, count=2)  # type: ignore[arg-type]


def test_a_loss_per_element_is_refused_with_its_shape() -> None:
    with pytest.raises(ValueError, match=r"Loss.total has shape \(3,\).*summed"):
        Loss(total=torch.zeros(3), count=3)


def test_a_sum_over_the_groups_count_is_not_the_mean_of_the_microbatches_means() -> None:
    # 512 elements of mean 2 beside 1536 of mean 4:
    # (512 * 2 + 1536 * 4) / 2048 = 7168 / 2048 = 3.5, and the mean of means is (2 + 4) / 2 = 3.
    losses = [Loss(torch.full((n,), mean).sum(), count=n) for n, mean in ((512, 2.0), (1536, 4.0))]
    count = sum(loss.count for loss in losses)
    assert sum(float(loss.total) for loss in losses) / count == 3.5
    assert sum(float(loss.total) / loss.count for loss in losses) / 2 == 3.0


# -- Group


@pytest.fixture
def group() -> Group:
    fetched: list[int] = []

    def fetch(k: int) -> str:
        fetched.append(k)
        return f"batch {k}"

    made = Group(fetch, count=10, local_count=6, examples=((0, 1), (2,), ()), update=4)
    made.fetched = fetched  # type: ignore[attr-defined]
    return made


def test_a_group_is_the_sequence_of_its_microbatches(group: Group) -> None:
    assert len(group) == 3
    assert list(group) == ["batch 0", "batch 1", "batch 2"]
    assert group[-1] == "batch 2"
    assert group[1:] == ["batch 1", "batch 2"]


def test_a_microbatch_beyond_the_group_is_an_index_error(group: Group) -> None:
    with pytest.raises(IndexError, match="microbatch 3 of 3"):
        group[3]
    with pytest.raises(IndexError):
        group[-4]


def test_a_microbatch_is_collated_only_when_it_is_asked_for(group: Group) -> None:
    iterator = iter(group)
    assert group.fetched == []  # type: ignore[attr-defined]
    next(iterator)
    assert group.fetched == [0]  # type: ignore[attr-defined]


def test_a_group_tells_its_counts_examples_and_number(group: Group) -> None:
    assert (group.count, group.local_count, group.update) == (10, 6, 4)
    assert group.examples == ((0, 1), (2,), ())


@pytest.mark.parametrize(
    ("factory", "wanted"),
    [
        (lambda: None, False),
        (lambda device: None, True),
        (lambda d: None, True),
        (lambda scale=2.0: None, False),
        (lambda device="cuda", scale=2.0: None, True),
        (lambda **settings: None, False),
        (torch.amp.GradScaler, True),
        (functools.partial(torch.amp.GradScaler, init_scale=4.0), True),
        (functools.partial(torch.amp.GradScaler, "cpu"), False),
    ],
)
def test_a_factory_of_scalers_is_given_the_device_if_it_takes_one(
    factory: Callable[..., Any], wanted: bool
) -> None:
    assert wants_device(factory) == wanted
