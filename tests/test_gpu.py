"""Cases with ``device="cuda"``: those that cannot run, anywhere; and, on a GPU, those that can."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from equivtest import Experiment, Loss, Plan, Rank, Verdict, check
from equivtest.devices import Gpu, Machine, Share
from equivtest.loops import accumulate
from equivtest.pool import Pool

HAS_GPU = torch.cuda.is_available() and dist.is_nccl_available()
GPUS = torch.cuda.device_count() if HAS_GPU else 0
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
needs_two = pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")

generator = torch.Generator().manual_seed(0)
DATA = [
    (torch.randn(1, 8, 8, generator=generator), torch.randint(0, 3, (), generator=generator))
    for _ in range(16)
]


class Net(nn.Module):
    """A convolution, for cuDNN, and products, for cuBLAS."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.GroupNorm(2, 4)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(4 * 36, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(torch.relu(self.norm(self.conv(x)))).flatten(1))


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    x, y = batch
    return Loss(F.cross_entropy(model(x), y, reduction="sum"), count=len(y))


def an_experiment(**changes) -> Experiment:
    given = {
        "model": Net,
        "data": DATA,
        "loss": cross_entropy,
        "count": lambda batch: len(batch[1]),
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4),
        "clip_norm": 1.0,
        "scaler": lambda device: torch.amp.GradScaler(device, init_scale=2.0**10),
    }
    return Experiment(**{**given, **changes})


plain = an_experiment()


def on_gpu(experiment: Experiment, plan: Plan, precision: str = "fp32", **how) -> Verdict:
    return check(experiment, plan, precision=precision, device="cuda", timeout_s=120, **how)


# -- cannot run


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


def told_of(pool: Pool, gpus: int, share: Share, capability: tuple[int, int] = (8, 0)) -> Pool:
    pool._machine = Machine(tuple(Gpu(str(k), "a model", capability) for k in range(gpus)), share)
    return pool


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_without_a_device_nothing_is_compared_and_the_verdict_says_so(pool: Pool) -> None:
    verdict = on_gpu(plain, Plan(2, 2, 2), pool=pool)
    assert verdict.status == "not-run"
    assert verdict.failure is not None
    assert verdict.failure.text == "no CUDA device: nothing was compared"
    assert (verdict.card.device, verdict.card.backend) == ("cuda", "nccl")


def test_more_replicas_than_gpus_are_not_run_and_start_no_rank(pool: Pool) -> None:
    verdict = on_gpu(plain, Plan(1, 2, 4), pool=told_of(pool, 4, Share(1, 2)))
    assert verdict.status == "not-run"
    assert "D=4 needs 4 GPUs, one a replica, and this worker owns 2" in verdict.explain()
    assert pool._processes is None


def test_a_precision_that_the_gpu_lacks_is_not_run(pool: Pool) -> None:
    verdict = on_gpu(plain, Plan(2, 2, 1), "bf16-mixed", pool=told_of(pool, 1, Share(), (7, 0)))
    assert verdict.status == "not-run"
    assert "bf16-mixed needs a GPU of compute capability 8.0" in verdict.explain()


def test_a_device_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ValueError, match="device='cuda:1': pass 'cpu' or 'cuda'"):
        check(plain, Plan(2, 2, 2), device="cuda:1")


# -- on a GPU


@needs_gpu
@pytest.mark.parametrize(
    "precision", ["fp64", "fp32", "tf32", "bf16", "fp16", "bf16-mixed", "fp16-mixed"]
)
def test_one_replica_gives_the_replays_bits_in_every_precision(precision: str) -> None:
    verdict = on_gpu(plain, Plan(2, 4, 1), precision)
    assert verdict.status == "equivalent", verdict.explain()
    assert [row.replay_bits_equal for row in verdict.updates] == [True, True]
    assert verdict.card.first_peak_bytes
    assert (verdict.card.device, verdict.card.backend) == ("cuda", "nccl")


@needs_two
@pytest.mark.parametrize("precision", ["fp64", "fp32", "tf32", "bf16-mixed", "fp16-mixed"])
def test_two_replicas_on_nccl_give_the_replays_bits(precision: str) -> None:
    """A sum of two has no order."""
    verdict = on_gpu(plain, Plan(2, 2, 2), precision)
    assert verdict.status == "equivalent", verdict.explain()
    assert [row.replay_bits_equal for row in verdict.updates] == [True, True]


@needs_gpu
def test_replicas_that_share_a_gpu_are_equivalent_on_gloo() -> None:
    verdict = on_gpu(plain, Plan(1, 1, 2 * GPUS), "fp32", share_gpus=True)
    assert verdict.status == "equivalent", verdict.explain()
    assert verdict.card.backend == "gloo"


@needs_gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16-mixed"])
def test_a_small_wrong_weight_is_a_fault(precision: str) -> None:
    def one_in_ten_thousand_off(rank: Rank) -> None:
        for group in rank.groups:
            for k, batch in enumerate(group):
                with rank.autocast():
                    loss = rank.loss(rank.model, batch)
                weight = 1.0001 if k == 0 else 1.0
                (weight * loss.total / group.count * rank.D).backward()
            nn.utils.clip_grad_norm_(rank.module.parameters(), 1.0)
            rank.optimizer.step()
            rank.optimizer.zero_grad()

    verdict = on_gpu(plain, Plan(2, 4, 1), precision, loop=one_in_ten_thousand_off)
    assert verdict.status == "fault", verdict.explain()


@needs_gpu
def test_dropout_draws_the_same_numbers_in_the_replay() -> None:
    """The loop is acquitted by comparison A; the split is not, and has no name yet."""
    verdict = on_gpu(an_experiment(model=lambda: Net(dropout=0.5)), Plan(2, 4, 1))
    assert [row.replay_bits_equal for row in verdict.updates] == [True, True]
    assert verdict.status == "unexplained"


@needs_gpu
@pytest.mark.parametrize("flags", [{}, {"fused": True}, {"capturable": True}, {"foreach": False}])
def test_every_implementation_of_an_optimizer_is_replayed_bit_for_bit(flags: dict) -> None:
    made = an_experiment(
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, **flags)
    )
    verdict = on_gpu(made, Plan(2, 4, 1))
    assert verdict.status == "equivalent", verdict.explain()


@needs_gpu
def test_the_same_case_gives_the_same_rows_twice() -> None:
    assert on_gpu(plain, Plan(2, 4, 1)).rows == on_gpu(plain, Plan(2, 4, 1)).rows


@needs_gpu
def test_an_operation_without_a_deterministic_kernel_is_not_run() -> None:
    class Adaptive(Net):
        def forward(self, x: Tensor) -> Tensor:
            # adaptive_avg_pool2d's backward is on torch's list of those without
            return super().forward(F.adaptive_avg_pool2d(x + 0 * self.head.bias.sum(), 8))

    verdict = on_gpu(an_experiment(model=Adaptive), Plan(2, 4, 1))
    assert verdict.status == "not-run", verdict.explain()
    assert "deterministic" in verdict.explain()


@needs_gpu
def test_a_case_on_the_cpu_is_as_before_after_one_on_the_gpu() -> None:
    before = check(plain, Plan(2, 2, 2))
    on_gpu(plain, Plan(2, 4, 1), loop=accumulate)
    assert check(plain, Plan(2, 2, 2)).rows == before.rows
