"""``Verdict.explain``: read by somebody tired."""

from __future__ import annotations

from dataclasses import replace

import pytest
import verdicts

from equivtest.causes import Cause
from equivtest.compare import figures
from equivtest.compare.prose import explain, headline, what_happened, what_to_change
from equivtest.compare.sensitivity import Outcome, PlantedRun, Sensitivity, sentence
from equivtest.compare.tables import SourceRow
from equivtest.compare.verdict import About, Finding, Status
from equivtest.plan import Plan

PLAN = Plan(4, 2, 2)


def test_equivalent_takes_two_lines() -> None:
    assert explain(verdicts.equivalent(PLAN)).splitlines() == [
        "equivalent: m4-A2-D2 in fp32: the accumulated, reduced update is the large-batch update.",
        "Judged: 4 tensors, 2 updates, largest margin 0.25 of 1.",
    ]


def test_a_fault_says_what_why_what_to_change_and_the_numbers_in_this_order() -> None:
    text = explain(verdicts.fault(PLAN))
    places = [
        text.index(part)
        for part in (
            ": m4-A2-D2 in fp32: The accumulated, reduced gradient is not",
            "Evidence: (differs.gradient) update 0, rank 0, embedding.weight: 8 of 8",
            "What to change: The tensors beyond tolerance",
            "(clip.missing) The experiment clips",
            "Worst tensors (8 of 8 rows beyond tolerance):",
            "embedding.weight                0    1.3e-2     2.5e-7   5.3e4",
            "Notes: A reduction ran",
        )
    ]
    assert places == sorted(places)
    assert max(map(len, text.splitlines()[1:])) <= 100


def test_each_cause_has_its_own_evidence_however_often_one_was_found() -> None:
    often = tuple(Finding("differs.gradient", f"off in {u}", update=u) for u in range(5))
    verdict = verdicts.fault(PLAN, findings=(*often, Finding("clip.missing", "not clipped")))
    lines = explain(verdict).splitlines()
    assert lines[0].endswith("And 1 more cause, below.")
    assert (
        lines[1] == "Evidence: (differs.gradient) update 0: off in 0 (also in updates 1, 2, 3, 4)"
    )
    assert lines[2].strip() == "(clip.missing) not clipped"


def test_a_failing_case_shows_its_whole_sheet_and_a_passing_one_none() -> None:
    lines = explain(verdicts.fault(PLAN)).splitlines()
    sheet = lines[lines.index("Sheet:") + 1 :]
    told = dict(line.strip().split("  ", 1) for line in sheet)
    assert told["plan, m × A × D"].strip() == "4 × 2 × 2 = 16 examples"
    for name in ("data-parallel group", "supervised elements", "precision", "normalisation"):
        assert name in told
    for name in ("last group", "updates", "peak bytes, later", "null tensors", "blind tensors"):
        assert name in told
    passing = verdicts.fault(PLAN, expect=("clip.missing", "differs.gradient"))
    assert passing.passed
    assert "Sheet:" not in explain(passing)


@pytest.mark.parametrize(
    ("about", "look_at"),
    [
        (About.SPLIT, "the model, the loss and collate"),
        (About.REPEATING, "what draws or counts"),
        (About.DIVERGING, "the learning rate"),
        (About.SUMS, "the precision: the loop adds what it should"),
        ("", "the update, rank and tensor above"),
    ],
)
def test_what_has_no_name_says_where_to_look(about: str, look_at: str) -> None:
    found = (Finding("", "its bits are odd", about=about),)
    verdict = verdicts.fault(PLAN, status=Status.UNEXPLAINED, findings=found)
    assert f"What to look at: {look_at}" in explain(verdict)


def test_an_error_with_a_cause_says_it_first_and_keeps_the_traceback() -> None:
    named = (Finding("sync.static_graph", "only a static graph stops there"),)
    lines = explain(replace(verdicts.error(PLAN), findings=named)).splitlines()
    assert lines[0].startswith("error (sync.static_graph): m4-A2-D2 in fp32: ")
    assert lines[1] == "Evidence: only a static graph stops there"
    assert "rank 1 raised RuntimeError: boom" in lines
    assert "RuntimeError: boom" in lines


def test_an_error_names_the_rank_once_and_gives_the_traceback() -> None:
    lines = explain(verdicts.error(PLAN)).splitlines()
    assert lines[0] == "error: m4-A2-D2 in fp32: rank 1 raised RuntimeError: boom"
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-1] == "RuntimeError: boom"


def test_a_divergence_that_did_not_appear_is_said() -> None:
    text = explain(verdicts.equivalent(PLAN, expect=("clip.missing",)))
    assert text.startswith("expected clip.missing, found equivalent: m4-A2-D2 in fp32.")


def test_not_run_gives_torchs_reason() -> None:
    assert explain(verdicts.not_run(PLAN)) == "not-run: m4-A2-D2 in tf32: tf32 needs a CUDA device"


def test_what_cannot_be_judged_is_named() -> None:
    verdict = verdicts.equivalent(PLAN)
    blind = verdicts.card(PLAN, blind_tensors=("a", "b", "c", "d"), not_judged=("a", "e"))
    text = explain(verdicts.equivalent(PLAN, card=blind))
    assert "not judged: 4 blind tensors (a, b, c, …); 1 tensor (e)" in text
    assert "not judged" not in explain(verdict)


def test_a_tensor_that_the_oracle_acquits_is_shown_with_the_figures_of_its_margin() -> None:
    # Beyond the replay by 1e-3 / 2.5e-7 = 4000, within the oracle's 9e-7 by half.
    row = verdicts.tensor("a", state="rounding", replay_distance=1e-3, oracle_distance=4.5e-7)
    other = verdicts.tensor("b", margin=4.0)
    table = explain(verdicts.fault(PLAN, rows=(row, other))).splitlines()
    (line,) = [line.split() for line in table if line.startswith("  a ")]
    assert line == ["a", "0", "4.5e-7", "9.0e-7", "0.50", "2.2e-7", "oracle"]


def test_a_tensor_whose_sums_alone_are_beyond_is_shown_with_exact_ones() -> None:
    # Beyond the replay by 1e-3 / 2.5e-7 = 4000; its addends, added exactly, are within by a tenth.
    row = verdicts.tensor("a", state="rounding", replay_distance=1e-3, exact_distance=2.5e-8)
    table = explain(verdicts.equivalent(PLAN, rows=(row,), status=Status.EXPLAINED)).splitlines()
    (line,) = [line.split() for line in table if line.startswith("  a ")]
    assert line == ["a", "0", "2.5e-8", "2.5e-7", "0.10", "2.2e-7", "replay,", "sums", "exact"]


def test_every_status_has_a_headline_even_with_nothing_to_go_on() -> None:
    for status in Status:
        verdict = verdicts.equivalent(PLAN, status=status, rows=(), updates=(), events=())
        assert len(headline(verdict)) > 10
        assert explain(verdict)


def test_every_cause_says_what_happened() -> None:
    for cause in Cause:
        assert what_happened(cause).endswith(".")
        assert f"{what_happened(cause)} {what_to_change(cause)}".strip() == cause.prose


def test_a_finding_without_a_cause_speaks_for_itself() -> None:
    verdict = verdicts.fault(
        PLAN, status=Status.UNEXPLAINED, findings=(Finding("", "head.weight is 1.4 off."),)
    )
    assert headline(verdict) == "head.weight is 1.4 off."


def explained(expect: tuple[str, ...], *causes: str) -> str:
    findings = tuple(Finding(cause, f"first at `{cause}`.", update=0) for cause in causes)
    rows = tuple(SourceRow(cause, 1 / len(causes), "", claimed=True) for cause in causes)
    return explain(
        verdicts.equivalent(
            PLAN, status=Status.EXPLAINED, findings=findings, source_rows=rows, expect=expect
        )
    )


def test_an_explained_case_that_was_not_expected_says_how_to_accept_it() -> None:
    lines = explained(("equivalent",), "source.batchnorm").splitlines()
    assert lines[0].startswith("explained by source.batchnorm, expected equivalent: m4-A2-D2")
    assert 'To accept it: expect="source.batchnorm"' in lines
    assert "Worst tensors (all 8 rows within tolerance):" in lines
    lines = explained(("equivalent",), "source.dropout", "source.batchnorm").splitlines()
    assert 'To accept it: expect={"source.batchnorm", "source.dropout"}' in lines


def test_a_source_too_many_and_one_that_is_missing_are_told_apart() -> None:
    text = explained(("source.batchnorm",), "source.batchnorm", "source.dropout")
    assert "source.dropout was not expected: m4" in text.splitlines()[0]
    text = explained(("source.batchnorm", "source.dropout"), "source.batchnorm")
    assert "source.dropout was expected and is not needed: m4" in text.splitlines()[0]


def test_an_expected_source_is_no_reason_to_say_how_to_accept_it() -> None:
    assert "To accept it" not in explained(("source.batchnorm",), "source.batchnorm")


def test_a_source_beside_what_has_no_name_is_no_headline_and_no_advice() -> None:
    verdict = verdicts.fault(
        PLAN,
        status=Status.UNEXPLAINED,
        findings=(Finding("source.dropout", "100% at `1`"), Finding("", "the loop is off")),
    )
    lines = explain(verdict).splitlines()
    assert lines[0].endswith(": the loop is off")
    assert lines[1] == "Evidence: the loop is off"
    assert not any(line.startswith("What to change") for line in lines)


def test_what_isolation_left_is_said_where_it_explains_nothing() -> None:
    verdict = verdicts.fault(
        PLAN,
        status=Status.UNEXPLAINED,
        findings=(Finding("", "the split gradient is 0.4 of its scale away"),),
        source_rows=(SourceRow("source.dropout", 0.25, "", claimed=False),),
        remainder=0.75,
    )
    assert "Isolated: source.dropout 25%; left with all of them: 75.00%" in explain(verdict)


@pytest.mark.parametrize(
    ("value", "decimals", "text"),
    [
        (1.0, 0, "100%"),
        (0.784, 0, "78%"),
        (0.004, 0, "<1%"),
        (0.0, 0, "0%"),
        (-0.003, 0, "0%"),
        (-0.35, 0, "-35%"),
        (0.00001, 2, "<0.01%"),
        (0.9999, 2, "99.99%"),
    ],
)
def test_a_share_is_never_minus_nothing(value: float, decimals: int, text: str) -> None:
    assert figures.share(value, decimals) == text


def test_the_sensitivity_counts_kinds_and_tells_what_is_not_seen_first() -> None:
    text = explain(verdicts.equivalent(PLAN, sensitivity=verdicts.sensitivity()))
    assert text.splitlines()[2:] == [
        "Sensitivity: 2 of 4 kinds would be caught here, 1 of them by name; the smallest weight "
        "error seen",
        "             is 0.02 %.",
        "             runs, and is not seen: mem.kept_graph",
        "             runs, and cannot be judged: opt.frozen (error: rank 1 raised)",
        "             caught, by another name: sync.never (differs.ranks)",
        "             cannot show: it does not clip: clip.missing",
        "             weight error not seen: 0.015 % of update 0, replica 1, microbatch 0",
    ]


def test_a_sensitivity_without_an_answer_says_why() -> None:
    found = Sensitivity(reason="equivtest's own recipe is error here: rank 0 raised")
    text = explain(verdicts.equivalent(PLAN, sensitivity=found))
    assert "Sensitivity: not measured: equivtest's own recipe is error here" in text
    blind = Sensitivity((PlantedRun("sync.never", "sync.never", Outcome.NOT_SEEN),))
    assert sentence(blind) == (
        "0 of 1 kind would be caught here; no error of one microbatch's weight is seen, not even "
        "100 %"
    )
