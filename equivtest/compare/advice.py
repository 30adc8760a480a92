"""Where to go on with a case whose divergence has no name."""

from __future__ import annotations

from equivtest.compare.verdict import About, Status, Verdict


def what_to_look_at(verdict: Verdict) -> list[str]:
    """Where to go on with what has no name: the loop, or what is off without any."""
    if verdict.status is not Status.UNEXPLAINED:
        return []
    unnamed = [finding for finding in verdict.findings if not finding.cause]
    return [_LOOK_AT.get(unnamed[0].about, _LOOK_AT_LOOP)] if unnamed else []


_LOOK_AT: dict[str, str] = {
    About.REPEATING: (
        "what draws or counts without a seed: run the loss twice on one batch from one state and "
        "compare; seed it in model() or in the forward, and the case can be judged."
    ),
    About.SPLIT: (
        "the model, the loss and collate, not the loop: it is not needed for this. Look for what "
        "depends on how many examples come together (a mean where a sum is due, statistics or a "
        "maximum over the batch, padding that is not masked): leave parts out until it is gone."
    ),
    About.DIVERGING: (
        "the learning rate and the data: the experiment leaves the finite numbers by itself, with "
        "one large batch as well."
    ),
    About.SUMS: (
        "the precision: the loop adds what it should, and its sums lose more than any known order "
        "or dtype accounts for."
    ),
}
"""Where a finding that has no cause leads, by what it is about."""

_LOOK_AT_LOOP = (
    "the update, rank and tensor above: compare the loop's forward with the experiment's there, "
    'and run the case again with isolate="always" to see what the known sources take away.'
)
