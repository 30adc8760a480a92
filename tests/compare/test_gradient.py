"""The three comparisons of a gradient: what they decide, and what they cannot judge."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equivtest
from equivtest import Experiment, Loss, Plan, Rank, Verdict
from equivtest.arms.replay import Replay
from equivtest.compare.gradient import (
    AgainstOracle,
    AgainstReplay,
    against_replay,
    decides,
    vanished,
)
from equivtest.compare.weights import Weights
from equivtest.loops import normalised
from equivtest.precision import precision as precision_called

U = 2.0**-24

# -- comparison A


def a_replay(expected: list[Tensor | None], scale: list[float], **changes: Any) -> Replay:
    return Replay(expected=expected, reduced=[], scale=scale, **changes)


def one(gradient: Tensor | None, expected: Tensor | None, scale: float = 4.0) -> AgainstReplay:
    (found,) = against_replay([[gradient]], a_replay([expected], [scale]), Plan(1, 4, 1))
    return found


def test_the_distance_is_over_the_sum_of_the_norms_of_what_was_added() -> None:
    # |3 - 1| / 4, allowed 4 sqrt(4) u and what float32 loses near zero.
    found = one(torch.tensor([3.0]), torch.tensor([1.0], dtype=torch.float64))
    assert found.distance == 0.5
    assert found.tolerance == pytest.approx(8 * U, rel=1e-12)
    assert not found.within


def test_the_tolerance_is_that_of_the_gradients_own_dtype() -> None:
    found = one(torch.tensor([1.0]).bfloat16(), torch.tensor([1.0], dtype=torch.float64))
    assert found.tolerance == pytest.approx(8 * 2.0**-8, rel=1e-12)


def test_the_worst_rank_decides_although_the_mean_is_right() -> None:
    expected = a_replay([torch.tensor([2.0], dtype=torch.float64)], [2.0])
    (found,) = against_replay(
        [[torch.tensor([2.0])], [torch.tensor([1.0])], [torch.tensor([3.5])]],
        expected,
        Plan(1, 1, 3),
    )
    assert (found.rank, found.distance) == (2, 0.75)


@pytest.mark.parametrize(
    ("gradient", "expected"),
    [(None, torch.zeros(1, dtype=torch.float64)), (torch.zeros(1), None)],
    ids=["none for zeros", "zeros for none"],
)
def test_none_is_not_zero(gradient: Tensor | None, expected: Tensor | None) -> None:
    found = one(gradient, expected, scale=0.0)
    assert found.missing
    assert not found.within


def test_none_on_both_sides_is_within() -> None:
    assert one(None, None, scale=0.0).within


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_what_is_not_finite_is_beyond_any_tolerance_even_on_both_sides(odd: float) -> None:
    found = one(torch.tensor([odd]), torch.tensor([odd], dtype=torch.float64))
    assert found.distance == math.inf
    assert not found.within


def test_another_shape_is_beyond_any_tolerance() -> None:
    assert not one(torch.ones(2), torch.ones(1, dtype=torch.float64)).within


# -- what becomes of a tensor


def oracle(**changes: Any) -> AgainstOracle:
    """One tensor that C judges and accepts, unless changed."""
    given: dict[str, Any] = {
        "split": [0.0],
        "split_tolerances": [1.0],
        "floor": [0.0],
        "oracle": [0.5],
        "oracle_tolerances": [1.0],
        "null": [False],
        "blind": [False],
        "scale": [1.0],
        "capped": [False],
        "drew": False,
        "coupled": False,
        "repeatable": True,
        "loss_ratio": 1.0,
    }
    return AgainstOracle(**{**given, **changes})


WITHIN, BEYOND = AgainstReplay(0.5, 1.0, 0), AgainstReplay(2.0, 1.0, 0)
SHARED = a_replay([None], [1.0], shared=True)
OPAQUE = a_replay([None], [1.0], shared=False)
EXPLAINS = Weights({(0, 0): 2.0}, {(0, 0): 1e-6}, [2.0], [0.5], U, determined=True)
ORDINARY = Weights({(0, 0): 1.0}, {(0, 0): 1e-6}, [2.0], [0.5], U, determined=True)
# What these leave is beyond A's tolerance of 1: most of the distance, and a tenth of it.
LEAVES = Weights({(0, 0): 2.0}, {(0, 0): 1e-6}, [2.0], [1.5], U, determined=True)
MOSTLY = Weights({(0, 0): 2.0}, {(0, 0): 1e-6}, [20.0], [2.0], U, determined=True)
SLIGHTLY = Weights(
    {(0, 0): 1.01}, {(0, 0): 1e-6}, [20.0], [2.0], U, determined=True
)  # 1 % is rounding in bfloat16


@pytest.mark.parametrize(
    ("a", "replay", "c", "weights", "state"),
    [
        (WITHIN, OPAQUE, oracle(oracle=[9.0]), None, "equal"),
        (BEYOND, SHARED, oracle(), None, "differs"),
        (BEYOND, OPAQUE, oracle(), EXPLAINS, "differs"),
        (BEYOND, OPAQUE, oracle(), ORDINARY, "rounding"),
        (BEYOND, OPAQUE, oracle(), LEAVES, "rounding"),
        (BEYOND, OPAQUE, oracle(), MOSTLY, "differs"),
        (BEYOND, OPAQUE, oracle(), SLIGHTLY, "rounding"),
        (BEYOND, OPAQUE, oracle(oracle=[2.0]), None, "differs"),
        (BEYOND, OPAQUE, oracle(), None, "rounding"),
        (BEYOND, OPAQUE, None, None, "not judged"),
        (BEYOND, OPAQUE, oracle(capped=[True], oracle=[2.0]), None, "not judged"),
        (BEYOND, OPAQUE, oracle(split=[2.0], oracle=[2.0]), None, "not judged"),
        (BEYOND, OPAQUE, oracle(repeatable=False, oracle=[2.0]), None, "not judged"),
        (BEYOND, OPAQUE, oracle(null=[True], oracle=[2.0]), None, "differs"),
        (BEYOND, OPAQUE, oracle(null=[True]), EXPLAINS, "rounding"),
        (BEYOND, SHARED, oracle(null=[True]), None, "differs"),
    ],
    ids=[
        "within A, whatever C says",
        "beyond A with shared bits",
        "weights explain it",
        "weights are the plan's",
        "weights do not explain it",
        "weights explain most of it",
        "weights explain it within the forward's rounding",
        "C fails",
        "C accepts",
        "no C",
        "noise above the cap",
        "the split is not right",
        "the forward does not repeat",
        "a null tensor that C rejects",
        "a null tensor that C accepts",
        "a null tensor with shared bits",
    ],
)
def test_a_tensor_becomes(a, replay, c, weights, state: str) -> None:
    assert decides([a], replay, c, weights, precision_called("bf16-mixed")) == [state]


def test_a_missing_gradient_differs_whatever_c_says() -> None:
    missing = AgainstReplay(math.inf, 0.0, 0, missing=True)
    assert decides([missing], OPAQUE, oracle(), None, precision_called("fp32")) == ["differs"]


def test_a_loss_in_parts_shares_no_bits_however_near_most_tensors_are() -> None:
    near, far = AgainstReplay(1e-7, 2e-7, 0), AgainstReplay(3e-7, 2e-7, 0)
    known = precision_called("fp32")
    three = oracle(**{k: v * 3 for k, v in vars(oracle()).items() if isinstance(v, list)})
    assert decides([near, near, far], OPAQUE, three, None, known)[2] == "differs"
    parted = replace(OPAQUE, parted=True)
    assert decides([near, near, far], parted, three, None, known)[2] == "rounding"


def test_zeros_where_the_oracle_has_something_have_vanished() -> None:
    something, zeros = torch.tensor([1e-9], dtype=torch.float64), torch.zeros(1)
    assert vanished([[zeros], [zeros]], [something], 0)
    assert not vanished([[zeros], [zeros + 1]], [something], 0)
    assert not vanished([[zeros]], [torch.zeros(1, dtype=torch.float64)], 0)
    assert not vanished([[None]], [something], 0)


# -- on real ranks: null and blind tensors, and weights

generator = torch.Generator().manual_seed(0)
TOKENS = [
    {
        "x": torch.randn(4, 6, generator=generator),
        "y": torch.randn(4, 1, generator=generator),
    }
    for _ in range(8)
]


def squared(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    residual = model(batch["x"]) - batch["y"]
    return Loss((residual**2).sum(), count=residual.numel())


def an_experiment(model: Callable[[], nn.Module], data: Any = TOKENS, **changes: Any) -> Experiment:
    return Experiment(
        model=model,
        data=data,
        loss=squared,
        count=lambda batch: batch["y"].numel(),
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
        updates=1,
        **changes,
    )


def check(experiment: Experiment, precision: str, loop: Any = None) -> Verdict:
    plan = Plan(len(experiment.data) // 4, 2, 2)
    return equivtest.check(experiment, plan, precision=precision, loop=loop, timeout_s=60)


class Attention(nn.Module):
    """The bias of the keys adds one number to every score of a query: the softmax drops it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(6, 6), nn.Linear(6, 6)
        self.value, self.out = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        return self.out(scores.softmax(-1) @ self.value(x))


class Instance(nn.Module):
    """A bias by channel before a normalisation over the other axis, which takes its mean away."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Conv1d(6, 5, 1), nn.InstanceNorm1d(5)
        self.out = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.inner(x.transpose(1, 2))).tanh().transpose(1, 2))


def layer_norm() -> nn.Module:
    """A bias by feature before LayerNorm keeps its gradient, but for its mean."""
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 1))


@pytest.mark.parametrize(
    ("model", "precision", "null"),
    [
        (Attention, "fp64", ("key.bias",)),
        (Attention, "fp32", ("key.bias",)),
        (Attention, "bf16-mixed", ("key.bias",)),
        (Instance, "fp32", ("inner.bias",)),  # in fp64 every example rounds alike in any split
        (Instance, "bf16-mixed", ("inner.bias",)),
        (layer_norm, "fp64", ()),
        (layer_norm, "fp32", ()),
        (layer_norm, "bf16-mixed", ()),
    ],
)
def test_a_gradient_that_is_zero_in_exact_arithmetic_is_known_as_null(
    model: Callable[[], nn.Module], precision: str, null: tuple[str, ...]
) -> None:
    verdict = check(an_experiment(model), precision)
    assert verdict.status == "equivalent", verdict.explain()
    assert verdict.card.null_tensors == null


def changing(change: Callable[[Rank], None]) -> Callable[[Rank], None]:
    """The right gradient, then ``change``, then the update."""

    def loop(rank: Rank) -> None:
        for group in rank.groups:
            for k, batch in enumerate(group):
                rank.model.require_backward_grad_sync = k == len(group) - 1  # type: ignore[assignment]
                with rank.autocast():
                    loss = rank.loss(rank.model, batch)
                (normalised(loss, group) * rank.D).backward()
            change(rank)
            rank.optimizer.step()
            rank.optimizer.zero_grad()

    return loop


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16-mixed"])
def test_a_null_tensor_is_still_judged_against_the_replay(precision: str) -> None:
    def disturb(rank: Rank) -> None:
        rank.module.key.bias.grad.add_(1e-2)  # type: ignore[union-attr,operator]

    verdict = check(an_experiment(Attention), precision, changing(disturb))
    assert "differs.gradient" in verdict.causes
    assert verdict.findings[0].tensor == "key.bias"


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("model", [Attention, Instance])
def test_a_null_tensor_of_a_forward_with_other_last_bits_is_no_fault(
    model: Callable[[], nn.Module], precision: str
) -> None:
    # The same positions in the opposite order: only the null bias, all rounding, is far away.
    def backwards(rank: Rank) -> None:
        for group in rank.groups:
            for k, batch in enumerate(group):
                rank.model.require_backward_grad_sync = k == len(group) - 1  # type: ignore[assignment]
                residual = rank.model(batch["x"].flip(1)).flip(1) - batch["y"]
                ((residual**2).sum() / group.count * rank.D).backward()
            rank.optimizer.step()

    verdict = check(an_experiment(model), precision, backwards)
    assert verdict.status == "equivalent", verdict.explain()


def line() -> nn.Module:
    module = nn.Linear(1, 1)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    return module


# Residuals -1, 1, -1, 0.99 at x of the same sign: the bias' gradient is 0.01 of a sum of 3.99, the
# weight's all of it. tau = 4 x 2^-8 = 0.0156 in bfloat16: below 2 tau a zeroed bias would pass C.
CANCELLING = [
    {"x": torch.tensor([s]), "y": torch.tensor([y])}
    for s, y in ((1.0, 1.0), (-1.0, -1.0), (1.0, 1.0), (-1.0, -0.99))
]


@pytest.mark.parametrize(("precision", "blind"), [("bf16", ("bias",)), ("fp32", ())])
def test_a_gradient_that_nearly_cancels_is_blind_where_rounding_is_as_large(
    precision: str, blind: tuple[str, ...]
) -> None:
    verdict = check(an_experiment(line, CANCELLING), precision)
    assert verdict.status == "equivalent", verdict.explain()
    assert verdict.card.blind_tensors == blind


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16-mixed"])
def test_a_zeroed_bias_gradient_is_a_fault(precision: str) -> None:
    def zero(rank: Rank) -> None:
        rank.module[0].bias.grad.zero_()  # type: ignore[index,union-attr,operator]

    verdict = check(an_experiment(layer_norm), precision, changing(zero))
    assert "differs.gradient" in verdict.causes
    assert verdict.findings[0].tensor == "0.bias"


def test_a_gradient_set_to_none_is_a_fault_although_it_was_zero() -> None:
    class Unheard(nn.Module):
        """A layer whose output is multiplied by zero."""

        def __init__(self) -> None:
            super().__init__()
            self.heard, self.unheard = nn.Linear(6, 1), nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.heard(x) + 0 * self.unheard(x)

    def forget(rank: Rank) -> None:
        for p in rank.module.unheard.parameters():  # type: ignore[union-attr,operator]
            p.grad = None

    assert check(an_experiment(Unheard), "fp32").status == "equivalent"
    verdict = check(an_experiment(Unheard), "fp32", changing(forget))
    assert "differs.gradient" in verdict.causes


def weighing(weights: dict[tuple[int, int], float]) -> Callable[[Rank], None]:
    """A loop that gives microbatch k of replica r another weight."""

    def loop(rank: Rank) -> None:
        for group in rank.groups:
            for k, batch in enumerate(group):
                rank.model.require_backward_grad_sync = k == len(group) - 1  # type: ignore[assignment]
                with rank.autocast():
                    loss = rank.loss(rank.model, batch)
                weight = weights.get((rank.dp_rank, k), 1.0)
                (normalised(loss, group) * rank.D * weight).backward()
            rank.optimizer.step()
            rank.optimizer.zero_grad()

    return loop


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16-mixed"])
def test_a_weight_error_of_1e_4_on_one_microbatch_is_found_and_named(precision: str) -> None:
    verdict = check(an_experiment(layer_norm), precision, weighing({(1, 0): 1.0001}))
    assert verdict.causes == ("differs.gradient",)
    assert "microbatch 0 of replica 1 counts 1.0001 times" in verdict.explain()
    found = verdict.weights.set_index(["replica", "microbatch"])["found"]
    assert found[1, 0] == pytest.approx(1.0001, abs=1e-6)
    assert found.drop((1, 0)).to_list() == pytest.approx([1.0] * 3, abs=1e-6)


def test_the_worked_example_of_unequal_counts_shows_its_wrong_weights() -> None:
    # One position in microbatches of three and of one: 512 and 1536 tokens in small. The mean of
    # means weighs 1/2 / 3 and 1/2 / 1 where 1/4 each is right: 2/3 and 2 times.
    data = [
        {"x": torch.randn(1, 6, generator=generator), "y": torch.randn(1, 1, generator=generator)}
        for _ in range(4)
    ]

    def mean_of_means(rank: Rank) -> None:
        for group in rank.groups:
            for batch in group:
                loss = rank.loss(rank.model, batch)
                (loss.total / loss.count / len(group)).backward()
            rank.optimizer.step()

    verdict = equivtest.check(
        an_experiment(layer_norm, data), Plan((3, 1), 2, 1), loop=mean_of_means, timeout_s=60
    )
    # Each example counts one element: means over unequal numbers of examples.
    assert verdict.causes == ("norm.mean_of_means_samples",)
    assert verdict.weights["found"].to_list() == pytest.approx([2 / 3, 2.0], abs=1e-5)


def test_gradients_of_nan_on_both_sides_are_not_equal() -> None:
    class Overflows(nn.Module):  # in float32, and not in the float64 large batch
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            large = self.inner(x) * 1e30 * 1e30
            return large - large.detach()

    verdict = check(an_experiment(Overflows), "fp32")
    assert verdict.status == "fault"
    assert verdict.cause == "prec.nonfinite"


def test_a_right_loop_is_not_blamed_where_the_experiment_itself_diverges() -> None:
    class Diverges(nn.Module):  # finite in the first update, and no longer after it
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 1, bias=False)
            nn.init.zeros_(self.inner.weight)

        def forward(self, x: Tensor) -> Tensor:
            out = self.inner(x)
            return out * (float("nan") if self.inner.weight.detach().any() else 1.0)

    verdict = check(replace(an_experiment(Diverges), updates=2), "fp32")
    assert verdict.status == "unexplained", verdict.explain()
    assert verdict.causes == ()
    assert "the experiment itself diverges" in verdict.explain()


def test_sparse_gradients_are_compared() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(7, 4, sparse=True), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.table(x.abs().mul(3).long().clamp(max=6)).sum(-2)).squeeze(-1)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        out = model(batch["x"])
        return Loss(F.mse_loss(out, batch["y"][..., 0], reduction="sum"), out.numel())

    made = Experiment(
        model=Sparse,
        data=TOKENS,
        loss=loss,
        count=lambda batch: batch["y"].numel(),
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
        updates=2,
        last_group="process",
    )
    verdict = equivtest.check(made, Plan(2, 2, 1), timeout_s=60)
    assert verdict.status == "equivalent", verdict.explain()
