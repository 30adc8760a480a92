"""Whole sessions on real process groups: what they leave, with and without xdist."""

from __future__ import annotations

import os
import signal
import xml.etree.ElementTree as ElementTree

import pandas as pd
import pytest
from sessions import LINEAR, Session

from equivtest.cli import main

IDS = {
    "test_linear.py::test_right[m1-A8-D1]",
    "test_linear.py::test_right[m4-A1-D2]",
    "test_linear.py::test_right[m2-A2-D2]",
    "test_linear.py::test_right[m1-A4-D2]",
    "test_linear.py::test_wrong[m8-A1-D1]",
    "test_linear.py::test_wrong[m2-A2-D2]",
    "test_linear.py::test_expected",
    "test_linear.py::test_impossible",
}


def test_one_process_leaves_records_table_page_and_a_summary(linear: Session) -> None:
    summary = linear.folder / "step.md"
    status, output = linear.run(
        "-p", "no:xdist", "-rs", "--junitxml=junit.xml", "--equiv-run-id=one",
        environment={"GITHUB_STEP_SUMMARY": str(summary)},
    )  # fmt: skip
    assert status == 1, output
    assert "1 failed, 7 passed, 1 skipped" in output
    assert "Rerun: pytest 'test_linear.py::test_wrong[m2-A2-D2]'" in output
    assert "tf32 needs a CUDA device" in output
    assert "1 of 8 cases is not as expected." in output
    assert "report: " in output

    records = linear.records()
    assert set(records) == IDS
    wrong = records["test_linear.py::test_wrong[m2-A2-D2]"]
    assert (wrong["experiment"], wrong["loop"]) == ("linear", "halved")
    assert wrong["outcome"]["causes"] == ["differs.gradient"]
    assert {path.name for path in (linear.folder / "reports/runs").iterdir()} == {"one"}

    table = pd.read_csv(linear.folder / "reports/results.csv")
    assert set(table["id"]) == IDS
    assert list(table["status"].value_counts().sort_index().items()) == [
        ("equivalent", 5),
        ("fault", 2),
        ("not-run", 1),
    ]
    assert "1 of 8 cases is not as expected." in linear.page()
    assert "left no record" not in linear.page()
    assert "did not end by itself" not in linear.page()

    assert summary.read_text().startswith("### equivtest: 1 of 8 cases is not as expected.")
    junit = ElementTree.parse(linear.folder / "junit.xml")
    found = {p.get("name"): p.get("value") for p in junit.iter("property")}
    assert set(found) == {"equivtest_status", "equivtest_cause", "equivtest_margin"}


def test_two_workers_leave_the_records_that_one_process_leaves(linear: Session) -> None:
    alone = linear.run("-n", "0", "--equiv-reports=alone")
    shared = linear.run("-n", "2", "-v", "--equiv-reports=shared")
    assert (alone[0], shared[0]) == (1, 1), alone[1] + shared[1]
    assert "scheduling tests via ExperimentScheduling" in shared[1]
    for name in ("alone", "shared"):
        assert set(linear.records(name)) == IDS

    def stable(reports: str) -> dict[str, str]:
        paths = (linear.folder / reports).glob("runs/*/cases/*.json")
        return {path.name: path.read_text().split('"volatile"')[0] for path in paths}

    assert stable("alone") == stable("shared")


def test_cases_of_one_function_stay_on_one_worker(session: Session) -> None:
    session.write(
        "test_where.py",
        LINEAR
        + """
import os, pathlib, pytest

@pytest.mark.parametrize("plan", plans(8, max_D=1), ids=str)
@pytest.mark.parametrize("name", ["a", "b"])
def test_a(equivalence, plan, name): note("a")

@pytest.mark.parametrize("plan", plans(8, max_D=1), ids=str)
def test_b(equivalence, plan): note("b")

@pytest.mark.parametrize("k", range(6))
def test_plain(k): note("plain")

def note(what):
    pathlib.Path(f"{what}-{os.environ['PYTEST_XDIST_WORKER']}").touch()
""",
    )
    status, output = session.run("-n", "2")
    assert status == 0, output
    for what in ("a", "b"):
        assert len(list(session.folder.glob(f"{what}-gw*"))) == 1
    # A test that asks for the fixture and does not call it is not hidden.
    assert "12 collected tests left no record (12 passed)" in session.page()


def test_a_test_may_check_several_cases_and_all_of_them_are_kept(session: Session) -> None:
    session.write(
        "test_several.py",
        LINEAR
        + """
def test_both(equivalence):
    assert equivalence(linear, Plan(2, 2, 2)).status == "equivalent"
    equivalence(linear, Plan(4, 1, 2), loop=halved)
    raise AssertionError("not reached")

def test_other_product(equivalence):
    equivalence(linear, Plan(2, 2, 1))

def test_too_many(equivalence):
    equivalence(linear, Plan(1, 2, 4))

def test_bad_argument(equivalence):
    equivalence(linear, Plan(2, 2, 2), expect="fine")
""",
    )
    status, output = session.run("--equiv-max-ranks=2", "-rs")
    assert status == 1
    records = session.records()
    assert set(records) == {
        "test_several.py::test_both",
        "test_several.py::test_both#2",
        "test_several.py::test_other_product",
        "test_several.py::test_too_many",
        "test_several.py::test_bad_argument",
    }
    # An argument that cannot be fails its test, whatever was expected, and is on the page.
    for name in ("other_product", "bad_argument"):
        outcome = records[f"test_several.py::test_{name}"]["outcome"]
        assert (outcome["status"], outcome["passed"]) == ("error", False)
    assert "not reached" not in output
    assert "m2-A2-D2 is 2 x 2 x 2 = 8 examples per update and m2-A2-D1 is 2 x 2 x 1 = 4" in output
    assert "m1-A2-D4 needs 4 processes, and --equiv-max-ranks is 2" in output
    assert "expect='fine': pass a status" in output
    assert "left no record" not in session.page()
    assert "m2-A2-D1 is 2 x 2 x 1 = 4" in session.page()


def test_a_killed_worker_takes_only_its_own_case(session: Session) -> None:
    session.write(
        "test_killed.py",
        LINEAR
        + """
import os, pytest, signal

@pytest.mark.parametrize("k", range(3))
def test_kills(equivalence, k):
    equivalence(linear, Plan(2, 2, 2), precision="fp64")
    if k == 1:
        os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.parametrize("k", range(2))
def test_others(equivalence, k):
    equivalence(linear, Plan(2, 2, 2), precision="fp64")
""",
    )
    status, output = session.run("-n", "2")
    assert status == 1, output
    assert "1 failed, 4 passed" in output
    assert set(session.records()) == {
        "test_killed.py::test_kills[0]",
        "test_killed.py::test_kills[1]",
        "test_killed.py::test_kills[2]",
        "test_killed.py::test_others[0]",
        "test_killed.py::test_others[1]",
    }


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


def test_a_killed_session_leaves_records_that_make_a_page(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(session.folder / "reached")
    session.write(
        "test_long.py",
        LINEAR
        + """
import pytest, signal

@pytest.mark.parametrize("k", range(3))
def test_it(equivalence, k):
    equivalence(linear, Plan(2, 2, 2))
    if k == 1:
        open("reached", "w").close()
        signal.pause()
""",
    )
    process = session.start("-p", "no:xdist")
    open(session.folder / "reached").close()  # until the second test has written its record
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert main(["report", str(session.folder / "reports")]) == 0
    assert "1 collected test left no record (1 never finished)" in capsys.readouterr().out
    assert "did not end by itself" in session.page()
