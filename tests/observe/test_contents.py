"""Examples are told by the contents of what a forward received, or they are unknown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from ranks import a_rank, weight
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, default_collate
from watching import groups

from equivtest import Rank
from equivtest.loops import accumulate
from equivtest.observe import contents
from equivtest.observe.contents import Contents, Search
from equivtest.observe.observer import Observer

POINTS = [{"x": torch.tensor([i, i * i, 1.0]), "y": torch.tensor(i % 2)} for i in range(8)]
LINES = [torch.tensor(line) for line in ([1, 2, 3], [4], [1, 2], [5, 6, 7, 8], [9, 9])]


def search(data: Sequence[Any], collate: Any = None, stored: torch.dtype = torch.float32) -> Search:
    alone = None if collate is None else (lambda i: collate([data[i]]))
    return Contents(data, alone, stored).searching(range(len(data)))


def batch(*ids: int) -> Any:
    return default_collate([POINTS[i] for i in ids])


def padded(*ids: int, left: bool = False) -> Tensor:
    side = "left" if left else "right"
    return pad_sequence([LINES[i] for i in ids], batch_first=True, padding_side=side)


# -- what is told


def test_a_batch_is_told_row_by_row() -> None:
    assert search(POINTS).examples(batch(5, 0, 3), whole=True) == (5, 0, 3)


def test_a_models_argument_is_told_without_the_batch_around_it() -> None:
    assert search(POINTS).examples(((batch(5, 0)["x"],), {}), whole=False) == (5, 0)


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16])
def test_floats_are_compared_as_they_are_stored(stored: torch.dtype) -> None:
    data = [torch.tensor([0.1 * i, 1.0]) for i in range(4)]
    received = torch.stack(data[1:3]).to(stored)
    assert search(data, stored=stored).examples(received, whole=True) == (1, 2)


def test_numbers_and_lists_of_numbers_are_examples_too() -> None:
    data = [{"input_ids": [i, 7, i], "label": i % 2} for i in range(4)]
    received = {"input_ids": torch.tensor([[2, 7, 2], [0, 7, 0]]), "label": torch.tensor([0, 0])}
    assert search(data).examples(((), received), whole=False) == (2, 0)


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_a_padded_row_is_its_example(left: bool) -> None:
    assert search(LINES).examples(padded(0, 1, 3, left=left), whole=True) == (0, 1, 3)


def test_a_row_that_the_padding_makes_another_example_is_unknown() -> None:
    data = [torch.tensor(line) for line in ([1, 2], [1, 2, 0], [3, 3, 3, 3])]
    received = pad_sequence(data[1:], batch_first=True)
    assert search(data).examples(received, whole=True) is None


def test_a_row_without_its_last_token_is_its_example() -> None:
    assert search(LINES).examples(padded(3, 1)[:, :-1], whole=False) == (3, 1)


def test_the_batch_may_be_the_second_axis() -> None:
    assert search(LINES).examples(padded(3, 0).T, whole=True) == (3, 0)


def test_what_collate_makes_of_an_example_alone_is_told() -> None:
    words = ["ab", "c", "abd"]

    def collate(examples: list[str]) -> Tensor:
        return pad_sequence([torch.tensor([ord(c) for c in e]) for e in examples], True)

    assert search(words, collate).examples(collate([words[2], words[1]]), whole=True) == (2, 1)


def test_a_model_that_is_shown_a_batch_twice_received_it_once() -> None:
    x = batch(5, 0)["x"]
    told = search(POINTS)
    assert told.examples(torch.cat([x, x]), whole=False) == (5, 0)
    assert told.examples(x.repeat_interleave(2, dim=0), whole=False) == (5, 0)


# -- what is not


@pytest.mark.parametrize(
    "change",
    [lambda x: x + 1, lambda x: -x, lambda x: x[:, :1] * 0, lambda x: x.new_zeros(0, 3)],
    ids=["shifted", "negative", "zeros", "empty"],
)
def test_other_numbers_are_unknown(change: Any) -> None:
    assert search(POINTS).examples(change(batch(3, 4)["x"]), whole=False) is None


def test_one_odd_row_leaves_the_batch_unknown() -> None:
    x = batch(3, 4)["x"]
    x[1] += 0.5
    assert search(POINTS).examples(x, whole=False) is None


def test_a_row_whose_label_was_masked_is_not_that_example() -> None:
    masked = batch(3, 3)
    masked["y"][1] = -100
    assert search(POINTS).examples(masked, whole=True) is None


def test_one_whole_number_does_not_tell_an_example() -> None:
    data = [(torch.tensor([0.5 + i, 1.0]), torch.tensor(i)) for i in range(6)]
    noisy, timestep = torch.zeros(2, 2), torch.tensor([4, 1])
    assert search(data).examples((noisy, timestep), whole=False) is None


def test_what_several_different_examples_share_tells_none_of_them() -> None:
    data = [(torch.tensor([1.0, 2.0]), torch.tensor(float(i))) for i in range(3)]
    assert search(data).examples(torch.tensor([[1.0, 2.0]]), whole=False) is None


def test_texts_tell_apart_what_tensors_do_not() -> None:
    data = [{"text": t, "y": torch.tensor(1.0)} for t in ("a", "b")]
    assert search(data).examples(torch.tensor([1.0]), whole=False) is None


# -- equal examples


def test_equal_examples_are_one_with_the_others_beside_it() -> None:
    data = [torch.tensor([float(i % 3)]) for i in range(5)]
    told = search(data)
    assert told.examples(torch.tensor([[1.0], [2.0], [1.0]]), whole=True) == (1, 2, 1)
    assert told.twins == ((1, 4),)


# -- what it costs, and what it leaves


class Augmented:
    """Another example at each reading, from the generator that the loop draws from."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Tensor:
        self.reads += 1
        return torch.randn(3)


def test_examples_that_are_drawn_are_unknown_and_no_number_is_used_up() -> None:
    data = Augmented()
    received = torch.stack([data[0], data[1]])
    before = torch.get_rng_state()
    assert search(data).examples(received, whole=True) is None  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), before)


def test_each_example_is_read_once_and_only_when_asked_for() -> None:
    data = Augmented()
    told = search(data)  # type: ignore[arg-type]
    assert data.reads == 0
    for _ in range(2 * contents.PATIENCE):
        told.examples(torch.zeros(1, 3), whole=True)
    assert data.reads == 4


def test_of_large_data_so_much_is_searched_and_it_is_said(monkeypatch: Any) -> None:
    monkeypatch.setattr(contents, "MOST_EXAMPLES", 3)
    told = Contents(POINTS, None, torch.float32).searching([5])
    assert told.left_out == ""
    assert told.examples(batch(1), whole=True) == (1,)
    assert told.examples(batch(5), whole=True) == (5,)
    assert told.examples(batch(4), whole=True) is None
    assert told.left_out == "the data has 8 examples, and 3 of them are searched"


def test_data_that_cannot_be_read_leaves_examples_unknown() -> None:
    class Broken(Augmented):
        def __getitem__(self, i: int) -> Tensor:
            raise OSError("gone")

    told = search(Broken())  # type: ignore[arg-type]
    assert told.examples(torch.zeros(1, 3), whole=True) is None


# -- in the observer


def drawing(rank: Rank) -> None:
    """A loop with a loader and a forward that draw from the global generators."""
    for _ in range(2):
        for batch in DataLoader(rank.dataset, batch_size=2, shuffle=True):  # type: ignore[arg-type]
            out = rank.model(torch.nn.functional.dropout(batch.clone(), 0.5))
            out.square().sum().backward()
        rank.optimizer.step()
        rank.optimizer.zero_grad()


def test_a_search_changes_no_bit_of_what_the_loop_computes() -> None:
    left = []
    for searched in (False, True):
        data = [torch.tensor([0.5 + i]) for i in range(6)]
        torch.manual_seed(3)
        rank = a_rank(weight(1.0), dataset=data)
        observer = Observer(rank, [3, 3], lambda _: None, search(data) if searched else None)
        with observer.watching():
            drawing(rank)
        left.append((rank.module.weight.detach().clone(), torch.get_rng_state()))
    (bare, state), (found, same) = left
    assert torch.equal(bare, found)
    assert torch.equal(state, same)


def own(change: Any) -> list[list[tuple[int, ...] | None]]:
    """Ids by update and microbatch of a loop that shows the model ``change(batch)``."""
    data = [torch.tensor([0.5 + i]) for i in range(4)]
    rank = a_rank(weight(1.0), dataset=data)

    def loop() -> None:
        for batch in DataLoader(rank.dataset, batch_size=2):  # type: ignore[arg-type]
            sum(rank.model(part).sum() for part in change(batch)).backward()
        rank.optimizer.step()

    observer = Observer(rank, [2], lambda _: None, search(data))
    with observer.watching():
        loop()
    return [[m.ids for m in u.microbatches] for u in observer.trace().updates]


@pytest.mark.parametrize(
    "change",
    [lambda b: [b], lambda b: [b, b], lambda b: [b[:1], b[1:]], lambda b: [b, b + 0.1]],
    ids=["once", "twice", "in parts", "beside another"],
)
def test_a_microbatch_is_one_however_the_model_is_shown_it(change: Any) -> None:
    assert own(change) == [[(0, 1), (2, 3)]]


def test_what_is_told_by_memory_is_not_searched() -> None:
    data = Augmented()
    rank = a_rank(weight())
    observer = Observer(rank, [1], lambda _: None, search(data))  # type: ignore[arg-type]
    rank.groups = groups([[torch.ones(2, 1)]], observer.fetched)
    with observer.watching():
        accumulate(rank)
    (update,) = observer.trace().updates
    assert [(m.ids, m.by_contents) for m in update.microbatches] == [((0, 1), False)]
    assert data.reads == 0
