"""Whole cases on real process groups: what is found, and what is never said."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equivtest
from equivtest import Experiment, Loss, Plan, PlanError, Rank, Verdict
from equivtest.loops import accumulate

generator = torch.Generator().manual_seed(0)
DATA = [
    {
        "x": torch.randn(5, generator=generator),
        "y": torch.randint(0, 3, (), generator=generator),
    }
    for _ in range(16)
]


def cross_entropy(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    total = F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
    return Loss(total, count=len(batch["y"]))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def layers(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), *between, nn.ReLU(), nn.Linear(8, 3))


def an_experiment(**changes) -> Experiment:
    given = {
        "model": layers,
        "data": DATA,
        "loss": cross_entropy,
        "count": lambda batch: len(batch["y"]),
        "optimizer": sgd,
    }
    return Experiment(**{**given, **changes})


def check(experiment: Experiment, plan: Plan, precision: str = "fp32", **how) -> Verdict:
    return equivtest.check(experiment, plan, precision=precision, timeout_s=60, **how)


plain = an_experiment()


# -- right


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "bf16-mixed", "fp16-mixed", "fp16"])
def test_the_recipe_is_equivalent_in_every_precision_of_a_cpu(precision: str) -> None:
    verdict = check(plain, Plan(2, 2, 2), precision)
    assert verdict.status == "equivalent", verdict.explain()
    assert verdict.margin < 1


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16-mixed"])
def test_two_replicas_on_gloo_give_the_replays_bits(precision: str) -> None:
    verdict = check(plain, Plan(2, 4, 2), precision)
    assert [row.replay_bits_equal for row in verdict.updates] == [True, True]


def test_the_same_case_gives_the_same_verdict_twice() -> None:
    first, second = (replace(check(plain, Plan(1, 2, 2)), duration_s=0.0) for _ in range(2))
    assert first == second


def test_a_case_does_not_depend_on_the_cases_before_it() -> None:
    alone = check(plain, Plan(2, 2, 2))
    check(plain, Plan(4, 2, 1), "fp64")
    check(plain, Plan(1, 2, 2))
    assert replace(check(plain, Plan(2, 2, 2)), duration_s=0.0) == replace(alone, duration_s=0.0)


def test_a_verdict_counts_what_ran() -> None:
    card = check(plain, Plan(2, 2, 2)).card
    # 2 microbatches x 2 replicas x 2 updates, of two examples of one supervised element each.
    assert (card.microbatches, card.examples_seen, card.supervised) == (8, 16, 16)
    assert (card.updates_attempted, card.updates_applied) == (2, 2)


def test_the_oracles_loss_is_that_of_plain_float64_torch() -> None:
    verdict = check(plain, Plan(2, 2, 2), "fp64")
    torch.manual_seed(0)  # the experiment's seed, times 1,000,003, for replica 0
    module = layers().double()
    x = torch.stack([e["x"] for e in DATA[:8]]).double()
    y = torch.stack([e["y"] for e in DATA[:8]])
    expected = F.cross_entropy(module(x), y).item()
    assert verdict.updates[0].oracle_loss == pytest.approx(expected, rel=1e-14)
    assert verdict.updates[0].loss == pytest.approx(expected, rel=1e-14)


def test_without_a_count_a_batch_norm_has_the_buffers_of_its_forwards_alone() -> None:
    # A dry forward that counts must not move running statistics of the arms: one whole batch is
    # right, in gradient and buffers.
    made = an_experiment(model=lambda: layers(nn.BatchNorm1d(8)), count=None)
    verdict = check(made, Plan(8, 1, 1), "fp64")
    assert verdict.status == "equivalent", verdict.explain()


def test_two_optimizers_over_parts_of_a_model_are_both_judged() -> None:
    def optimizers(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
        return {
            "first": torch.optim.SGD(model[0].parameters(), lr=0.1),
            "last": torch.optim.AdamW(model[-1].parameters(), lr=1e-3),
        }

    verdict = check(an_experiment(optimizer=optimizers), Plan(2, 2, 2))
    assert verdict.status == "equivalent", verdict.explain()
    assert verdict.card.optimizer == "AdamW, SGD"


def test_a_loss_of_two_terms_with_their_own_counts_is_equivalent() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Loss]:
        out = model(batch["x"])
        chosen = batch["y"] == 1
        return {
            "class": Loss(F.cross_entropy(out, batch["y"], reduction="sum"), len(out)),
            "size": Loss((out[chosen] ** 2).sum(), chosen.sum()),
        }

    verdict = check(an_experiment(loss=loss, count=None), Plan(2, 2, 2), "fp64")
    assert verdict.status == "equivalent", verdict.explain()


# -- sources: beyond tolerance, the loop acquitted, no fault claimed

SOURCES = {
    "dropout": lambda: layers(nn.Dropout(0.5)),
    "batchnorm": lambda: layers(nn.BatchNorm1d(8)),
}


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16-mixed"])
@pytest.mark.parametrize("source", SOURCES)
def test_a_source_is_neither_a_fault_nor_hidden(source: str, precision: str) -> None:
    made = an_experiment(model=SOURCES[source])
    verdict = check(made, Plan(4, 2, 2), precision, isolate="never")
    assert verdict.status == "unexplained", verdict.explain()
    assert verdict.causes == ()
    assert verdict.replay_margin is not None
    assert verdict.replay_margin <= 1  # the loop did what the plan says
    assert verdict.split_margin is not None
    assert verdict.split_margin > 1  # and the split is not the large batch
    assert all(row.state == "equal" for row in verdict.rows)


def test_what_draws_random_numbers_is_said() -> None:
    made = an_experiment(model=SOURCES["dropout"])
    verdict = check(made, Plan(4, 2, 1), "fp64", isolate="never")
    assert "draws random numbers" in verdict.findings[0].text


def test_examples_that_see_each_other_are_said() -> None:
    made = an_experiment(model=SOURCES["batchnorm"])
    verdict = check(made, Plan(4, 2, 1), "fp64", isolate="never")
    assert "examples see each other" in verdict.findings[0].text


def test_a_loss_over_pairs_is_no_equivalent_split() -> None:
    # In-batch negatives: the loss of a single example is zero, and so is its gradient.
    def contrastive(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        z = F.normalize(model(batch["x"]), dim=1)
        return Loss(F.cross_entropy(z @ z.T, torch.arange(len(z)), reduction="sum"), count=len(z))

    made = an_experiment(loss=contrastive, count=lambda batch: len(batch["x"]))
    verdict = check(made, Plan(2, 2, 2), "fp64", isolate="never")
    assert verdict.status == "unexplained", verdict.explain()
    assert "examples see each other" in verdict.findings[0].text
    assert check(made, Plan(8, 1, 1), "fp64").status == "equivalent"


@pytest.mark.parametrize("forwards", [1, 2])
def test_a_forward_beside_the_plan_moves_running_statistics_and_is_a_fault(forwards: int) -> None:
    def warms_up(rank: Rank) -> None:
        for _ in range(forwards):
            rank.module(torch.randn(8, 5))
        accumulate(rank)

    made = an_experiment(model=SOURCES["batchnorm"])
    verdict = check(made, Plan(8, 1, 1), loop=warms_up)
    assert verdict.status == "fault", verdict.explain()
    assert verdict.cause == "differs.buffers"


def test_an_evaluation_in_the_middle_of_the_loop_is_no_fault() -> None:
    def evaluates(rank: Rank) -> None:
        for group in rank.groups:
            rank.module.eval()
            with torch.no_grad():
                rank.module(torch.ones(3, 5))
            rank.module.train()
            rank.groups = [group]
            accumulate(rank)

    verdict = check(an_experiment(model=SOURCES["batchnorm"]), Plan(8, 1, 1), loop=evaluates)
    assert verdict.status == "equivalent", verdict.explain()


# -- overflow and underflow


def scaled_by(power: int):
    return lambda: torch.amp.GradScaler("cpu", init_scale=2.0**power)


def test_a_skipped_update_alone_is_inconclusive() -> None:
    # 2^60 times any gradient is beyond float16's 65504: torch skips, rightly, and nothing is left.
    verdict = check(an_experiment(scaler=scaled_by(60), updates=1), Plan(2, 2, 2), "fp16-mixed")
    assert verdict.status == "inconclusive", verdict.explain()
    assert (verdict.card.updates_attempted, verdict.card.updates_applied) == (1, 0)
    assert any("was skipped" in note for note in verdict.notes)


def test_gradients_that_all_vanish_in_float16_are_not_called_equivalent() -> None:
    # A loss times 1e-9 has gradients below half of float16's smallest number, 2^-25 = 3e-8.
    def tiny(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        loss = cross_entropy(model, batch)
        return Loss(loss.total * 1e-9, loss.count)

    verdict = check(an_experiment(loss=tiny, updates=1), Plan(2, 2, 2), "fp16")
    assert verdict.status != "equivalent", verdict.explain()
    assert verdict.status != "fault", verdict.explain()


# -- cannot run


def test_tf32_on_a_cpu_is_not_run() -> None:
    verdict = check(plain, Plan(2, 2, 2), "tf32")
    assert verdict.status == "not-run"
    assert "CUDA" in verdict.explain()


def test_replicas_of_several_processes_are_not_run() -> None:
    verdict = check(plain, Plan(2, 2, 2, tp=2))
    assert verdict.status == "not-run"
    assert "2 processes a replica" in verdict.explain()


def test_adamw_in_float16_is_not_run_because_its_eps_is_zero() -> None:
    made = an_experiment(optimizer=lambda model: torch.optim.AdamW(model.parameters()))
    verdict = check(made, Plan(2, 2, 2), "fp16")
    assert verdict.status == "not-run"
    assert "eps=1e-08 is 0 in float16" in verdict.explain()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            x[:, None, :].expand(-1, 2, -1),
            torch.full((len(x),), 2),
            batch_first=True,
            enforce_sorted=False,
        )
        return self.head(self.lstm(packed)[1][0][0])


def test_what_torch_refuses_in_a_precision_is_not_run_in_torchs_words() -> None:
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(RuntimeError) as refusal:
        Recurrent()(torch.ones(2, 5))
    made = an_experiment(model=Recurrent)
    assert check(made, Plan(2, 2, 2), "fp32").status == "equivalent"
    verdict = check(made, Plan(2, 2, 2), "fp16-mixed")
    assert verdict.status == "not-run", verdict.explain()
    assert str(refusal.value).splitlines()[0] in verdict.explain()


class Scattering(nn.Module):
    """``put_`` without accumulation: torch has no kernel of it that gives the same bits twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y + torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))


def test_an_operation_without_a_deterministic_kernel_is_not_run_in_torchs_words() -> None:
    verdict = check(an_experiment(model=Scattering), Plan(2, 2, 2), "fp64")
    assert verdict.status == "not-run", verdict.explain()
    assert "put_ does not have a deterministic implementation" in verdict.explain()


def test_what_a_backend_does_not_support_is_not_run_and_no_error_of_the_recipe() -> None:
    def refused_by_nccl(module: nn.Module) -> nn.Module:
        # ProcessGroupNCCL::allreduce_sparse
        raise RuntimeError("NCCL does not support all_reduce with sparse tensors.\nC++ stack")

    verdict = check(plain, Plan(2, 2, 2), wrap=refused_by_nccl)
    assert verdict.status == "not-run", verdict.explain()
    assert "torch refuses it: NCCL does not support all_reduce" in verdict.explain()
    own = check(plain, Plan(2, 2, 2), wrap=refused_by_nccl, loop=accumulate)
    assert own.status == "error"


# -- cannot finish


def test_a_loop_that_raises_is_an_error_with_rank_and_traceback() -> None:
    def fails_in_rank_1(rank: Rank) -> None:
        if rank.dp_rank == 1:
            raise KeyError("no such shard")
        accumulate(rank)

    verdict = check(plain, Plan(2, 2, 2), loop=fails_in_rank_1)
    assert verdict.status == "error"
    assert verdict.failure is not None
    assert verdict.failure.rank == 1
    assert "KeyError: 'no such shard'" in verdict.failure.text
    assert "in fails_in_rank_1" in verdict.failure.text
    assert "rank 1" in verdict.explain()


def test_a_case_after_a_failed_one_runs() -> None:
    def fails(rank: Rank) -> None:
        raise RuntimeError("on purpose")

    assert check(plain, Plan(2, 2, 2), loop=fails).status == "error"
    assert check(plain, Plan(2, 2, 2)).status == "equivalent"


def test_a_factory_that_builds_another_model_each_time_is_said() -> None:
    # Random numbers of its own, which no seed reaches.
    def unrepeatable() -> nn.Module:
        module = layers()
        own = torch.Generator()
        own.seed()
        with torch.no_grad():
            module[0].weight.normal_(generator=own)
        return module

    verdict = check(an_experiment(model=unrepeatable), Plan(2, 2, 1))
    assert verdict.status == "error", verdict.explain()
    assert "builds different parameters on each call" in verdict.explain()


def test_a_factory_that_builds_another_shape_each_time_is_an_error() -> None:
    import itertools

    widths = itertools.count(4)

    def growing() -> nn.Module:
        width = next(widths)
        return nn.Sequential(nn.Linear(5, width), nn.Linear(width, 3))

    verdict = check(an_experiment(model=growing), Plan(2, 2, 1))
    assert verdict.status == "error", verdict.explain()


def test_a_count_that_disagrees_with_the_loss_is_one_clear_error() -> None:
    made = an_experiment(count=lambda batch: 2 * len(batch["y"]))
    verdict = check(made, Plan(2, 2, 2))
    assert verdict.status == "error", verdict.explain()
    # 8 examples, one supervised element each; the count says two.
    assert "adds up to 16 over the microbatches, and the loss counts 8" in verdict.explain()


def test_a_count_without_a_term_of_the_loss_is_an_error_that_names_both() -> None:
    made = an_experiment(count=lambda batch: {"tokens": len(batch["y"])})
    verdict = check(made, Plan(2, 2, 2))
    assert verdict.status == "error", verdict.explain()
    assert "'tokens'" in verdict.explain()


def test_a_group_without_supervised_elements_is_an_error_that_says_so() -> None:
    verdict = check(an_experiment(count=lambda batch: 0), Plan(2, 2, 2))
    assert verdict.status == "error"
    assert "there is nothing to divide the loss by" in verdict.explain()


# -- refused at once


def test_an_unknown_precision_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="precision='half'"):
        check(plain, Plan(2, 2, 2), "half")


def test_an_unknown_expectation_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="expect='good'"):
        check(plain, Plan(2, 2, 2), expect="good")


def test_a_plan_that_does_not_fit_the_data_is_a_plan_error() -> None:
    with pytest.raises(PlanError, match="16 examples do not fill"):
        check(an_experiment(updates=3), Plan(3, 1, 2))
