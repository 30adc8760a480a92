"""The vocabulary between controller, nursery and workers.

Controller to nursery: `fork` (Birth, with the worker's descriptors) and `signal` (tokens, number).
Nursery to controller: `ready`, `forked` (token, pid), `exited` (token, wait status).
Controller to worker: `world` (WorldOrder), `keep` (digest), `drop` (digest), `job` (JobOrder).
Worker to controller: `returned` (Returned) or `raised` (Raised).
"""

from __future__ import annotations

from dataclasses import dataclass

from equivtest.devices import ON_CPU, Seating


@dataclass(frozen=True)
class Birth:
    """A worker to be forked; `rank` is `None` for the process outside of any group.

    `visible_gpus` becomes its CUDA_VISIBLE_DEVICES; `None` leaves the controller's.
    """

    token: int
    rank: int | None
    threads: int
    visible_gpus: str | None = None


@dataclass(frozen=True)
class WorldOrder:
    size: int
    path: str
    seating: Seating = ON_CPU


@dataclass(frozen=True)
class JobOrder:
    """One job. `size` is 0 outside of any group; path and directory follow the controller's.

    `size` and `seating` together name the process group that it finds.
    """

    serial: int
    size: int
    sys_path: tuple[str, ...]
    directory: str | None
    seating: Seating = ON_CPU


@dataclass(frozen=True)
class Returned:
    """The job's result comes as payload; `left` is what makes the process unfit for another job."""

    group_intact: bool
    left: str = ""


@dataclass(frozen=True)
class Raised:
    """An exception as plain text: its class need not exist where this is read."""

    type: str
    message: str
    traceback: str
