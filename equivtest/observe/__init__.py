"""The Trace: what a run leaves behind, read from outside the loop."""

from equivtest.observe.trace import (
    Event,
    MicrobatchTrace,
    OptimizerTrace,
    State,
    Trace,
    UpdateTrace,
)

__all__ = ["Event", "MicrobatchTrace", "OptimizerTrace", "State", "Trace", "UpdateTrace"]
