"""What went wrong in a job, who caused it, and how to say it."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


class PoolError(Exception):
    """The pool could not do what it was asked."""


class Unsendable(PoolError):
    """An argument of a job cannot be pickled; nothing was run."""


class RankFailed(PoolError):
    """A job could not finish because of one of its processes.

    `rank` is the one that caused it (`None` where no rank is more to blame than another, and for
    the single process outside of any group), `what`
    says what happened. `last_events`, `stacks` and `output` are by rank, at the moment of failure.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None,
        what: str,
        last_events: tuple[str, ...] = (),
        stacks: tuple[str, ...] = (),
        output: tuple[str, ...] = (),
        exception_type: str | None = None,
        exception_message: str | None = None,
        all_raised: bool = False,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.what = what
        self.last_events = last_events
        self.stacks = stacks
        self.output = output
        self.exception_type = exception_type
        self.exception_message = exception_message
        self.all_raised = all_raised


class Timeout(RankFailed):
    """A job did not finish in its time."""


@dataclass(frozen=True)
class Ending:
    """One rank's part in a job that failed.

    `order` counts the endings as they became known; `text` is the traceback of an exception, or the
    Python stack of a rank that waits or was ended in C++.
    """

    rank: int
    kind: Literal["returned", "raised", "died", "waiting"]
    order: int = 0
    status: int | None = None
    exception_type: str | None = None
    exception_message: str | None = None
    text: str = ""
    last_event: str = ""
    output: str = ""

    @property
    def what(self) -> str:
        if self.kind == "raised":
            return f"raised {self.exception_type}: {self.exception_message}"
        if self.kind == "died":
            return explain_status(self.status)
        return "returned" if self.kind == "returned" else "was still running"

    @property
    def is_victim(self) -> bool:
        """Whether the exception only reports that another rank has gone."""
        return self.kind == "raised" and bool(_PEER_GONE.search(self.exception_message or ""))

    @property
    def in_collective(self) -> bool:
        """Whether the rank was waiting for others: in a collective, or in DDP's backward."""
        _, _, current = self.text.rpartition("Current thread")
        files = [file for file in _FRAME.findall(current) if not file.endswith("torch/_ops.py")]
        return bool(files) and bool(_COLLECTIVE.search(files[0]))  # the innermost comes first


_PEER_GONE = re.compile(
    r"connection (closed|reset) by peer|broken pipe|connection refused|socket closed"
    r"|read error|write error|connectFullMesh|application timeout caused pair closure",
    re.IGNORECASE,
)
_FRAME = re.compile(r'File "(.+?)", line')
# DDP reduces at the end of backward, in C++: its innermost Python frame is then autograd's. NCCL's
# collectives return at once: who waits for their end is in torch.cuda.synchronize.
_COLLECTIVE = re.compile(
    r"torch/distributed/|torch/nn/parallel/distributed\.py$|torch/autograd/graph\.py$"
    r"|torch/cuda/__init__\.py$"
)
_SHOWN_LINES = 40


def explain_status(status: int | None) -> str:
    """A wait status in words."""
    if status is None:
        return "ended with the process that forks the ranks, which was killed"
    if status & 0x7F:
        number = status & 0x7F
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        if number == signal.SIGABRT:
            return "was ended by SIGABRT in C++ (see its output)"
        return f"was killed by {name}"
    return f"exited with code {status >> 8}"


def diagnose(endings: Sequence[Ending], *, timeout_s: float | None, solo: bool) -> RankFailed:
    """The error for a job with these endings; `timeout_s` is given if its time ran out."""
    kinds = {(e.kind, e.exception_type, e.exception_message) for e in endings}
    all_raised = len(kinds) == 1 and endings[0].kind == "raised"
    culprit, what = (endings[0], endings[0].what) if all_raised else _culprit(endings, timeout_s)
    if solo:
        who = "the single process"
    elif len(endings) > 1 and (culprit is None or all_raised):
        who = f"all {len(endings)} ranks"
    else:
        who = f"rank {culprit.rank if culprit else 0} of {len(endings)}"
    return (RankFailed if timeout_s is None else Timeout)(
        _message(endings[:1] if all_raised else endings, culprit, f"{who} {what}"),
        rank=None if culprit is None or solo or who.startswith("all") else culprit.rank,
        what=what,
        last_events=tuple(e.last_event for e in endings),
        stacks=tuple(e.text for e in endings),
        output=tuple(e.output for e in endings),
        exception_type=culprit.exception_type if culprit else None,
        exception_message=culprit.exception_message if culprit else None,
        all_raised=all_raised,
    )


def _culprit(endings: Sequence[Ending], timeout_s: float | None) -> tuple[Ending | None, str]:
    ended = sorted((e for e in endings if e.kind in ("died", "raised")), key=_blame)
    if ended and ended[0].kind == "died" and ended[0].status is None:
        return None, ended[0].what
    if ended:
        return ended[0], ended[0].what
    waiting = [e for e in endings if e.kind == "waiting"]
    finished = [e for e in endings if e.kind == "returned"]
    what = f"did not finish within {timeout_s or 0:g} s"
    elsewhere = [e for e in waiting if not e.in_collective]
    if finished and not elsewhere:
        return finished[0], f"returned without the collective in which {_wait(waiting)}"
    if finished:
        what += f", after {_ranks(finished)} had returned"
    if elsewhere and len(elsewhere) < len(waiting):
        others = [e for e in waiting if e.in_collective]
        return elsewhere[0], f"{what}; {_wait(others)} in a collective"
    return (waiting[0] if len(waiting) == 1 or len(elsewhere) == 1 else None), what


def _blame(ending: Ending) -> tuple[int, int]:
    if ending.kind == "died":
        return 0, ending.order
    return (2 if ending.is_victim else 1), ending.order


def _ranks(endings: Sequence[Ending]) -> str:
    return ("rank " if len(endings) == 1 else "ranks ") + ", ".join(str(e.rank) for e in endings)


def _wait(endings: Sequence[Ending]) -> str:
    return f"{_ranks(endings)} {'waits' if len(endings) == 1 else 'wait'}"


def _message(endings: Sequence[Ending], culprit: Ending | None, headline: str) -> str:
    lines = [headline]
    if culprit is not None:
        lines += _evidence(culprit)
    for ending in endings:
        if ending is not culprit:
            what_of_this = ending.what.partition("\n")[0]
            lines += ["", f"rank {ending.rank} {what_of_this}", *_evidence(ending)]
    return "\n".join(lines)


def _evidence(ending: Ending) -> list[str]:
    lines = [f"  last event: {ending.last_event or 'none noted'}", *_quoted(ending.text)]
    if ending.output:
        lines += ["  its output:", *_quoted(ending.output)]
    return lines


def _quoted(text: str) -> list[str]:
    lines = text.rstrip().splitlines()
    if len(lines) > _SHOWN_LINES:
        left_out = len(lines) - _SHOWN_LINES
        half = _SHOWN_LINES // 2
        lines = [*lines[:half], f"[... {left_out} lines ...]", *lines[-half:]]
    return [f"    {line}" for line in lines]
