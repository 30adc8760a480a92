"""One message to some workers, and what became of it in each."""

from __future__ import annotations

import time
from dataclasses import replace

from equivtest.pool.channel import Frame
from equivtest.pool.failure import Ending, RankFailed, diagnose
from equivtest.pool.member import Member
from equivtest.pool.processes import Processes

# After the first failure the others get this long, plus the time that the job has already taken, to
# fail or finish as well: whether every rank raised the same is a different finding.
_GRACE_S = 0.5


class Exchange:
    """The answers of some workers to one message."""

    def __init__(self, processes: Processes, members: list[Member]) -> None:
        self._processes = processes
        self._members = members
        self.answers: dict[Member, Frame] = {}
        self._endings: dict[Member, Ending] = {}
        self._start_s = time.monotonic()

    @property
    def failed(self) -> bool:
        return any(ending.kind in ("raised", "died") for ending in self._endings.values())

    def wait(self, limit_s: float) -> bool:
        """True once all have ended, False when the time is over."""
        deadline = time.monotonic() + limit_s
        while len(self._endings) < len(self._members):
            if time.monotonic() >= deadline:
                return False
            failed_before = self.failed
            for member, frame in self._processes.poll(deadline):
                self._hear(member, frame)
            if self.failed and not failed_before:
                elapsed_s = time.monotonic() - self._start_s
                deadline = min(deadline, time.monotonic() + _GRACE_S + elapsed_s)
        return True

    def _hear(self, member: Member, frame: Frame | None) -> None:
        if member not in self._members or member in self._endings:
            return
        ending = Ending(member.birth.rank or 0, "returned", len(self._endings))
        if frame is None:
            ending = replace(ending, kind="died", status=member.status)
        elif frame.kind == "raised":
            raised = frame.meta
            ending = replace(
                ending,
                kind="raised",
                exception_type=raised.type,
                exception_message=raised.message,
                text=raised.traceback,
            )
        else:
            self.answers[member] = frame
        self._endings[member] = ending

    def failure(self, limit_s: float | None, *, solo: bool) -> RankFailed:
        """What the endings and the stacks of those that still run amount to."""
        waiting = [m for m in self._members if m not in self._endings]
        self._processes.dump_stacks(waiting)
        return diagnose([self._ending(m) for m in self._members], timeout_s=limit_s, solo=solo)

    def _ending(self, member: Member) -> Ending:
        ending = self._endings.get(member) or Ending(member.birth.rank or 0, "waiting")
        text = member.stacks() if ending.kind in ("waiting", "died") else ending.text
        return replace(ending, text=text, last_event=member.last_event(), output=member.output())
