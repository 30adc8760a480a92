"""Plans that do not fit the data, and data that makes no batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from inputs import DATA, GOOD, an_experiment, check, told

from equivtest import Plan, PlanError, plans


@pytest.mark.parametrize("size", ["m", "A", "D"])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (0, "=0: pass a whole number of at least 1"),
        (-2, "=-2: pass a whole number of at least 1"),
        (True, "=True is a bool: pass a whole number of at least 1, an int"),
        (2.0, "=2.0 is a float: pass a whole number of at least 1, an int"),
        ("2", "='2' is a str: pass a whole number of at least 1, an int"),
    ],
)
def test_a_size_that_is_none(size: str, given: Any, message: str) -> None:
    with pytest.raises(PlanError, match=f"^{size}{message}$"):
        check(GOOD, Plan(**{"m": 2, "A": 2, "D": 2, size: given}))


def test_a_product_that_is_none() -> None:
    with pytest.raises(PlanError, match=r"^B=0: pass a whole number of at least 1$"):
        plans(0)


@pytest.mark.parametrize(
    ("n", "last_group", "message"),
    [
        (
            7,
            None,
            r"7 examples do not fill .*m2-A2-D2: 2 x 2 x 2 = 8 .*pass last_group=\"process\"",
        ),
        (7, "drop", r"last_group=\"drop\" leaves no group: 7 examples.*pass more examples"),
        (0, None, "data has 0 examples: pass at least one"),
    ],
)
def test_examples_that_do_not_fill_the_plan(n: int, last_group: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check(an_experiment(data=DATA[:n], last_group=last_group))


class BrokenRow:
    def __len__(self) -> int:
        return len(DATA)

    def __getitem__(self, i: int) -> Any:
        if i == 5:
            raise KeyError("no such row")
        return DATA[i]


def ill(examples: list[Any]) -> Any:
    raise KeyError("tokens")


RAGGED = [(torch.zeros(1 + i % 3), torch.zeros(1)) for i in range(8)]


@pytest.mark.parametrize("count", [None, lambda batch: len(batch[1])])
@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"data": BrokenRow()}, ["data[5] raised KeyError: 'no such row'", "must give an example"]),
        (
            {"data": RAGGED},
            ["torch's default_collate raised", "[1] at entry 0", "examples 0, 1: pass a collate"],
        ),
        ({"data": [object()] * 8}, ["default_collate raised TypeError", "'object'", "pass a coll"]),
        ({"collate": ill}, ["collate raised KeyError: 'tokens' on examples 0, 1: pass a collate"]),
        (
            {"collate": lambda examples: None},
            ["collate returned None for examples 0, 1: return the batch"],
        ),
    ],
    ids=["broken row", "ragged", "objects", "collate raises", "collate returns nothing"],
)
def test_examples_that_make_no_batch(change: Any, parts: list[str], count: Any) -> None:
    text = told(an_experiment(**change, count=count))
    assert all(part in text for part in parts), text


def test_the_users_own_traceback_follows_and_the_harness_has_no_part_in_it() -> None:
    lines = check(an_experiment(collate=ill)).explain().splitlines()
    assert lines[1].strip() == "Traceback (most recent call last):"
    assert lines[-1].strip() == "KeyError: 'tokens'"
    assert sum("File " in line for line in lines) == 1
    assert 'raise KeyError("tokens")' in "".join(lines)
