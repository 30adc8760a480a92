"""The order in which findings are told."""

from __future__ import annotations

from equivtest.causes import Cause
from equivtest.compare.telling import telling
from equivtest.compare.verdict import Finding


def test_an_update_in_each_microbatch_comes_before_what_follows_from_it() -> None:
    found = [
        Finding(Cause.NEVER_SYNCHRONISED, "no backward reduced", update=0),
        Finding(Cause.STALE_CARRYOVER, "not cleared", update=1),
        Finding(Cause.UPDATE_PER_MICROBATCH, "12 updates, the plan has 3"),
    ]
    assert [f.cause for f in telling(found)] == [
        "opt.update_per_microbatch",
        "sync.never",
        "accum.stale_carryover",
    ]
