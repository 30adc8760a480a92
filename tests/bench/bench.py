"""``make bench``: what a case costs, in ratios against baselines measured in the same run.

Every figure is the best of some rounds, on both sides of a ratio and in turns: what disturbs a
machine only ever adds. Bars are those that the project holds itself to.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import bare  # noqa: E402
import experiments  # noqa: E402
import watched  # noqa: E402

from equivtest import Experiment, Plan, check, plans  # noqa: E402
from equivtest.arms.candidate import candidate  # noqa: E402
from equivtest.plan import layout  # noqa: E402
from equivtest.pool import Pool, Shared  # noqa: E402
from equivtest.report import identity, record  # noqa: E402

PLANS = plans(32, max_D=4)
EXPERIMENTS = {"smallest": experiments.smallest, "4-layer LM": experiments.language_model}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("pairs", "observer", "spawns", "start", "cases", "page"))
    chosen = parser.parse_args()
    parts = {
        "pairs": lambda: pairs(chosen.rounds),
        "observer": lambda: observer(chosen.rounds),
        "spawns": lambda: spawns(chosen.rounds),
        "start": lambda: start(chosen.rounds),
        "cases": cases,
        "page": lambda: _python(str(HERE / "pages.py"), quiet=False),
    }
    for name in [chosen.only] if chosen.only else parts:
        parts[name]()


# -- a warm pair


def pairs(rounds: int) -> None:
    """Every plan of a file in turn with its bare arms; what plans share is dealt out over them."""
    print(f"A warm pair at D=2 against its bare arms; {len(PLANS)} plans a file, fp32, ms")
    print(f"{'':24}{'bare':>8}{'pair':>8}{'shared':>8}{'ratio':>8}   by plan, A = 1 2 4 8 16")
    with tempfile.TemporaryDirectory() as folder:
        pool = Pool()
        try:
            for name, make in EXPERIMENTS.items():
                for updates in (1, 3):
                    _print_pair(name, updates, _measured(pool, Path(folder), make(updates), rounds))
        finally:
            pool.close()
    print("bar: at most 2 in all four\n")


def _measured(
    pool: Pool, folder: Path, experiment: Experiment, rounds: int
) -> dict[str, dict[Plan, float]]:
    best: dict[str, dict[Plan, float]] = defaultdict(lambda: defaultdict(lambda: float("inf")))

    def measure(what: str, plan: Plan, run: Callable[[], object]) -> None:
        best[what][plan] = min(best[what][plan], timed(run))

    for k in range(rounds + 1):
        # Another seed is another experiment, of which no process has anything.
        fresh = replace(experiment, seed=k)
        shared = Shared(fresh)
        for plan in PLANS:
            if k == 0:  # the first round warms the processes up
                _pair(pool, folder, fresh, plan)
                _bare(pool, shared, fresh, plan)
                continue
            measure("cold", plan, lambda: _pair(pool, folder, fresh, plan))  # noqa: B023
            measure("bare", plan, lambda: _bare(pool, shared, fresh, plan))  # noqa: B023
            measure("warm", plan, lambda: _pair(pool, folder, fresh, plan))  # noqa: B023
    return best


def _pair(pool: Pool, folder: Path, experiment: Experiment, plan: Plan) -> None:
    """What the fixture does in a case: check it and leave its record."""
    verdict = check(experiment, plan, precision="fp32", pool=pool)
    if verdict.status != "equivalent":
        raise RuntimeError(verdict.explain())
    case = record.Record(
        id=str(plan),
        nodeid=str(plan),
        experiment="bench",
        loop="",
        wrap="",
        rerun="",
        environment=identity.environment(),
        verdict=verdict,
    )
    record.write(case, folder)


def _bare(pool: Pool, shared: Shared, experiment: Experiment, plan: Plan) -> None:
    groups = layout(plan, len(experiment.data), updates=experiment.updates)
    pool.run(bare.candidate, shared, groups, D=plan.D)
    pool.solo(bare.references, shared, groups)


def _print_pair(name: str, updates: int, best: dict[str, dict[Plan, float]]) -> None:
    at_two = [plan for plan in PLANS if plan.D == 2]
    shared = sum(best["cold"][p] - best["warm"][p] for p in PLANS) / len(PLANS)
    by_plan = [(best["warm"][p] + shared) / best["bare"][p] for p in at_two]
    base, warm = (sum(best[what][p] for p in at_two) / len(at_two) for what in ("bare", "warm"))
    figures = "".join(f"{1e3 * seconds:8.1f}" for seconds in (base, warm, shared))
    each = " ".join(f"{ratio:.2f}" for ratio in by_plan)
    title = f"{name}, {updates} update{'s' if updates > 1 else ''}"
    print(f"{title:24}{figures}{(warm + shared) / base:8.2f}   {each}", flush=True)


# -- the observer


def observer(rounds: int) -> None:
    """What watching adds to a rank, against the warm pair: a rank and what judges it."""
    print("The observer in a warm pair of the 4-layer LM at D=2, fp32, ms of a processor")
    print(f"{'':24}{'watched':>8}{'not':>8}{'judge':>8}{'share':>8}   by plan, A = 1 2 4 8 16")
    pool = Pool()
    try:
        for updates in (1, 3):
            _print_observer(pool, experiments.language_model(updates), rounds)
    finally:
        pool.close()
    print("bar: at most 15 %\n")


def _print_observer(pool: Pool, experiment: Experiment, rounds: int) -> None:
    shared, at_two = Shared(experiment), [plan for plan in PLANS if plan.D == 2]
    figures = [_observed(pool, experiment, shared, plan, rounds) for plan in at_two]
    shares = [(seen - unseen) / (seen + judged) for seen, unseen, judged in figures]
    each = [sum(column) / len(at_two) for column in zip(*figures, strict=True)]
    share = (each[0] - each[1]) / (each[0] + each[2])
    title = f"{experiment.updates} update{'s' if experiment.updates > 1 else ''}"
    told = "".join(f"{1e3 * seconds:8.1f}" for seconds in each)
    by_plan = " ".join(f"{100 * one:.0f} %" for one in shares)
    print(f"{title:24}{told}{100 * share:6.0f} %   {by_plan}", flush=True)


def _observed(
    pool: Pool, experiment: Experiment, shared: Shared, plan: Plan, rounds: int
) -> tuple[float, float, float]:
    """Least seconds of the candidate watched, not watched, and of judging it."""
    case = watched.case(experiment, shared, plan)
    traces = pool.run(candidate, shared, case, D=2, sealed=True)
    runs = [
        (
            *pool.run(watched.candidates, shared, case, D=2)[0],
            pool.solo(watched.judging, shared, case, traces),
        )
        for _ in range(2 * rounds + 1)
    ]
    seen, unseen, judged = map(min, zip(*runs[1:], strict=True))  # the first one warms them up
    return seen, unseen, judged


# -- torch's own test classes


def spawns(rounds: int) -> None:
    """The smallest pair against a spawn per test and a pool per class."""
    import spawned

    pool, experiment = Pool(), spawned.EXPERIMENT
    with tempfile.TemporaryDirectory() as folder:
        try:
            ours = _measured_pair(pool, Path(folder), experiment, rounds)
        finally:
            pool.close()
    spawn = min(spawned.seconds_each(spawned.SpawnPerTest, rounds))
    first, *others = spawned.seconds_each(spawned.PoolPerClass, 5 * rounds)
    print(f"The smallest pair ({spawned.PLAN}) in torch's own test classes, ms")
    print(f"equivtest, warm pair    {1e3 * ours:8.1f}")
    print(f"a spawn per test        {1e3 * spawn:8.1f}   {spawn / ours:.0f} x (bar: at least 100)")
    each = min(others)
    print(f"a pool per class        {1e3 * each:8.1f}   {each / ours:.2f} x, after {first:.1f} s\n")


def _measured_pair(pool: Pool, folder: Path, experiment: Experiment, rounds: int) -> float:
    import spawned

    for plan in PLANS:
        _pair(pool, folder, experiment, plan)
    return min(
        timed(lambda: _pair(pool, folder, experiment, spawned.PLAN)) for _ in range(10 * rounds)
    )


# -- cold start, and the main job


def start(rounds: int) -> None:
    """From nothing to a first verdict, against importing torch with torch._dynamo."""
    imports, verdict = float("inf"), float("inf")
    for _ in range(rounds):
        imports = min(imports, timed(lambda: _python("-c", "import torch, torch._dynamo")))
        verdict = min(verdict, timed(lambda: _python(str(HERE / "first_verdict.py"))))
    print("From nothing to a first verdict, s")
    print(f"import torch, torch._dynamo {imports:5.2f}")
    print(f"first verdict               {verdict:5.2f}   (bar: {1.5 * imports + 1:.2f})\n")


def cases() -> None:
    """``make cases`` as a whole."""
    with tempfile.TemporaryDirectory() as folder:
        command = ("-m", "pytest", "cases", "-n", "auto", "-q", f"--equiv-reports={folder}")
        imports = timed(lambda: _python("-c", "import torch, torch._dynamo"))
        whole = timed(lambda: _python(*command))
        with (Path(folder) / "results.csv").open(newline="") as file:
            n = sum(1 for _ in csv.DictReader(file))
    print(f"make cases: {n} cases in {whole:.0f} s on {os.cpu_count()} cores (bar: 600 in 90 s);")
    print(f"{whole / imports:.0f} x importing torch._dynamo, {1e3 * whole / n:.0f} ms each")


def _python(*arguments: str, quiet: bool = True) -> None:
    output = subprocess.DEVNULL if quiet else None
    subprocess.run([sys.executable, *arguments], check=True, stdout=output)


def timed(run: Callable[[], object]) -> float:
    """Seconds that ``run`` takes."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
