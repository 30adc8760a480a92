"""Where to go on with a case whose divergence has no name."""

from __future__ import annotations

from equivtest.compare.verdict import Status, Verdict


def what_to_look_at(verdict: Verdict) -> list[str]:
    """Where to go on with what has no name: the loop, or what is off without any."""
    if verdict.status is not Status.UNEXPLAINED:
        return []
    unnamed = [finding for finding in verdict.findings if not finding.cause]
    if not unnamed:
        return []
    text = unnamed[0].text
    known = (advice for words, advice in _LOOK_AT if words in text)
    return [next(known, _LOOK_AT_LOOP)]


_LOOK_AT = (
    (
        "run twice",
        "what draws or counts without a seed: run the loss twice on one batch from one state and "
        "compare; seed it in model() or in the forward, and the case can be judged.",
    ),
    (
        "without any loop",
        "the model, the loss and collate, not the loop: it is not needed for this. Look for what "
        "depends on how many examples come together (a mean where a sum is due, statistics or a "
        "maximum over the batch, padding that is not masked): leave parts out until it is gone.",
    ),
    (
        "diverges",
        "the learning rate and the data: the experiment leaves the finite numbers by itself, with "
        "one large batch as well.",
    ),
    (
        "what the plan's microbatches add up to",
        "the precision: the loop adds what it should, and its sums lose more than any known order "
        "or dtype accounts for.",
    ),
)
"""Words of a finding that has no cause, and where they lead."""

_LOOK_AT_LOOP = (
    "the update, rank and tensor above: compare the loop's forward with the experiment's there, "
    'and run the case again with isolate="always" to see what the known sources take away.'
)
