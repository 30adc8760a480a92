"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` so that a reader never sees a part of it.

    A process killed on the way leaves a hidden ``.tmp`` file that no reader looks at, and what was
    at ``path`` before. The temporary file is beside its target because a rename between file
    systems is a copy; it carries the process id because two workers may write the same file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[-60:]}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> int:
    """The same of a text; returns its size in bytes.

    A lone surrogate in a name has no UTF-8, and a NUL ends it for some readers: both are shown as
    their escapes.
    """
    content = text.replace("\0", "\\x00").encode("utf-8", "backslashreplace")
    write_whole(path, content)
    return len(content)
