"""Style and script of the page: inside of it, or as files beside it; and the policy for each."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TEMPLATES = Path(__file__).parent / "templates"

STYLE, SCRIPT = "equivtest.css", "equivtest.js"
"""Names of the files beside a page that has them outside."""


@dataclass(frozen=True)
class Assets:
    """What a template needs of them.

    Attributes:
        policy: the page's content security policy: nothing may load and run but these two.
        style, script: their text; empty where they are files.
    """

    policy: str
    style: str = ""
    script: str = ""


def inside() -> Assets:
    """Both in the page, known to its policy by their hashes."""
    style, script = (files()[name].decode() for name in (STYLE, SCRIPT))
    return Assets(_policy(_hash(style), _hash(script)), style, script)


def beside() -> Assets:
    """Both in files, for a server whose own policy forbids what is inline."""
    return Assets(_policy("'self'", "'self'"))


def files() -> Mapping[str, bytes]:
    """The files that go beside the page."""
    names = {STYLE: "page.css", SCRIPT: "page.js"}
    return {name: (TEMPLATES / source).read_bytes() for name, source in names.items()}


def _policy(style: str, script: str) -> str:
    return (
        f"default-src 'none'; style-src {style}; script-src {script}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
