"""A job that changes its process for good does not change the next job."""

import copy
import importlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from equivtest.pool import Pool, Seat


def train(seat: Seat) -> tuple[list[float], int]:
    """What a usual loop does, and where."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3))
    )
    copy.deepcopy(model.module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(torch.randn(5, 4))
        loss = F.cross_entropy(logits.float(), torch.zeros(5, dtype=torch.long))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
    dist.barrier()
    return [p.sum().item() for p in model.parameters()], os.getpid()


def hook_every_module() -> None:
    nn.modules.module.register_module_forward_hook(lambda module, inputs, output: output * 2)


def hook_every_optimizer() -> None:
    register_optimizer_step_post_hook(lambda *_: None)


def patch_a_layer() -> None:
    nn.Linear.forward = lambda self, x: F.linear(x, self.weight / 2)  # type: ignore


def patch_a_base_class() -> None:
    nn.Sequential.__call__ = lambda self, x: self.forward(x) * 2  # type: ignore


def patch_a_function() -> None:
    F.cross_entropy = lambda *_, **__: torch.ones((), requires_grad=True)


def patch_an_optimizer() -> None:
    step = torch.optim.AdamW.step

    def twice(self: torch.optim.AdamW, closure: None = None) -> None:
        step(self)
        step(self)

    torch.optim.AdamW.step = twice  # type: ignore


def patch_a_scheduler() -> None:
    torch.optim.lr_scheduler.StepLR.get_lr = lambda self: [1.0]  # type: ignore


def patch_tensors() -> None:
    torch.Tensor.backward = lambda *_, **__: None  # type: ignore


def patch_what_tensors_inherit() -> None:
    torch.Tensor.sum = lambda self: self.mean()  # type: ignore


def patch_torch() -> None:
    torch.randn = lambda *shape, **_: torch.ones(shape)  # type: ignore


def patch_distributed() -> None:
    dist.barrier = lambda *_, **__: None  # type: ignore


def patch_random() -> None:
    random.random = lambda: 0.5
    np.random.rand = lambda *_: 0.5  # type: ignore


def flip_a_flag() -> None:
    torch.backends.mkldnn.enabled = False  # type: ignore


def flush_denormals() -> None:
    torch.set_flush_denormal(True)


def lower_precision() -> None:
    torch.set_float32_matmul_precision("medium")


def enter_a_mode() -> None:
    torch.autograd.set_detect_anomaly(True)


def leave_a_thread() -> None:
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def trace() -> None:
    sys.settrace(lambda *_: None)


def set_an_alarm() -> None:
    signal.alarm(60)


POISONS = (
    hook_every_module,
    hook_every_optimizer,
    patch_a_layer,
    patch_a_base_class,
    patch_a_function,
    patch_an_optimizer,
    patch_a_scheduler,
    patch_tensors,
    patch_what_tensors_inherit,
    patch_torch,
    patch_distributed,
    patch_random,
    flip_a_flag,
    flush_denormals,
    lower_precision,
    enter_a_mode,
    leave_a_thread,
    trace,
    set_an_alarm,
)


@pytest.mark.parametrize("poison", POISONS, ids=lambda p: p.__name__)
def test_the_next_job_runs_in_a_process_without_it(pool: Pool, poison: Callable[[], None]) -> None:
    clean = pool.run(train, D=2)

    def job(seat: Seat) -> str:
        if seat.rank == 1:
            poison()
        return "done"

    assert pool.run(job, D=2) == ["done", "done"]
    after = pool.run(train, D=2)
    assert [values for values, _ in after] == [values for values, _ in clean]
    assert {pid for _, pid in after}.isdisjoint(pid for _, pid in clean)


def test_usual_jobs_keep_their_processes(pool: Pool) -> None:
    def everything(seat: Seat) -> None:
        train(seat)
        for optimizer in (torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop):
            parameter = nn.Parameter(torch.ones(2, 2))
            parameter.square().sum().backward()
            optimizer([parameter], lr=0.1).step()
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        torch.utils.checkpoint.checkpoint(torch.sin, torch.ones(2), use_reentrant=False)
        torch.func.vmap(torch.func.grad(torch.sin))(torch.ones(2))
        thread = threading.Thread(target=time.sleep, args=(0.01,))
        thread.start()

    first = [pid for _, pid in pool.run(train, D=2)]
    pool.run(everything, D=2)
    for _ in range(20):
        assert [pid for _, pid in pool.run(train, D=2)] == first


def test_what_is_put_back_counts_for_nothing(pool: Pool) -> None:
    def job(seat: Seat) -> int:
        original = F.cross_entropy
        F.cross_entropy = original.__class__(original.__code__, {})
        handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
        torch.Tensor.sum = torch.Tensor.mean  # type: ignore
        handle.remove()
        F.cross_entropy = original
        del torch.Tensor.sum
        return os.getpid()

    assert pool.run(job, D=2) == pool.run(job, D=2)


def test_what_a_library_changes_as_it_is_imported_is_part_of_the_process(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "library_that_patches.py").write_text(
        "import os\nimport torch\ntorch.Tensor.sum = lambda self: 7\n"
        "def pid():\n    return os.getpid()\n"
    )
    monkeypatch.syspath_prepend(str(installed))
    total = torch.Tensor.__dict__.get("sum")
    library = importlib.import_module("library_that_patches")
    del torch.Tensor.sum
    assert total is None
    pid = library.pid
    first = pool.run(lambda seat: pid(), D=2)
    assert pool.run(lambda seat: pid(), D=2) == first
    pool.run(lambda seat: patch_a_layer(), D=2)  # leaves clean processes for the other tests
    assert set(pool.run(lambda seat: os.getpid(), D=2)).isdisjoint(first)


HELPERS = {
    "a_name_of_its_own": ("apply_smartly", True),
    "a_name_that_was_inherited": ("__call__", False),
    "a_private_name": ("_smartly", False),
}


@pytest.mark.parametrize("name", HELPERS)
def test_what_a_library_adds_with_its_first_model(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    added, kept = HELPERS[name]
    library = f"library_that_adds_{name}"
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / f"{library}.py").write_text(
        f"import os\nimport torch\n"
        f"def helper(self, *_):\n    return 7\n"
        f"def pid():\n    torch.nn.Sequential.{added} = helper\n    return os.getpid()\n"
    )
    monkeypatch.syspath_prepend(str(installed))
    pid = importlib.import_module(library).pid
    first = pool.run(lambda seat: pid(), D=2)
    assert (pool.run(lambda seat: os.getpid(), D=2) == first) is kept
    pool.run(lambda seat: patch_a_layer(), D=2)  # leaves clean processes for the other tests
    pool.run(lambda seat: None, D=2)


def test_a_name_that_a_job_adds_of_its_own(pool: Pool) -> None:
    def job(seat: Seat) -> int:
        nn.Sequential.apply_smartly = lambda self: 7  # type: ignore[attr-defined]
        return os.getpid()

    assert set(pool.run(job, D=2)).isdisjoint(pool.run(lambda seat: os.getpid(), D=2))
