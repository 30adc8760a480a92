"""A real pytest in a folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]

LINEAR = """
import torch
from equivtest import Experiment, Loss, Plan, plans

def loss(model, batch):
    x, y = batch
    return Loss(total=(model(x) - y).square().sum(), count=y.numel())

def examples(n):
    draw = torch.Generator().manual_seed(0)
    return [(torch.randn(4, generator=draw), torch.randn(2, generator=draw)) for _ in range(n)]

linear = Experiment(
    model=lambda: torch.nn.Linear(4, 2),
    data=examples(16),
    loss=loss,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
)

def halved(rank):
    for group in rank.groups:
        rank.optimizer.zero_grad()
        for batch in group:
            (rank.loss(rank.model, batch).total / group.count).backward()
        rank.optimizer.step()
"""

LINEAR_CASES = """
import pytest

@pytest.mark.parametrize("plan", plans(8, max_D=2)[-4:], ids=str)
def test_right(equivalence, plan):
    equivalence(linear, plan, precision="fp64")

@pytest.mark.parametrize("plan", [Plan(8, 1, 1), Plan(2, 2, 2)], ids=str)
def test_wrong(equivalence, plan):
    equivalence(linear, plan, loop=halved)

def test_expected(equivalence):
    equivalence(linear, Plan(2, 2, 2), loop=halved, expect="fault")

def test_impossible(equivalence):
    equivalence(linear, Plan(2, 2, 2), precision="tf32")

def test_ordinary():
    pass
"""


def a_session(folder: Path) -> Session:
    """A folder that is pytest's root, and takes nothing from the folders above it."""
    session = Session(folder)
    session.write("pytest.ini", "[pytest]\n")
    return session


@dataclass(frozen=True)
class Session:
    """A folder with test files, and pytest run in it."""

    folder: Path

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def start(self, *arguments: str, environment: dict[str, str] | None = None) -> Any:
        """The running pytest; its output in one pipe."""
        installed = entry_points(group="pytest11", name="equivtest")
        plugin = [] if installed else ["-p", "equivtest.plugin"]
        inherited = {
            k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "GITHUB_"))
        }
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *plugin, *arguments],
            cwd=self.folder,
            env=inherited | {"PYTHONPATH": path} | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str, **more: Any) -> tuple[int, str]:
        """Exit status and output."""
        process = self.start(*arguments, **more)
        output, _ = process.communicate(timeout=180)
        return process.returncode, output

    def records(self, reports: str = "reports") -> dict[str, dict[str, Any]]:
        """The records of the only run, by id."""
        paths = (self.folder / reports).glob("runs/*/cases/*.json")
        return {data["id"]: data for data in (json.loads(path.read_text()) for path in paths)}

    def page(self) -> str:
        return (self.folder / "reports" / "divergence.html").read_text()

    def files(self) -> Sequence[str]:
        return sorted(path.name for path in self.folder.iterdir() if path.name != "__pycache__")
