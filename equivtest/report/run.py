"""The folder that one session writes, and what it says when read back.

``collected.json`` is written when the tests are known and ``run.json`` when the session ends: a
collected test without a record is named, and a session that was killed shows as not ended.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equivtest.report.atomic import write_whole
from equivtest.report.history import Point, histories
from equivtest.report.record import SCHEMA, Record, RecordError, read

UNFINISHED = "unfinished"


@dataclass(frozen=True)
class RunFolder:
    """``<reports>/runs/<run id>`` of one session.

    Attributes:
        reports: the folder that holds ``runs``, ``results.csv`` and the page.
        run_id: name of the run's folder.
        started: when the session began, ISO 8601 in UTC: the latest run is the one shown.
    """

    reports: Path
    run_id: str
    started: str

    @property
    def path(self) -> Path:
        return self.reports / "runs" / self.run_id

    @property
    def cases(self) -> Path:
        return self.path / "cases"

    def write_collected(self, nodeids: Sequence[str]) -> None:
        """Say which tests will leave records. Every worker writes the same bytes.

        A run that is added to has not ended any more.
        """
        (self.path / "run.json").unlink(missing_ok=True)
        self._write("collected.json", {"collected": list(nodeids)})

    def read_collected(self) -> tuple[str, ...]:
        """Node ids of the collected tests; none where no test uses the fixture."""
        return tuple(_read_json(self.path / "collected.json").get("collected", ()))

    def write_ended(self, outcomes: Mapping[str, str]) -> None:
        """Say that the session ended, and how its tests did that have no record."""
        self._write("run.json", {"outcomes": dict(sorted(outcomes.items()))})

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        whole = {"schema": SCHEMA, "run_id": self.run_id, "started": self.started, **content}
        write_whole(self.path / name, (json.dumps(whole, indent=1) + "\n").encode())


@dataclass(frozen=True)
class Run:
    """One or several runs read back.

    Attributes:
        records: in no particular order, one a case; the latest where several runs have it.
        missing: collected tests without a record, with what became of them.
        ended: every session ended by itself.
        run_ids: folders that were read, the latest last.
        unreadable: what is wrong with files that could not be read.
        selection: how many of the cases these are, in words; empty for all.
        history: by case id, a point for each run, the oldest first; only of cases that several of
            the runs have.
    """

    records: tuple[Record, ...]
    missing: Mapping[str, str] = field(default_factory=dict)
    ended: bool = True
    run_ids: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    selection: str = ""
    history: Mapping[str, tuple[Point, ...]] = field(default_factory=dict)

    @property
    def replaced(self) -> int:
        """Cases that an earlier run has as well."""
        return sum(record.id in self.history for record in self.records)


def find(folder: Path, latest: int = 1) -> list[Path]:
    """Run folders at or below ``folder``: itself, or the latest of each reports folder in it.

    Args:
        folder: a run's folder, a reports folder, or one that holds several reports folders.
        latest: how many runs of a reports folder, at least 1; of those the oldest comes first.

    Raises:
        FileNotFoundError: there is none.
    """
    if _is_run(folder):
        return [folder]
    homes = sorted(path for path in folder.rglob("runs") if path.is_dir())
    runs = [[run for run in home.iterdir() if _is_run(run)] for home in homes]
    found = [run for of_home in runs for run in sorted(of_home, key=age)[-latest:]]
    if not found:
        raise FileNotFoundError(
            f"{folder} holds no run: pass a reports folder (with runs/<run id>/cases in it) "
            "or a run's own folder"
        )
    return found


def _is_run(folder: Path) -> bool:
    """Also that of a session which was killed before its first case."""
    return (folder / "cases").is_dir() or (folder / "collected.json").is_file()


def load(folders: Iterable[Path]) -> Run:
    """Read run folders and merge them; a file that cannot be read is said, not hidden."""
    with _uncollected():
        return _merged([_read_run(folder) for folder in sorted(folders, key=age)])


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the garbage collector: rows hold no cycles, and it took a third of the reading."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _read_run(folder: Path) -> Run:
    records, unreadable = _read_records(folder / "cases")
    closing = _read_json(folder / "run.json")
    outcomes = _texts(closing.get("outcomes"))
    recorded = {record.nodeid for record in records}
    nodeids = _listed(_read_json(folder / "collected.json").get("collected"))
    return Run(
        records=records,
        missing={n: outcomes.get(n, UNFINISHED) for n in nodeids if n not in recorded},
        ended=bool(closing),
        run_ids=(folder.name,),
        unreadable=unreadable,
    )


def _read_records(cases: Path) -> tuple[tuple[Record, ...], tuple[str, ...]]:
    """The records of a ``cases`` folder, one a case, and what is wrong with the other files."""
    records: dict[str, Record] = {}
    unreadable: list[str] = []
    for path in sorted(cases.glob("*.json")):
        try:
            record = read(path)
        except (RecordError, OSError) as error:
            unreadable.append(str(error))
            continue
        records[record.id] = record
    return tuple(records.values()), tuple(unreadable)


def _merged(runs: Sequence[Run]) -> Run:
    """Several runs, the oldest first, as one: of each case the latest record."""
    records = {record.id: record for run in runs for record in run.records}
    recorded = {record.nodeid for record in records.values()}
    missing = {nodeid: how for run in runs for nodeid, how in run.missing.items()}
    history = histories([(run.run_ids[-1], run.records) for run in runs])
    return Run(
        records=tuple(records.values()),
        missing={nodeid: how for nodeid, how in missing.items() if nodeid not in recorded},
        ended=all(run.ended for run in runs),
        run_ids=tuple(run_id for run in runs for run_id in run.run_ids),
        unreadable=tuple(text for run in runs for text in run.unreadable),
        history=history,
    )


def age(folder: Path) -> tuple[str, str, str]:
    """What orders runs, the oldest first: when they began, then by name."""
    return (_started(folder), folder.name, str(folder))


def _listed(value: Any) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def _texts(value: Any) -> dict[str, str]:
    """A mapping of texts, and of another thing what of it is one: half of a page beats none."""
    pairs = value.items() if isinstance(value, dict) else ()
    return {key: one for key, one in pairs if isinstance(one, str)}


def _started(folder: Path) -> str:
    return str(_read_json(folder / "collected.json").get("started", ""))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}
