"""The folder that one session writes, and what it says when read back.

``collected.json`` is written when the tests are known and ``run.json`` when the session ends: a
collected test without a record is named, and a session that was killed shows as not ended.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equivtest.report.atomic import write_whole
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
        replaced: cases that an earlier run has as well.
        unreadable: what is wrong with files that could not be read.
    """

    records: tuple[Record, ...]
    missing: Mapping[str, str] = field(default_factory=dict)
    ended: bool = True
    run_ids: tuple[str, ...] = ()
    replaced: int = 0
    unreadable: tuple[str, ...] = ()


def find(folder: Path) -> list[Path]:
    """Run folders at or below ``folder``: itself, or the latest run of each reports folder in it.

    Raises:
        FileNotFoundError: there is none.
    """
    if (folder / "cases").is_dir():
        return [folder]
    homes = sorted(path for path in folder.rglob("runs") if path.is_dir())
    runs = [[run for run in home.iterdir() if (run / "cases").is_dir()] for home in homes]
    latest = [max(found, key=lambda run: (_started(run), run.name)) for found in runs if found]
    if not latest:
        raise FileNotFoundError(
            f"{folder} holds no run: pass a reports folder (with runs/<run id>/cases in it) "
            "or a run's own folder"
        )
    return latest


def load(folders: Iterable[Path]) -> Run:
    """Read run folders and merge them; a file that cannot be read is said, not hidden."""
    records: dict[str, Record] = {}
    missing: dict[str, str] = {}
    unreadable: list[str] = []
    ended, replaced = True, 0
    ordered = sorted(folders, key=lambda run: (_started(run), str(run)))
    for folder in ordered:
        for path in sorted((folder / "cases").glob("*.json")):
            try:
                record = read(path)
            except (RecordError, OSError) as error:
                unreadable.append(str(error))
                continue
            replaced += record.id in records
            records[record.id] = record
        closing = _read_json(folder / "run.json")
        ended = ended and bool(closing)
        outcomes = closing.get("outcomes", {})
        collected = _read_json(folder / "collected.json").get("collected", ())
        missing.update({nodeid: outcomes.get(nodeid, UNFINISHED) for nodeid in collected})
    recorded = {record.nodeid for record in records.values()}
    return Run(
        records=tuple(records.values()),
        missing={nodeid: how for nodeid, how in missing.items() if nodeid not in recorded},
        ended=ended,
        run_ids=tuple(folder.name for folder in ordered),
        replaced=replaced,
        unreadable=tuple(unreadable),
    )


def _started(folder: Path) -> str:
    return str(_read_json(folder / "collected.json").get("started", ""))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
