"""Every experiment of this folder, in every precision and on up to 8 replicas (`make full`)."""

import os

import pytest
from test_chars_transformer import chars_transformer
from test_digits_conv import digits_conv
from test_digits_mlp import digits_mlp
from test_gpt2 import gpt2
from test_half_labelled import half_labelled
from test_last_group import last_group_dropped, last_group_processed, short_epoch
from test_lines_lstm import lines_lstm, lstm_expected
from test_loss_scaling import loss_scaling
from test_rare_targets import rare_targets
from test_shared_layers import find_unused, shared_layers
from test_weighted_regression import UNEQUAL, weighted_regression
from test_wines import averaged, norm_within_bound, two_epochs, values_within_bound
from test_word_vectors import word_vectors

from equivtest import Plan, plans

GPU = os.environ.get("EQUIVTEST_GPU") == "1"  # `make gpu-matrix`

PRECISIONS = ["fp64", "fp32", "bf16", "fp16", "bf16-mixed", "fp16-mixed"]
if GPU:
    PRECISIONS.append("tf32")

# SGD divides by nothing. The others guard their division with an eps (Adam's is 1e-8, Adagrad's
# 1e-10) which is 0 in float16: in pure fp16 they are not run.
SGD = {digits_mlp, digits_conv, averaged, norm_within_bound}


def wide(*sweep):
    """Decorate a test with the plans, every one under every precision."""
    plan = pytest.mark.parametrize("plan", sweep, ids=str)
    precision = pytest.mark.parametrize("precision", PRECISIONS)
    return lambda test: plan(precision(test))


of_32 = wide(*plans(32, max_D=8))
of_8 = wide(*plans(8, max_D=8))
unequal = wide(*UNEQUAL, Plan((1, 3), 2, 8), Plan((1, 1, 2), 3, 8))


@pytest.fixture
def swept(equivalence, plan, precision):
    """Check an experiment under this test's plan and precision."""

    def check(experiment, **how):
        refused = precision == "fp16" and experiment not in SGD
        how.setdefault("expect", "not-run" if refused else "equivalent")
        equivalence(experiment, plan, precision=precision, **how)

    return check


@of_32
def test_digits_mlp(swept):
    swept(digits_mlp)


@of_32
def test_digits_conv(swept):
    swept(digits_conv)


@of_32
def test_chars_transformer(swept):
    swept(chars_transformer)


@of_32
def test_gpt2(swept):
    swept(gpt2)


@of_32
def test_lines_lstm(swept, precision):
    if GPU:  # cuDNN has what the CPU lacks
        swept(lines_lstm)
    else:
        swept(lines_lstm, expect=lstm_expected(precision))


@of_32
def test_word_vectors(swept):
    swept(word_vectors)


@of_32
def test_shared_layers(swept):
    swept(shared_layers, wrap=find_unused)


@of_32
def test_weighted_regression(swept):
    swept(weighted_regression)


@unequal
def test_unequal_microbatches(swept):
    swept(weighted_regression)


@of_32
def test_rare_targets(swept):
    swept(rare_targets)


@of_32
def test_half_labelled(swept):
    swept(half_labelled)


@of_32
def test_loss_scaling(swept):
    swept(loss_scaling)


@of_32
def test_two_epochs(swept):
    swept(two_epochs)


@of_32
def test_averaged(swept):
    swept(averaged)


@of_32
def test_norm_within_bound(swept):
    swept(norm_within_bound)


@of_32
def test_values_within_bound(swept):
    swept(values_within_bound)


@of_32
def test_short_epoch(swept):
    swept(short_epoch)


@of_8
def test_last_group_processed(swept):
    swept(last_group_processed)


@of_8
def test_last_group_dropped(swept):
    swept(last_group_dropped)
