"""A power of two on the loss changes no margin of the gradient, bit for bit.

Promised in fp64, fp32, bf16 and bf16-mixed, as long as no element of a backward leaves the normal
range (``correct.stays_normal``), and for the first update: a significand does not change with the
exponent, so every distance and every scale is the same number times the power. Not promised:

* fp16 and fp16-mixed, whose normal range begins at 2^-14.
* Later updates. Their parameters come of an update that does not scale: learning rate and weight
  decay stay, Adam's eps (1e-8) is added to the root of a second moment that scales, and
  ``clip_grad_norm_`` adds 1e-6 to the norm that it divides by. Gradients are compared before the
  clip, so the first update's margins see none of these.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from correct import check_scaled
from drawn_table import PROPERTY


@pytest.mark.parametrize("stream", range(100, 104))
def test_a_power_of_two_on_the_loss_changes_no_margin(
    stream: int, record_property: Callable[[str, object], None]
) -> None:
    tally, wrong = check_scaled(examples=75, stream=stream)
    record_property(PROPERTY, tally.text())
    assert not wrong, "\n".join(wrong)
