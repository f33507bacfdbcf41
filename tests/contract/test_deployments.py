"""Servers that are more than one process: a Cluster, Sentinels, TLS, users with rights of their own."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import redis.asyncio as aioredis

from pagemill.engine.async_engine import AsyncEngine
from pagemill.engine.errors import RequestError
from pagemill.ingest.client import AsyncClient, QueueUnavailableError
from pagemill.ingest.config import QueueConfig
from tests.chaos import servers
from tests.contract.conftest import STORY, serving

FAST = {"heartbeat_timeout_s": 2.0, "block_ms": 100, "poll_ms": 50, "drain_timeout_s": 5.0}


def test_a_cluster_of_three(play: Any, engine: AsyncEngine, story: list[int]) -> None:
    """Shards on different nodes; live events by SPUBLISH, heard at the shard's node only."""

    async def scenario(nodes: list[Any]) -> None:
        url = f"redis+cluster://127.0.0.1:{nodes[0].port},127.0.0.1:{nodes[1].port}"
        config = QueueConfig(redis_url=url, shards=8, **FAST)
        async with serving(engine, config), AsyncClient(config, watchdog_s=30) as client:
            started = time.monotonic()
            handles = [await client.submit(**STORY | {"max_tokens": 12}) for _ in range(8)]
            results = await asyncio.gather(*(handle.result(timeout=60) for handle in handles))
            assert all(result.token_ids == story[:12] for result in results)
            assert time.monotonic() - started < 25, "live events did not arrive, the watchdog did"
            homes = {client._redis.get_node_from_key(client.keys.shard_of(h.id).statistics).port for h in handles}
            assert len(homes) > 1
            handle = await client.submit(**STORY | {"max_tokens": 300})
            async for _ in handle:
                assert await handle.cancel() == "requested"
                break
            try:
                await handle.result(timeout=20)
            except RequestError as error:
                assert error.code == "cancelled"
        for node in nodes:
            async with aioredis.Redis(port=node.port, protocol=2) as plain:
                used = await plain.info("commandstats")
                assert "cmdstat_publish" not in used
                for key in await plain.keys("*:in:*"):
                    assert await plain.xlen(key) == 0

    with servers.cluster() as nodes:
        play(scenario(nodes))


def test_a_sentinel_failover_in_mid_stream(play: Any, engine: AsyncEngine, story: list[int], tmp_path: Path) -> None:
    """What the old master had not passed on is lost; whoever followed it is told, and new requests are served."""

    async def scenario(pair: list[Any], ports: list[int]) -> None:
        url = "redis+sentinel://" + ",".join(f"127.0.0.1:{port}" for port in ports) + "/mymaster/0"
        config = QueueConfig(redis_url=url, **FAST)
        async with serving(engine, config), AsyncClient(config, watchdog_s=0.5) as client:
            handle = await client.submit(**STORY, flush_ms=0)
            seen: list[int] = []
            try:
                async for delta in handle:
                    seen += delta.token_ids
                    if len(seen) == 3:
                        await asyncio.to_thread(pair[0].kill)
                assert seen == story
            except RequestError as error:
                assert error.code == "request_lost" and seen == story[: len(seen)]
            async with asyncio.timeout(20):
                while True:
                    try:
                        after = await client.submit(**STORY, idempotency_key="after")
                        break
                    except QueueUnavailableError:
                        await asyncio.sleep(0.05)
            assert (await after.result(timeout=30)).token_ids == story
        async with aioredis.Redis(port=pair[1].port, protocol=2) as plain:
            assert (await plain.info("replication"))["role"] == "master"
            assert await plain.xlen("pm:{default.0}:in:1") == 0
            errors = await plain.info("errorstats")
            assert errors.get("errorstat_READONLY", {}).get("count", 0) < 50

    with servers.sentinels(tmp_path) as (pair, ports):
        play(scenario(pair, ports))
