"""A run that is killed at any moment: what is left makes a page that says what is missing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import verdicts

from equivtest.plan import Plan
from equivtest.report import casehtml
from equivtest.report import record as records
from equivtest.report.page import render_page
from equivtest.report.record import Record
from equivtest.report.run import Run, RunFolder, find, load

PLANS = (Plan(4, 2, 2), Plan(2, 4, 2), Plan(8, 1, 2))
MADE = [verdicts.record(verdicts.equivalent(plan)) for plan in PLANS]


class Killed(BaseException):
    """The process is gone: nothing that would clean up behind it runs."""


def session(reports: Path) -> None:
    """What a session writes, in order: five files."""
    folder = RunFolder(reports, "a-run", "2026-01-01T00:00:00+00:00")
    folder.write_collected([made.nodeid for made in MADE])
    for made in MADE:
        records.write(made, folder.cases)
    folder.write_ended({})


def killed_at(monkeypatch: pytest.MonkeyPatch, moment: int, before: bool) -> None:
    """Kill at the file of that number: before it has its name, or just after."""
    real: Callable[..., None] = os.replace
    done = 0

    def replace(source: Path, target: Path) -> None:
        nonlocal done
        if done == moment and before:
            os.link(source, source.with_suffix(".left"))  # what `unlink` of a dead process leaves
            raise Killed
        real(source, target)
        done += 1
        if done == moment + 1 and not before:
            raise Killed

    monkeypatch.setattr(os, "replace", replace)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("moment", range(5))
def test_a_page_says_what_is_missing_whenever_the_run_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int, before: bool
) -> None:
    killed_at(monkeypatch, moment, before)
    with pytest.raises(Killed):
        session(tmp_path)
    monkeypatch.undo()
    written = moment + (not before)
    if written == 0:  # not even the names of the tests are known
        with pytest.raises(FileNotFoundError, match="holds no run"):
            find(tmp_path)
        return
    run = load(find(tmp_path))
    left = 3 - min(written - 1, 3)
    assert len(run.records) == 3 - left
    assert len(run.missing) == left
    page = render_page(run)
    assert ("did not end by itself" in page) == (written < 5)
    told = f"{left} collected test{'s' if left != 1 else ''} left no record ({left} never finished)"
    assert (told in page) == (left > 0)
    for made in MADE[3 - left :]:
        assert made.nodeid.replace("'", "&#39;") in page


def test_half_a_record_of_a_full_disk_is_named(tmp_path: Path) -> None:
    session(tmp_path)
    torn = sorted((tmp_path / "runs/a-run/cases").iterdir())[0]
    torn.write_bytes(torn.read_bytes()[:1000])
    page = render_page(load(find(tmp_path)))
    assert "1 record could not be read" in page
    assert torn.name in page
    assert "1 collected test left no record" in page


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[" * 200_000, "is not JSON"),
        ('{"schema": true}', "has schema True"),
        ("null", "has no schema"),
    ],
    ids=["deep", "schema", "null"],
)
def test_what_is_no_record_takes_no_other_with_it(tmp_path: Path, content: str, told: str) -> None:
    session(tmp_path)
    (tmp_path / "runs/a-run/cases/x.json").write_text(content)
    run = load(find(tmp_path))
    assert len(run.records) == 3
    assert run.unreadable[0].startswith("a-run/cases/x.json ")
    assert told in run.unreadable[0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("duration_s", 10**400),
        ("duration_s", "NaN"),
        ("microbatches", 10**400),
        ("examples_seen", 10**400),
        ("first_peak_bytes", 10**400),
    ],
)
def test_a_number_beyond_all_is_refused_or_shown_and_takes_no_page(
    tmp_path: Path, field: str, value: object
) -> None:
    session(tmp_path)
    path = sorted((tmp_path / "runs/a-run/cases").iterdir())[0]
    data = json.loads(path.read_text())
    (data["volatile"] if field in data["volatile"] else data["verdict"]["card"])[field] = value
    path.write_text(json.dumps(data))
    run = load(find(tmp_path))
    assert len(run.records) + len(run.unreadable) == 3
    assert "did not end by itself" not in render_page(run)


@pytest.mark.parametrize("name", ["collected.json", "run.json"])
@pytest.mark.parametrize(
    "content",
    [
        "[" * 200_000,
        '{"collected": 5, "outcomes": []}',
        '{"collected": [["a"], null], "outcomes": {"t": 5, "u": {}}}',
        '{"collected": null, "outcomes": null}',
    ],
    ids=["deep", "number", "nested", "null"],
)
def test_side_files_that_are_none_take_no_page(tmp_path: Path, name: str, content: str) -> None:
    session(tmp_path)
    (tmp_path / "runs/a-run" / name).write_text(content)
    run = load(find(tmp_path))
    assert len(run.records) == 3
    assert "m4-A2-D2" in render_page(run)


def test_a_pipe_among_the_records_is_not_waited_for(tmp_path: Path) -> None:
    session(tmp_path)
    os.mkfifo(tmp_path / "runs/a-run/cases/x.json")
    run = load(find(tmp_path))
    assert run.unreadable == ("a-run/cases/x.json is no file",)


def test_a_case_that_cannot_be_drawn_is_named_and_the_others_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = casehtml.case_view

    def view(record: Record, *rest: object) -> object:
        if record.id == MADE[1].id:
            raise ZeroDivisionError("division by zero")
        return real(record, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(casehtml, "case_view", view)
    page = render_page(Run(tuple(MADE)))
    assert page.count('<details class="case"') == 2
    assert "could not be drawn</b> ZeroDivisionError: division by zero" in page
