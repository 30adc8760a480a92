"""A run that is killed at any moment: what is left makes a page that says what is missing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import verdicts

from equivtest.plan import Plan
from equivtest.report import record as records
from equivtest.report.page import render_page
from equivtest.report.run import RunFolder, find, load

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
