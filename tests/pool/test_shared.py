import gc

import torch

from equivtest.pool import Pool, Seat, Shared
from equivtest.pool.shared import KEPT, Ledger


def add_one(seat: Seat, arguments: dict[str, torch.Tensor]) -> float:
    arguments["x"].add_(1)
    return arguments["x"][0].item()


def test_a_job_in_the_ranks_cannot_change_it_for_the_next(pool: Pool) -> None:
    for size in (10, 100_000):
        shared = Shared({"x": torch.zeros(size)})
        assert [pool.run(add_one, shared, D=2) for _ in range(3)] == [[1.0, 1.0]] * 3
        assert shared.obj["x"][0] == 0.0


def test_the_single_process_keeps_the_object(pool: Pool) -> None:
    shared = Shared({"x": torch.zeros(10)})
    assert [pool.solo(add_one, shared) for _ in range(3)] == [1.0, 2.0, 3.0]


def test_it_arrives_unwrapped_wherever_it_stands_in_the_arguments(pool: Pool) -> None:
    shared = Shared([1, 2])
    assert pool.solo(lambda seat, a, b: a["deep"] is b, {"deep": shared}, shared)


def test_the_bytes_are_sent_once(pool: Pool) -> None:
    shared = Shared(torch.zeros(100_000))
    pool.run(lambda seat, x: None, shared, D=2)
    blob = shared.blob
    pool.run(lambda seat, x: None, shared, D=2)
    assert shared.blob is blob
    ledger = Ledger()
    assert ledger.plan([shared]) == ([shared], [])
    assert ledger.plan([shared, Shared(torch.zeros(100_000))]) == ([], [])


def test_a_process_keeps_the_last_ones_only(pool: Pool) -> None:
    many = [Shared(i) for i in range(KEPT + 2)]
    ledger = Ledger()
    for shared in many:
        ledger.plan([shared])
    assert ledger.plan([many[0]]) == ([many[0]], [many[2].digest])
    for _ in range(2):
        assert [pool.solo(lambda seat, x: x, shared) for shared in many] == list(range(KEPT + 2))
    assert pool.solo(lambda seat, xs: xs, many) == list(range(KEPT + 2))


def test_equal_contents_have_equal_digests() -> None:
    assert Shared([1, 2]).digest == Shared([1, 2]).digest
    assert Shared([1, 2]).digest != Shared([1, 3]).digest
    gc.collect()
