"""Who is named when several ranks have ended in different ways."""

from equivtest.pool.failure import Ending, RankFailed, Timeout, diagnose, explain_status

GONE = "[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:35401"


def raised(rank: int, message: str, order: int = 0) -> Ending:
    return Ending(
        rank, "raised", order, exception_type="RuntimeError", exception_message=message, text="tb"
    )


def name(*endings: Ending, timeout_s: float | None = None) -> RankFailed:
    return diagnose(endings, timeout_s=timeout_s, solo=False)


def test_a_dead_rank_comes_before_those_that_report_it() -> None:
    error = name(raised(0, GONE), Ending(1, "died", 1, status=9), raised(2, GONE, 2))
    assert (error.rank, error.what) == (1, "was killed by SIGKILL")


def test_the_rank_that_raised_comes_before_those_that_report_a_closed_connection() -> None:
    assert name(raised(0, GONE, 0), raised(1, "mine", 1)).rank == 1


def test_of_two_of_a_kind_the_first_is_named() -> None:
    assert name(raised(0, "second", 1), raised(1, "first", 0)).rank == 1


def test_no_rank_is_named_where_none_is_more_to_blame() -> None:
    frame = 'File "torch/distributed/distributed_c10d.py", line 1 in all_reduce'
    stack = f"Current thread (most recent call first):\n  {frame}"
    error = name(Ending(0, "waiting", text=stack), Ending(1, "waiting", text=stack), timeout_s=5)
    assert isinstance(error, Timeout)
    assert error.rank is None
    assert str(error).startswith("all 2 ranks did not finish within 5 s\n")


def test_a_status_is_explained() -> None:
    assert explain_status(9) == "was killed by SIGKILL"
    assert explain_status(3 << 8) == "exited with code 3"
    assert "C++" in explain_status(6)
    assert explain_status(6 | 0x80) == explain_status(6)  # with a core dump
