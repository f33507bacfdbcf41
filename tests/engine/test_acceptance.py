"""Saying no at once: caps on what waits, and deadlines that are out of reach."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagemill.engine.acceptance import (
    GRACE_S,
    MAX_RETRY_MS,
    MIN_RETRY_MS,
    RETRY_MS,
    Acceptance,
    QueueCaps,
)
from pagemill.engine.errors import RequestError
from pagemill.engine.policy import Backlog
from tests.engine.toy_engine import outlook

STEADY = outlook((0.0, 0.0), (10.0, 10.0), (20.0, 20.0))


def refusal(call: Callable[[], None]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        call()
    return caught.value


def test_the_cap_counts_at_acceptance() -> None:
    """A burst cannot overshoot: whoever was let in counts before the next is looked at."""
    acceptance = Acceptance(QueueCaps(max_waiting_requests=5))
    for _ in range(5):
        acceptance.accept(10)
    error = refusal(lambda: acceptance.accept(10))
    assert (error.code, error.retry_after_ms) == ("queue_full", RETRY_MS)
    assert acceptance.backlog == Backlog(5, 50), "a refusal leaves nothing behind"
    acceptance.leave(10)
    acceptance.accept(10)
    assert refusal(lambda: acceptance.accept(10, outlook=STEADY)).retry_after_ms == 1000  # one has to go


def test_the_cap_in_tokens_takes_any_one_request() -> None:
    acceptance = Acceptance(QueueCaps(max_waiting_prompt_tokens=1000))
    acceptance.accept(5000)
    error = refusal(lambda: acceptance.accept(1, outlook=STEADY))
    assert error.code == "queue_full"
    assert error.retry_after_ms == 41_000 - 1000 + 10, "4,001 tokens are 40.01 requests of the mean size"
    error = refusal(lambda: acceptance.accept(10**6, outlook=STEADY))
    assert error.retry_after_ms == 50_000, "when what waits has gone, there is room for any one"
    acceptance.leave(5000)
    acceptance.accept(400)
    acceptance.accept(600)
    assert refusal(lambda: acceptance.accept(1)).code == "queue_full"


def test_no_caps_no_refusal() -> None:
    acceptance = Acceptance(QueueCaps())
    for _ in range(1000):
        acceptance.accept(10_000, time_left_s=0.001)
    assert acceptance.backlog == Backlog(1000, 10_000_000)


def test_a_deadline_out_of_reach_is_refused_at_once() -> None:
    acceptance = Acceptance(QueueCaps())
    for _ in range(19):
        acceptance.accept(100, outlook=STEADY, time_left_s=30.0)
    # It would start in 20 s by the forecast; 20 / (4/3) - GRACE_S is taken for certain.
    acceptance.accept(100, outlook=STEADY, time_left_s=15.0 - GRACE_S)
    acceptance.leave(100)
    error = refusal(lambda: acceptance.accept(100, outlook=STEADY, time_left_s=12.0))
    assert (error.code, error.param) == ("deadline_unreachable", "ttl_ms")
    assert error.retry_after_ms == 2500
    assert acceptance.backlog.requests == 19
    # An urgent one does not wait for those.
    acceptance.accept(100, outlook=STEADY, time_left_s=2.0, ahead=Backlog(0, 0))


def test_nobody_is_refused_while_nobody_waits() -> None:
    """The outlook may be of a busy second ago."""
    acceptance = Acceptance(QueueCaps())
    acceptance.accept(100, outlook=outlook((9.0, 0.0), (10.0, 1.0)), time_left_s=0.1)
    assert acceptance.backlog == Backlog(1, 100)


def test_waiting_times_told_are_within_reason() -> None:
    acceptance = Acceptance(QueueCaps(max_waiting_requests=1))
    acceptance.accept(1)
    assert (
        refusal(lambda: acceptance.accept(1, outlook=outlook((0.0, 0.0), (1e-6, 9.0)))).retry_after_ms == MIN_RETRY_MS
    )
    assert refusal(lambda: acceptance.accept(1, outlook=outlook((0.0, 0.0), (1e9, 1.0)))).retry_after_ms == MAX_RETRY_MS


def test_resumed_requests_are_counted_without_being_asked() -> None:
    acceptance = Acceptance(QueueCaps(max_waiting_requests=1))
    acceptance.count(10)
    acceptance.count(10)
    assert acceptance.backlog == Backlog(2, 20)
    with pytest.raises(AssertionError):
        for _ in range(3):
            acceptance.leave(10)
