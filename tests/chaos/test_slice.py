"""A short, seeded slice of `make chaos`."""

from __future__ import annotations

import asyncio

import pytest

from tests.chaos.run import Plan, run_chaos


@pytest.mark.timeout(180)
def test_every_request_is_answered_once_whatever_breaks() -> None:
    plan = Plan(requests=2000, seed=20, duration_s=6, engines=2, in_flight=64, bodies=24, pause_s=(0.1, 0.5))
    outcome = asyncio.run(run_chaos(plan))
    assert len(outcome.requests) > 20
    assert outcome.rows["ended"]["completed"] > 10
    assert outcome.rows["faults"].total() > 5
