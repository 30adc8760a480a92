"""Sessions with ``--equiv-device=cuda``, and ``make gpu-matrix``, where there is no GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from sessions import Session

_ROOT = Path(__file__).parents[2]
MESSAGE = "no CUDA device: nothing was compared"

without_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs a machine without a CUDA device"
)


@without_gpu
@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_session_that_compared_nothing_fails_and_says_why(linear: Session, workers: str) -> None:
    status, output = linear.run("-n", workers, "--equiv-device=cuda", "-rs")
    assert status == pytest.ExitCode.TESTS_FAILED, output
    assert f"\n{MESSAGE}\n" in output
    records = linear.records()
    assert len(records) == 8
    for record in records.values():
        assert record["verdict"]["status"] == "not-run"
        assert record["verdict"]["failure"]["text"] == MESSAGE
        assert record["environment"]["device"] == "no CUDA device"
    assert "No case was run; 8 could not be run here." in linear.page()
    assert linear.page().lower().count(MESSAGE.lower()) >= 7  # each case says why


@without_gpu
def test_cases_that_were_expected_not_to_run_are_no_comparison_either(session: Session) -> None:
    session.write(
        "test_expected.py",
        "import test_linear\n"
        "def test_it(equivalence):\n"
        "    equivalence(test_linear.linear, test_linear.Plan(2, 2, 2), expect='not-run')\n",
    )
    from sessions import LINEAR

    session.write("test_linear.py", LINEAR)
    status, output = session.run("--equiv-device=cuda")
    assert status == pytest.ExitCode.TESTS_FAILED, output
    assert "1 passed" in output
    assert MESSAGE in output


def test_sharing_gpus_is_an_option_and_an_ini_value(session: Session) -> None:
    check = (
        "def test_it(request):\n"
        "    from equivtest.options import settings\n"
        "    assert settings(request.config).share_gpus is {}\n"
    )
    session.write("test_it.py", check.format(True))
    assert session.run("--equiv-share-gpus")[0] == 0
    assert session.run()[0] == 1
    session.write("pytest.ini", "[pytest]\nequiv_share_gpus = true\n")
    assert session.run()[0] == 0


def test_each_worker_is_told_its_share(session: Session) -> None:
    session.write(
        "test_share.py",
        "import os, pathlib, pytest\n"
        "@pytest.mark.parametrize('k', range(8))\n"
        "def test_it(k):\n"
        "    worker = os.environ['PYTEST_XDIST_WORKER']\n"
        "    place = os.environ['EQUIVTEST_WORKER'].replace('/', '-of-')\n"
        "    pathlib.Path(f'{worker}-{place}').touch()\n",
    )
    status, output = session.run("-n", "2")
    assert status == 0, output
    assert [name for name in session.files() if name.startswith("gw")] == [
        "gw0-0-of-2",
        "gw1-1-of-2",
    ]


def test_a_worker_that_replaces_a_lost_one_is_told_its_share(session: Session) -> None:
    session.write(
        "test_share.py",
        "import os, pathlib\n"
        "def test_a():\n"
        "    os._exit(1)\n"
        "def test_b():\n"
        "    worker = os.environ['PYTEST_XDIST_WORKER']\n"
        "    place = os.environ['EQUIVTEST_WORKER'].replace('/', '-of-')\n"
        "    pathlib.Path(f'{worker}-{place}').touch()\n",
    )
    session.run("-n", "1")
    assert "gw1-0-of-1" in session.files()


@without_gpu
@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_gpu_matrix_with_a_python_that_has_torch_makes_no_environment(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(_ROOT / name, tmp_path)
    for name in ("equivtest", "cases"):
        shutil.copytree(_ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "GITHUB_"))}
    done = subprocess.run(
        [
            "make",
            "gpu-matrix",
            f"PYTHON={sys.executable}",
            "PYTEST_ARGS=-k 'digits_mlp and (tf32 or fp64) and D1'",
        ],
        cwd=tmp_path,
        env=inherited | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode != 0, output
    assert f"\n{MESSAGE}\n" in output
    assert not (tmp_path / ".venv").exists()
    table = pd.read_csv(tmp_path / "reports/results.csv")
    assert set(table["status"]) == {"not-run"}
    assert set(table["precision"]) == {"fp64", "tf32"}
    assert set(table["device"]) == {"cuda"}
    page = (tmp_path / "reports/divergence.html").read_text()
    assert page.lower().count(MESSAGE.lower()) >= len(table)  # each case says why
