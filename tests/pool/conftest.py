import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from equivtest.pool import Pool

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool(timeout_s=60.0)
    yield pool
    pool.close()


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start a Python script in a process of its own, with a temporary directory of its own."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()

    def start(source: str, *, inline: bool = False) -> subprocess.Popen[str]:
        source = textwrap.dedent(source)
        file = tmp_path / "script.py"
        file.write_text(source)
        return subprocess.Popen(
            [sys.executable, *(["-c", source] if inline else [str(file)])],
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )

    return start
