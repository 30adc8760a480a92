"""``results.csv``: a row a case, with the columns that scripts outside the project rely on."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equivtest.compare.prose import deciding
from equivtest.compare.verdict import Status
from equivtest.report.atomic import write_whole
from equivtest.report.ranking import fixed_key
from equivtest.report.record import Record

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = (
    "id",
    "experiment",
    "loop",
    "wrap",
    "m",
    "A",
    "D",
    "precision",
    "device",
    "backend",
    "optimizer",
    "status",
    "expected",
    "passed",
    "cause",
    "expected_cause",
    "notes",
    "margin",
    "replay_margin",
    "split_margin",
    "oracle_margin",
    "worst_tensor",
    "distance",
    "tolerance",
    "noise_floor",
    "loss",
    "oracle_loss",
    "microbatches",
    "updates_attempted",
    "updates_applied",
    "examples",
    "supervised",
    "null_tensors",
    "blind_tensors",
    "first_peak_bytes",
    "later_peak_bytes",
    "duration_s",
)


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


def write_results(records: Iterable[Record], path: Path) -> None:
    """Write ``results.csv``, whole or not at all."""
    text = results(records).to_csv(index=False)
    write_whole(path, text.encode("utf-8", "backslashreplace"))


def write_parquet(records: Iterable[Record], path: Path) -> bool:
    """Write the same table as Parquet, whole or not at all; False where pyarrow is not installed.

    Columns of numbers are numbers there: counts that may be missing are nullable integers.
    """
    if importlib.util.find_spec("pyarrow") is None:
        return False
    table = results(records).convert_dtypes(dtype_backend="pyarrow")
    buffer = io.BytesIO()
    table.to_parquet(buffer, index=False)
    write_whole(path, buffer.getvalue())
    return True


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
