"""Records: what is written comes back, whole, strict, and the same for the same verdict."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import verdicts

from equivtest.compare.sensitivity import Sensitivity
from equivtest.compare.tables import EventRow, SourceRow
from equivtest.compare.verdict import Card, Verdict
from equivtest.plan import Plan
from equivtest.report import record as records
from equivtest.report.atomic import write_whole
from equivtest.report.codec import CodecError, decode, encode
from equivtest.report.page import render_page
from equivtest.report.run import Run

PLAN = Plan(4, 2, 2)
MADE = {
    "equivalent": verdicts.equivalent(PLAN),
    "fault": verdicts.fault(PLAN),
    "error": verdicts.error(PLAN),
    "not-run": verdicts.not_run(PLAN),
    "unequal microbatches": verdicts.equivalent(Plan((1, 3), 2, 2)),
    "sources": verdicts.equivalent(
        PLAN, source_rows=(SourceRow("source.dropout", 0.9, "at `0`", claimed=True),), remainder=0.1
    ),
    "sensitivity": verdicts.equivalent(PLAN, sensitivity=verdicts.sensitivity()),
    "no sensitivity": verdicts.equivalent(PLAN, sensitivity=Sensitivity(reason="it is a fault")),
}


@pytest.mark.parametrize("verdict", MADE.values(), ids=list(MADE))
def test_a_record_comes_back_equal(verdict: Verdict) -> None:
    record = verdicts.record(verdict)
    assert records.from_json(records.to_json(record)) == record


def test_floats_that_json_has_no_word_for_come_back() -> None:
    text = records.to_json(verdicts.record(verdicts.nothing_finite(PLAN)))
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not strict JSON"))
    back = records.from_json(text).verdict
    assert math.isnan(back.rows[0].replay_distance or 0)
    assert back.rows[0].oracle_distance == math.inf
    assert back.rows[0].norm == -math.inf
    assert math.isnan(back.updates[0].loss or 0)


def test_only_volatile_differs_between_two_runs_of_a_case() -> None:
    slow = verdicts.fault(PLAN, duration_s=7.5)
    slow = replace(slow, card=replace(slow.card, first_peak_bytes=4096, later_peak_bytes=2048))
    slow = replace(slow, updates=tuple(replace(u, peak_bytes=4096) for u in slow.updates))
    first, second = (
        records.to_json(verdicts.record(verdict)) for verdict in (verdicts.fault(PLAN), slow)
    )
    assert first != second
    assert first.split('"volatile"')[0] == second.split('"volatile"')[0]


def test_a_reader_without_the_package_finds_the_outcome() -> None:
    data = json.loads(records.to_json(verdicts.record(verdicts.fault(PLAN))))
    assert data["schema"] == 2
    assert data["outcome"] == {
        "status": "fault",
        "passed": False,
        "causes": ["differs.gradient", "clip.missing"],
        "margin": pytest.approx(5.3e4),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 3}, "has schema 3, and this equivtest reads schemas 1, 2: a newer equivtest"),
        ({"schema": 0}, "has schema 0, and this equivtest reads schemas 1, 2: render it with the"),
        ({"schema": "2"}, "has schema '2'"),
        ({"schema": [2]}, r"has schema \[2\]"),
        ({"volatile": {}}, "does not follow schema 2: 'duration_s'"),
        ({"loop": 3}, "record.loop is a int, should be a str"),
        ({"colour": "red"}, "record has unknown fields: colour"),
    ],
)
def test_another_schema_is_refused_with_the_reason(change: dict[str, object], message: str) -> None:
    data = json.loads(records.to_json(verdicts.record(verdicts.fault(PLAN)))) | change
    with pytest.raises(records.RecordError, match=message):
        records.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null", '{"schema": 1}'])
def test_what_is_no_record_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "half.json"
    path.write_text(text)
    with pytest.raises(records.RecordError, match=r"half\.json"):
        records.read(path)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "..",
        "../../etc/passwd",
        "a/b.py::test[x y|z]",
        "é" * 300,
        "\udcff",
        "A" * 500,
        ".hidden",
    ],
)
def test_any_id_gives_one_safe_file_name(name: str, tmp_path: Path) -> None:
    file_name = records.file_name(name)
    assert len(file_name.encode()) <= 143  # what eCryptfs leaves of 255
    assert not file_name.startswith(".")
    path = records.write(verdicts.record(MADE["fault"], id=name), tmp_path)
    assert path.parent == tmp_path
    assert records.read(path).id == name


def test_ids_that_look_alike_have_different_files() -> None:
    names = ["t[a b]", "t[a_b]", "t[a/b]", "T[a b]", "t[a b]#2"]
    assert len({records.file_name(name).lower() for name in names}) == len(names)


def test_a_write_that_is_killed_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cases" / "one.json"
    write_whole(path, b"before")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, b"after")
    assert path.read_bytes() == b"before"
    assert list(path.parent.iterdir()) == [path]


def test_numbersof_other_libraries_become_plain_ones() -> None:
    import numpy as np

    verdict = verdicts.equivalent(
        PLAN, rows=(verdicts.tensor("w", replay_distance=np.float32(0.5)),)
    )
    data = encode(verdict, Verdict)
    at = data["rows"]["columns"].index("replay_distance")
    assert type(data["rows"]["rows"][0][at]) is float
    assert decode(encode(verdict.card, Card), Card) == verdict.card


# -- tables


def events(**changes: Any) -> dict[str, Any]:
    """A verdict as a record has it, with its table of events changed."""
    data = encode(verdicts.equivalent(PLAN), Verdict)
    return data | {"events": data["events"] | changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"columns": ["rank", "colour"]}, r"record\.events has unknown columns: colour"),
        ({"columns": ["rank"], "rows": [[0]]}, r"record\.events lacks columns.*: .*kind"),
        ({"rows": [[0, 0]]}, r"record\.events\[0\] has 2 entries, should have 7"),
        ({"rows": [3]}, "is a int, should be a list"),
        ({"rows": [[0, 0, 0, 1, "", 0.0, []]]}, r"record\.events\[0\]\.kind is a int, should be"),
        ({"more": []}, "has other keys than columns and rows"),
    ],
)
def test_a_table_that_does_not_fit_is_told_by_its_place(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CodecError, match=message):
        decode(events(**changes), Verdict)


def test_a_table_without_rows_and_one_that_lacks_columns_with_defaults_are_read() -> None:
    assert decode(events(rows=[]), Verdict).events == ()
    short = {"columns": ["rank", "update", "microbatch", "kind"], "rows": [[0, 1, None, "clip"]]}
    assert decode(events(**short), Verdict).events == (EventRow(0, 1, None, "clip"),)


def test_a_record_that_an_earlier_version_wrote_is_read() -> None:
    """``schema1.json`` is a record of schema 1 as a run of that version left it."""
    record = records.read(Path(__file__).with_name("schema1.json"))
    verdict = record.verdict
    assert (verdict.status, verdict.causes) == ("fault", ("norm.mean_of_means_accum",))
    assert len(verdict.rows) == 12
    assert verdict.rows[0].tensor == "0.weight"
    assert [event.kind for event in verdict.events][:3] == ["forward", "backward", "forward"]
    assert {event.at_s for event in verdict.events} == {0.0}
    assert verdict.microbatches == ()
    assert record.listings == ()
    assert verdict.updates[0].peak_bytes == verdict.card.first_peak_bytes
    page = render_page(Run((record,)))
    assert "Distance by depth: " in page
    assert "Memory by microbatch" not in page
    assert records.from_json(records.to_json(record)) == record
