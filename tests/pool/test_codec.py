"""Values survive the way between processes, and share memory there as they did here."""

import enum
import functools
import sys
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from equivtest.pool import Pool, PoolError, Seat
from equivtest.pool.codec import Sealed, decode, encode

TENSORS = {
    "float32": torch.arange(6.0).reshape(2, 3),
    "bfloat16": torch.arange(6.0).bfloat16(),
    "float16": torch.arange(6.0).half(),
    "bool": torch.tensor([True, False]),
    "zero-dim": torch.tensor(3.5, dtype=torch.float64),
    "no element": torch.empty(0, 4),
    "complex": torch.tensor([1 + 2j, 3 - 1j]),
    "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "transposed": torch.arange(6).reshape(2, 3).T,
    "strided": torch.arange(10)[::3],
    "expanded": torch.tensor([2.0]).expand(4),
    "sparse": torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (3,), check_invariants=True),
    "large": torch.arange(100_000.0),
    "requires grad": torch.ones(2, requires_grad=True),
    "parameter": nn.Parameter(torch.ones(2)),
    "frozen parameter": nn.Parameter(torch.ones(2), requires_grad=False),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_of_any_kind_survives(pool: Pool, kind: str) -> None:
    tensor = TENSORS[kind]
    for back in (decode(encode(tensor)), pool.solo(lambda seat, t: t, tensor)):
        assert type(back) is type(tensor)
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert (back.layout, back.requires_grad) == (tensor.layout, tensor.requires_grad)
        if tensor.layout is torch.strided:
            assert back.stride() == tensor.stride()
        assert torch.equal(back.to_dense(), tensor.to_dense())


@pytest.mark.parametrize("size", [10, 100_000], ids=["inline", "mapped"])
def test_shared_memory_is_sent_once_and_still_shared(size: int) -> None:
    base = torch.zeros(size)
    blob = encode({"base": base, "view": base[2:4], "again": base, "detached": base.detach()})
    one = encode(base)
    sent = len(blob.payload) + len(blob.files) * base.nbytes
    assert sent < len(one.payload) + len(one.files) * base.nbytes + 1_000
    back = decode(blob)
    assert back["base"] is back["again"]
    back["base"][3] = 5.0
    assert back["view"].tolist() == [0.0, 5.0]
    assert back["detached"][3] == 5.0


def test_each_decoding_has_memory_of_its_own() -> None:
    blob = encode(torch.zeros(100_000))
    decode(blob).fill_(1.0)
    assert decode(blob).sum() == 0.0


def test_a_sealed_object_is_opened_where_it_arrives(pool: Pool) -> None:
    sent = [{"small": torch.arange(3.0) * k, "large": torch.full((100_000,), k)} for k in (1, 2)]
    sealed = [Sealed(encode(one)) for one in sent]
    own = torch.arange(100_000.0)
    first, back, second = pool.solo(lambda seat, *a: a, sealed[0], own, sealed[1])
    assert torch.equal(back, own)
    for found, wanted in zip((first, second), sent, strict=True):
        assert torch.equal(found["small"], wanted["small"])
        assert torch.equal(found["large"], wanted["large"])


def test_results_of_ranks_can_be_sent_on_unopened(pool: Pool) -> None:
    sealed = pool.run(lambda seat: torch.full((100_000,), float(seat.rank)), D=2, sealed=True)
    assert all(isinstance(one, Sealed) for one in sealed)
    assert pool.solo(lambda seat, a: [t.sum().item() for t in a], sealed) == [0.0, 100_000.0]


def test_submodules_that_a_function_reaches_by_name_are_imported_with_it() -> None:
    import xml.dom.minidom

    def root(text: str) -> str:
        return xml.dom.minidom.parseString(text).documentElement.tagName

    root.__module__ = "__main__"  # travels by value
    blob = encode(root)
    assert b"xml.dom.minidom" in blob.payload
    assert b"xml.dom.pulldom" not in blob.payload
    assert decode(blob)("<a/>") == "a"


def test_tied_parameters_stay_tied(pool: Pool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    back = pool.solo(lambda seat, m: m, model)
    assert back[1].weight is back[0].weight


class Colour(enum.Enum):
    RED = 1


@dataclass(frozen=True)
class Point:
    x: float
    colour: Colour = Colour.RED


@functools.cache
def doubled(x: float) -> float:
    return 2 * x


def test_what_a_test_module_defines_goes_there_and_back(pool: Pool) -> None:
    def job(seat: Seat, point: Point) -> Point:
        assert isinstance(point, Point)
        assert point.colour is Colour.RED
        return Point(doubled(point.x), point.colour)

    (back,) = pool.run(job, Point(1.5), D=1)
    assert back == Point(3.0, Colour.RED)
    assert type(back) is Point
    assert back.colour is Colour.RED


def test_a_module_that_nobody_else_can_import_travels_along(pool: Pool) -> None:
    module = types.ModuleType("made_by_hand")
    module.__file__ = __file__
    module.answer = 42  # type: ignore[attr-defined]
    sys.modules["made_by_hand"] = module
    try:
        assert pool.solo(lambda seat: module.answer) == 42
    finally:
        del sys.modules["made_by_hand"]


@pytest.mark.parametrize(
    "module", [torch.backends.mkldnn, torch.backends.cudnn, torch.ops, torch.ops.aten]
)
def test_a_module_of_a_class_of_its_own_is_imported_there(module: types.ModuleType) -> None:
    assert type(module) is not types.ModuleType
    assert decode(encode(module)) is module


def test_a_job_may_mention_the_backends_of_torch(pool: Pool) -> None:
    def job(seat: Seat) -> bool:
        return bool(torch.backends.mkldnn.enabled)

    assert pool.run(job, D=1) == [torch.backends.mkldnn.enabled]


def test_what_cannot_be_sent_is_named(pool: Pool) -> None:
    def job(seat: Seat, *args: Any) -> None:
        pass

    generator = (i for i in range(3))
    with pytest.raises(PoolError, match=r"argument 1 of .*job \(a generator\) cannot be sent"):
        pool.run(job, 1, generator, D=2)
    with pytest.raises(PoolError, match=r"result .* cannot be sent back"):
        pool.solo(lambda seat: (i for i in range(3)))
