"""The ``equivtest`` command."""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from equivtest import __version__, commands

Subcommands = Any  # argparse keeps the type of its subparsers to itself


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status.

    0, or 2 where there was nothing to do it with; 1 of ``compare`` where something differs.
    """
    parser = argparse.ArgumentParser(
        prog="equivtest", description="Numerical equivalence tests for PyTorch training loops."
    )
    parser.add_argument("--version", action="version", version=f"equivtest {__version__}")
    subcommands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (_report, _compare, _devices, _faults, _causes):
        add(subcommands)
    arguments = parser.parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that the terminal cannot write is escaped
            stream.reconfigure(errors="backslashreplace")
    try:
        status: int = arguments.run(arguments)
    except BrokenPipeError:  # a reader, as `head` is, that has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the rest goes nowhere
        return 0
    except Exception:
        traceback.print_exc()
        return 2  # 1 of compare says that something differs
    return status


def _report(subcommands: Subcommands) -> None:
    report = subcommands.add_parser(
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
        help="where to write (default: the one reports folder that was given, else reports/merged)",
    )
    report.add_argument(
        "--runs",
        type=_count,
        default=1,
        metavar="N",
        help="how many runs of a reports folder to take, for the history of each case (default 1)",
    )
    report.add_argument(
        "--select",
        default="",
        metavar="WORDS",
        help="show only the cases with all these words in their name, test, status or causes, "
        "in full, as selection.html",
    )
    report.add_argument(
        "--external-assets",
        action="store_true",
        help="put style and script into files beside the page, for a server whose content security "
        "policy forbids what is inline",
    )
    report.set_defaults(
        run=lambda given: commands.report(
            given.folders,
            given.out,
            latest=given.runs,
            words=given.select,
            external=given.external_assets,
        )
    )


def _compare(subcommands: Subcommands) -> None:
    comparison = subcommands.add_parser(
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
    comparison.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where to write comparison.html (default: the reports folder of NEW)",
    )
    comparison.set_defaults(run=lambda given: commands.compare(given.old, given.new, given.out))


def _devices(subcommands: Subcommands) -> None:
    devices = subcommands.add_parser(
        "devices",
        help="print the arguments that pytest takes on the GPUs at hand",
        description="Print the arguments for pytest with which each worker has a GPU for every "
        "replica, as far as there are so many: `pytest $(equivtest devices) --equiv-device=cuda`.",
    )
    devices.add_argument(
        "--max-D",
        type=_count,
        default=4,
        metavar="D",
        help="replicas of the largest plan (default 4)",
    )
    devices.set_defaults(run=lambda given: commands.devices(given.max_D))


def _faults(subcommands: Subcommands) -> None:
    planted = subcommands.add_parser(
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
    planted.set_defaults(run=lambda given: commands.faults(given.folders))


def _causes(subcommands: Subcommands) -> None:
    causes = subcommands.add_parser(
        "causes",
        help="print what a verdict can name",
        description="Print the causes that a verdict can name and `expect` takes: all by kind and "
        "name, or those that were asked for with what to change.",
    )
    causes.add_argument("names", nargs="*", metavar="CAUSE", help="clip.missing, say")
    causes.set_defaults(run=lambda given: commands.causes(given.names))


def _count(text: str) -> int:
    """A number of things, at least one."""
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text[:20]!r}: pass a whole number, 1 or more")
    return int(text)
