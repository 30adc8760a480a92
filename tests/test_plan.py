"""Plans: which products there are, and which example goes where."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equivtest import Plan, PlanError, plans
from equivtest.plan import comparable, layout, smaller

# -- products


@pytest.mark.parametrize(
    ("m", "A", "D", "examples"), [(2, 8, 2, 32), (1, 16, 2, 32), (4, 4, 2, 32), (2, 8, 1, 16)]
)
def test_a_plan_has_the_product_of_its_sizes_in_examples(
    m: int, A: int, D: int, examples: int
) -> None:
    assert Plan(m, A, D).examples == examples


def test_tensor_parallel_processes_share_their_replicas_examples() -> None:
    plan = Plan(2, 8, 2, tp=2)
    assert plan.examples == 32  # 2 x 8 x 2, not 64
    assert plan.processes == 4


def test_pipeline_and_tensor_parallel_processes_multiply() -> None:
    plan = Plan(1, 2, 2, tp=2, pp=3)
    assert (plan.examples, plan.processes) == (4, 12)


def test_unequal_microbatches_are_added_up_for_each_replica() -> None:
    plan = Plan((5, 2, 1), A=3, D=2)
    assert plan.sizes == (5, 2, 1)
    assert plan.examples == 16  # (5 + 2 + 1) x 2


def test_a_list_of_sizes_makes_the_same_plan_as_a_tuple() -> None:
    assert Plan([3, 1], 2, 2) == Plan((3, 1), 2, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (Plan(2, 4, 2), "m2-A4-D2"),
        (Plan((3, 1), 2, 2), "m3+1-A2-D2"),
        (Plan(2, 8, 2, tp=2), "m2-A8-D2-tp2"),
        (Plan(1, 1, 1, tp=2, pp=4), "m1-A1-D1-tp2-pp4"),
    ],
)
def test_a_plan_reads_as_its_sizes(plan: Plan, text: str) -> None:
    assert str(plan) == text


@pytest.mark.parametrize(
    ("plan", "arithmetic"),
    [(Plan(2, 8, 2), "2 x 8 x 2 = 32"), (Plan((3, 1), 2, 2), "(3 + 1) x 2 = 8")],
)
def test_a_plan_shows_its_product_in_figures(plan: Plan, arithmetic: str) -> None:
    assert plan.arithmetic == arithmetic


# -- every factorisation


def test_there_are_fifteen_plans_of_32_examples_on_up_to_four_replicas() -> None:
    # 32 = 2^5: 6 pairs (m, A) at D=1, 5 of 16 at D=2, 4 of 8 at D=4.
    found = plans(32, max_D=4)
    assert len(found) == 15
    assert [sum(p.D == D for p in found) for D in (1, 2, 4)] == [6, 5, 4]


def test_plans_of_12_are_every_ordered_triple_with_that_product() -> None:
    # 12 = 2^2 x 3: C(4, 2) x C(3, 2) = 6 x 3 ordered triples.
    found = {(p.m, p.A, p.D) for p in plans(12)}
    triples = {
        (m, A, D)
        for m in range(1, 13)
        for A in range(1, 13)
        for D in range(1, 13)
        if m * A * D == 12
    }
    assert found == triples
    assert len(plans(12)) == 18


def test_plans_come_by_replicas_and_then_by_accumulations() -> None:
    assert [str(p) for p in plans(4, max_D=2)] == [
        "m4-A1-D1",
        "m2-A2-D1",
        "m1-A4-D1",
        "m2-A1-D2",
        "m1-A2-D2",
    ]


def test_a_bound_on_the_microbatch_leaves_out_the_larger_ones() -> None:
    assert {p.m for p in plans(32, max_D=1, max_m=4)} == {1, 2, 4}


# -- refusals: the argument, what was given, the arithmetic


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: Plan(0, 1, 1), ["m=0"]),
        (lambda: Plan(1, -2, 1), ["A=-2"]),
        (lambda: Plan(1, 1, 2.0), ["D=2.0"]),
        (lambda: Plan(1, 1, True), ["D=True"]),
        (lambda: Plan(1, 1, 1, tp=0), ["tp=0"]),
        (lambda: Plan((2, 0), 2, 1), ["m=0"]),
        (lambda: Plan((2, 1, 1), 2, 1), ["m=(2, 1, 1)", "3 microbatch sizes", "A=2"]),
        (lambda: plans(0), ["B=0"]),
        (lambda: plans(8, max_D=0), ["max_D=0"]),
        (lambda: plans(8, max_m="4"), ["max_m='4'"]),
    ],
)
def test_a_size_that_cannot_be_is_named_with_what_was_given(make, parts: list[str]) -> None:
    with pytest.raises(PlanError) as error:
        make()
    assert [part for part in parts if part not in str(error.value)] == []


def test_plans_of_one_product_are_comparable() -> None:
    assert comparable([Plan(2, 8, 2), Plan(1, 16, 2), Plan(4, 4, 2)]) == 32


def test_plans_of_different_products_are_refused_with_both_products() -> None:
    with pytest.raises(PlanError, match=r"2 x 8 x 2 = 32.*2 x 8 x 1 = 16.*different experiments"):
        comparable(iter([Plan(2, 8, 2), Plan(2, 8, 1)]))


def test_comparing_no_plan_is_refused() -> None:
    with pytest.raises(PlanError, match="no plan was given"):
        comparable([])


# -- which example goes where


def test_replicas_and_microbatches_are_contiguous() -> None:
    (group,) = layout(Plan(2, 2, 2), 8, updates=1)
    assert group.ids == (((0, 1), (2, 3)), ((4, 5), (6, 7)))
    assert group.flat == tuple(range(8))
    assert not group.partial


def test_unequal_microbatches_are_cut_in_their_order_on_each_replica() -> None:
    (group,) = layout(Plan((3, 1), 2, 2), 8, updates=1)
    assert group.ids == (((0, 1, 2), (3,)), ((4, 5, 6), (7,)))
    assert group.shape == ((3, 1), (3, 1))


def test_every_plan_of_a_product_puts_the_same_examples_into_each_group() -> None:
    for plan in plans(12):
        groups = layout(plan, 24, updates=2)
        assert [group.flat for group in groups] == [tuple(range(12)), tuple(range(12, 24))]


def test_an_epoch_begins_again_where_the_data_end() -> None:
    groups = layout(Plan(2, 1, 1), 4, updates=5)
    assert [group.epoch for group in groups] == [0, 0, 1, 1, 2]
    assert [group.update for group in groups] == [0, 1, 2, 3, 4]
    assert [group.flat for group in groups[:4]] == [(0, 1), (2, 3), (0, 1), (2, 3)]


def test_left_over_examples_want_a_decision() -> None:
    with pytest.raises(PlanError, match=r"30 examples.*2 x 2 x 2 = 8.*6 are left over.*last_group"):
        layout(Plan(2, 2, 2), 30, updates=4)


def test_left_over_examples_that_no_update_reaches_want_none() -> None:
    groups = layout(Plan(2, 2, 2), 30, updates=3)
    assert groups[-1].flat == tuple(range(16, 24))


def test_the_last_group_is_processed_as_a_smaller_one() -> None:
    # 11 = 8 + 3: replicas get 2 and 1, in one microbatch each, which holds up to 2.
    groups = layout(Plan(2, 2, 2), 11, updates=3, last_group="process")
    assert groups[1].ids == (((8, 9),), ((10,),))
    assert [group.partial for group in groups] == [False, True, False]
    assert groups[2].flat == tuple(range(8))


def test_the_last_group_is_dropped_and_its_examples_are_named_in_the_next() -> None:
    groups = layout(Plan(2, 2, 2), 11, updates=3, last_group="drop")
    assert [group.epoch for group in groups] == [0, 1, 2]
    assert [group.dropped for group in groups] == [(), (8, 9, 10), (8, 9, 10)]
    assert not any(group.partial for group in groups)


def test_dropped_examples_are_named_once() -> None:
    # 9 = 2 groups of 4 + 1, an epoch.
    groups = layout(Plan(2, 2, 1), 9, updates=4, last_group="drop")
    assert [group.dropped for group in groups] == [(), (), (8,), ()]


def test_dropping_the_only_group_is_refused_with_its_arithmetic() -> None:
    with pytest.raises(PlanError, match=r"leaves no group: 5 examples.*2 x 2 x 2 = 8"):
        layout(Plan(2, 2, 2), 5, updates=1, last_group="drop")


def test_a_replica_without_examples_still_gets_as_many_microbatches() -> None:
    # One example for three replicas: the others run an empty microbatch, or the reduction hangs.
    (group,) = layout(Plan(2, 2, 3), 1, updates=1, last_group="process")
    assert group.ids == (((0,),), ((),), ((),))


def test_a_replica_with_fewer_examples_keeps_one_for_each_microbatch_while_they_last() -> None:
    # 5 over two replicas of m=2, A=2: 3 and 2. Both need two microbatches; the second deals 1 + 1
    # rather than 2 + 0.
    (group,) = layout(Plan(2, 2, 2), 5, updates=1, last_group="process")
    assert group.ids == (((0, 1), (2,)), ((3,), (4,)))


def test_no_examples_at_all_are_refused() -> None:
    with pytest.raises(PlanError, match="data has 0 examples"):
        layout(Plan(1, 1, 1), 0, updates=1)


def test_no_updates_are_refused() -> None:
    with pytest.raises(PlanError, match="updates=0"):
        layout(Plan(1, 1, 1), 4, updates=0)


# -- order


def _epochs(seed: int, shuffle: bool = True) -> list[tuple[int, ...]]:
    groups = layout(Plan(4, 2, 2), 16, updates=3, shuffle=shuffle, seed=seed)
    return [group.flat for group in groups]


def test_shuffled_epochs_have_orders_of_their_own() -> None:
    first, second, third = _epochs(seed=0)
    assert len({first, second, third, tuple(range(16))}) == 4


def test_the_order_is_a_function_of_the_seed() -> None:
    assert _epochs(seed=3) == _epochs(seed=3)
    assert _epochs(seed=3) != _epochs(seed=4)


def test_the_order_does_not_depend_on_the_plan() -> None:
    found = {
        tuple(group.flat for group in layout(plan, 16, updates=3, shuffle=True, seed=1))
        for plan in plans(16)
    }
    assert len(found) == 1


def test_without_shuffling_every_epoch_has_the_order_of_the_data() -> None:
    assert _epochs(seed=7, shuffle=False) == [tuple(range(16))] * 3


# -- properties

sizes = st.integers(1, 5)
a_plan = st.builds(Plan, sizes, sizes, st.integers(1, 6)) | st.lists(
    sizes, min_size=1, max_size=4
).flatmap(lambda m: st.builds(lambda D: Plan(tuple(m), len(m), D), st.integers(1, 6)))
property_test = settings(deadline=None, derandomize=True, max_examples=200)


@property_test
@given(plan=a_plan, n=st.integers(1, 200), shuffle=st.booleans(), seed=st.integers(0, 99))
def test_each_epoch_uses_every_example_once(plan: Plan, n: int, shuffle: bool, seed: int) -> None:
    in_an_epoch = -(-n // plan.examples)
    groups = layout(
        plan, n, updates=2 * in_an_epoch, shuffle=shuffle, last_group="process", seed=seed
    )
    for epoch in (0, 1):
        used = sorted(i for group in groups if group.epoch == epoch for i in group.flat)
        assert used == list(range(n))


@property_test
@given(plan=a_plan, left=st.integers(1, 150))
def test_leftovers_are_dealt_evenly_and_in_order(plan: Plan, left: int) -> None:
    left = min(left, plan.examples - 1)
    if left == 0:
        return
    (group,) = layout(plan, left, updates=1, last_group="process")
    shares = [sum(replica) for replica in group.shape]
    assert sum(shares) == left
    assert max(shares) - min(shares) <= 1
    assert group.flat == tuple(range(left))
    lengths = {len(replica) for replica in group.ids}
    assert len(lengths) == 1
    assert 1 <= lengths.pop() <= plan.A
    for replica in group.shape:
        assert all(size <= most for size, most in zip(replica, plan.sizes, strict=False))
        # An empty microbatch only where the replica has fewer examples than microbatches.
        assert min(replica) >= 1 or sum(replica) < len(replica)


@property_test
@given(plan=a_plan, groups=st.integers(1, 4))
def test_full_groups_have_the_plans_shape(plan: Plan, groups: int) -> None:
    for group in layout(plan, groups * plan.examples, updates=groups):
        assert group.shape == (plan.sizes,) * plan.D
        assert all(b == a + 1 for a, b in pairwise(group.flat))


@property_test
@given(plan=a_plan, n=st.integers(1, 200))
def test_dropped_and_used_examples_are_the_whole_epoch(plan: Plan, n: int) -> None:
    if n < plan.examples:
        return
    used = n // plan.examples
    *epoch, following = layout(plan, n, updates=used + 1, last_group="drop", shuffle=True)
    assert sorted((*(i for g in epoch for i in g.flat), *following.dropped)) == list(range(n))


@property_test
@given(B=st.integers(1, 60), max_D=st.integers(1, 8))
def test_plans_are_distinct_and_of_their_product(B: int, max_D: int) -> None:
    found = plans(B, max_D=max_D)
    assert all(p.examples == B and p.D <= max_D for p in found)
    assert len(set(found)) == len(found)
    # The number of (D, A) with D | B and A | B / D, counted by trial.
    assert len(found) == sum(B % (D * A) == 0 for D in range(1, max_D + 1) for A in range(1, B + 1))


# -- a smaller microbatch of the same product


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (Plan(2, 8, 2), Plan(1, 16, 2)),
        (Plan(12, 1, 1), Plan(6, 2, 1)),
        (Plan(9, 2, 3), Plan(3, 6, 3)),
        (Plan(7, 1, 2), Plan(1, 7, 2)),  # a prime has no halves
        (Plan(4, 2, 2, tp=2), Plan(2, 4, 2, tp=2)),
        (Plan((3, 2), 2, 1), Plan((2, 1, 2), 3, 1)),
        (Plan((5, 1), 2, 2), Plan((3, 2, 1), 3, 2)),
        (Plan((2, 2), 2, 2), Plan(1, 4, 2)),  # equal parts are one number
        (Plan(1, 8, 2), None),
        (Plan((1, 1), 2, 2), None),
    ],
    ids=str,
)
def test_the_next_smaller_microbatch(plan: Plan, expected: Plan | None) -> None:
    assert smaller(plan) == expected


@property_test
@given(plan=a_plan)
def test_a_smaller_plan_is_of_the_same_product_and_has_a_smaller_largest_microbatch(
    plan: Plan,
) -> None:
    other = smaller(plan)
    assert (other is None) == (max(plan.sizes) == 1)
    if other is not None:
        assert (other.examples, other.D) == (plan.examples, plan.D)
        assert 2 * max(other.sizes) <= max(plan.sizes) + 1
