"""A headless Chromium for the tests of the pages; without one they are skipped, but in CI."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_pages import Opened, Opener

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
_MISSING = "no Chromium here: `make browser` installs one"


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The browser, one for each worker."""
    playwright = pytest.importorskip("playwright.sync_api", reason=_MISSING)
    with playwright.sync_playwright() as driver:
        installed = next(filter(None, map(shutil.which, _NAMES)), driver.chromium.executable_path)
        if not Path(installed).exists():
            if os.environ.get("CI"):
                pytest.fail(f"{_MISSING}, and in CI nothing may be skipped for want of it")
            pytest.skip(_MISSING)
        browser = driver.chromium.launch(executable_path=installed, args=_ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium: Any) -> Iterator[Opener]:
    """Opens a file as a person would; what the page asks for or complains of is kept."""
    contexts = []

    def opening(path: Path, fragment: str = "", **how: Any) -> Opened:
        context = chromium.new_context(**({"viewport": {"width": 1240, "height": 900}} | how))
        contexts.append(context)
        return Opened.of(context.new_page(), path, fragment)

    yield opening
    for context in contexts:
        context.close()
