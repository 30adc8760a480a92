"""Parameters that no optimizer holds, and gradients of those that nobody trains. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from equivtest.causes import Cause
from equivtest.compare.verdict import Finding
from equivtest.observe.trace import Trace, UpdateTrace


def unheld(update: UpdateTrace, names: Collection[str]) -> frozenset[str]:
    """Parameters that no optimizer of the update holds."""
    held = {name for optimizer in update.optimizers for name in optimizer.names}
    return frozenset(names) - held


def unheld_note(trace: Trace, names: Collection[str]) -> Iterator[str]:
    """What to say of ``unheld`` parameters; others are of an optimizer that was not called."""
    known = {n for groups in trace.groups_after for names, _ in groups for n in names}
    nobodys = sorted(set(names) - known)
    if nobodys:
        yield f"no optimizer holds {nobodys[0]!r} ({len(nobodys)}): not updated and not judged"


def frozen(u: int, seen: Sequence[UpdateTrace], names: Collection[str]) -> Iterator[Finding]:
    """A gradient on a parameter that the experiment freezes: it is trained, or clipped with.

    Args:
        seen: update ``u`` by rank.
        names: the parameters that the experiment trains.
    """
    extra = sorted(
        {n for update in seen for n, g in update.gradient.items() if g is not None} - set(names)
    )
    if extra:
        text = (
            f"{extra[0]!r} has a gradient in update {u} ({len(extra)} parameters), and the "
            "experiment's model freezes it"
        )
        yield Finding(Cause.GRADIENT, text, update=u, tensor=extra[0])
