"""Real servers for tests: one embedded Valkey a session, Redis 7.0 (the floor) where it is installed.

Every test gets an empty server, and fails at its end if it left a key behind that never expires.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from pagemill.ingest.config import QueueConfig
from pagemill.ingest.embedded import EmbeddedServer
from pagemill.ingest.keys import QueueKeys

FLOOR_SERVER = Path("/usr/bin/redis-server")
LASTING_SUFFIXES = ("in:0", "in:1", "in:2", "delay", "hook:due", "hook:dead", "dlq", "engines", "hb", "stat")


@pytest.fixture(scope="session")
def valkey() -> Iterator[EmbeddedServer]:
    """The session's Valkey, on a Unix socket and a port."""
    server = EmbeddedServer(arguments=["--enable-debug-command", "local"])
    with server:
        yield server


@pytest.fixture(scope="session")
def floor_redis() -> Iterator[EmbeddedServer]:
    """The oldest server that is supported."""
    if not FLOOR_SERVER.exists():
        pytest.skip("no redis-server installed")
    with EmbeddedServer(program=FLOOR_SERVER) as server:
        yield server


def _clean(server: EmbeddedServer) -> Iterator[str]:
    with redis.Redis.from_url(server.url, protocol=2) as client:
        client.flushall()
        yield server.url
        forever = [key.decode() for key in client.scan_iter(count=1000) if client.pttl(key) == -1]
        leaked = [key for key in forever if not key.endswith(LASTING_SUFFIXES)]
        assert not leaked, f"keys without a time to live: {leaked}"


@pytest.fixture
def redis_url(valkey: EmbeddedServer) -> Iterator[str]:
    """URL of an empty Valkey."""
    yield from _clean(valkey)


@pytest.fixture(params=["valkey", "floor_redis"])
def any_redis_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """URL of an empty server, the test being run once on each kind."""
    yield from _clean(request.getfixturevalue(request.param))


@pytest.fixture
def queue_config(redis_url: str) -> QueueConfig:
    return QueueConfig(redis_url=redis_url, heartbeat_timeout_s=1.0, block_ms=100, poll_ms=50, drain_timeout_s=5.0)


@pytest.fixture
def queue_keys(queue_config: QueueConfig) -> QueueKeys:
    return QueueKeys(queue_config.key_prefix, queue_config.queue, queue_config.shards)


@pytest.fixture
def run() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Runs coroutines on one event loop, which lives as long as the test."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture
def refusing_url() -> Iterator[str]:
    """A URL where nobody listens, and nobody can come to listen while the test runs."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"redis://127.0.0.1:{held.getsockname()[1]}/0"
