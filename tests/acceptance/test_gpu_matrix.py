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
from sessions import LINEAR, Session

_ROOT = Path(__file__).parents[2]
MESSAGE = "no CUDA device: nothing was compared"

without_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs a machine without a CUDA device"
)


@without_gpu
def test_a_session_that_compared_nothing_fails_and_says_why(linear: Session) -> None:
    """One whose case was expected not to run, and passes, has compared nothing either."""
    expected = "def test_it(equivalence):\n    equivalence(linear, PLAN, expect='not-run')\n"
    linear.write("test_expected.py", LINEAR + "PLAN = Plan(2, 2, 2)\n" + expected)
    status, output = linear.run("-p", "no:xdist", "--equiv-device=cuda", "-rs")
    assert status == pytest.ExitCode.TESTS_FAILED, output
    assert "2 passed, 8 skipped" in output
    assert f"\n{MESSAGE}\n" in output
    records = linear.records()
    assert len(records) == 9
    for record in records.values():
        assert record["verdict"]["status"] == "not-run"
        assert record["verdict"]["failure"]["text"] == MESSAGE
        assert record["environment"]["device"] == "no CUDA device"
    assert "No case was run; 9 could not be run here." in linear.page()
    assert linear.page().lower().count(MESSAGE.lower()) >= 8  # each case says why


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
