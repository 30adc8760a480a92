"""The smallest pair in torch's own two test classes: a spawn per test, and a pool per class."""

from __future__ import annotations

import itertools
import time
import unittest
from typing import Any

import bare
import experiments
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcContinuousTest, MultiProcessTestCase

from equivtest import Plan
from equivtest.plan import layout
from equivtest.pool import Seat

PLAN = Plan(m=4, A=4, D=2)
EXPERIMENT = experiments.smallest(updates=1)
GROUPS = layout(PLAN, len(EXPERIMENT.data), updates=1)


def pair(rank: int) -> None:
    """The candidate on both ranks; on rank 0 large batch and replay as well."""
    seat = Seat(rank, PLAN.D, dist.group.WORLD)
    bare.candidate(seat, EXPERIMENT, GROUPS)
    if rank == 0:
        bare.references(seat, EXPERIMENT, GROUPS)


class SpawnPerTest(MultiProcessTestCase):
    """New processes, which import torch, for each test."""

    @property
    def world_size(self) -> int:
        return PLAN.D

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def test_pair(self) -> None:
        store = dist.FileStore(self.file_name, PLAN.D)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=PLAN.D)
        pair(self.rank)
        dist.destroy_process_group()


class PoolPerClass(MultiProcContinuousTest):
    """One process group for all tests of the class; of one size."""

    world_size = PLAN.D

    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    @classmethod
    def device_type(cls) -> str:
        return "cpu"

    def test_pair(self) -> None:
        pair(self.rank)


def seconds_each(case: type[Any], times: int) -> list[float]:
    """Seconds of each of ``times`` runs of the class's one test, in one suite."""
    marks = [time.perf_counter()]

    class Marked(unittest.TestResult):
        def stopTest(self, test: unittest.TestCase) -> None:  # noqa: N802 - unittest's name
            marks.append(time.perf_counter())

    result = Marked()
    suite = unittest.TestSuite(case("test_pair") for _ in range(times))
    suite.run(result)
    failed = [text for _, text in (*result.errors, *result.failures)]
    if failed or result.testsRun != times:
        raise RuntimeError(f"{case.__name__}: {result.testsRun} of {times} tests ran; {failed[:1]}")
    return [after - before for before, after in itertools.pairwise(marks)]
