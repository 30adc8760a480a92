"""What a case computes with: set for it alone, and as its precision says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from equivtest.arms.case import Case
from equivtest.arms.computing import computing, device_of, float32_arithmetic, in_ddp
from equivtest.arms.reference import Reference
from equivtest.experiment import Experiment
from equivtest.plan import Plan
from equivtest.precision import precision


def flags() -> tuple[bool, bool, bool]:
    cudnn = torch.backends.cudnn
    return torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark


@pytest.mark.parametrize("tf32", [True, False])
def test_products_and_convolutions_compute_alike_and_as_before_afterwards(tf32: bool) -> None:
    before = flags()
    assert before == (False, True, False)  # torch's own default: TF32 in convolutions alone
    with float32_arithmetic(tf32=tf32):
        assert flags() == (tf32, tf32, False)
    assert flags() == before


@pytest.mark.parametrize(("name", "tf32"), [("tf32", True), ("fp32", False), ("bf16-mixed", False)])
def test_only_tf32_cases_compute_in_tf32_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, name: str, tf32: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    with computing(replace(CASE, precision=precision(name), device="cuda")):
        assert flags() == (tf32, tf32, False)
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_flags_of_a_gpu_are_left_alone_on_the_cpu() -> None:
    with computing(CASE):
        assert flags() == (False, True, False)
        assert torch.are_deterministic_algorithms_enabled()


def test_a_rank_knows_its_gpu_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert device_of(replace(CASE, device="cuda")) == torch.device("cuda", 1)
    assert device_of(CASE) == torch.device("cpu")


def test_the_wrapper_is_bound_to_the_gpu_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[object] = []
    path = "equivtest.arms.computing.DistributedDataParallel"
    monkeypatch.setattr(path, lambda module, device_ids: bound.append(device_ids))
    in_ddp(nn.Linear(1, 1), torch.device("cuda", 3))
    in_ddp(nn.Linear(1, 1), torch.device("cpu"))
    assert bound == [[3], None]


def test_what_is_kept_of_an_experiment_is_of_one_device() -> None:
    """A case on a GPU must not find the model of one on the CPU."""
    cache: dict[object, object] = {}
    experiment = Experiment(
        model=nn.Identity, data=[], loss=lambda model, batch: None, optimizer=lambda model: None
    )
    on_cpu = Reference(cache, experiment, CASE)
    on_gpu = Reference(cache, experiment, replace(CASE, device="cuda"))
    assert on_cpu._kept.once("bench", lambda: "cpu") == "cpu"
    assert on_gpu._kept.once("bench", lambda: "cuda") == "cuda"


CASE = Case(Plan(1, 1, 1), precision("fp32"), (), None, None, "cpu", "")
