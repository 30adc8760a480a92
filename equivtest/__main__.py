"""``python -m equivtest``, for an interpreter that equivtest is not installed in."""

import sys

from equivtest.cli import main

sys.exit(main())
