"""Folders to run pytest in."""

from __future__ import annotations

from pathlib import Path

import pytest
from sessions import LINEAR, Session


@pytest.fixture
def session(tmp_path: Path) -> Session:
    session = Session(tmp_path)
    session.write("pytest.ini", "[pytest]\n")
    return session


@pytest.fixture
def linear(session: Session) -> Session:
    """A folder with a linear experiment: right, wrong at D=2, impossible, and an ordinary test."""
    text = """
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
    session.write("test_linear.py", LINEAR + text)
    return session
