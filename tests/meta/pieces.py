"""What loops of the tests share with the recipe: the pieces that the planted faults are made of."""

from equivtest.faults.pieces import (
    accumulated,
    averaged,
    backward,
    bare,
    finish,
    reducing_last,
    right,
)

__all__ = ["accumulated", "averaged", "backward", "bare", "finish", "reducing_last", "right"]
