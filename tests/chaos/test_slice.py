"""A short, seeded slice of `make chaos`."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.company import run_company
from tests.chaos.run import Plan, run_chaos


# Requests and faults are counted, so that a slow machine takes longer and sees as much.
@pytest.mark.timeout(400)
def test_every_request_is_answered_once_whatever_breaks() -> None:
    plan = Plan(
        requests=100_000, seed=20, duration_s=6, least=20, engines=2, in_flight=64, bodies=24, pause_s=(0.1, 0.5)
    )
    outcome = asyncio.run(run_chaos(plan))
    assert outcome.rows["ended"]["completed"] > 10
    assert len(outcome.requests) >= 20 and outcome.rows["faults"].total() >= 20


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("deployment", "blows"),
    [("sentinel", ["master killed"]), ("cluster", ["slot moved", "node killed", "slot moved"])],
)
def test_whoever_reads_is_told_the_truth_or_a_named_error(tmp_path: Path, deployment: str, blows: list[str]) -> None:
    run = run_company(deployment, tmp_path, requests=100_000, seed=20, duration_s=math.inf, engines=1, blows=blows)
    counts = asyncio.run(run)
    assert {name: counts[name] for name in blows} == Counter(blows) and counts["completed"] > 10
