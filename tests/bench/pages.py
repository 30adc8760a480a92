"""Large pages: records written by hand, then ``equivtest report`` as a process, then a browser.

    python tests/bench/pages.py [CASES [TENSORS]]

Half of the cases are faults. Prints what the page weighs, what it took, the most memory, and when
the browser painted first.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "report"))

import verdicts

from equivtest.plan import plans
from equivtest.report import record as records
from equivtest.report.run import RunFolder

PRECISIONS = ("fp64", "fp32", "bf16-mixed", "fp16-mixed")
PLANS = plans(32, max_D=4)


def main() -> None:
    cases = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    tensors = int(sys.argv[2]) if len(sys.argv) > 2 else 100
    with tempfile.TemporaryDirectory() as folder:
        report(Path(folder), cases, tensors)


def report(reports: Path, cases: int, tensors: int) -> None:
    write(reports, cases, tensors)
    began = time.perf_counter()
    command = [sys.executable, "-m", "equivtest", "report", str(reports)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    took = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    page = reports / "divergence.html"
    size = page.stat().st_size / 2**20
    print(f"A page of {cases:,} cases of {tensors} tensors in two updates, half of them faults")
    print(f"size {size:.2f} MiB (bar at 1,000 x 100: 5), rendered in {took:.1f} s (15) with "
          f"{peak:.0f} MiB (500), first paint {first_paint(page)} (2 s)\n")  # fmt: skip


def write(reports: Path, cases: int, tensors: int) -> None:
    """The records of a run."""
    layers = ("attn.qkv", "attn.proj", "norm1", "norm2", "mlp.up", "mlp.down", "gate", "out")
    names = [f"blocks.{k // 8}.{layers[k % 8]}.weight" for k in range(tensors)]
    folder = RunFolder(reports, "large", "2026-01-01T00:00:00+00:00")
    for i in range(cases):
        plan, precision = PLANS[i % len(PLANS)], PRECISIONS[i // len(PLANS) % len(PRECISIONS)]
        experiment = f"experiment_{i // (len(PLANS) * len(PRECISIONS))}"
        make, margin = (verdicts.fault, 5e4) if i % 2 else (verdicts.equivalent, 0.2)
        rows = tuple(
            verdicts.tensor(name, u, margin / (1 + k % 7 + u))
            for u in (0, 1)
            for k, name in enumerate(names)
        )
        made = verdicts.record(make(plan, precision, rows=rows), experiment)
        name = f"cases/test_large.py::test_{experiment}[{precision}-{plan}]"
        records.write(replace(made, id=name, nodeid=name), folder.cases)
    folder.write_collected([])
    folder.write_ended({})


def first_paint(page: Path) -> str:
    """From the browser's own clock; best of three."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return "not measured: no playwright"
    chromium = shutil.which("chromium")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        times = []
        for _ in range(3):
            tab = browser.new_page(viewport={"width": 1240, "height": 900})
            tab.goto(page.as_uri())
            asked = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
            times.append(tab.evaluate(asked))
            tab.close()
        browser.close()
    return f"{min(times) / 1000:.2f} s"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
