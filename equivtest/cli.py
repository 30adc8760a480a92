"""The ``equivtest`` command."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from equivtest import __version__
from equivtest.report.run import find, load


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, or 2 where there was nothing to do it with."""
    parser = argparse.ArgumentParser(
        prog="equivtest", description="Numerical equivalence tests for PyTorch training loops."
    )
    parser.add_argument("--version", action="version", version=f"equivtest {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    report = commands.add_parser(
        "report",
        help="render results.csv and divergence.html from records",
        description="Render results.csv and divergence.html again from the records of one or more "
        "runs. Of a reports folder the latest run is taken; several are merged, as shards are.",
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
    return _report(arguments.folders, arguments.out)


def _devices(max_D: int) -> int:
    from equivtest.gpumatrix import MissingPackagesError
    from equivtest.gpumatrix import arguments as pytest_arguments

    try:
        print(shlex.join(pytest_arguments(max_D)))
    except MissingPackagesError as error:
        print(f"equivtest devices: {sys.executable}: {error}", file=sys.stderr)
        return 2
    return 0


def _report(folders: Sequence[Path], out: Path | None) -> int:
    from equivtest.report.closing import render

    try:
        runs = [run for folder in folders for run in find(folder)]
        run = load(dict.fromkeys(path.resolve() for path in runs))
        lines = render(run, out or _default_out(folders))
    except OSError as error:
        print(f"equivtest report: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


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
