"""Reports folders that cannot be written to: before the session, and in the middle of it."""

from __future__ import annotations

import pytest
from sessions import LINEAR, Session

REFUSES = """
import errno, os, pathlib, shutil
from equivtest.report import atomic

whole = pathlib.Path.write_bytes

def refuse(number, after):
    \"\"\"A disk that takes ``after`` more files and then none.\"\"\"
    left = iter(range(after))
    def write_bytes(path, content):
        if next(left, None) is None:
            raise OSError(number, os.strerror(number), str(path))
        return whole(path, content)
    pathlib.Path.write_bytes = write_bytes
"""

CASES = """
import pytest

@pytest.mark.parametrize("k", range(3))
def test_it(equivalence, k):
    if k == 1:
        before(k)
    verdict = equivalence(linear, Plan(2, 2, 2), precision="fp64")

@pytest.fixture(autouse=True)
def put_back():
    yield
    pathlib.Path.write_bytes = whole
"""


@pytest.mark.parametrize(
    ("before", "why"),
    [
        ("def before(k): refuse(errno.ENOSPC, 0)", "No space left on device"),
        ("def before(k): refuse(errno.EACCES, 0)", "Permission denied"),
        (
            "def before(k): shutil.rmtree('reports'); pathlib.Path('reports').touch()",
            "Not a directory",
        ),
    ],
    ids=["full", "forbidden", "a file in its place"],
)
def test_a_record_that_cannot_be_written_ends_its_case_and_no_other(
    session: Session, before: str, why: str
) -> None:
    session.write("test_it.py", LINEAR + REFUSES + before + CASES)
    status, output = session.run("-rA", "-p", "no:xdist")
    assert status == 1, output
    assert "INTERNALERROR" not in output
    assert "the record of this case could not be written: [Errno" in output
    assert why in output
    assert "pass another folder with --equiv-reports" in output
    # What was measured is not lost with the record.
    assert "Without a record: equivalent: m2-A2-D2 in fp64" in output
    if why == "Not a directory":
        assert "2 failed, 1 passed" in output  # nor can the next one
        return
    assert "1 failed, 2 passed" in output
    assert set(session.records()) == {"test_it.py::test_it[0]", "test_it.py::test_it[2]"}
    assert "1 collected test left no record (1 failed)" in session.page()


def test_a_folder_that_goes_away_is_made_again(session: Session) -> None:
    before = "def before(k): shutil.rmtree('reports')"
    session.write("test_it.py", LINEAR + REFUSES + before + CASES)
    status, output = session.run("-p", "no:xdist")
    assert status == 0, output
    assert set(session.records()) == {"test_it.py::test_it[1]", "test_it.py::test_it[2]"}


@pytest.mark.parametrize("folder", ["pytest.ini", "pytest.ini/below/it"])
def test_a_path_at_or_below_a_file_is_refused_at_once(session: Session, folder: str) -> None:
    session.write("test_it.py", LINEAR + "def test_it(equivalence): pass")
    status, output = session.run(f"--equiv-reports={folder}")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "pytest.ini is not a folder that can be written to; pass a folder" in output


def test_a_folder_that_refuses_when_the_tests_are_known_ends_the_session(session: Session) -> None:
    session.write("conftest.py", REFUSES + "refuse(errno.EROFS, 0)")
    session.write("test_it.py", LINEAR + "def test_it(equivalence): raise AssertionError")
    status, output = session.run("-p", "no:xdist")
    assert status == pytest.ExitCode.USAGE_ERROR, output
    assert "INTERNALERROR" not in output
    assert "cannot be written to: [Errno 30] Read-only file system" in output
    assert "pass a folder that can" in output
