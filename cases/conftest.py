"""`make cases` runs the case files; `make full` the sweep over them, which holds all they do.

Those of `faults/`, `sources/` and `symptoms/` run in both: in `make full` in more settings.
"""

import os

FULL = os.environ.get("EQUIVTEST_FULL") == "1"
SWEEP = "test_full_sweep.py"
IN_BOTH = ("faults", "sources", "symptoms")


def pytest_ignore_collect(collection_path):
    if not collection_path.name.startswith("test_") or collection_path.parent.name in IN_BOTH:
        return None
    # Either the sweep or the files that it imports, so that no case runs twice.
    return True if (collection_path.name == SWEEP) != FULL else None
