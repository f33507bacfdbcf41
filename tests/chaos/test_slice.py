"""A short, seeded slice of `make chaos`."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.company import run_company
from tests.chaos.run import Plan, run_chaos


@pytest.mark.timeout(180)
def test_every_request_is_answered_once_whatever_breaks() -> None:
    plan = Plan(requests=2000, seed=20, duration_s=6, engines=2, in_flight=64, bodies=24, pause_s=(0.1, 0.5))
    outcome = asyncio.run(run_chaos(plan))
    assert len(outcome.requests) > 20
    assert outcome.rows["ended"]["completed"] > 10
    assert outcome.rows["faults"].total() > 5


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("deployment", "blows"),
    [("sentinel", ["master killed"]), ("cluster", ["slot moved", "node killed", "slot moved"])],
)
def test_whoever_reads_is_told_the_truth_or_a_named_error(tmp_path: Path, deployment: str, blows: list[str]) -> None:
    run = run_company(deployment, tmp_path, requests=2000, seed=20, duration_s=60, engines=1, blows=blows)
    counts = asyncio.run(run)
    assert {name: counts[name] for name in blows} == Counter(blows) and counts["completed"] > 10
