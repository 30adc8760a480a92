"""The oracle: one large batch in float64, its scale, and other ways to compute the same."""

import pytest
import setups
import torch
from setups import an_experiment, pairs, squared, whole
from torch import Tensor, nn

from equivtest import Loss
from equivtest.arms.bench import Bench
from equivtest.arms.oracle import Whole
from equivtest.batches import Batches
from equivtest.calling import ExperimentError


def line() -> nn.Module:
    """y = 1 x + 0."""
    module = nn.Linear(1, 1)
    nn.init.ones_(module.weight)
    nn.init.zeros_(module.bias)
    return module


# x = 1, 2, 3 and y = 0, 4, 0: residuals 1, -2, 3; residuals times x 1, -4, 9.
regression = an_experiment(line, pairs([[1], [2], [3]], [[0], [4], [0]]), squared)


def values(gradients: list[Tensor | None]) -> list[float]:
    return [float(g) for g in gradients if g is not None]


def test_the_gradient_of_a_regression_is_that_of_its_formula() -> None:
    # 2/3 (1 - 4 + 9) = 4 and 2/3 (1 - 2 + 3) = 4/3.
    assert values(whole(regression).gradients) == pytest.approx([4.0, 4 / 3], rel=1e-15)


def test_the_loss_is_the_mean_over_the_count() -> None:
    assert whole(regression).loss == pytest.approx(14 / 3, rel=1e-15)  # (1 + 4 + 9) / 3


def test_the_scale_is_the_sum_of_the_norms_of_the_examples_gradients() -> None:
    # What cancels in the sum still rounds: 2/3 (1 + 4 + 9) = 28/3 and 2/3 (1 + 2 + 3) = 4.
    assert whole(regression).scale == pytest.approx([28 / 3, 4.0], rel=1e-15)


def test_the_gradient_is_computed_from_the_values_as_stored() -> None:
    # 1.001 is 1.0 in bfloat16 (spacing 2^-7 at 1).
    data = pairs([[1.001], [2.0], [3.0]], [[0], [4], [0]])
    made = an_experiment(line, data, squared)
    bench = Bench(made, torch.float64)
    found = Whole(
        bench,
        Batches(made, torch.bfloat16, torch.float64),
        setups.state_of(bench),
        (0, 1, 2),
        {"": 3.0},
    )
    assert values(found.gradients) == pytest.approx([4.0, 4 / 3], rel=1e-15)


def test_a_loss_scale_is_taken_out_of_the_gradients_again() -> None:
    scaled = whole(regression, loss_scale=2.0**17)
    assert values(scaled.gradients) == values(whole(regression).gradients)


def test_terms_are_weighed_by_their_own_counts() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Loss]:
        out = model(batch["x"])
        return {"sum": Loss(out.sum(), count=len(out)), "first": Loss(out[0].sum(), count=1)}

    made = an_experiment(line, regression.data, loss)
    bench = Bench(made, torch.float64)
    found = Whole(
        bench,
        Batches(made, torch.float64),
        setups.state_of(bench),
        (0, 1, 2),
        {"sum": 3.0, "first": 1.0},
    )
    # d/dw: (1 + 2 + 3) / 3 + 1 = 3; d/db: 3 / 3 + 1 = 2.
    assert values(found.gradients) == pytest.approx([3.0, 2.0], rel=1e-15)


def test_a_count_that_disagrees_with_the_loss_is_refused_with_both_numbers() -> None:
    bench = Bench(regression, torch.float64)
    batches = Batches(regression, torch.float64)
    found = Whole(bench, batches, setups.state_of(bench), (0, 1, 2), {"": 6.0})
    with pytest.raises(
        ExperimentError, match=r"adds up to 6 .*the loss counts 3 on the same 3 examples"
    ):
        found.check()


def test_a_count_with_other_terms_than_the_loss_is_refused_with_both() -> None:
    bench = Bench(regression, torch.float64)
    batches = Batches(regression, torch.float64)
    found = Whole(bench, batches, setups.state_of(bench), (0, 1, 2), {"tokens": 3.0})
    with pytest.raises(ExperimentError, match=r"count gives the terms \['tokens'\].*one total"):
        _ = found.gradients


# -- other ways to compute the same


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))


generator = torch.Generator().manual_seed(1)
curved = an_experiment(
    net,
    [
        {"x": torch.randn(3, generator=generator), "y": torch.randn(1, generator=generator)}
        for _ in range(12)
    ],
    squared,
)


def apart(a: list[Tensor | None], b: list[Tensor | None]) -> float:
    """Largest distance of two gradients over the norm of the second."""
    return max(
        float((x - y).norm() / y.norm())
        for x, y in zip(a, b, strict=True)
        if x is not None and y is not None
    )


@pytest.mark.parametrize(
    "way",
    [lambda w: w.third(), lambda w: w.permuted(0), lambda w: w.jittered(0), lambda w: w.split(5)],
    ids=["third", "permuted", "jittered", "split"],
)
def test_another_way_moves_last_bits_and_nothing_else(way) -> None:
    found = whole(curved)
    moved = apart(way(found), found.gradients)
    # u = 1.1e-16. A sum of 12 terms and a 3-layer pass cannot lose more than a few dozen of it.
    assert 0 < moved < 1e-14


def test_permutations_differ_from_one_another() -> None:
    found = whole(curved)
    assert apart(found.permuted(0), found.permuted(1)) > 0


@pytest.mark.parametrize("way", ["permuted", "jittered"])
def test_the_same_way_gives_the_same_bits_in_another_run(way: str) -> None:
    first, second = (getattr(whole(curved), way)(2) for _ in range(2))
    assert apart(first, second) == 0


def test_the_oracle_does_not_depend_on_what_was_computed_before_it() -> None:
    found = whole(curved)
    found.jittered(1)
    found.split(1)
    assert apart(found.gradients, whole(curved).gradients) == 0


def test_random_numbers_are_noticed_and_drawn_alike_in_each_run() -> None:
    made = an_experiment(lambda: nn.Sequential(net(), nn.Dropout(0.5)), curved.data, squared)
    first, second = whole(made), whole(made)
    assert first.drew
    assert apart(first.gradients, second.gradients) == 0
    assert not whole(curved).drew


# -- examples that see each other


def contrastive(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    """Each example's score against those of its whole batch."""
    score = model(batch["x"])
    return Loss(-score.log_softmax(0).sum(), count=len(score))


@pytest.mark.parametrize(
    ("layer", "coupled"),
    [(nn.LayerNorm(16), False), (nn.BatchNorm1d(16), True), (nn.Identity(), False)],
    ids=["layernorm", "batchnorm", "nothing"],
)
def test_examples_are_coupled_by_batch_norm_and_not_by_layer_norm(
    layer: nn.Module, coupled: bool
) -> None:
    made = an_experiment(
        lambda: nn.Sequential(nn.Linear(3, 16), layer, nn.Tanh(), nn.Linear(16, 1)),
        curved.data,
        squared,
    )
    assert whole(made).coupled is coupled


def test_examples_are_coupled_by_a_loss_over_the_batch() -> None:
    assert whole(an_experiment(net, curved.data, contrastive)).coupled


def test_the_scale_of_coupled_examples_is_over_parts_of_four() -> None:
    # Twelve examples in parts of four: three gradients, each by plain autograd.
    made = an_experiment(net, curved.data, contrastive)
    found = whole(made)
    module = found.bench.module
    expected = [0.0] * len(list(module.parameters()))
    for part in range(3):
        x = torch.stack([e["x"] for e in curved.data[4 * part : 4 * part + 4]]).double()
        total = -module(x).log_softmax(0).sum() / 12
        for t, gradient in enumerate(torch.autograd.grad(total, list(module.parameters()))):
            expected[t] += float(gradient.norm())
    assert found.scale == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_no_part_of_the_scale_is_a_single_example_that_a_model_may_refuse() -> None:
    # Five examples: not four and one, which BatchNorm1d refuses, but one part. S_t is then the
    # norm of the whole gradient.
    made = an_experiment(
        lambda: nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1)),
        curved.data[:5],
        squared,
    )
    found = whole(made)
    assert found.coupled
    assert found.scale == [float(g.norm()) for g in found.gradients if g is not None]


def test_a_gradient_of_pure_rounding_does_not_make_examples_coupled() -> None:
    # The bias after which a softmax over the features is taken back: its sum direction is null.
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 4)
            self.shift = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return (self.inner(x) + self.shift).softmax(-1)[:, :1]

    assert not whole(an_experiment(Shifted, curved.data, squared)).coupled


def test_last_bits_of_a_complex_parameter_are_moved_in_both_parts() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.tensor([0.6 + 0.8j]))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.by).imag

    made = an_experiment(Turned, pairs([[1], [2], [3]], [[0], [4], [0]]), squared)
    found = whole(made)
    assert not found.unsteady(0, found.scale[0])
