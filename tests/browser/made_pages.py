"""Pages for the browser, written from records made by hand, and what is seen of one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "report"))

import verdicts

from equivtest.compare.verdict import Finding
from equivtest.plan import Plan, plans
from equivtest.report.history import Point
from equivtest.report.record import Record
from equivtest.report.run import Run

Opener = Callable[..., "Opened"]


@dataclass(frozen=True)
class Opened:
    """An open page: addresses that it asked for beside its own, and what its console said."""

    page: Any
    asked: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, page: Any, path: Path, fragment: str = "") -> Opened:
        opened = cls(page)
        address = path.as_uri()
        page.on("request", lambda request: opened.note(request.url, address))
        page.on("console", lambda message: opened.complaints.append(message.text))
        page.on("pageerror", lambda error: opened.complaints.append(str(error)))
        page.on("dialog", lambda dialog: (opened.complaints.append("dialog"), dialog.dismiss()))
        page.goto(address + fragment)
        return opened

    def note(self, asked: str, own: str) -> None:
        if asked.partition("#")[0] != own and not asked.startswith("data:"):
            self.asked.append(asked)

    def rows(self) -> list[str]:
        """The rows of the index that are shown: status, loop and precision."""
        return [
            " ".join(row.split())
            for row in self.page.locator("table.index tbody tr:visible").evaluate_all(
                "rows => rows.map(row => [0, 2, 3].map(k => row.cells[k].textContent).join(' '))"
            )
        ]


def everything() -> Run:
    """A run with every status, a fault that is expected, a planted one, and a history."""
    plan = Plan(4, 2, 2)
    made = [
        verdicts.record(verdicts.fault(plan)),
        verdicts.record(verdicts.fault(plan, "fp64", 5e12)),
        verdicts.record(verdicts.error(Plan(2, 2, 4), "fp64")),
        verdicts.record(verdicts.not_run(plan)),
        verdicts.record(
            verdicts.fault(
                plan,
                "bf16-mixed",
                findings=(Finding("clip.missing", "The norm is 2.25, the bound 1.", update=1),),
                expect=("clip.missing",),
            ),
            "planted_loop",
            loop="no_clip",
            planted="clip.missing",
        ),
        verdicts.record(
            verdicts.equivalent(plan, "fp16-mixed", sensitivity=verdicts.sensitivity()), "asked"
        ),
        *(
            verdicts.record(verdicts.equivalent(p, precision, 0.1 + 0.01 * i), "recipe_lm")
            for precision in ("fp64", "fp32")
            for i, p in enumerate(plans(16, max_D=2))
        ),
    ]
    records = tuple(_numbered(record, k) for k, record in enumerate(made))
    points = [Point(f"run-{k}", r.verdict.status, 0.1 * k) for k, r in enumerate(records[:3])]
    return Run(records, run_ids=("a-run",), history={records[0].id: tuple(points)})


def _numbered(record: Record, k: int) -> Record:
    return replace(record, id=f"{record.id}{k}", nodeid=f"{record.nodeid}{k}")
