"""Causes that torch itself stops at: what its words mean, and what to do where they are no help."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from equivtest.causes import Cause


@dataclass(frozen=True)
class Stop:
    """An error of torch that has one reason.

    Attributes:
        pattern: found in its message, in any case.
        text: why that is the reason.
        event: found in the last event of a rank, where the message alone does not tell: a loop that
            leaves an update out, and the scaler's with it, meets the same words a group later.
    """

    cause: Cause
    pattern: str
    text: str
    event: str = ""

    def matches(self, message: str, last_events: Sequence[str]) -> bool:
        """The error is this one."""
        return bool(re.search(self.pattern, message, re.IGNORECASE)) and any(
            self.event in event for event in last_events or ("",)
        )


STOPS = (
    # The assertion stands in ``Reducer::finalize_backward``. With static_graph=True the first
    # backward queues it whether the wrapper is to reduce or not; without, only a backward that
    # reduces does, for which it holds.
    Stop(
        Cause.STATIC_GRAPH,
        r"expect_autograd_hooks_ INTERNAL ASSERT FAILED",
        "DistributedDataParallel stopped in a backward that was not to reduce, at an assertion "
        "that only a wrapper with static_graph=True reaches there",
    ),
    Stop(
        Cause.UNSCALE_PER_MICRO,
        r"unscale_\(\) has already been called on this optimizer since the last update",
        "the scaler was asked to unscale a second time after a backward, before any update: its "
        "gradients would have been divided by the scale twice",
        event="of microbatch 1 in update",  # its backward, or its reduction
    ),
)

HINTS = (
    (
        r"Expected to have finished reduction in the prior iteration",
        "a parameter got no gradient in the backward before, and the reduction still waits for it: "
        "leave the parameter out of the model or use it in every microbatch, let the loss use "
        "every output, or wrap with DistributedDataParallel(..., find_unused_parameters=True)",
    ),
    (
        r"Expected to mark a variable ready only once",
        "a parameter was reached twice in one reduced backward: by reentrant checkpointing "
        "(use_reentrant=False) or by a forward that runs twice before it; run all but the last "
        "backward of a group inside no_sync",
    ),
    (
        r"not compatible with static_graph",
        "static_graph=True promises that every backward reaches the same parameters: leave it out",
    ),
    (
        r"Trying to backward through the graph a second time",
        "a loss of an earlier microbatch is part of this one's: detach what is kept, or call "
        "backward once on the sum",
    ),
    (
        r"No inf checks were recorded for this optimizer",
        "scaler.update() or scaler.step() came before any scaled backward, or no parameter has a "
        "gradient: scale the loss with scaler.scale() in each microbatch",
    ),
)
"""What torch's message says, and what to do about it; none of them is a cause by itself."""


def stopped_by(message: str, last_events: Sequence[str]) -> Stop | None:
    """The cause of an exception with this message; None where it may have several.

    Args:
        last_events: of each rank.
    """
    return next((stop for stop in STOPS if stop.matches(message, last_events)), None)


def hint(message: str) -> str:
    """What to do about an exception with this message; empty where nothing is known."""
    found = (text for pattern, text in HINTS if re.search(pattern, message, re.IGNORECASE))
    return next(found, "")
