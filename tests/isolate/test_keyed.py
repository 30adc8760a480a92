"""Random numbers by example: a batch and its parts draw the same, however cut and padded."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from drawing import (
    LAYERS,
    MODELS,
    Between,
    Checkpointed,
    LayerDrop,
    OwnGenerator,
    P,
    PackedSorted,
    noise,
)
from forwards import SEED, WIDTH, Setup, apart, lines
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from equivtest.isolate.places import IN_THE_LOSS, Place
from equivtest.isolate.random.fields import NO_PACKING, NOT_PROBED, Layout, Layouts, Site, Untied
from equivtest.isolate.random.keyed import Keyed, in_turn
from equivtest.isolate.random.probing import NO_ORDER, NO_PLACE, OTHER_GENERATORS
from equivtest.observe.rng import RandomState

LENGTHS = (3, 5, 2, 5, 1)
WHOLE = [range(5)]
SPLITS = ([[0, 1], [2, 3, 4]], [[i] for i in range(5)])

ROUNDING = 1e-13
"""Of the gradient's norm: some hundreds of float64 operations between the two ways to add it up."""
OTHER_NUMBERS = 1e-2
"""What other random numbers move the gradients of these models by at least."""


@pytest.fixture(autouse=True)
def _float64() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def setup(name: str, **options: Any) -> Setup:
    torch.manual_seed(0)
    return Setup(MODELS[name](), lines(LENGTHS), **options)


def streamed(one: Setup, parts: Any) -> Tensor:
    """The gradient of the sum over ``parts`` with numbers from torch's generator."""
    one.model.zero_grad()
    torch.manual_seed(1)
    for ids in parts:
        one.total(ids).backward()
    return one.in_a_row()


@pytest.mark.parametrize("name", MODELS)
def test_a_split_and_its_padding_move_no_number(name: str) -> None:
    one = setup(name)
    layouts = one.layouts()
    assert layouts.odd == ()
    whole = one.gradient(WHOLE, layouts)
    found = [apart(one.gradient(parts, layouts), whole) for parts in SPLITS]
    one.pad = 3
    found.append(apart(one.gradient(WHOLE, layouts), whole))
    assert max(found) <= ROUNDING
    one.pad = 0
    # A coin or two may fall alike: in any of some updates, and under any of some seeds.
    for keys in ([(SEED, u) for u in range(1, 6)], [(seed, 0) for seed in range(5)]):
        assert any(apart(one.gradient(WHOLE, layouts, key), whole) > OTHER_NUMBERS for key in keys)


def test_rows_that_the_model_gives_packed_are_known_in_the_loss() -> None:
    class Rows(nn.Linear):
        def forward(self, x: Tensor, mask: Tensor) -> Any:
            held = mask[:, : max(x.shape[1] - 1, 1)].sum(1)  # but the last of the longest
            x = super().forward(x) * F.pad(mask[:, 1:], (0, 1)).unsqueeze(-1)
            return pack_padded_sequence(x, held, batch_first=True, enforce_sorted=False)

    def loss(packed: PackedSequence, _: Tensor) -> Tensor:
        return F.dropout(packed.data, P).square().sum()

    one = Setup(Rows(WIDTH, WIDTH), lines(LENGTHS), loss=loss)
    layouts = one.layouts()
    whole = one.gradient(WHOLE, layouts)
    assert max(apart(one.gradient(parts, layouts), whole) for parts in SPLITS) <= ROUNDING


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("stack", range(5))
def test_neither_does_any_stack_of_layers(stack: int, left: bool) -> None:
    drawn = random.Random(2 * stack + left)
    torch.manual_seed(stack)
    layers = [drawn.choice(LAYERS)() for _ in range(5)]
    lengths = [*(drawn.randint(1, 7) for _ in range(4)), 8]
    one = Setup(Between(nn.Sequential(*layers)), lines(lengths), left=left)
    layouts = one.layouts()
    assert layouts.odd == ()
    whole = one.gradient(WHOLE, layouts)
    found = [apart(one.gradient(parts, layouts), whole) for parts in SPLITS]
    one.pad = 2
    found.append(apart(one.gradient(WHOLE, layouts), whole))
    assert max(found) <= ROUNDING


@pytest.mark.parametrize("name", ["Dropout", "folded, batch second", "LSTM, batch second"])
def test_a_stream_gives_a_split_other_numbers(name: str) -> None:
    one = setup(name)
    whole = streamed(one, WHOLE)
    assert max(apart(streamed(one, parts), whole) for parts in SPLITS) > OTHER_NUMBERS


@pytest.mark.parametrize(
    "name", ["Dropout", "folded", "folded, batch second", "attention", "without padding"]
)
def test_padding_in_front_moves_no_number(name: str) -> None:
    one = setup(name, left=True)
    if name == "attention":  # which looks at what is in front: no padding may be there
        one.data = lines((4,) * 5)
    layouts = one.layouts()
    whole = one.gradient(WHOLE, layouts)
    assert max(apart(one.gradient(parts, layouts), whole) for parts in SPLITS) <= ROUNDING
    assert layouts.from_end == (name in ("Dropout", "folded", "folded, batch second"))


class TestWrongLayouts:
    """Each way to read a batch that a shape alone suggests, where it is wrong."""

    def test_the_examples_in_turn_are_not_one_after_the_other(self) -> None:
        one = setup("folded both ways")
        layouts = one.layouts()
        assert [layout.order for layout in layouts.by_site.values()] == ["major", "minor"]
        for order in ("major", "minor"):
            swapped = {s: replace(held, order=order) for s, held in layouts.by_site.items()}
            assert self._apart(one, replace(layouts, by_site=swapped)) > OTHER_NUMBERS

    def test_positions_behind_padding_are_counted_from_the_end(self) -> None:
        one = setup("Dropout", left=True)
        assert self._apart(one, replace(one.layouts(), from_end=False)) > OTHER_NUMBERS

    def test_an_axis_that_the_batch_divides_is_not_the_batch(self) -> None:
        one = setup("LSTM")  # which turns to (L, N, H): 6 positions, 6 examples
        one.data = lines((6,) * 6)
        layouts = one.layouts()
        assert {layout.axis for layout in layouts.by_site.values()} == {1}
        first = {site: Layout(0) for site in layouts.by_site}
        assert self._apart(one, Layouts(first), splits=[[[0, 1, 2], [3, 4, 5]]]) > OTHER_NUMBERS

    def _apart(self, one: Setup, layouts: Layouts, splits: Any = SPLITS) -> float:
        whole = one.gradient([range(len(one.data))], layouts)
        return max(apart(one.gradient(parts, layouts), whole) for parts in splits)


class TestWhatIsNotByExample:
    """It is said, with its module."""

    @pytest.mark.parametrize(
        ("draw", "said"),
        [
            (lambda x: x[torch.randperm(len(x))], "a permutation of the batch cannot be drawn"),
            (lambda x: x + torch.rand(len(x), len(x)).sum(), "two examples draws 2 by 2 numbers"),
            (
                lambda x: torch.stack([F.dropout(e, P) for e in x]),
                "how often it draws depends",
            ),
            (
                lambda x: x * torch._standard_gamma(torch.ones_like(x)),
                "aten._standard_gamma.default cannot be made from a key",
            ),
            (
                lambda x: x * torch.randn(x.shape, dtype=torch.complex128).abs(),
                "aten.randn.default cannot be made from a key",
            ),
        ],
    )
    def test_by_torch(self, draw: Callable[[Tensor], Tensor], said: str) -> None:
        one = Setup(Between(noise(draw)), lines(LENGTHS))
        (told,) = one.layouts().odd
        assert told.place == Place("noise", "Noise")
        assert said in told.why

    def test_an_axis_with_the_examples_in_the_middle(self) -> None:
        def draw(x: Tensor) -> Tensor:
            turned = x.transpose(0, 1)  # (L, N, W) in one axis
            return F.dropout(turned.flatten(), P).reshape(turned.shape).transpose(0, 1)

        one = Setup(Between(noise(draw)), lines(LENGTHS))
        assert one.layouts().odd[0] == Untied(Place("noise", "Noise"), NO_ORDER)

    def test_an_axis_with_positions_in_the_middle(self) -> None:
        def draw(x: Tensor) -> Tensor:
            turned = x.transpose(1, 2)  # (N, W, L) in one axis
            return F.dropout(turned.flatten(), P).reshape(turned.shape).transpose(1, 2)

        one = Setup(Between(noise(draw)), lines(LENGTHS))
        assert one.layouts().odd == (Untied(Place("noise", "Noise"), NO_PLACE),)

    def test_sequences_that_numpy_sorts_before_they_are_packed(self) -> None:
        def by_numpy(lengths: Tensor) -> Tensor:
            return torch.from_numpy(np.argsort(-lengths.numpy(), kind="stable"))

        one = Setup(PackedSorted(by_numpy), lines((3, 5, 4)))
        with Keyed(one.model, range(3), (SEED, 0), one.layouts()) as keyed:
            one.total(range(3))
        assert keyed.unkeyed == [Untied(Place("cells", "GRU"), NO_PACKING)]

    def test_by_numpy(self) -> None:
        one = Setup(Between(noise(lambda x: x * np.random.rand(len(x)).mean())), lines(LENGTHS))
        layouts = one.layouts()
        assert str(layouts.first) == "at `noise` (Noise)"
        assert layouts.odd == (Untied(None, OTHER_GENERATORS),)

    def test_in_the_forward_alone(self) -> None:
        one = Setup(Between(noise(lambda x: x)), lines(LENGTHS))
        layouts = one.layouts()
        with Keyed(one.model, [0, 1], (SEED, 0), layouts) as keyed:
            F.dropout(one.model(*one.batch([0, 1])), P).sum().backward()
        assert keyed.unkeyed == [Untied(IN_THE_LOSS, NOT_PROBED)]


def test_what_draws_first_is_named() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Dropout(P)), nn.Dropout(P))
    one = Setup(Between(model), lines(LENGTHS))
    assert str(one.layouts().first) == "at `noise.1.0` (Dropout)"
    layers = Setup(Between(LayerDrop()), lines(LENGTHS))
    assert str(layers.layouts().first) == "at `noise` (LayerDrop)"
    loss = Setup(nn.Linear(WIDTH, WIDTH), lines(LENGTHS))
    loss.model.forward = lambda x, _: F.dropout(x, P) * loss.model.weight.sum()
    assert str(loss.layouts().first) == "in the model's own forward (Linear)"


def test_a_module_run_part_by_part_draws_for_each_part() -> None:
    one = setup("folded both ways")
    layouts = one.layouts()
    inner = one.model.noise

    def by_parts(x: Tensor) -> Tensor:
        parts = zip(x.split([2, 3]), in_turn([2, 3]), strict=True)
        return torch.cat([inner(part) for part, _ in parts])

    whole = one.gradient(WHOLE, layouts)
    one.model.forward = lambda x, _: one.model.after(by_parts(torch.sin(one.model.before(x))))
    assert apart(one.gradient(WHOLE, layouts), whole) <= ROUNDING


def test_generators_are_left_as_they_were() -> None:
    own = OwnGenerator()
    one = Setup(Between(nn.Sequential(own, LayerDrop())), lines(LENGTHS))
    before, held = RandomState.now(), own.generator.get_state()
    one.gradient(WHOLE, one.layouts())
    assert not before.moved()
    assert torch.equal(own.generator.get_state(), held)


def test_masks_are_independent() -> None:
    """Between examples, modules, calls and updates: 4,096 coins, correlation below 5 / 64."""
    drop = nn.Dropout(0.5)
    model = nn.ModuleList([drop, nn.Dropout(0.5)])
    x = torch.ones(2, 4096)
    masks = []
    for update in (0, 1):
        sites = [Site(Place(p, "Dropout"), call) for p, call in (("0", 0), ("0", 1), ("1", 0))]
        with Keyed(model, [3, 4], (SEED, update), Layouts(dict.fromkeys(sites, Layout(0)))):
            masks += [drop(x), drop(x), model[1](x)]
    rows = torch.cat(masks)  # 0 or 2: 12 masks, each of variance 1 around 1
    assert len(rows) == 12
    correlations = (rows - 1) @ (rows - 1).T / 4096 - torch.eye(12)
    assert correlations.abs().max() < 5 / 64
    assert (rows.mean(1) - 1).abs().max() < 5 / 64


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # the inner of two
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("nested", [False, True])
def test_what_is_computed_again_draws_the_same(use_reentrant: bool, nested: bool) -> None:
    def checkpointed(use: bool | None) -> Setup:
        torch.manual_seed(0)
        return Setup(Checkpointed(use, nested), lines(LENGTHS))

    plain, again = checkpointed(None), checkpointed(use_reentrant)
    layouts = plain.layouts()
    whole = plain.gradient(WHOLE, layouts)
    assert again.layouts() == layouts
    assert torch.equal(again.gradient(WHOLE, layouts), whole)
    assert max(apart(again.gradient(parts, layouts), whole) for parts in SPLITS) <= ROUNDING
