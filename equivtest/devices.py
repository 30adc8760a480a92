"""GPUs: which of them a pytest worker owns, and where the replicas of a case sit. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

NO_DEVICE = "no CUDA device: nothing was compared"

WORKER = "EQUIVTEST_WORKER"
"""Environment variable that tells a pytest worker its share, as ``2/4``: the third of four."""


@dataclass(frozen=True)
class Gpu:
    """One GPU of this machine.

    Attributes:
        visible_as: what ``CUDA_VISIBLE_DEVICES`` calls it.
        name: its model.
        capability: compute capability, major and minor.
    """

    visible_as: str
    name: str
    capability: tuple[int, int]


@dataclass(frozen=True)
class Share:
    """Worker ``worker`` of ``workers``, counted from 0."""

    worker: int = 0
    workers: int = 1


@dataclass(frozen=True)
class Seating:
    """Where the ranks of a case sit.

    Attributes:
        backend: of their process group.
        gpus: by rank, the number of its GPU among those that the pool owns; none on the CPU.
    """

    backend: str = "gloo"
    gpus: tuple[int, ...] = ()


ON_CPU = Seating()


@dataclass(frozen=True)
class Machine:
    """The GPUs at hand.

    Attributes:
        gpus: all that this session may use.
        share: the part of them that is this process's own.
        facts: versions and settings, for the record.
    """

    gpus: tuple[Gpu, ...] = ()
    share: Share = Share()
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def own(self) -> tuple[Gpu, ...]:
        """The GPUs that no other worker uses."""
        return tuple(dealt(self.gpus, self.share))


def dealt(gpus: Sequence[T], share: Share) -> Sequence[T]:
    """The GPUs of one worker: neighbours, and as many for every worker.

    What is left over idles: were shares unequal, it would depend on the worker that a test happens
    to run on whether its case can run.
    """
    each = len(gpus) // share.workers
    return gpus[share.worker * each : (share.worker + 1) * each]


def workers_for(gpus: int, max_D: int) -> int:
    """As many workers as leave each of them a GPU for every replica; one where none can have so."""
    return max(1, gpus // max_D)


def seated(D: int, machine: Machine, share_gpus: bool) -> Seating | str:
    """Where ``D`` replicas sit, or why they cannot.

    A GPU of its own for each replica, on NCCL. NCCL refuses two ranks on one GPU ("Duplicate GPU
    detected"), so ranks that are to share GPUs meet on gloo, which takes CUDA tensors by way of the
    host.
    """
    own, present, workers = len(machine.own), len(machine.gpus), machine.share.workers
    if not present:
        return NO_DEVICE
    if not own:
        return (
            f"{present} GPUs cannot be shared out to {workers} pytest workers, of which each would "
            f"own a GPU: pass -n {present} or fewer"
        )
    if D > own and not share_gpus:
        return (
            f"D={D} needs {D} GPUs, one a replica, and this worker owns {own} ({present} GPUs // "
            f"{workers} workers = {own}): {_remedy(D, present, workers)}"
        )
    gpus = tuple(rank % own for rank in range(D))
    models = {machine.own[gpu].name for gpu in gpus}
    if len(models) > 1:
        # Candidate and replay share the bits of a gradient only where the same kernels run.
        return (
            f"D={D} would run on GPUs of different models ({', '.join(sorted(models))}), whose "
            "kernels differ in the last bits: choose equal ones with CUDA_VISIBLE_DEVICES"
        )
    return Seating("gloo" if D > own else "nccl", gpus)


def _remedy(D: int, present: int, workers: int) -> str:
    shared = "--equiv-share-gpus runs it on gloo with shared GPUs"
    if present >= D and workers > 1:
        return f"pass -n {present // D}, or {shared}"
    return shared


def visible_names(count: int, visible: str | None) -> tuple[str, ...]:
    """What ``CUDA_VISIBLE_DEVICES`` calls the first ``count`` GPUs, where it is now ``visible``."""
    names = visible.split(",") if visible is not None else map(str, range(count))
    return tuple(name.strip() for name in names)[:count]


def share_from(environ: Mapping[str, str]) -> Share:
    """The share that the plugin has left in a pytest worker's environment; all of it elsewhere."""
    worker, separator, workers = environ.get(WORKER, "").partition("/")
    return Share(int(worker), int(workers)) if separator else Share()


def first_free(taken: Sequence[int]) -> int:
    """The smallest number that is not taken: a worker that replaces a lost one gets its share."""
    return next(number for number in range(len(taken) + 1) if number not in taken)
