"""When sources are isolated, what it costs and what it leaves on a verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equivtest
from equivtest import Experiment, Loss, Plan, Rank
from equivtest.arms.oracle import NULL
from equivtest.compare.verdict import Finding, Verdict
from equivtest.isolate.explaining import _null
from equivtest.loops import accumulate


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    return Loss(F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"]))


def an_experiment(*middle: type[nn.Module], updates: int = 2) -> Experiment:
    def model() -> nn.Module:
        made = [m(8) if m is nn.BatchNorm1d else m() for m in middle]
        return nn.Sequential(nn.Linear(5, 8), *made, nn.Tanh(), nn.Linear(8, 3))

    draw = torch.Generator().manual_seed(0)
    data = [
        {"x": torch.randn(5, generator=draw), "y": torch.randint(3, (), generator=draw)}
        for _ in range(32)
    ]
    return Experiment(
        model=model,
        data=data,
        loss=loss,
        count=lambda batch: len(batch["y"]),
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
        updates=updates,
    )


def check(made: Experiment, **how: object) -> Verdict:
    return equivtest.check(made, Plan(4, 2, 2), precision="fp64", **how)  # type: ignore[arg-type]


normalised = an_experiment(nn.BatchNorm1d)


def test_a_source_explains_and_what_is_left_is_within() -> None:
    verdict = check(normalised, expect="source.batchnorm")
    assert (verdict.status, verdict.causes) == ("explained", ("source.batchnorm",))
    assert verdict.passed
    assert verdict.sources["source.batchnorm"] >= 0.9999
    assert verdict.remainder is not None
    assert sum(verdict.sources.values()) + verdict.remainder == pytest.approx(1, abs=1e-6)
    assert "first at `1` (BatchNorm1d)" in verdict.source_rows[0].where
    assert verdict.margin <= 1
    assert all(row.isolated_margin is None or row.isolated_margin <= 1 for row in verdict.rows)
    assert verdict.split_margin is not None
    assert verdict.split_margin > 1e6  # as it was before


def test_the_loop_is_still_judged_beside_a_source() -> None:
    def forgets_world_size(rank: Rank) -> None:
        for group in rank.groups:
            rank.optimizer.zero_grad()
            for batch in group:
                (rank.loss(rank.model, batch).total / group.count).backward()
            rank.optimizer.step()

    verdict = check(normalised, loop=forgets_world_size)
    assert verdict.status == "fault"
    assert verdict.cause == "norm.missing_world_size"
    assert verdict.sources["source.batchnorm"] >= 0.9999
    assert not replace(verdict, expect=("source.batchnorm",)).passed


def changing(kind: type[nn.Module], name: str, value: float) -> Callable[[Rank], None]:
    """The recipe, after an attribute of the model's layers of one kind was set."""

    def loop(rank: Rank) -> None:
        for layer in rank.module.modules():
            if isinstance(layer, kind):
                setattr(layer, name, value)
        accumulate(rank)

    return loop


def test_a_loop_that_changes_the_layer_is_not_excused_by_it() -> None:
    loop = changing(nn.BatchNorm1d, "eps", 1e-3)  # 1e-5 in the experiment's
    verdict = check(normalised, loop=loop, expect="source.batchnorm")
    assert verdict.causes == ("differs.gradient", "source.batchnorm")
    assert not verdict.passed


def test_random_numbers_that_the_replay_does_not_have_are_not_excused_by_it() -> None:
    # As far as can be told from another draw, which a right loop's fused kernels may make.
    loop = changing(nn.Dropout, "p", 0.1)  # 0.5 in the experiment's
    verdict = check(an_experiment(nn.Dropout), loop=loop, expect="source.dropout")
    assert (verdict.status, verdict.causes) == ("unexplained", ("source.dropout",))
    assert not verdict.passed
    assert "look the same here" in verdict.explain()


def test_a_right_loop_with_kernels_of_its_own_is_explained() -> None:
    def product(layer: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        weight, bias = (p.to(out.dtype) for p in layer.parameters())
        return (args[0].to(out.dtype).unsqueeze(1) * weight).sum(-1) + bias

    def loop(rank: Rank) -> None:
        for layer in rank.module.modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_hook(product)
        accumulate(rank)

    def model() -> nn.Module:
        norm = nn.BatchNorm1d(8, track_running_stats=False)
        return nn.Sequential(nn.Linear(5, 8), norm, nn.Tanh(), nn.Linear(8, 3))

    made = replace(normalised, model=model)
    verdict = equivtest.check(made, Plan(4, 2, 2), precision="bf16-mixed", loop=loop)
    assert (verdict.status, verdict.causes) == ("explained", ("source.batchnorm",))
    assert {row.state for row in verdict.rows if not row.null} == {"rounding"}


@pytest.mark.parametrize("isolate", ["auto", "always"])
def test_a_case_without_sources_has_none(isolate: str) -> None:
    verdict = check(an_experiment(), isolate=isolate)
    assert (verdict.status, verdict.source_rows) == ("equivalent", ())
    assert not replace(verdict, expect=("source.batchnorm",)).passed


@pytest.mark.parametrize("layer", [nn.BatchNorm1d, nn.Dropout])
def test_a_group_that_is_not_cut_has_no_source(layer: type[nn.Module]) -> None:
    made = an_experiment(layer)
    verdict = equivtest.check(made, Plan(16, 1, 1), precision="fp64", isolate="always")
    assert (verdict.status, verdict.causes) == ("equivalent", ()), verdict.explain()


def test_never_leaves_it_unexplained() -> None:
    verdict = check(normalised, isolate="never", expect="source.batchnorm")
    assert (verdict.status, verdict.causes, verdict.passed) == ("unexplained", (), False)


def test_what_could_not_be_named_is_not_passed_by_naming_the_rest() -> None:
    verdict = check(normalised, expect="source.batchnorm")
    spoilt = replace(verdict, findings=(*verdict.findings, Finding("", "something else")))
    assert verdict.passed
    assert not spoilt.passed


class DrawnLater(nn.Module):
    """Draws in every forward, and uses what it drew of examples whose first feature says so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(5, 3), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return torch.where(x[:, :1] > 0, self.dropout(h), h)


def drawn_later(coupled: bool) -> Experiment:
    """Of two updates the second uses what is drawn; both are coupled or neither is."""

    def total(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        out = model(batch["x"])
        logits = out - out.mean(0) if coupled else out
        return Loss(F.cross_entropy(logits, batch["y"], reduction="sum"), len(batch["y"]))

    made = an_experiment()
    data = [
        {**example, "x": torch.cat([torch.tensor([i // 16 - 0.5]), example["x"][1:]])}
        for i, example in enumerate(made.data)
    ]
    return replace(made, model=DrawnLater, data=data, loss=total, count=None)


@pytest.mark.parametrize("isolate", ["auto", "always"])
@pytest.mark.parametrize("coupled", [False, True])
def test_a_source_that_an_update_had_without_need_is_named_where_it_is_needed(
    coupled: bool, isolate: str
) -> None:
    # Update 0 draws random numbers and nothing comes of them: no source is needed, or another one.
    verdict = check(drawn_later(coupled), isolate=isolate)
    causes = {"source.dropout"} | ({"source.coupling"} if coupled else set())
    assert (verdict.status, set(verdict.causes)) == ("explained", causes), verdict.explain()
    assert {f.update for f in verdict.findings if f.cause == "source.dropout"} == {1}


def test_isolate_is_one_of_three() -> None:
    with pytest.raises(ValueError, match="isolate='sometimes': pass auto, always or never"):
        check(normalised, isolate="sometimes")


class Mixed(nn.Module):
    """Each example's features times the mean of the batch's."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.mean(0, keepdim=True).exp()


PLANTED = {
    "source.batchnorm": lambda: nn.BatchNorm1d(8),
    "source.dropout": lambda: nn.Dropout(0.5),
    "source.coupling": Mixed,
}


class Towers(nn.Module):
    """A tower for each source, with parameters of its own; ``chosen`` ones have it."""

    def __init__(self, chosen: tuple[str, ...]) -> None:
        super().__init__()
        self.towers = nn.ModuleDict(
            {
                name.rpartition(".")[2]: nn.Sequential(
                    nn.Linear(5, 8), layer() if name in chosen else nn.Identity(), nn.Linear(8, 1)
                )
                for name, layer in PLANTED.items()
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([tower(x) for tower in self.towers.values()]).sum(0)


def towers(*chosen: str) -> Verdict:
    def linear(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        # Linear in each tower: what one does is no part of another's gradient.
        return Loss((model(batch["x"]).squeeze(1) * batch["y"]).sum(), len(batch["y"]))

    made = replace(an_experiment(updates=1), model=lambda: Towers(chosen), loss=linear, count=None)
    return check(made, expect=chosen)


def test_sources_that_do_not_interact_have_the_shares_that_each_has_alone() -> None:
    alone = {name: towers(name) for name in PLANTED}
    squared = {
        name: sum(((row.split_distance or 0.0) * (row.scale or 0.0)) ** 2 for row in verdict.rows)
        for name, verdict in alone.items()
    }
    together = towers(*PLANTED)
    assert together.passed, together.explain()
    for name, own in squared.items():
        assert alone[name].passed, alone[name].explain()
        # The bar of 0.05; nothing interacts, and the three draw the same numbers as one.
        assert together.sources[name] == pytest.approx(own / sum(squared.values()), abs=1e-9)
    assert together.remainder is not None
    assert sum(together.sources.values()) + together.remainder == pytest.approx(1, abs=1e-6)


def test_a_coupling_that_acts_only_behind_the_batchs_own_statistics_is_found() -> None:
    def model() -> nn.Module:
        made = nn.Sequential(
            nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), Mixed(), nn.Linear(8, 3)
        )
        nn.init.constant_(made[0].bias, -100.0)  # with mean 0 and variance 1 no unit would live
        return made

    verdict = check(
        replace(an_experiment(), model=model), expect={"source.batchnorm", "source.coupling"}
    )
    assert verdict.passed, verdict.explain()
    assert "`3` (Mixed)" in next(r.where for r in verdict.source_rows if "coupling" in r.source)


# -- tensors that are zero in exact arithmetic


class Nudged:
    """An oracle whose rounding moves its second and third tensor, of which one came out as 0."""

    scale = (1.0, 0.0, 6e-18, 0.0)

    def unsteady(self, tensor: int, scale: float) -> bool:
        return (0.0, 4e-19, 4e-19, 0.0)[tensor] > NULL * scale


def test_a_null_tensor_whose_rounding_came_out_as_zero_is_not_judged() -> None:
    known = [False] * 4
    assert _null(Nudged(), [1.0, 6e-18, 6e-18, 6e-18], known) == [False, True, True, False]
    # What rounding may have moved but the split left as large as the others is no rounding.
    assert _null(Nudged(), [1.0, 0.5, 6e-18, 0.5], known) == [False, False, True, False]
