"""Contribution weights: planted ones are recovered, and nothing is claimed that cannot be known."""

import pytest
import torch
from torch import Tensor

from equivtest.compare.weights import Weights, fit

KEYS = [(r, k) for r in range(2) for k in range(3)]


def independent(tensors: int = 3, elements: int = 40) -> dict[tuple[int, int], list[Tensor | None]]:
    generator = torch.Generator().manual_seed(0)
    return {
        key: [
            torch.randn(elements, generator=generator, dtype=torch.float64) for _ in range(tensors)
        ]
        for key in KEYS
    }


def weighed(parts, weights: dict[tuple[int, int], float]) -> list[Tensor]:
    tensors = len(next(iter(parts.values())))
    return [sum(weights.get(k, 1.0) * p[t] for k, p in parts.items()) for t in range(tensors)]


def scales(parts) -> list[float]:
    tensors = len(next(iter(parts.values())))
    return [sum(float(p[t].norm()) for p in parts.values()) for t in range(tensors)]


def fitted(planted, dtype=torch.float64, parts=None) -> Weights:
    parts = parts or independent()
    gradient = [g.to(dtype) for g in weighed(parts, planted)]
    return fit(parts, weighed(parts, {}), gradient, scales(parts))


PLANTED = {(0, 0): 0.0, (0, 1): 2.0, (1, 1): 1.0 + 1e-4, (1, 2): -3.0}


def test_planted_weights_are_recovered_to_1e_15_in_float64() -> None:
    found = fitted(PLANTED).found
    for key in KEYS:
        # u times the condition of six nearly orthogonal vectors, and a few sums of 120 elements.
        assert found[key] == pytest.approx(PLANTED.get(key, 1.0), abs=3e-15)


def test_planted_weights_are_recovered_to_1e_7_from_a_float32_gradient() -> None:
    found = fitted(PLANTED, torch.float32).found
    for key in KEYS:
        assert found[key] == pytest.approx(PLANTED.get(key, 1.0), abs=1e-7)


def test_the_microbatches_with_another_weight_are_named() -> None:
    assert fitted(PLANTED).differ() == [(0, 0), (0, 1), (1, 1), (1, 2)]


def test_weights_of_one_name_no_microbatch() -> None:
    assert fitted({}).differ() == []
    assert fitted({}, torch.float32).differ() == []


@pytest.mark.parametrize(("error", "named"), [(3e-5, []), (9e-5, [(0, 1)])])
def test_a_weight_is_another_one_beyond_a_thousand_roundoffs(error: float, named: list) -> None:
    # 10^3 x 2^-24 = 6.0e-5
    assert fitted({(0, 1): 1 + error}, torch.float32).differ() == named


def test_weights_explain_a_gradient_that_is_made_of_the_microbatches() -> None:
    assert max(fitted(PLANTED).residual) < 1e-15


def test_what_no_weights_explain_stays_in_the_residual_of_its_tensor() -> None:
    parts = independent()
    gradient = weighed(parts, {})
    # A direction that no microbatch has: 0.5 of the tensor's scale long, in tensor 1.
    strange = torch.zeros(40, dtype=torch.float64)
    columns = torch.stack([p[1] for p in parts.values()])
    strange[0] = 1.0
    strange -= torch.linalg.lstsq(columns.T, strange[:, None]).solution[:, 0] @ columns
    gradient[1] = gradient[1] + strange / strange.norm() * 0.5 * scales(parts)[1]
    found = fit(parts, weighed(parts, {}), gradient, scales(parts))
    assert found.residual[1] == pytest.approx(0.5, rel=1e-9)
    assert max(found.residual[0], found.residual[2]) < 1e-12
    assert found.differ() == []


def test_microbatches_that_cannot_be_told_apart_share_what_is_missing() -> None:
    # Two equal gradients: a double and a missing one add up to the plan's. Nothing is claimed.
    same = torch.ones(8, dtype=torch.float64)
    parts = {(0, 0): [same], (0, 1): [same]}
    found = fit(parts, [2 * same], [2.0 * same + 0.0 * same], [2 * float(same.norm())])
    assert found.differ() == []
    # Three times where two were wanted: the least that explains it is 1.5 on each.
    found = fit(parts, [2 * same], [3 * same], [2 * float(same.norm())])
    assert list(found.found.values()) == pytest.approx([1.5, 1.5], rel=1e-12)


def test_where_microbatches_outnumber_elements_nothing_is_claimed() -> None:
    # Six weights of two numbers: one is doubled, and the least that explains it moves all six.
    parts = {key: [g[:2] for g in tensors[:1]] for key, tensors in independent().items()}
    found = fitted({(0, 1): 2.0}, parts=parts)
    assert max(found.residual) < 1e-14
    assert found.differ() == []


def test_what_can_be_told_apart_is_claimed_beside_what_cannot() -> None:
    # Microbatches 0 and 1 are the same, 2 is another: its weight alone is known.
    same, other = torch.eye(4, dtype=torch.float64)[:2]
    parts = {(0, 0): [same], (0, 1): [same], (0, 2): [other]}
    found = fitted({(0, 0): 3.0, (0, 2): 0.5}, parts=parts)
    assert found.differ() == [(0, 2)]
    assert found.found[0, 2] == pytest.approx(0.5, rel=1e-14)


def test_more_microbatches_than_elements_do_not_blow_up() -> None:
    parts = {key: [g[:2] for g in tensors[:1]] for key, tensors in independent().items()}
    found = fitted({}, parts=parts)
    assert found.differ() == []
    assert max(found.residual) < 1e-14


def test_nearly_dependent_gradients_have_uncertain_weights() -> None:
    # Apart by 1e-5 in one direction: a float32 gradient (6e-8) says nothing below 6e-3 about each.
    base = torch.ones(16, dtype=torch.float64)
    tilt = torch.linspace(-1, 1, 16, dtype=torch.float64)
    parts = {(0, 0): [base], (0, 1): [base + 1e-5 * tilt]}
    scale = scales(parts)
    single = lambda weights: [g.float() for g in weighed(parts, weights)]  # noqa: E731
    found = fit(parts, weighed(parts, {}), single({}), scale)
    assert min(found.sigma.values()) > 1e-3
    off = fit(parts, weighed(parts, {}), single({(0, 0): 1.001, (0, 1): 0.999}), scale)
    assert off.differ() == []


def test_none_is_a_contribution_of_nothing() -> None:
    one = torch.ones(3, dtype=torch.float64)
    parts = {(0, 0): [one, None], (0, 1): [None, one]}
    found = fit(parts, [one, one], [2 * one, None], [1.0, 1.0])
    assert found.found == pytest.approx({(0, 0): 2.0, (0, 1): 0.0})


def test_complex_gradients_are_fitted_by_real_weights() -> None:
    a = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128)
    b = torch.tensor([2j, 1 + 1j], dtype=torch.complex128)
    found = fit({(0, 0): [a], (0, 1): [b]}, [a + b], [0.5 * a + b], [1.0])
    assert found.found == pytest.approx({(0, 0): 0.5, (0, 1): 1.0}, rel=1e-14)


def test_a_tensor_without_scale_tells_nothing() -> None:
    zero, one = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    parts = {(0, 0): [zero, one], (0, 1): [zero, 2 * one]}
    found = fit(parts, [zero, 3 * one], [one, 3 * one], [0.0, 1.0])
    assert found.differ() == []
    assert found.residual[0] == float("inf")


def test_as_many_weights_as_elements_explain_anything_and_say_nothing() -> None:
    parts = {(0, k): [torch.eye(4, dtype=torch.float64)[k]] for k in range(4)}
    expected = torch.ones(4, dtype=torch.float64)
    odd = torch.tensor([3.0, -2.0, 0.5, 7.0], dtype=torch.float64)
    weights = fit(parts, [expected], [odd], [4.0])
    assert weights.residual[0] < 1e-12  # it does explain it
    assert weights.differ() == []
    assert not weights.explain(0.1)


def test_what_is_zero_in_exact_arithmetic_tells_no_weight() -> None:
    """One element of rounding: six weights give any."""
    parts = independent()
    for part in parts.values():
        part.append(torch.full((1,), 1e-17, dtype=torch.float64))
    odd = [*weighed(parts, {})[:3], torch.full((1,), 1.5e-17, dtype=torch.float64)]
    given = (parts, weighed(parts, {}), odd, scales(parts))
    assert min(fit(*given).found.values()) < 0.5
    found = fit(*given, null=[False] * 3 + [True])
    assert list(found.found.values()) == pytest.approx([1.0] * 6, abs=1e-14)
    assert max(found.initial) < 1e-15
