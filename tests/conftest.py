"""Fixtures that every folder of tests may use."""

from __future__ import annotations

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

__all__ = ["any_redis_url", "floor_redis", "queue_config", "queue_keys", "redis_url", "refusing_url", "run", "valkey"]
