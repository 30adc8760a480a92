"""Verdicts: what passes, what the margins are, what a user may expect."""

import math

import pytest

from equivtest.causes import Cause
from equivtest.compare.tables import TensorRow
from equivtest.compare.verdict import Card, Finding, Status, Verdict, expectation

CARD = Card(
    plan="m2-A2-D2",
    m="2",
    A=2,
    D=2,
    processes=2,
    examples=8,
    dp_group=(0, 1),
    precision="fp32",
    device="cpu",
    backend="gloo",
    optimizer="SGD",
    normalisation="",
    last_group="none left",
    last_group_examples=(),
    dropped_examples=(),
)


def verdict(status: Status, *causes: str, expect=("equivalent",), rows=()) -> Verdict:
    findings = tuple(Finding(cause, "because") for cause in causes)
    return Verdict(status, CARD, findings=findings, expect=expectation(expect), rows=rows)


def row(**changes) -> TensorRow:
    given = {"update": 0, "tensor": "w", "shape": (2,), "dtype": "float32", "state": "equal"}
    return TensorRow(**{**given, **changes})


# -- passed


@pytest.mark.parametrize("status", Status)
def test_a_status_passes_where_it_is_expected_and_nowhere_else(status: Status) -> None:
    assert verdict(status, expect=str(status)).passed
    assert not any(verdict(status, expect=str(o)).passed for o in Status if o is not status)


def test_equivalent_is_expected_unless_said_otherwise() -> None:
    assert verdict(Status.EQUIVALENT).passed
    assert not verdict(Status.FAULT, Cause.GRADIENT).passed


def test_an_expected_cause_passes() -> None:
    assert verdict(Status.FAULT, Cause.CLIP_MISSING, expect="clip.missing").passed


def test_an_expected_divergence_that_does_not_appear_fails() -> None:
    assert not verdict(Status.EQUIVALENT, expect="clip.missing").passed
    assert not verdict(Status.EQUIVALENT, expect="fault").passed


def test_another_cause_beside_the_expected_one_fails() -> None:
    both = (Cause.CLIP_MISSING, Cause.LOSS)
    assert not verdict(Status.FAULT, *both, expect="clip.missing").passed
    assert verdict(Status.FAULT, *both, expect={"clip.missing", "differs.loss"}).passed
    assert not verdict(Status.FAULT, both[0], expect={"clip.missing", "differs.loss"}).passed


def test_a_finding_without_a_name_is_no_cause() -> None:
    found = verdict(Status.UNEXPLAINED, "")
    assert (found.causes, found.cause) == ((), "")


def test_causes_come_once_each_and_the_first_is_the_cause() -> None:
    found = verdict(Status.FAULT, Cause.STATE, Cause.LOSS, Cause.STATE)
    assert found.causes == ("differs.state", "differs.loss")
    assert found.cause == "differs.state"


# -- expectation


def test_an_expectation_is_a_sorted_tuple_of_names() -> None:
    assert expectation("fault") == ("fault",)
    assert expectation({Cause.STATE, "clip.missing"}) == ("clip.missing", "differs.state")
    assert expectation(Status.NOT_RUN) == ("not-run",)


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"expect='any': pass a status \(equivalent, explained"):
        expectation("any")
    meant = r"\(did you mean clip\.missing\?\): pass a status"
    with pytest.raises(ValueError, match=meant):
        expectation(["clip.mising"])


def test_a_status_among_causes_is_refused() -> None:
    with pytest.raises(ValueError, match="one status, or a set of causes, not both"):
        expectation(["fault", "clip.missing"])


def test_expecting_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="expect="):
        expectation([])


# -- margins


def test_the_margin_is_the_largest_of_what_judges_the_loop_and_the_split() -> None:
    rows = (
        row(replay_distance=1.0, replay_tolerance=4.0, oracle_distance=9.0, oracle_tolerance=1.0),
        row(replay_distance=0.0, replay_tolerance=1.0, split_distance=1.0, split_tolerance=2.0),
    )
    found = verdict(Status.EQUIVALENT, rows=rows)
    assert found.margin == 0.5
    assert (found.replay_margin, found.split_margin, found.oracle_margin) == (0.25, 0.5, 9.0)
    assert found.worst is rows[1]


def test_a_null_tensor_has_no_split_margin_and_is_left_out_of_the_oracles() -> None:
    one = row(
        null=True,
        replay_distance=1.0,
        replay_tolerance=4.0,
        split_distance=9.0,
        split_tolerance=1.0,
        oracle_distance=5.0,
        oracle_tolerance=1.0,
    )
    found = verdict(Status.EQUIVALENT, rows=(one,))
    assert found.margin == 0.25
    assert found.split_margin is None
    assert found.oracle_margin is None


def test_something_over_a_tolerance_of_nothing_is_an_infinite_margin() -> None:
    assert row(replay_distance=1e-9, replay_tolerance=0.0).margin == math.inf
    assert row(replay_distance=0.0, replay_tolerance=0.0).margin == 0.0


@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_no_number_is_the_worst_wherever_it_stands(place: int) -> None:
    rows = [row(tensor=name, replay_distance=1e-8, replay_tolerance=1e-7) for name in "abc"]
    rows[place] = row(tensor="broken", replay_distance=math.nan, replay_tolerance=1e-7)
    made = verdict(Status.FAULT, rows=tuple(rows))
    assert math.isnan(made.margin)
    assert math.isnan(made.replay_margin)
    assert made.worst.tensor == "broken"
    beside = row(split_distance=math.nan, split_tolerance=1e-7, replay_distance=1e-8)
    assert math.isnan(beside.margin)


def test_what_was_not_judged_has_no_margin() -> None:
    rows = (row(state="not judged", replay_distance=8.0, replay_tolerance=1.0),)
    assert math.isnan(verdict(Status.INCONCLUSIVE, rows=rows).margin)


def test_tensors_and_weights_are_frames_with_a_row_for_each() -> None:
    made = Verdict(
        Status.FAULT,
        CARD,
        rows=(row(), row(update=1)),
        weight_rows=((0, 1, 2, 1.0, 0.5, 1e-3),),
    )
    assert list(made.tensors["update"]) == [0, 1]
    assert made.weights.to_dict("records") == [
        {"update": 0, "replica": 1, "microbatch": 2, "expected": 1.0, "found": 0.5, "sigma": 1e-3}
    ]


@pytest.mark.parametrize("cause", Cause)
def test_a_cause_says_what_happened_and_what_to_do(cause: Cause) -> None:
    # At least two sentences where something can be changed; every one ends.
    assert cause.prose.endswith(".")
    assert str(cause) == cause.value
    assert "." in cause.value
