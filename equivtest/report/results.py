"""``results.csv``: a row a case, with the columns that scripts outside the project rely on."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equivtest.compare.prose import deciding
from equivtest.compare.verdict import Status
from equivtest.report.atomic import write_text, write_whole
from equivtest.report.ranking import fixed_key
from equivtest.report.record import Record

if TYPE_CHECKING:
    import pandas as pd

KINDS = {
    "id": "string",
    "experiment": "string",
    "loop": "string",
    "wrap": "string",
    "m": "string",
    "A": "int64",
    "D": "int64",
    "precision": "string",
    "device": "string",
    "backend": "string",
    "optimizer": "string",
    "status": "string",
    "expected": "string",
    "passed": "bool",
    "cause": "string",
    "expected_cause": "string",
    "notes": "string",
    "margin": "float64",
    "replay_margin": "float64",
    "split_margin": "float64",
    "oracle_margin": "float64",
    "worst_tensor": "string",
    "distance": "float64",
    "tolerance": "float64",
    "noise_floor": "float64",
    "loss": "float64",
    "oracle_loss": "float64",
    "microbatches": "int64",
    "updates_attempted": "int64",
    "updates_applied": "int64",
    "examples": "int64",
    "supervised": "float64",
    "null_tensors": "int64",
    "blind_tensors": "int64",
    "first_peak_bytes": "int64",
    "later_peak_bytes": "int64",
    "duration_s": "float64",
}
"""The columns in their order, with their types in Parquet: the same whatever a run holds."""

COLUMNS = tuple(KINDS)


def results(records: Iterable[Record]) -> pd.DataFrame:
    """The table, in the order of the matrix.

    ``loss`` and ``oracle_loss`` are those of the last update; ``distance``, ``tolerance`` and
    ``noise_floor`` belong to ``worst_tensor``; ``null_tensors`` and ``blind_tensors`` are counts;
    ``examples`` and ``supervised`` count what the forwards received over all updates.
    """
    import pandas as pd

    rows = [_row(record) for record in sorted(records, key=fixed_key)]
    # Of objects, because a column of counts with a gap in it would turn into floats.
    return pd.DataFrame(rows, columns=list(COLUMNS), dtype=object)


def write_csv(table: pd.DataFrame, path: Path) -> None:
    """Write the table as ``results.csv``, whole or not at all."""
    write_text(path, table.to_csv(index=False))


def write_parquet(table: pd.DataFrame, path: Path) -> bool:
    """Write the table as Parquet, whole or not at all; False where pyarrow is not installed.

    What may be missing is null there.
    """
    if importlib.util.find_spec("pyarrow") is None:
        return False
    texts = {name: table[name].map(_in_utf8) for name, kind in KINDS.items() if kind == "string"}
    kinds = {name: f"{kind}[pyarrow]" for name, kind in KINDS.items()}
    typed = table.assign(**texts).astype(kinds)
    buffer = io.BytesIO()
    typed.to_parquet(buffer, index=False)
    write_whole(path, buffer.getvalue())
    return True


def _in_utf8(text: Any) -> Any:
    """A lone surrogate in a name has no UTF-8: it is shown as its escape."""
    return text.encode("utf-8", "backslashreplace").decode() if isinstance(text, str) else text


def _row(record: Record) -> dict[str, Any]:
    verdict, card = record.verdict, record.verdict.card
    last = verdict.updates[-1] if verdict.updates else None
    statuses = set(Status)
    return {
        "id": record.id,
        "experiment": record.experiment,
        "loop": record.loop,
        "wrap": record.wrap,
        "m": card.m,
        "A": card.A,
        "D": card.D,
        "precision": card.precision,
        "device": card.device,
        "backend": card.backend,
        "optimizer": card.optimizer,
        "status": verdict.status.value,
        "expected": ";".join(verdict.expect),
        "passed": verdict.passed,
        "cause": ";".join(verdict.causes),
        "expected_cause": ";".join(name for name in verdict.expect if name not in statuses),
        "notes": ";".join(verdict.notes),
        "margin": verdict.margin,
        "replay_margin": verdict.replay_margin,
        "split_margin": verdict.split_margin,
        "oracle_margin": verdict.oracle_margin,
        **_worst(record),
        "loss": last.loss if last else None,
        "oracle_loss": last.oracle_loss if last else None,
        "microbatches": card.microbatches,
        "updates_attempted": card.updates_attempted,
        "updates_applied": card.updates_applied,
        "examples": card.examples_seen,
        "supervised": card.supervised,
        "null_tensors": len(card.null_tensors),
        "blind_tensors": len(card.blind_tensors),
        "first_peak_bytes": card.first_peak_bytes,
        "later_peak_bytes": card.later_peak_bytes,
        "duration_s": round(verdict.duration_s, 6),
    }


def _worst(record: Record) -> dict[str, Any]:
    worst = record.verdict.worst
    if worst is None:
        return {}
    _, distance, tolerance = deciding(worst)
    return {
        "worst_tensor": worst.tensor,
        "distance": distance,
        "tolerance": tolerance,
        "noise_floor": worst.noise_floor,
    }
