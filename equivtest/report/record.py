"""One case on disk: who it is, what the verdict was, how to run it again.

Two runs of the same case write the same bytes but for ``volatile``: durations, the times of events
and peaks of memory.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equivtest.compare.verdict import Verdict
from equivtest.report.atomic import write_whole
from equivtest.report.codec import CodecError, decode, encode
from equivtest.report.listing import Listing

SCHEMA = 2

_READABLE = (1, SCHEMA)
"""1 has a mapping a row where 2 has tables, and no listings, microbatches, times and lines of
events: their defaults stand."""

_LINES = 4  # levels that are laid out in lines: a tensor's row is one

_MOST_BYTES = 64 * 2**20
"""A record of thousands of tensors has a few; a file beyond this is none."""

_NAME_LENGTH = 80  # with hash and suffix well below the 143 bytes that encrypted home folders allow


class RecordError(ValueError):
    """A file that is not a record which this version reads; names the file and says why."""


@dataclass(frozen=True)
class Record:
    """A case of a run.

    Attributes:
        id: names the case in its run: the test's node id, with ``#2`` for its second call.
        nodeid: the test.
        experiment, loop, wrap: names.
        rerun: the command that runs the test again.
        environment: what may explain a difference between two machines, in the order to show it.
        planted: the planted fault that the case runs (``equivtest.faults``); empty for a loop of
            somebody's own.
        listings: the loop's own source, where it could be read.
    """

    id: str
    nodeid: str
    experiment: str
    loop: str
    wrap: str
    rerun: str
    environment: Mapping[str, str]
    verdict: Verdict
    planted: str = ""
    listings: tuple[Listing, ...] = ()


def to_json(record: Record) -> str:
    """The record as strict JSON; equal records give equal bytes outside ``volatile``."""
    data = encode(record, Record)
    volatile = _take_volatile(data["verdict"])
    verdict = record.verdict
    # For readers without this package: derived on reading, so never read back.
    outcome = {
        "status": verdict.status.value,
        "passed": verdict.passed,
        "causes": [str(cause) for cause in verdict.causes],
        "margin": encode(verdict.margin, float),
    }
    whole = {"schema": SCHEMA, "outcome": outcome, **data, "volatile": volatile}
    return _laid_out(whole, _LINES) + "\n"


def _laid_out(value: Any, levels: int) -> str:
    """JSON with an entry a line down to ``levels``: json's own indent is ten times slower."""
    if levels and value and isinstance(value, dict):
        entries = [f"{json.dumps(key)}: {_laid_out(v, levels - 1)}" for key, v in value.items()]
        return "{\n" + ",\n".join(entries) + "\n}"
    if levels and value and isinstance(value, list):
        return "[\n" + ",\n".join(_laid_out(v, levels - 1) for v in value) + "\n]"
    return json.dumps(value, allow_nan=False)


def from_json(text: str, where: str = "record") -> Record:
    """The record that ``to_json`` wrote.

    Raises:
        RecordError: not JSON, of another schema, or with fields that this version does not know.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{where} is not JSON: {error}") from None
    if not isinstance(data, dict) or "schema" not in data:
        raise RecordError(f"{where} has no schema: it is not a record of a case")
    if type(data["schema"]) is not int or data["schema"] not in _READABLE:
        raise RecordError(_other_schema(data["schema"], where))
    try:
        verdict, volatile = data["verdict"], data["volatile"]
        _put_volatile(verdict, volatile)
        fields = {k: v for k, v in data.items() if k not in ("schema", "outcome", "volatile")}
        record: Record = decode(fields, Record)
    except (CodecError, LookupError, TypeError, AttributeError, ValueError) as error:
        raise RecordError(f"{where} does not follow schema {data['schema']}: {error}") from None
    return record


def _other_schema(schema: object, where: str) -> str:
    reads = f"this equivtest reads schemas {', '.join(map(str, _READABLE))}"
    if isinstance(schema, int) and schema > SCHEMA:
        return f"{where} has schema {schema}, and {reads}: a newer equivtest wrote it, so update"
    return (
        f"{where} has schema {schema!r}, and {reads}: render it with the version that wrote it, or "
        "run the cases again"
    )


def file_name(record_id: str) -> str:
    """A file name for the case: readable, safe on every file system, and different for every id."""
    readable = re.sub(r"[^A-Za-z0-9._+-]+", "_", record_id).strip("._")[-_NAME_LENGTH:]
    return f"{readable.lstrip('._-') or 'case'}-{digest(record_id)}.json"


def digest(record_id: str) -> str:
    """Ten hexadecimal digits that tell the case from others, the same in every run."""
    return hashlib.sha256(record_id.encode("utf-8", "surrogatepass")).hexdigest()[:10]


def write(record: Record, folder: Path) -> Path:
    """Write the record into a ``cases`` folder, whole or not at all; returns its path."""
    path = folder / file_name(record.id)
    write_whole(path, to_json(record).encode())
    return path


def read(path: Path) -> Record:
    """The record in a file, which errors name by its run's folder and its name.

    Raises:
        RecordError: it is not a record that this version reads.
        OSError: it cannot be read.
    """
    where = "/".join(path.parts[-3:])
    if not path.is_file():
        raise RecordError(f"{where} is no file")
    size = path.stat().st_size
    if size > _MOST_BYTES:
        raise RecordError(f"{where} has {size / 2**20:.0f} MiB: a record has some kilobytes")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecordError(f"{where} is not UTF-8: {error}") from None
    return from_json(text, where)


_VOLATILE_COLUMNS = (
    ("updates", "peak_bytes", "update_peak_bytes"),
    ("microbatches", "peak_bytes", "microbatch_peak_bytes"),
    ("events", "at_s", "event_at_s"),
)
"""Table of the verdict, its column, and the key of that in ``volatile``."""


def _take_volatile(verdict: dict[str, Any]) -> dict[str, Any]:
    return {
        "duration_s": verdict.pop("duration_s"),
        "first_peak_bytes": verdict["card"].pop("first_peak_bytes"),
        "later_peak_bytes": verdict["card"].pop("later_peak_bytes"),
        **{key: _take_column(verdict[table], column) for table, column, key in _VOLATILE_COLUMNS},
    }


def _put_volatile(verdict: dict[str, Any], volatile: dict[str, Any]) -> None:
    verdict["duration_s"] = volatile["duration_s"]
    verdict["card"]["first_peak_bytes"] = volatile["first_peak_bytes"]
    verdict["card"]["later_peak_bytes"] = volatile["later_peak_bytes"]
    for table, column, key in _VOLATILE_COLUMNS:
        if key in volatile:
            _put_column(verdict[table], column, volatile[key])


def _take_column(table: dict[str, Any], column: str) -> list[Any]:
    at = table["columns"].index(column)
    table["columns"].pop(at)
    return [row.pop(at) for row in table["rows"]]


def _put_column(table: Any, column: str, values: Sequence[Any]) -> None:
    if isinstance(table, list):  # as schema 1 has it: a mapping a row
        for row, value in zip(table, values, strict=True):
            row[column] = value
        return
    table["columns"].append(column)
    for row, value in zip(table["rows"], values, strict=True):
        row.append(value)
