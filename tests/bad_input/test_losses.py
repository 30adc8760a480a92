"""A loss that is none, and counts that disagree with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from inputs import DATA, GOOD, PLAN, an_experiment, check, own_loop, squared_error, told
from torch import nn

from equivtest import Loss, Plan


def total(model: nn.Module, batch: Any) -> torch.Tensor:
    return squared_error(model, batch).total


def made(**changes: Any) -> Any:
    """A loss with another total or count."""

    def loss(model: nn.Module, batch: Any) -> Loss:
        right = squared_error(model, batch)
        change = {name: make(right, model, batch) for name, make in changes.items()}
        return Loss(**{"total": right.total, "count": right.count, **change})

    return loss


def under_no_grad(model: nn.Module, batch: Any) -> Loss:
    with torch.no_grad():
        return squared_error(model, batch)


NO_GRAPH = "Loss.total has no graph on all 8 examples of an update in one batch in float64"
RETURN = "return Loss(total=..., count=...), or a mapping from term to Loss"
LOG = "look for log(0), 0/0 or an overflow"

BAD: dict[str, tuple[Any, list[str]]] = {
    "bare tensor": (total, ["loss returned a Tensor: ", RETURN]),
    "tuple": (lambda m, b: (total(m, b), 2), ["loss returned a tuple: ", RETURN]),
    "None": (lambda m, b: None, ["loss returned None: ", RETURN]),
    "bare terms": (
        lambda m, b: {"a": squared_error(m, b), "b": total(m, b)},
        ["loss returned a dict with 'b': a Tensor: ", RETURN],
    ),
    "no term": (lambda m, b: {}, ["loss returned a dict without any term: ", RETURN]),
    "not scalar": (
        lambda m, b: Loss((m(b[0]) - b[1]).square(), 2),
        ["loss raised ValueError: Loss.total has shape (2, 1): pass a scalar, summed"],
    ),
    "item": (
        made(total=lambda right, *_: right.total.item()),
        ["loss raised TypeError: Loss.total is a float: pass", "no .item()"],
    ),
    "detached": (made(total=lambda right, *_: right.total.detach()), [NO_GRAPH, ".detach()"]),
    "no_grad": (under_no_grad, [NO_GRAPH, "no_grad"]),
    "integer": (
        made(total=lambda right, *_: right.total.long()),
        ["loss raised TypeError: Loss.total is torch.int64: pass a real floating scalar"],
    ),
    "complex": (
        made(total=lambda right, *_: right.total * 1j),
        ["loss raised TypeError: Loss.total is torch.complex128: pass a real floating scalar"],
    ),
    "log of 0": (
        made(total=lambda _, m, b: (m(b[0]).sum() * 0).log()),
        ["Loss.total is -inf on all 8 examples", "no loop is to blame", LOG],
    ),
    "nan": (
        made(total=lambda right, *_: right.total * float("nan")),
        ["Loss.total is nan on all 8 examples", "no loop is to blame", LOG],
    ),
    "nan gradient": (
        made(total=lambda right, *_: (right.total * 0).sqrt()),
        ["the gradient of 'weight' is not finite on all 8", "the loss is", "square root"],
    ),
    "count None": (
        made(count=lambda *_: None),
        ["loss raised TypeError: Loss.count is None: pass the number of supervised elements"],
    ),
    "counts": (
        made(count=lambda *_: torch.ones(2)),
        ["loss raised ValueError: Loss.count has shape (2,): pass one number"],
    ),
    "count inf": (
        made(count=lambda *_: float("inf")),
        ["count adds up to 8 over the microbatches, and the loss counts inf on the same 8"],
    ),
    "raises": (
        lambda m, b: b["tokens"],
        ["loss raised TypeError: list indices must be integers or slices, not str"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_loss_that_is_none(name: str) -> None:
    loss, parts = BAD[name]
    text = told(an_experiment(loss=loss))
    assert all(part in text for part in parts), text


@pytest.mark.parametrize("name", ["bare tensor", "item", "detached", "nan", "raises"])
def test_it_is_told_under_a_loop_with_a_loss_of_its_own_and_without_count(name: str) -> None:
    loss, parts = BAD[name]
    words = [part.partition(": ")[2] or part for part in parts]
    for text in (
        told(an_experiment(loss=loss), loop=own_loop),
        told(an_experiment(loss=loss, count=None)),
    ):
        assert "loss" in text.lower()
        assert any(word in text for word in words), text


@pytest.mark.parametrize("precision", ["fp64", "fp16-mixed"])
def test_nan_in_the_data_is_traced_to_its_example(precision: str) -> None:
    data = [(x.clone(), y) for x, y in DATA]
    data[5][0][0] = float("nan")
    text = told(an_experiment(data=data), precision=precision)
    assert "Loss.total is nan" in text
    assert "NaN or inf in example 5 itself" in text


def test_what_the_loss_raises_reaches_the_loop_as_it_is() -> None:
    def sometimes(model: nn.Module, batch: Any) -> Loss:
        if batch[0].requires_grad:
            raise KeyError("not such a batch")
        return squared_error(model, batch)

    def catches(rank: Any) -> None:
        with pytest.raises(KeyError, match="not such a batch"):
            rank.loss(rank.module, (torch.ones(1, 3, requires_grad=True), torch.ones(1, 1)))
        own_loop(rank)

    verdict = check(an_experiment(loss=sometimes), loop=catches)
    assert verdict.status == "equivalent", verdict.explain()


def test_an_evaluation_without_gradients_is_no_loss_without_a_graph() -> None:
    def evaluates(rank: Any) -> None:
        own_loop(rank)
        with torch.no_grad():
            rank.loss(rank.module, rank.groups[0][0])

    verdict = check(GOOD, loop=evaluates)
    assert verdict.status == "equivalent", verdict.explain()


# -- counts

SPLIT = "count must give the supervised elements that Loss.count gives, for any split"
NUMBER = "return the number of supervised elements, at least 0"


def no_mask(batch: Any) -> int:
    raise KeyError("mask")


@pytest.mark.parametrize(
    ("count", "parts"),
    [
        (lambda b: 1, ["count adds up to 4 ", "loss counts 8 on the same 8 examples", SPLIT]),
        (lambda b: len(b[1]) ** 2, ["count adds up to 16 ", "loss counts 8 ", SPLIT]),
        (lambda b: 0, ["count is 0 over all 8 examples of update 0", "pass examples with superv"]),
        (lambda b: -2, ["count is -2: ", NUMBER]),
        (lambda b: float("nan"), ["count is nan: ", NUMBER]),
        (lambda b: float("inf"), ["count is inf: ", NUMBER]),
        (lambda b: None, ["count is None: ", NUMBER]),
        (lambda b: "many", ["count is 'many': ", NUMBER]),
        (lambda b: torch.ones(2), ["count is tensor([1., 1.]): ", NUMBER]),
        (lambda b: {"a": -1}, ["count of term 'a' is -1: ", NUMBER]),
        (no_mask, ["count raised KeyError: 'mask' on the batch of examples 0, 1"]),
        (lambda b: {"a": 2}, ["count gives the terms ['a'], and the loss has one total: use the"]),
    ],
)
def test_a_count_that_is_none(count: Any, parts: list[str]) -> None:
    text = told(an_experiment(count=count))
    assert all(part in text for part in parts), text


def test_a_count_is_told_under_a_loop_with_a_loss_of_its_own() -> None:
    text = told(an_experiment(count=lambda b: 1), loop=own_loop)
    assert text.startswith("count adds up to 4 over the microbatches, and the loss counts 8 ")
    assert text.endswith(SPLIT)


def test_a_count_beside_terms() -> None:
    text = told(an_experiment(loss=lambda m, b: {"b": squared_error(m, b)}))
    assert text == "count gives one number, and the loss has a term 'b': use the same terms in both"


@pytest.mark.parametrize(
    ("count", "parts"),
    [
        (
            lambda n: n**2,
            ["Loss.count adds up to 16 ", "loss counts 64 on the same 8", "any split"],
        ),
        (lambda n: 0, ["Loss.count is 0 over all 8 examples of update 0", "pass examples"]),
        (lambda n: -n, ["Loss.count is -2: ", NUMBER]),
        (lambda n: float("nan"), ["Loss.count is nan: ", NUMBER]),
    ],
)
def test_counts_of_the_loss_itself(count: Any, parts: list[str]) -> None:
    loss = made(count=lambda right, *_: count(right.count))
    text = told(an_experiment(loss=loss, count=None))
    assert all(part in text for part in parts), text


def test_a_dry_forward_that_fails_asks_for_a_count() -> None:
    def single(model: nn.Module, batch: Any) -> Loss:
        return Loss(model(batch[0].float()).sum(), len(batch[1]))

    text = told(an_experiment(loss=single, count=None), precision="fp32")
    assert text.startswith("loss raised RuntimeError: mat1 and mat2 must have the same dtype")
    assert "on a dry forward in float64, to count the supervised elements of examples 0, 1" in text
    assert text.endswith("pass count, a function of the batch, and none is needed")


def test_a_loss_that_the_large_batch_alone_cannot_run() -> None:
    def small(model: nn.Module, batch: Any) -> Loss:
        if len(batch[1]) > PLAN.m:
            raise ValueError("at most two")
        return squared_error(model, batch)

    text = told(an_experiment(loss=small))
    assert text == (
        "loss raised ValueError: at most two on all 8 examples of an update in one batch in float64"
    )


def test_a_count_that_disagrees_is_told_without_any_split() -> None:
    assert SPLIT in told(an_experiment(count=lambda b: 2 * len(b[1])), Plan(8, 1, 1))
