"""Fixtures that every folder of tests may use."""

from __future__ import annotations

import pytest

from tests.engine_session import engine, engine_loop, play
from tests.ingest.bare_engine import on_queue
from tests.redis_fixtures import (
    any_redis_url,
    floor_redis,
    queue_config,
    queue_keys,
    redis_url,
    refusing_url,
    run,
    valkey,
)

__all__ = [
    "any_redis_url",
    "engine",
    "engine_loop",
    "floor_redis",
    "on_queue",
    "play",
    "queue_config",
    "queue_keys",
    "redis_url",
    "refusing_url",
    "run",
    "valkey",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--schemas", type=int, default=120, help="random JSON schemas that structured output is tried on")
