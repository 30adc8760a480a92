"""Causes that show in some parameters only: those not reduced, and those not cleared."""

from __future__ import annotations

from collections.abc import Iterator

from equivtest.causes import Cause
from equivtest.diagnose.diagnosis import Diagnosis
from equivtest.diagnose.evidence import UpdateEvidence
from equivtest.diagnose.path import Held, paths
from equivtest.diagnose.weighing import Weighed


def unreduced(one: UpdateEvidence, weighed: Weighed) -> Iterator[Diagnosis]:
    """Parameters whose gradients are each replica's own, beside others that were reduced."""
    D = len(one.seen)
    if D == 1:
        return
    known = paths(one.seen, sorted(weighed.explained))
    own = [
        n for n, held in known.items() if (held is not None and _own(held)) or _partly(weighed, n)
    ]
    if not own:
        return
    gone = sorted(frozenset().union(*(update.unwrapped for update in one.seen)))
    text = (
        f"in update {one.u} each replica holds its own microbatches of {_said(own)} alone, {D} "
        "times what the plan gives them, and nothing of the others'"
    )
    if set(gone) & set(own):
        others = len(set(own) - set(gone))
        text += f": the wrapper does not hold {_said(gone)}, which was assigned after wrapping"
        text += f"; {others} more parameters wait for it in their bucket" if others else ""
        yield Diagnosis(Cause.PARAM_REPLACED, text, update=one.u, tensor=gone[0])
    elif len(own) < len(weighed.explained):
        text += f", and {len(weighed.explained) - len(own)} other parameters are reduced"
        yield Diagnosis(Cause.SOME_UNREDUCED, text, update=one.u, tensor=own[0])


def _own(held: list[Held]) -> bool:
    """Every rank holds microbatches of its own, and of no other rank's."""
    return all(mine and all(r == rank for r, _ in mine) for rank, mine in enumerate(held))


def _partly(weighed: Weighed, name: str) -> bool:
    """The gradient says so where no operation does."""
    return weighed.partly.get(name, weighed.extra).own


def left_over(one: UpdateEvidence, weighed: Weighed) -> Iterator[Diagnosis]:
    """Parameters that still hold the gradient of the update before, beside others cleared."""
    stale = {name: extra for name, extra in weighed.partly.items() if extra.earlier}
    if not stale:
        return
    name = min(stale)
    text = (
        f"the gradient of {_said(sorted(stale))} in update {one.u} holds {stale[name].earlier:.4g} "
        f"times what update {one.u - 1} left in .grad, and that of other parameters does not"
    )
    owners = [o for o in one.seen[0].optimizers if o.names & stale.keys()]
    held = frozenset().union(*(o.names for o in owners))
    if len(owners) < len(one.seen[0].optimizers) and weighed.explained & held <= stale.keys():
        kinds = " and ".join(o.kind.__name__ for o in owners)
        text += f": these are the parameters of {kinds}, and another optimizer's were cleared"
        yield Diagnosis(Cause.LEAK_BETWEEN_OPTIMIZERS, text, update=one.u, tensor=name)
    else:
        yield Diagnosis(Cause.STALE_CARRYOVER, text, update=one.u, tensor=name)


def _said(names: list[str]) -> str:
    more = f" and {len(names) - 1} more parameters" if len(names) > 1 else ""
    return f"{names[0]!r}{more}"
