"""A verdict in words: what is wrong, why we think so, what to change, then the figures."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence

from equivtest.causes import Cause
from equivtest.compare import figures
from equivtest.compare.advice import what_to_look_at
from equivtest.compare.sensitivity import Sensitivity, details, sentence
from equivtest.compare.sheet import sheet
from equivtest.compare.tables import TensorRow
from equivtest.compare.verdict import Finding, Status, Verdict

_WIDTH = 98
_CAUSES = 6
_TENSORS = 5
_NAME_WIDTH = 44


def explain(verdict: Verdict) -> str:
    """The verdict as text for a terminal; two lines where there is nothing to explain."""
    lines = [first_line(verdict)]
    if verdict.status is Status.ERROR:
        lines += _why(verdict) + _what_to_change(verdict) + _error(verdict)
    elif verdict.findings or verdict.status in (Status.FAULT, Status.UNEXPLAINED):
        lines += _why(verdict) + _tried(verdict) + _what_to_change(verdict)
        lines += _labelled("What to look at", what_to_look_at(verdict))
    if (
        verdict.status not in (Status.EQUIVALENT, Status.NOT_RUN, Status.ERROR)
        or not verdict.passed
    ):
        lines += worst_tensors(verdict)
        lines += _labelled("Not judged", [not_judged(verdict)] if not_judged(verdict) else [])
    elif verdict.status is Status.EQUIVALENT:
        lines.append(f"Judged: {judged(verdict)}.")
    lines += _labelled("Notes", verdict.notes)
    if not verdict.passed and verdict.status not in (Status.NOT_RUN, Status.ERROR):
        lines += card_lines(verdict)
    if verdict.sensitivity is not None:
        lines += sensitivity_lines(verdict.sensitivity)
    return "\n".join(lines)


def card_lines(verdict: Verdict) -> list[str]:
    """The final sheet, an entry a line; what does not apply is left out."""
    entries = [(name, text) for name, text in sheet(verdict) if text]
    width = max(len(name) for name, _ in entries)
    return ["Sheet:", *(f"  {name.ljust(width)}  {text}" for name, text in entries)]


def sensitivity_lines(found: Sensitivity) -> list[str]:
    """Which planted faults would be caught here, and what lies behind the numbers."""
    told = [f"{label}: {text}" for label, text in details(found)]
    return _labelled("Sensitivity", [f"{sentence(found)}.", *told])


def first_line(verdict: Verdict) -> str:
    """Status, causes, case and the headline; what was expected, if that was something else."""
    card = verdict.card
    if verdict.status is Status.EXPLAINED and not verdict.passed:
        return f"{_not_expected(verdict)}: {card.plan} in {card.precision}: {headline(verdict)}"
    expected = "" if verdict.passed else _expected(verdict)
    causes = f" ({'; '.join(map(str, verdict.causes))})" if verdict.causes else ""
    if verdict.status is Status.EQUIVALENT and not verdict.passed:
        wanted = ", ".join(verdict.expect)
        return f"expected {wanted}, found equivalent: {card.plan} in {card.precision}."
    return (
        f"{verdict.status.value}{causes}: {card.plan} in {card.precision}: "
        f"{headline(verdict)}{expected}"
    )


def headline(verdict: Verdict) -> str:
    """The verdict in one sentence, without the case's name."""
    if verdict.status is Status.ERROR:
        named = what_happened(verdict.cause)
        return named or _with_rank(verdict, _first_line(reason(verdict)))
    if verdict.status is Status.NOT_RUN:
        return reason(verdict)
    if verdict.status is Status.EQUIVALENT:
        return "the accumulated, reduced update is the large-batch update."
    if verdict.status is Status.EXPLAINED:
        return _explained(verdict)
    if verdict.status is Status.INCONCLUSIVE:
        return f"no tensor could be judged: {not_judged(verdict) or 'no gradient was compared'}."
    if verdict.status is Status.UNEXPLAINED and verdict.findings:
        return unnamed_first(verdict)[0].text
    if verdict.cause:
        told = what_happened(verdict.cause) or verdict.findings[0].text
        others = sum(not cause.startswith("source.") for cause in verdict.causes[1:])
        more = f" And {figures.several(others, 'more cause')}, below." if others else ""
        return told + more
    if verdict.findings:
        return verdict.findings[0].text
    return "beyond tolerance, and no cause reaches its evidence bar."


def _explained(verdict: Verdict) -> str:
    """One source in its own words, several by name."""
    if len(verdict.causes) == 1:
        return f"no fault of the loop. {what_happened(verdict.cause)}"
    return f"no fault of the loop, within tolerance once isolated: {sources_text(verdict)}."


def reason(verdict: Verdict) -> str:
    """Why a case did not run or could not finish."""
    if verdict.failure is not None and verdict.failure.text:
        return verdict.failure.text
    texts = [*verdict.notes, *(finding.text for finding in verdict.findings)]
    return texts[0] if texts else "no reason was recorded"


def what_happened(cause: str) -> str:
    """The first sentence of a cause's prose; empty for a name that is no cause."""
    known = Cause.named(cause)
    return known.happened if known else ""


def what_to_change(cause: str) -> str:
    """The rest of a cause's prose: how to see it and what to change."""
    known = Cause.named(cause)
    return known.change if known else ""


def sources_text(verdict: Verdict) -> str:
    """Each isolated source with its share of the squared distance, the largest first."""
    shares = sorted(verdict.sources.items(), key=lambda item: (-item[1], item[0]))
    told = ", ".join(f"{name} {figures.share(share)}" for name, share in shares)
    return told or "no source was isolated"


def margin_text(verdict: Verdict) -> str:
    """The margin in a word or a number: ``within`` of a fault that no distance told."""
    if not any(row.state != "not judged" for row in verdict.rows):
        return figures.ABSENT
    if math.isnan(verdict.margin):
        return "NaN"
    if verdict.status is Status.FAULT and verdict.margin <= 1:
        return "within"
    return figures.margin(verdict.margin)


def judged(verdict: Verdict) -> str:
    """How much an acquittal rests on."""
    names = {row.tensor for row in verdict.rows}
    parts = [
        figures.several(len(names), "tensor"),
        figures.several(len(verdict.updates), "update"),
        f"largest margin {figures.margin(verdict.margin)} of 1",
    ]
    left_out = not_judged(verdict)
    return ", ".join(parts) + (f"; not judged: {left_out}" if left_out else "")


def not_judged(verdict: Verdict) -> str:
    """What the verdict does not rest on, counted and named."""
    card = verdict.card
    others = [name for name in card.not_judged if name not in card.blind_tensors]
    parts = [_named(card.blind_tensors, "blind tensor")] if card.blind_tensors else []
    parts += [_named(others, "tensor")] if others else []
    return "; ".join(parts)


def finding_text(finding: Finding) -> str:
    """The finding's sentence, led by where it is if it does not say so itself."""
    unsaid = [part for part in places(finding) if part not in finding.text]
    prefix = f"{', '.join(unsaid)}: " if unsaid else ""
    others = " or ".join(finding.alternatives)
    return f"{prefix}{finding.text}" + (f"; {others} would show the same here" if others else "")


def places(finding: Finding) -> list[str]:
    """Where a finding is: update, rank and tensor, as far as it concerns one."""
    where = [f"update {finding.update}"] if finding.update is not None else []
    where += [f"rank {finding.rank}"] if finding.rank is not None else []
    where += [finding.tensor] if finding.tensor else []
    return where


def worst_tensors(verdict: Verdict, limit: int = _TENSORS) -> list[str]:
    """The rows with the largest margins as an aligned table; empty where nothing was compared."""
    rows = sorted(verdict.rows, key=lambda row: -figures.orderly(row.margin))[:limit]
    if not rows:
        return []
    beyond = sum(row.margin > 1 for row in verdict.rows)
    head = ("tensor", "update", "distance", "tolerance", "margin", "floor", "compared with")
    cells: list[tuple[str, ...]] = [head]
    cells += [_cells(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    of_all = figures.several(len(verdict.rows), "row")
    count = f"{beyond} of {of_all} beyond tolerance" if beyond else f"all {of_all} within tolerance"
    return [f"Worst tensors ({count}):", *(_aligned(row, widths) for row in cells)]


def deciding(row: TensorRow) -> tuple[str, float | None, float | None]:
    """The comparison that ``row.margin`` is of: what with, distance, tolerance."""
    if row.isolated_distance is not None:
        if (row.isolated_margin or 0.0) > (row.loop_margin or 0.0):
            return "oracle, sources isolated", row.isolated_distance, row.isolated_tolerance
    elif (row.split_margin or 0.0) > (row.loop_margin or 0.0):
        return "oracle (split)", row.split_distance, row.split_tolerance
    if row.exact_distance is not None:
        return "replay, sums exact", row.exact_distance, row.replay_tolerance
    if row.state == "rounding":
        return "oracle", row.oracle_distance, row.oracle_tolerance
    return "replay", row.replay_distance, row.replay_tolerance


def _cells(row: TensorRow) -> tuple[str, ...]:
    compared_with, distance, tolerance = deciding(row)
    return (
        _shortened(row.tensor),
        str(row.update),
        figures.distance(distance),
        figures.distance(tolerance),
        figures.margin(row.margin),
        figures.ABSENT if row.null else figures.distance(row.noise_floor),
        compared_with,
    )


def _why(verdict: Verdict) -> list[str]:
    """Each cause with its own evidence: what was found first of it, and where else it was."""
    by_cause: dict[str, list[Finding]] = {}
    for finding in unnamed_first(verdict):
        by_cause.setdefault(finding.cause, []).append(finding)
    several = len(by_cause) > 1
    texts = []
    for cause, (first, *others) in list(by_cause.items())[:_CAUSES]:
        name = f"({cause}) " if several and cause else ""
        texts.append(f"{name}{finding_text(first)}{_also(first, others)}")
    if len(by_cause) > _CAUSES:
        texts.append(f"and {figures.several(len(by_cause) - _CAUSES, 'more cause')}")
    return _labelled("Evidence", texts)


def _also(first: Finding, others: Sequence[Finding]) -> str:
    """Where else it was found, as short as it can be said."""
    if not others:
        return ""
    updates = sorted({f.update for f in others if f.update not in (None, first.update)})
    if len(updates) == len(others):
        shown = ", ".join(map(str, updates[:6])) + (", …" if len(updates) > 6 else "")
        return f" (also in update{'s' if len(updates) > 1 else ''} {shown})"
    return f" (and {figures.several(len(others), 'more finding')} like it)"


def unnamed_first(verdict: Verdict) -> list[Finding]:
    """Of an unexplained case what has no name comes first: sources beside it are evidence."""
    if verdict.status is not Status.UNEXPLAINED:
        return list(verdict.findings)
    return sorted(verdict.findings, key=lambda finding: bool(finding.cause))


def _what_to_change(verdict: Verdict) -> list[str]:
    if verdict.status is Status.UNEXPLAINED:
        return []  # what is to be changed about the sources beside it is not what is wrong
    causes = verdict.causes
    texts = [what_to_change(causes[0])] if causes else []
    others = ((cause, Cause.named(cause)) for cause in causes[1:])
    texts += [f"({cause}) {known.prose}" for cause, known in others if known]
    return _labelled("What to change", [text for text in texts if text]) + _to_accept(verdict)


def _error(verdict: Verdict) -> list[str]:
    """The text below its first line, which the headline has if no cause has taken its place."""
    first, _, rest = reason(verdict).strip().partition("\n")
    return [*([first] if verdict.cause else []), *rest.rstrip().splitlines()]


def _not_expected(verdict: Verdict) -> str:
    """An explained case that was expected otherwise: what is too many and what is missing."""
    found, wanted = list(verdict.causes), verdict.expect
    told = f"explained by {' and '.join(found)}"
    if wanted == ("equivalent",):
        return f"{told}, expected equivalent"
    lacking = [cause for cause in found if cause not in wanted]
    extra = [cause for cause in wanted if cause not in found]
    parts = [f"{', '.join(lacking)} was not expected"] if lacking else []
    parts += [f"{', '.join(extra)} was expected and is not needed"] if extra else []
    return f"{told}, and {'; '.join(parts)}"


def _tried(verdict: Verdict) -> list[str]:
    """What isolation took away where it does not explain the case."""
    if verdict.status is not Status.UNEXPLAINED or not verdict.source_rows:
        return []
    left = figures.share(verdict.remainder or 0.0, 2)
    return _labelled("Isolated", [f"{sources_text(verdict)}; left with all of them: {left}"])


def _to_accept(verdict: Verdict) -> list[str]:
    """How an explained case is made to pass: a test says what it takes for granted."""
    if verdict.status is not Status.EXPLAINED or verdict.passed:
        return []
    causes = sorted(verdict.causes)
    given = (
        f'"{causes[0]}"' if len(causes) == 1 else "{" + ", ".join(f'"{c}"' for c in causes) + "}"
    )
    return _labelled("To accept it", [f"expect={given}"])


def _expected(verdict: Verdict) -> str:
    return f" (expected: {', '.join(verdict.expect)})" if verdict.expect != ("equivalent",) else ""


def _with_rank(verdict: Verdict, text: str) -> str:
    rank = verdict.failure.rank if verdict.failure is not None else None
    return text if rank is None or f"rank {rank}" in text else f"rank {rank}: {text}"


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _labelled(label: str, texts: Iterable[str]) -> list[str]:
    """``label: text``, wrapped, further texts below the first."""
    lines: list[str] = []
    for text in texts:
        start = f"{label}: " if not lines else " " * (len(label) + 2)
        lines += textwrap.wrap(
            text,
            _WIDTH,
            initial_indent=start,
            subsequent_indent=" " * (len(label) + 2),
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def _named(names: Sequence[str], noun: str) -> str:
    shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return f"{figures.several(len(names), noun)} ({shown})"


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Names to the left, figures to the right."""
    last = len(cells) - 1
    padded = [
        cell.ljust(width) if k in (0, last) else cell.rjust(width)
        for k, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return f"  {'  '.join(padded)}".rstrip()


def _shortened(name: str) -> str:
    if len(name) <= _NAME_WIDTH:
        return name
    return name[: _NAME_WIDTH // 2 - 1] + "…" + name[-_NAME_WIDTH // 2 :]
