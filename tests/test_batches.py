"""From examples to batches, and how many elements of them are supervised."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from equivtest import Experiment, Loss
from equivtest.arms.build import build
from equivtest.batches import Batches, Counter, added, agree, as_counts, by_term, plain
from equivtest.calling import ExperimentError
from equivtest.observe.rng import RandomState


def an_experiment(**changes) -> Experiment:
    given = {
        "model": lambda: nn.Linear(2, 1),
        "data": [{"x": torch.tensor([float(i), 0.5]), "id": i} for i in range(4)],
        "loss": lambda model, batch: Loss(model(batch["x"]).sum(), count=len(batch["x"])),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    }
    return Experiment(**{**given, **changes})


# -- casting


def test_floating_tensors_are_cast_and_others_are_left_alone() -> None:
    data = [
        {"x": torch.tensor([1.5]), "y": torch.tensor(3), "mask": torch.tensor(True), "name": "a"}
    ]
    batch = Batches(an_experiment(data=data), torch.float64)([0])
    assert batch["x"].dtype is torch.float64
    assert batch["y"].dtype is torch.int64
    assert batch["mask"].dtype is torch.bool
    assert batch["name"] == ["a"]


def test_what_the_candidate_stored_is_rounded_and_then_widened() -> None:
    # bfloat16's spacing at 1 is 2^-7: 1 + 2^-9 is a quarter of it away and rounds to 1, and
    # 1 + 3 * 2^-8 is halfway between 1 + 2^-7 and 1 + 2^-6, and goes to the even 1 + 2^-6.
    data = [torch.tensor([1 + 2.0**-9, 1 + 3 * 2.0**-8], dtype=torch.float64)]
    batch = Batches(an_experiment(data=data), torch.bfloat16, torch.float64)([0])
    assert batch.dtype is torch.float64
    assert batch.tolist() == [[1.0, 1 + 2.0**-6]]


def test_complex_tensors_are_cast_to_the_complex_dtype_of_that_width() -> None:
    data = [torch.tensor([1 + 2j], dtype=torch.complex128)]
    assert Batches(an_experiment(data=data), torch.float32)([0]).dtype is torch.complex64


def test_examples_come_in_the_order_of_their_ids() -> None:
    batch = Batches(an_experiment(), torch.float32)([3, 1])
    assert batch["x"][:, 0].tolist() == [3.0, 1.0]
    assert batch["id"].tolist() == [3, 1]


def test_the_experiments_collate_is_used() -> None:
    made = an_experiment(collate=lambda examples: {"n": len(examples)})
    assert Batches(made, torch.float32)([0, 1, 2]) == {"n": 3}


# -- batches without examples


def test_an_empty_batch_has_no_row_and_every_other_axis() -> None:
    batch = Batches(an_experiment(), torch.float64)([])
    assert batch["x"].shape == (0, 2)
    assert batch["x"].dtype is torch.float64
    assert batch["id"].shape == (0,)


def test_the_batch_axis_is_found_where_it_is_second() -> None:
    made = an_experiment(
        data=[torch.ones(3) for _ in range(2)], collate=lambda e: torch.stack(e, dim=1)
    )
    assert Batches(made, torch.float32)([]).shape == (3, 0)


def test_a_leaf_without_a_batch_axis_keeps_its_value_in_an_empty_batch() -> None:
    made = an_experiment(
        collate=lambda e: {"x": torch.stack([i["x"] for i in e]), "table": torch.arange(3.0)}
    )
    assert Batches(made, torch.float32)([])["table"].tolist() == [0.0, 1.0, 2.0]


def test_a_collate_whose_structure_changes_with_the_batch_cannot_be_empty() -> None:
    made = an_experiment(collate=lambda examples: [e["x"] for e in examples])
    with pytest.raises(ExperimentError, match="another structure for two examples than for one"):
        Batches(made, torch.float32)([])


# -- counts as numbers


def test_counts_become_plain_numbers_by_term() -> None:
    assert as_counts(torch.tensor(3)) == {"": 3.0}
    assert as_counts({"tokens": torch.tensor(5), "images": 2}) == {"tokens": 5.0, "images": 2.0}


def test_counts_are_added_up_by_term() -> None:
    assert added([{"a": 1.0, "b": 2.0}, {"a": 4.0}]) == {"a": 5.0, "b": 2.0}


def test_a_loop_sees_one_number_or_a_mapping_of_terms() -> None:
    assert plain({"": 3.0}) == 3
    assert isinstance(plain({"": 3.0}), int)
    assert plain({"": 2.5}) == 2.5
    assert plain({"a": 1.0}) == {"a": 1}


def test_a_loss_that_is_no_loss_is_refused() -> None:
    with pytest.raises(ExperimentError, match="loss returned a Tensor: return Loss"):
        by_term(torch.zeros(()))  # type: ignore[arg-type]
    with pytest.raises(ExperimentError, match="loss returned a dict"):
        by_term({"a": torch.zeros(())})  # type: ignore[dict-item]


# -- counting


def counter(experiment: Experiment) -> Counter:
    return Counter(experiment, {}, lambda: build(experiment, torch.float64))


def test_the_experiments_count_is_asked_with_the_batch() -> None:
    made = an_experiment(count=lambda batch: (batch["x"][:, 0] > 0.5).sum())
    assert counter(made)((0, 1, 2)) == {"": 2.0}


def test_without_a_count_a_dry_forward_of_the_loss_tells() -> None:
    made = an_experiment(loss=lambda model, batch: Loss(model(batch["x"]).sum(), count=7))
    assert counter(made)((0, 1)) == {"": 7.0}


def test_a_loss_with_terms_is_counted_by_term() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Loss]:
        out = model(batch["x"])
        return {"a": Loss(out.sum(), count=len(out)), "b": Loss(out.sum() ** 2, count=1)}

    assert counter(an_experiment(loss=loss))((0, 1, 2)) == {"a": 3.0, "b": 1.0}


def test_the_same_examples_are_counted_once() -> None:
    asked: list[int] = []
    made = an_experiment(count=lambda batch: asked.append(1) or len(batch["x"]))
    count = counter(made)
    assert count((0, 1)) == count((0, 1)) == {"": 2.0}
    assert len(asked) == 1


class Noisy(nn.Module):
    """Draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.linear(x), 0.5)


def test_a_dry_forward_moves_no_random_number_of_torch() -> None:
    made = an_experiment(model=Noisy)
    count = counter(made)
    count((0, 1))  # builds its model, under a seed of its own
    torch.manual_seed(5)
    before = torch.get_rng_state()
    count((1, 2))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("generator", ["torch", "numpy", "python"])
def test_a_dry_forward_moves_no_generator(generator: str) -> None:
    import random

    draws: dict[str, Any] = {
        "torch": lambda: torch.rand(()),
        "numpy": np.random.rand,
        "python": random.random,
    }
    draw = draws[generator]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        return Loss(model(batch["x"]).sum() * float(draw()), count=1)

    count = counter(an_experiment(loss=loss))
    count((0, 1))  # builds its model, under a seed of its own
    before = RandomState.now()
    count((1, 2))
    assert not before.moved()


def test_a_loss_that_takes_gradients_itself_is_counted() -> None:
    def penalised(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        x = batch["x"].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return Loss(slope.square().sum(), count=slope.sum() * 0 + 3)

    with torch.no_grad():
        assert counter(an_experiment(loss=penalised))((0, 1)) == {"": 3.0}


def test_weights_are_counted_as_the_forwards_receive_them() -> None:
    # 0.1 in bfloat16, 8 significant bits: 205 / 2048.
    made = an_experiment(
        data=[{"x": torch.zeros(2), "w": torch.tensor(0.1)}] * 4,
        count=lambda batch: batch["w"].sum(),
    )
    count = Counter(made, {}, lambda: build(made, torch.float64), torch.bfloat16)
    assert count((0, 1, 2, 3)) == {"": 4 * 205 / 2048}


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (32.0, 32.0, True),
        (2.0**25 + 1, 2.0**25, False),  # whole numbers: a token too many is one too many
        (3.3, 3.3 * (1 + 2**-23), True),  # four roundings of float32 for four examples
        (3.3, 3.3 * (1 + 2**-21), False),
        (3.3, 3.0, False),
    ],
)
def test_counts_agree_exactly_or_to_the_rounding_of_a_sum_of_weights(
    a: float, b: float, same: bool
) -> None:
    assert agree(a, b, 4) is same


def test_an_empty_batch_counts_nothing() -> None:
    assert counter(an_experiment(count=lambda batch: len(batch["x"])))(()) == {"": 0.0}


# -- seeds


def drawn_parameters() -> nn.Module:
    """Parameters from every generator that a factory may use."""
    import random

    module = nn.Linear(1, 1)
    with torch.no_grad():
        module.weight.fill_(random.random())
        module.bias.fill_(float(np.random.rand()))
    return module


def test_a_model_is_built_alike_each_time_whatever_was_drawn_before() -> None:
    made = an_experiment(model=drawn_parameters)
    first = build(made, torch.float64)
    torch.rand(3), np.random.rand(3)
    second = build(made, torch.float64)
    assert torch.equal(first.weight, second.weight)
    assert torch.equal(first.bias, second.bias)


def test_another_seed_builds_another_model() -> None:
    one, other = (build(an_experiment(seed=s), torch.float64) for s in (0, 1))
    assert not torch.equal(one.weight, other.weight)


def test_a_factory_that_gives_no_module_is_refused() -> None:
    with pytest.raises(ExperimentError, match=r"model\(\) returned a dict"):
        build(an_experiment(model=dict), torch.float32)


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(ExperimentError, match="ReLU without trainable parameters"):
        build(an_experiment(model=nn.ReLU), torch.float32)
