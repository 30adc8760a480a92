"""Folders to run pytest in."""

from __future__ import annotations

from pathlib import Path

import pytest
from sessions import LINEAR, LINEAR_CASES, Session, a_session


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return a_session(tmp_path)


@pytest.fixture
def linear(session: Session) -> Session:
    """A folder with a linear experiment: right, wrong at D=2, impossible, and an ordinary test."""
    session.write("test_linear.py", LINEAR + LINEAR_CASES)
    return session
