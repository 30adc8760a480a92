"""Options, ini twins, and what a session without a case leaves alone."""

from __future__ import annotations

import pytest
from sessions import LINEAR, Session


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--equiv-isolate=often", "--equiv-isolate='often': pass auto, always or never"),
        ("--equiv-timeout=soon", "--equiv-timeout='soon': pass a number of seconds above 0"),
        ("--equiv-timeout=0", "--equiv-timeout='0': pass a number of seconds above 0"),
        ("--equiv-timeout=nan", "--equiv-timeout='nan': pass a number of seconds above 0"),
        ("--equiv-device=tpu", "--equiv-device='tpu': pass cpu or cuda"),
        ("--equiv-max-ranks=-1", "--equiv-max-ranks='-1': pass a whole number of at least 1"),
        ("--equiv-run-id=../up", "--equiv-run-id='../up': pass up to 100 letters"),
        ("--equiv-reports=pytest.ini", "pytest.ini is not a folder that can be written to"),
    ],
)
def test_a_bad_option_is_a_usage_error_that_says_what_to_pass(
    session: Session, argument: str, message: str
) -> None:
    status, output = session.run(argument)
    assert status == pytest.ExitCode.USAGE_ERROR
    assert message in output
    assert session.files() == ["pytest.ini"]


def test_a_bad_ini_value_names_the_ini_option(session: Session) -> None:
    session.write("pytest.ini", "[pytest]\nequiv_max_ranks = many\n")
    status, output = session.run()
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "equiv_max_ranks='many': pass a whole number of at least 1" in output


@pytest.mark.parametrize("workers", [(), ("-n", "2"), ("-p", "no:xdist")], ids=str)
def test_a_session_without_a_case_writes_nothing_and_imports_no_torch(
    session: Session, workers: tuple[str, ...]
) -> None:
    session.write(
        "test_plain.py",
        "import sys\n"
        "def test_a(): assert not {'torch', 'pandas', 'jinja2'} & set(sys.modules)\n"
        "def test_b(): pass\n",
    )
    status, output = session.run(*workers)
    assert status == 0, output
    assert "equivtest ==" not in output
    assert session.files() == ["pytest.ini", "test_plain.py"]


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=str)
def test_collecting_only_writes_nothing_and_starts_no_rank(
    session: Session, workers: tuple[str, ...]
) -> None:
    session.write(
        "test_plans.py",
        "import pytest\n"
        "from equivtest import plans\n"
        "@pytest.mark.parametrize('plan', plans(8, max_D=2), ids=str)\n"
        "def test_it(equivalence, plan): pass\n",
    )
    session.write(
        "conftest.py",
        "import pytest, sys\n"
        "@pytest.hookimpl(trylast=True)\n"
        "def pytest_unconfigure(): assert 'equivtest.pool' not in sys.modules\n",
    )
    status, output = session.run("--collect-only", "-q", *workers)
    assert status == 0, output
    assert "test_plans.py::test_it[m1-A4-D2]" in output
    assert session.files() == ["conftest.py", "pytest.ini", "test_plans.py"]


def test_sensitivity_is_told_at_the_end_and_kept_in_the_record(session: Session) -> None:
    """A is 1 and D is 1: few kinds can show, so few run."""
    session.write(
        "test_linear.py",
        LINEAR + "def test_right(equivalence): equivalence(linear, Plan(8, 1, 1))\n",
    )
    status, output = session.run("--equiv-sensitivity")
    assert status == 0, output
    assert "sensitivity of linear · m8-A1-D1 · fp32: " in output
    assert "the smallest weight error seen is" in output
    (record,) = session.records().values()
    runs = {run["name"]: run for run in record["verdict"]["sensitivity"]["runs"]}
    assert runs["norm.missing_division"]["outcome"] in ("named", "caught")
    assert runs["sync.never"]["text"] == "D is 1: there is nothing to reduce"


def test_sensitivity_is_an_ini_value_too(session: Session) -> None:
    session.write(
        "test_it.py",
        "def test_it(request):\n"
        "    from equivtest.options import settings\n"
        "    assert settings(request.config).sensitivity\n",
    )
    assert session.run()[0] == 1
    session.write("pytest.ini", "[pytest]\nequiv_sensitivity = true\n")
    assert session.run()[0] == 0
