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

def written():
    return len(list(pathlib.Path("reports").glob("runs/*/cases/*.json")))

@pytest.fixture(autouse=True)
def put_back():
    yield
    pathlib.Path.write_bytes = whole
"""

CASE = """
@pytest.mark.parametrize("k", range(3))
def test_{name}(equivalence, k):
    if k == 1:
        {before}
    equivalence(linear, Plan(2, 2, 2), precision="fp64")
"""


def told(output: str, why: str, times: int = 1) -> None:
    """Each case that lost its record says why, and what was measured."""
    assert "INTERNALERROR" not in output
    assert output.count("the record of this case could not be written: [Errno") >= times
    assert why in output
    assert "pass another folder with --equiv-reports" in output
    # What was measured is not lost with the record.
    assert "Without a record: equivalent: m2-A2-D2 in fp64" in output


def test_a_record_that_cannot_be_written_ends_its_case_and_no_other(session: Session) -> None:
    full = CASE.format(name="full", before="refuse(errno.ENOSPC, 0)")
    forbidden = CASE.format(name="forbidden", before="refuse(errno.EACCES, 0)")
    session.write("test_it.py", LINEAR + REFUSES + CASES + full + forbidden)
    status, output = session.run("-rA", "-p", "no:xdist")
    assert status == 1, output
    told(output, "No space left on device", times=2)
    assert "Permission denied" in output
    assert "2 failed, 4 passed" in output
    names = [f"{what}[{k}]" for what in ("full", "forbidden") for k in (0, 2)]
    assert set(session.records()) == {f"test_it.py::test_{name}" for name in names}
    assert "2 collected tests left no record (2 failed)" in session.page()


def test_a_folder_that_goes_away_is_made_again_and_a_file_in_its_place_is_not(
    session: Session,
) -> None:
    gone = CASE.format(name="gone", before="shutil.rmtree('reports')")
    made_again = "    assert written() == (1, 1, 2)[k]\n"
    a_file = "shutil.rmtree('reports'); pathlib.Path('reports').touch()"
    taken = CASE.format(name="taken", before=a_file)
    session.write("test_it.py", LINEAR + REFUSES + CASES + gone + made_again + taken)
    status, output = session.run("-rA", "-p", "no:xdist")
    assert status == 1, output
    told(output, "Not a directory", times=2)
    assert "2 failed, 4 passed" in output  # from the file on, no case can leave a record
    assert "FAILED test_it.py::test_taken[1]" in output
    assert "FAILED test_it.py::test_taken[2]" in output


@pytest.mark.parametrize("folder", ["pytest.ini", "pytest.ini/below/it"])
def test_a_path_at_or_below_a_file_is_refused_at_once(session: Session, folder: str) -> None:
    session.write("test_it.py", "def test_it(equivalence): pass")
    status, output = session.run(f"--equiv-reports={folder}")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "pytest.ini is not a folder that can be written to; pass a folder" in output


def test_a_folder_that_refuses_when_the_tests_are_known_ends_the_session(session: Session) -> None:
    session.write("conftest.py", REFUSES + "refuse(errno.EROFS, 0)")
    session.write("test_it.py", "def test_it(equivalence): raise AssertionError")
    status, output = session.run("-p", "no:xdist")
    assert status == pytest.ExitCode.USAGE_ERROR, output
    assert "INTERNALERROR" not in output
    assert "cannot be written to: [Errno 30] Read-only file system" in output
    assert "pass a folder that can" in output
