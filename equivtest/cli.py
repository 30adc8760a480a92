"""The ``equivtest`` command."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from equivtest import __version__
from equivtest.report.run import Run, age, find, load


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status.

    0, or 2 where there was nothing to do it with; 1 of ``compare`` where something differs.
    """
    parser = argparse.ArgumentParser(
        prog="equivtest", description="Numerical equivalence tests for PyTorch training loops."
    )
    parser.add_argument("--version", action="version", version=f"equivtest {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    report = commands.add_parser(
        "report",
        help="render results.csv and divergence.html from records",
        description="Render results.csv and divergence.html again from the records of one or more "
        "runs. Of a reports folder the latest run is taken, or the latest N; several are merged, "
        "as shards are, and of a case that several have the latest record counts.",
    )
    report.add_argument(
        "folders", nargs="+", type=Path, metavar="DIR", help="a reports folder, or one run's folder"
    )
    report.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where to write (default: the one reports folder that was given, else reports)",
    )
    report.add_argument(
        "--runs",
        type=_count,
        default=1,
        metavar="N",
        help="how many runs of a reports folder to take, for the history of each case (default 1)",
    )
    comparison = commands.add_parser(
        "compare",
        help="say what differs between two runs",
        description="Say which verdicts changed between two runs of the same cases, which margins "
        "moved by more than noise, and which cases were added or are gone. Of a reports folder the "
        "latest run is taken; of a folder of several, the latest of each, merged as shards are. "
        "Exit status 0: nothing differs; 1: something does; 2: something could not be read.",
    )
    for name, what in (("old", "before"), ("new", "after")):
        comparison.add_argument(
            name,
            type=Path,
            metavar=name.upper(),
            help=f"the run {what}: a reports folder, or one run's folder",
        )
    devices = commands.add_parser(
        "devices",
        help="print the arguments that pytest takes on the GPUs at hand",
        description="Print the arguments for pytest with which each worker has a GPU for every "
        "replica, as far as there are so many: `pytest $(equivtest devices) --equiv-device=cuda`.",
    )
    devices.add_argument(
        "--max-D", type=int, default=4, metavar="D", help="replicas of the largest plan (default 4)"
    )
    planted = commands.add_parser(
        "faults",
        help="print what became of the planted faults of a run",
        description="Print the table of the planted faults that a run has records of: kind × "
        "experiment × plan × precision, each named, caught, missed or not run. Of a reports folder "
        "the latest run is taken.",
    )
    planted.add_argument(
        "folders",
        nargs="*",
        type=Path,
        default=[Path("reports")],
        metavar="DIR",
        help="a reports folder, or one run's folder (default: reports)",
    )
    causes = commands.add_parser(
        "causes",
        help="print what a verdict can name",
        description="Print the causes that a verdict can name and `expect` takes: all by kind and "
        "name, or those that were asked for with what to change.",
    )
    causes.add_argument("names", nargs="*", metavar="CAUSE", help="clip.missing, say")
    arguments = parser.parse_args(argv)
    if arguments.command == "devices":
        return _devices(arguments.max_D)
    if arguments.command == "faults":
        return _faults(arguments.folders)
    if arguments.command == "causes":
        return _causes(arguments.names)
    if arguments.command == "compare":
        return _compare(arguments.old, arguments.new)
    return _report(arguments.folders, arguments.out, arguments.runs)


def _devices(max_D: int) -> int:
    from equivtest.gpumatrix import MissingPackagesError
    from equivtest.gpumatrix import arguments as pytest_arguments

    try:
        print(shlex.join(pytest_arguments(max_D)))
    except MissingPackagesError as error:
        print(f"equivtest devices: {sys.executable}: {error}", file=sys.stderr)
        return 2
    return 0


def _count(text: str) -> int:
    """A number of things, at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of runs: pass 1 or more")
    return int(text)


def _report(folders: Sequence[Path], out: Path | None, latest: int) -> int:
    from equivtest.report.closing import render

    try:
        runs = [run for folder in folders for run in find(folder, latest)]
        run = load(dict.fromkeys(path.resolve() for path in runs))
        lines = render(run, out or _default_out(folders))
    except OSError as error:
        print(f"equivtest report: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


def _compare(old: Path, new: Path) -> int:
    from equivtest.report.comparing import compare, lines

    try:
        runs = _two_runs(old, new)
    except (OSError, ValueError) as error:
        print(f"equivtest compare: {error}", file=sys.stderr)
        return 2
    comparison = compare(*runs)
    print("\n".join(lines(comparison)))
    unreadable = len(runs[0].unreadable) + len(runs[1].unreadable)
    if unreadable:
        # The cases of these files may be among those that look gone or added.
        print(
            f"equivtest compare: incomplete, for {unreadable} of the records could not be read",
            file=sys.stderr,
        )
        return 2
    return 0 if comparison.same else 1


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


def _faults(folders: Sequence[Path]) -> int:
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


def _causes(names: Sequence[str]) -> int:
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
    only = folders[0]
    return only if len(folders) == 1 and (only / "runs").is_dir() else Path("reports")
