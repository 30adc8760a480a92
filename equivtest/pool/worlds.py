"""Process groups by size and seating, of which one at a time is torch's default.

Torch keeps everything about process groups in module tables. Each size D has its own set of those
tables, made by its own `init_process_group` over ranks 0 … D−1, and a job finds just those: it
cannot tell that the same processes serve groups of other sizes, or on another backend.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch._C._distributed_c10d as _C
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from equivtest.devices import Seating
from equivtest.pool import gpu

_TABLES = (
    "_pg_map",
    "_pg_names",
    "_pg_group_ranks",
    "_pg_backend_config",
    "_tags_to_pg",
    "_pg_to_tag",
)
# The pool's own deadline ends a job; that of gloo or NCCL must not come first with a message that
# names no rank.
_NEVER = timedelta(days=7)


@dataclass
class World:
    """One size's default process group and torch's tables as they were when it was made.

    `device` is this rank's GPU, if it has one.
    """

    group: Any
    store: Any
    device: torch.device | None
    tables: dict[str, dict[Any, Any]] = field(default_factory=dict)
    group_count: int = 1


class Worlds:
    """The process groups of this process by size and seating."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._worlds: dict[tuple[int, Seating], World] = {}

    def create(self, size: int, path: str, seating: Seating) -> None:
        """Meet ranks 0 … size−1 at the file `path`; replaces an older group of the same kind."""
        self._worlds.pop((size, seating), None)
        device = gpu.of_rank(seating, self._rank)
        if device is not None:
            gpu.take(device)
        hook = sys.excepthook  # torch wraps it at every call
        try:
            store = dist.FileStore(path, size)
            dist.init_process_group(
                seating.backend,
                store=store,
                rank=self._rank,
                world_size=size,
                timeout=_NEVER,
                # Bound to it, NCCL connects here and now, where a failure is the group's and not
                # that of the first case that reduces. Gloo has no use for it.
                device_id=device if seating.backend == "nccl" else None,
            )
        finally:
            sys.excepthook = hook
        group = c10d._get_default_group()
        world = World(group, c10d._pg_map[group][1], device, group_count=c10d._group_count)
        world.tables = {name: _copy(getattr(c10d, name)) for name in _TABLES}
        self._worlds[size, seating] = world
        _clear()

    @contextlib.contextmanager
    def entered(self, size: int, seating: Seating, serial: int) -> Iterator[Any]:
        """Make the group of this size and seating torch's default for one job.

        After a job that raises nothing is put back: the pool ends the ranks of a job that fails,
        and NCCL may wait for ever to take down a group whose other ranks are still in it.
        """
        world = self._worlds[size, seating]
        if world.device is not None:
            torch.cuda.set_device(world.device)  # the last job may have chosen another
        for name, table in world.tables.items():
            getattr(c10d, name).update(_copy(table))
        c10d._group_count = world.group_count
        # Groups that the job makes meet under keys of this job's own: names repeat from job to job,
        # and an address that an earlier job left in the store would be taken for a live one.
        backend, _ = c10d._pg_map[world.group]
        c10d._pg_map[world.group] = (backend, dist.PrefixStore(f"job{serial}", world.store))
        _register(world.group)
        c10d._update_default_pg(world.group)
        yield world.group
        gpu.finish(world.device)
        if not self._leave(world):
            del self._worlds[size, seating]

    def has(self, size: int, seating: Seating) -> bool:
        """False once a job has destroyed this default group: the pool must make it anew."""
        return (size, seating) in self._worlds

    def _leave(self, world: World) -> bool:
        intact = c10d._world.default_pg is world.group and world.group in c10d._pg_map
        for group in list(c10d._pg_map):
            if group is not world.group:
                with contextlib.suppress(Exception):
                    dist.destroy_process_group(group)
        _clear()
        return intact


def _clear() -> None:
    c10d._update_default_pg(None)
    for name in _TABLES:
        getattr(c10d, name).clear()
    c10d._world.pg_coalesce_state.clear()
    c10d._group_count = 0
    c10d._unregister_all_process_groups()


def _register(group: Any) -> None:
    with contextlib.suppress(RuntimeError):
        _C._unregister_process_group(group.group_name)
    _C._register_process_group(group.group_name, group)


def _copy(table: dict[Any, Any]) -> dict[Any, Any]:
    return {key: list(v) if isinstance(v, list) else v for key, v in table.items()}
