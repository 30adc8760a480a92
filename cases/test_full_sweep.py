"""Every experiment of this folder, in every precision and on up to 8 replicas (`make full`)."""

import pytest
from test_chars_transformer import chars_transformer
from test_digits_mlp import digits_mlp
from test_last_group import last_group_dropped, last_group_processed, short_epoch
from test_lines_lstm import lines_lstm

from equivtest import plans

PRECISIONS = ["fp64", "fp32", "bf16", "fp16", "bf16-mixed", "fp16-mixed"]

NOT_RUN = {
    # Adam, AdamW and RMSprop guard their division with eps=1e-8, which is 0 in float16.
    (chars_transformer, "fp16"),
    (lines_lstm, "fp16"),
    (short_epoch, "fp16"),
    (last_group_processed, "fp16"),
    (last_group_dropped, "fp16"),
    # torch has no float16 LSTM on the CPU under autocast.
    (lines_lstm, "fp16-mixed"),
}


def wide(examples_per_update):
    """Decorate a test with every plan of the product and every precision."""
    plan = pytest.mark.parametrize("plan", plans(examples_per_update, max_D=8), ids=str)
    precision = pytest.mark.parametrize("precision", PRECISIONS)
    return lambda test: plan(precision(test))


def expected(experiment, precision):
    return "not-run" if (experiment, precision) in NOT_RUN else "equivalent"


@wide(32)
def test_digits_mlp(equivalence, plan, precision):
    equivalence(digits_mlp, plan, precision=precision)


@wide(32)
def test_chars_transformer(equivalence, plan, precision):
    expect = expected(chars_transformer, precision)
    equivalence(chars_transformer, plan, precision=precision, expect=expect)


@wide(32)
def test_lines_lstm(equivalence, plan, precision):
    expect = expected(lines_lstm, precision)
    equivalence(lines_lstm, plan, precision=precision, expect=expect)


@wide(32)
def test_short_epoch(equivalence, plan, precision):
    expect = expected(short_epoch, precision)
    equivalence(short_epoch, plan, precision=precision, expect=expect)


@wide(8)
def test_last_group_processed(equivalence, plan, precision):
    expect = expected(last_group_processed, precision)
    equivalence(last_group_processed, plan, precision=precision, expect=expect)


@wide(8)
def test_last_group_dropped(equivalence, plan, precision):
    expect = expected(last_group_dropped, precision)
    equivalence(last_group_dropped, plan, precision=precision, expect=expect)
