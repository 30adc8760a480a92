"""Features gathered over the replicas: what the gather does to the gradient before it.

Nothing but an exchange in the forward gives a loop the gradient of replicas' examples that see each
other. Where tensors hold D times or 1/D of it, the gather's backward is what went wrong; whether
gradients crossed in the backward tells which way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from equivtest.causes import Cause
from equivtest.compare.together import Together
from equivtest.diagnose.diagnosis import Covers, Diagnosis
from equivtest.observe.trace import UpdateTrace


def gathered(
    u: int, names: Sequence[str], found: Together, seen: Sequence[UpdateTrace]
) -> Iterator[Diagnosis]:
    """What ``found`` says of the gather.

    Args:
        names: of the parameters, by position.
        seen: the update by rank.
    """
    cause = _cause(found, seen)
    if cause is None:
        return
    odd = [name for name, f in zip(names, found.factors, strict=True) if f not in (None, 1.0)]
    factor = next(f for f in found.factors if f not in (None, 1.0))
    others = sum(f == 1.0 for f in found.factors)
    text = (
        f"{len(odd)} gradients ({odd[0]!r} first) are {factor:g} times those of the replicas' "
        f"examples taken together in update {u}, D being {len(seen)}"
    )
    text += f", and {others} are right" if others else ""
    text += f"; {_crossing(seen)}" if _crossed(seen, "forward") else ""
    covers = Covers((Cause.GRADIENT, Cause.LOSS), (u,))
    yield Diagnosis(cause, text, (covers,), update=u, tensor=odd[0])


def _cause(found: Together, seen: Sequence[UpdateTrace]) -> Cause | None:
    factors = {factor for factor in found.factors if factor is not None}
    off = factors - {1.0}
    back = _crossed(seen, "backward")
    if len(off) != 1:
        return None
    if max(off) < 1.0:
        if 1.0 in factors:
            return Cause.GATHER_NO_GRAD
        # One number on all tensors is no more than that, unless the gather itself was watched.
        if not _crossed(seen, "forward"):
            return None
        return Cause.MISSING_WORLD_SIZE if back else Cause.GATHER_NO_GRAD
    # Without a gradient through the gather, times D puts right what is before it, not the rest.
    return Cause.GATHER_DOUBLE if back or factors == off else None


def _crossed(seen: Sequence[UpdateTrace], phase: str) -> bool:
    """Python called a collective in this phase that moves no gradients of parameters."""
    return any(
        one.phase == phase and not one.parameters for update in seen for one in update.collectives
    )


def _crossing(seen: Sequence[UpdateTrace]) -> str:
    forward = next(
        one.name for update in seen for one in update.collectives if one.phase == "forward"
    )
    return f"{forward} was called in the forward, and " + (
        "gradients crossed in the backward as well"
        if _crossed(seen, "backward")
        else "nothing in the backward"
    )
