"""Whole sessions on real process groups: what they leave, with and without xdist."""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from sessions import LINEAR, LINEAR_CASES, Session, a_session

from equivtest.cli import main

SEVERAL = """
def test_both(equivalence):
    assert equivalence(linear, Plan(2, 2, 2)).status == "equivalent"
    equivalence(linear, Plan(4, 1, 2), loop=halved)
    raise AssertionError("not reached")

def test_other_product(equivalence):
    equivalence(linear, Plan(2, 2, 2))
    equivalence(linear, Plan(2, 2, 1))

def test_too_many(equivalence):
    equivalence(linear, Plan(1, 2, 4))

def test_bad_argument(equivalence):
    equivalence(linear, Plan(2, 2, 2), expect="fine")
"""

WHERE = """
import os, pathlib, pytest
from equivtest import plans

@pytest.mark.parametrize("plan", plans(8, max_D=1), ids=str)
@pytest.mark.parametrize("name", ["a", "b"])
def test_a(equivalence, plan, name): note("a")

@pytest.mark.parametrize("plan", plans(8, max_D=1), ids=str)
def test_b(equivalence, plan): note("b")

@pytest.mark.parametrize("k", range(6))
def test_plain(k): note("plain")

def note(what):
    worker = os.environ.get("PYTEST_XDIST_WORKER", "alone")
    pathlib.Path(f"{what}-{worker}").touch()
"""

LINEAR_IDS = {
    "test_linear.py::test_right[m1-A8-D1]",
    "test_linear.py::test_right[m4-A1-D2]",
    "test_linear.py::test_right[m2-A2-D2]",
    "test_linear.py::test_right[m1-A4-D2]",
    "test_linear.py::test_wrong[m8-A1-D1]",
    "test_linear.py::test_wrong[m2-A2-D2]",
    "test_linear.py::test_expected",
    "test_linear.py::test_impossible",
}
SEVERAL_IDS = {
    "test_several.py::test_both",
    "test_several.py::test_both#2",
    "test_several.py::test_other_product",
    "test_several.py::test_other_product#2",
    "test_several.py::test_too_many",
    "test_several.py::test_bad_argument",
}
TITLE = "4 of 14 cases are not as expected; 2 of them: norm.missing_world_size; 2 errors."


@dataclass(frozen=True)
class Ended:
    """A session that has ended: where, with what status, and what it printed."""

    session: Session
    status: int
    output: str


def of_three_files(folder: Path, *arguments: str, **more: Any) -> Ended:
    """The linear cases, several cases in a test, and tests that call nothing; at most two ranks."""
    session = a_session(folder)
    session.write("test_linear.py", LINEAR + LINEAR_CASES)
    session.write("test_several.py", LINEAR + SEVERAL)
    session.write("test_where.py", WHERE)
    return Ended(session, *session.run(*arguments, "--equiv-max-ranks=2", **more))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("alone")
    return of_three_files(
        folder, "-p", "no:xdist", "-rs", "--junitxml=junit.xml", "--equiv-run-id=one",
        environment={"GITHUB_STEP_SUMMARY": str(folder / "step.md")},
    )  # fmt: skip


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return of_three_files(tmp_path_factory.mktemp("shared"), "-n", "2", "-v", "--equiv-run-id=one")


SHARDS = (
    ("test_linear.py::test_right",),
    ("test_linear.py", "-k", "not right"),
    ("test_several.py",),
    ("test_where.py",),
)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of four sessions, each with a part of the tests and reports of its own."""
    folder = tmp_path_factory.mktemp("sharded")
    for k, chosen in enumerate(SHARDS):
        of_three_files(
            folder, "-p", "no:xdist", *chosen, "--equiv-run-id=one",
            f"--equiv-reports=shards/{k}/reports",
        )  # fmt: skip
    assert main(["report", str(folder / "shards"), "--out", str(folder / "merged")]) == 0
    return folder / "merged" / "divergence.html"


def test_one_process_leaves_records_table_page_and_a_summary(alone: Ended) -> None:
    folder, output = alone.session.folder, alone.output
    assert alone.status == 1, output
    assert "4 failed, 25 passed, 2 skipped" in output
    assert "Rerun: pytest 'test_linear.py::test_wrong[m2-A2-D2]'" in output
    assert "tf32 needs a CUDA device" in output
    assert TITLE in output
    assert "report: " in output

    records = alone.session.records()
    assert set(records) == LINEAR_IDS | SEVERAL_IDS
    wrong = records["test_linear.py::test_wrong[m2-A2-D2]"]
    assert (wrong["experiment"], wrong["loop"]) == ("linear", "halved")
    assert wrong["outcome"]["causes"] == ["norm.missing_world_size"]
    assert {path.name for path in (folder / "reports/runs").iterdir()} == {"one"}

    table = pd.read_csv(folder / "reports/results.csv")
    assert set(table["id"]) == LINEAR_IDS | SEVERAL_IDS
    linear = table[table["id"].isin(LINEAR_IDS)]
    assert list(linear["status"].value_counts().sort_index().items()) == [
        ("equivalent", 5),
        ("fault", 2),
        ("not-run", 1),
    ]
    page = alone.session.page()
    assert TITLE in page
    assert "did not end by itself" not in page

    summary = (folder / "step.md").read_text()
    in_markdown = TITLE.replace("_", r"\_")
    assert summary.startswith(f"### equivtest: {in_markdown}")
    junit = ElementTree.parse(folder / "junit.xml")
    found = {p.get("name"): p.get("value") for p in junit.iter("property")}
    assert set(found) == {"equivtest_status", "equivtest_cause", "equivtest_margin"}


def test_a_test_may_check_several_cases_and_all_of_them_are_kept(alone: Ended) -> None:
    records = alone.session.records()
    # An argument that cannot be fails its test, whatever was expected, and is on the page.
    for name in ("other_product#2", "bad_argument"):
        outcome = records[f"test_several.py::test_{name}"]["outcome"]
        assert (outcome["status"], outcome["passed"]) == ("error", False)
    assert "not reached" not in alone.output
    product = "m2-A2-D2 is 2 x 2 x 2 = 8 examples per update and m2-A2-D1 is 2 x 2 x 1 = 4"
    assert product in alone.output
    assert "m1-A2-D4 needs 4 processes, and --equiv-max-ranks is 2" in alone.output
    assert "expect='fine': pass a status" in alone.output
    assert "m2-A2-D1 is 2 x 2 x 1 = 4" in alone.session.page()


@pytest.mark.parametrize("how", ["alone", "shared"])
def test_a_test_that_asks_for_the_fixture_and_does_not_call_it_is_not_hidden(
    how: str, request: pytest.FixtureRequest
) -> None:
    page = request.getfixturevalue(how).session.page()
    assert "12 collected tests left no record (12 passed)" in page


def test_two_workers_leave_the_records_that_one_process_leaves(alone: Ended, shared: Ended) -> None:
    assert shared.status == 1, shared.output
    assert "scheduling tests via ExperimentScheduling" in shared.output
    assert set(shared.session.records()) == LINEAR_IDS | SEVERAL_IDS

    def stable(ended: Ended) -> dict[str, str]:
        paths = (ended.session.folder / "reports").glob("runs/*/cases/*.json")
        return {path.name: path.read_text().split('"volatile"')[0] for path in paths}

    assert stable(alone) == stable(shared)


def test_one_process_two_workers_and_four_shards_give_the_same_page_but_for_times(
    alone: Ended, shared: Ended, sharded: Path
) -> None:
    pages = [alone.session.page(), shared.session.page(), sharded.read_text()]
    assert len(pages[0]) > 100_000
    first, second, third = map(timeless, pages)
    assert first == second
    assert first == third


def timeless(page: str) -> str:
    """Without durations, and without the times of events."""
    page = re.sub(r'<details class="when">.*?</details>', "", page, flags=re.S)
    return re.sub(r"\b\d+(\.\d+)? (ms|s|min)\b", "some time", page)


def test_cases_of_one_function_stay_on_one_worker(shared: Ended) -> None:
    for what in ("a", "b"):
        assert len(list(shared.session.folder.glob(f"{what}-gw*"))) == 1


def test_two_killed_workers_take_only_their_own_cases(session: Session) -> None:
    """The second dies while the replacement of the first collects: two pipes see to that."""
    for pipe in ("collecting", "replaced"):
        os.mkfifo(session.folder / pipe)
    session.write(
        "conftest.py",
        """
import os

def pytest_collection():
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker == "gw2":
        open("collecting", "w").close()  # waits for the test that dies then
        open("replaced").close()  # waits for that one's replacement
    elif worker == "gw3":
        open("replaced", "w").close()
""",
    )
    session.write(
        "test_killed.py",
        LINEAR
        + """
import os, pathlib, pytest, signal

@pytest.fixture(autouse=True)
def begun(request):
    with open("begun", "a") as file:
        file.write(request.node.name + "\\n")

@pytest.mark.parametrize("k", range(4))
def test_kills(equivalence, k):
    equivalence(linear, Plan(2, 2, 2), precision="fp64")
    if k == 1:
        os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.parametrize("k", range(3))
def test_kills_at_once(equivalence, k):
    if k == 0:
        open("collecting").close()
        os.kill(os.getpid(), signal.SIGKILL)
    equivalence(linear, Plan(2, 2, 2), precision="fp64")

@pytest.mark.parametrize("k", range(2))
def test_others(equivalence, k):
    equivalence(linear, Plan(2, 2, 2), precision="fp64")

def test_plain(): pass
""",
    )
    status, output = session.run("-n", "2")
    assert status == 1, output
    assert "INTERNALERROR" not in output
    assert "2 failed, 8 passed" in output
    ids = [f"test_kills[{k}]" for k in range(4)] + [f"test_kills_at_once[{k}]" for k in (1, 2)]
    ids += ["test_others[0]", "test_others[1]"]
    assert set(session.records()) == {f"test_killed.py::{test}" for test in ids}
    begun = (session.folder / "begun").read_text().split()
    assert sorted(begun) == sorted([*ids, "test_kills_at_once[0]", "test_plain"])
    assert "1 collected test left no record (1 failed)" in session.page()
