"""What each command of ``equivtest`` does; returns its exit status.

Each imports what it needs: ``equivtest devices`` runs where torch alone is installed.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from equivtest.compare import figures
from equivtest.report.run import Run, age, find, load


def devices(max_D: int) -> int:
    """Print pytest's arguments for the GPUs at hand."""
    from equivtest.gpumatrix import MissingPackagesError
    from equivtest.gpumatrix import arguments as pytest_arguments

    try:
        print(shlex.join(pytest_arguments(max_D)))
    except MissingPackagesError as error:
        print(f"equivtest devices: {sys.executable}: {error}", file=sys.stderr)
        return 2
    return 0


def report(
    folders: Sequence[Path], out: Path | None, *, latest: int, words: str, external: bool
) -> int:
    """Render the records of one or more runs."""
    from equivtest.report.closing import render
    from equivtest.report.selecting import selected

    try:
        paths = [path.resolve() for folder in folders for path in find(folder, latest)]
        run = load(dict.fromkeys(paths))
        if words:
            run = selected(run, words)
        lines = render(run, out or _default_out(folders), external=external)
    except (OSError, ValueError) as error:
        print(f"equivtest report: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


def compare(old: Path, new: Path, out: Path | None) -> int:
    """Say what differs between two runs, and write it as a page."""
    from equivtest.report import compared, comparing
    from equivtest.report.comparisonpage import write_comparison

    try:
        runs = _two_runs(old, new)
        comparison = comparing.compare(*runs)
        page = (out or _home(new)) / "comparison.html"
        write_comparison(comparison, page)
    except (OSError, ValueError) as error:
        print(f"equivtest compare: {error}", file=sys.stderr)
        return 2
    print(figures.printable("\n".join([*compared.lines(comparison), f"comparison: {page}"])))
    unknown = _incomplete(*runs)
    if unknown:
        print(f"equivtest compare: incomplete, for {unknown}", file=sys.stderr)
        return 2
    return 0 if comparison.same else 1


def _incomplete(old: Run, new: Run) -> str:
    """Why cases may look gone, added or the same that are not; empty where nothing is missing."""
    unreadable = len(old.unreadable) + len(new.unreadable)
    if unreadable:
        return f"{unreadable} of the records could not be read"
    return "" if new.ended else "the new run did not end by itself: there may be more cases"


def _two_runs(old: Path, new: Path) -> tuple[Run, Run]:
    """The runs of both arguments.

    Raises:
        OSError: one of them holds no run.
        ValueError: both are the same run, or one has no record.
    """
    folders = {"OLD": _named_runs("OLD", old), "NEW": _named_runs("NEW", new)}
    if set(folders["OLD"]) == set(folders["NEW"]):
        raise ValueError(_same_run(old, new))
    return _with_records("OLD", old, folders["OLD"]), _with_records("NEW", new, folders["NEW"])


def _named_runs(argument: str, folder: Path) -> list[Path]:
    try:
        return [path.resolve() for path in find(folder)]
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{argument}: {error}") from None


def _with_records(argument: str, given: Path, folders: Sequence[Path]) -> Run:
    run = load(folders)
    if run.records:
        return run
    why = f" ({run.unreadable[0]})" if run.unreadable else ""
    raise ValueError(
        f"{argument}: {given} has no record that could be read{why}: pass a run whose tests left "
        "records"
    )


def _same_run(old: Path, new: Path) -> str:
    """Why the arguments cannot be compared, and which folders could be."""
    held = {path.resolve() for given in (old, new) for path in find(given, latest=2)}
    told = (
        "OLD and NEW are the same run (of a reports folder the latest is taken): "
        "pass the folders of two runs"
    )
    # The latest two of several reports folders would be shards of one session.
    if len(held) < 2 or len({path.parent for path in held}) > 1:
        return f"{told}, <reports>/runs/<run id> each"
    before, after = sorted(held, key=age)[-2:]
    return f"{told}, the latest two say: {before} {after}"


def faults(folders: Sequence[Path]) -> int:
    """Print the table of the planted faults."""
    from equivtest.report.planted import lines, outcomes

    try:
        run = load(dict.fromkeys(path for folder in folders for path in find(folder)))
    except OSError as error:
        print(f"equivtest faults: {error}", file=sys.stderr)
        return 2
    found = outcomes(run.records)
    if not found:
        where = ", ".join(map(str, folders))
        print(
            f"equivtest faults: the run in {where} planted none: run pytest cases/faults first",
            file=sys.stderr,
        )
        return 2
    print("\n".join([*lines(found), *run.unreadable]))
    return 0


def causes(names: Sequence[str]) -> int:
    """Print what a verdict can name."""
    from equivtest.causes import Cause

    known = {name: Cause.named(name) for name in names}
    unknown = [name for name, cause in known.items() if cause is None]
    if unknown:
        print(f"equivtest causes: no cause is called {', '.join(unknown)}", file=sys.stderr)
        return 2
    width = max(map(len, Cause))
    for cause in Cause if not names else filter(None, known.values()):
        print(f"{cause.ljust(width)}  {cause.kind:<10}  {cause.prose if names else cause.happened}")
    return 0


def _default_out(folders: Sequence[Path]) -> Path:
    """The one reports folder; of several a folder of their own, for a page may be there already."""
    only = folders[0]
    return only if len(folders) == 1 and (only / "runs").is_dir() else Path("reports", "merged")


def _home(folder: Path) -> Path:
    """The reports folder that a run's folder lies in, or the folder itself."""
    whole = folder.resolve()
    return whole.parent.parent if whole.parent.name == "runs" else folder
