"""Servers that are more than one process: a Cluster, Sentinels, TLS, users with rights of their own."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as aioredis

from pagemill.engine.async_engine import AsyncEngine
from pagemill.engine.errors import ConfigError, RequestError
from pagemill.ingest.client import AsyncClient, QueueUnavailableError
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.embedded import EmbeddedServer, free_port
from pagemill.ingest.worker import Worker
from tests.chaos import servers
from tests.contract.conftest import STORY, serving
from tests.redis_fixtures import FLOOR_SERVER

FAST = {"heartbeat_timeout_s": 2.0, "block_ms": 100, "poll_ms": 50, "drain_timeout_s": 5.0}


def test_a_cluster_of_three(play: Any, engine: AsyncEngine, story: list[int]) -> None:
    """Shards on different nodes; live events by SPUBLISH, heard at the shard's node only."""

    async def scenario(nodes: list[Any]) -> None:
        url = f"redis+cluster://127.0.0.1:{nodes[0].port},127.0.0.1:{nodes[1].port}"
        config = QueueConfig(redis_url=url, shards=8, **FAST)
        # Live events bring it: the watchdog would be too late.
        async with serving(engine, config), AsyncClient(config, watchdog_s=600) as client:
            handles = [await client.submit(**STORY | {"max_tokens": 12}) for _ in range(8)]
            results = await asyncio.gather(*(handle.result(timeout=60) for handle in handles))
            assert all(result.token_ids == story[:12] for result in results)
            homes = {client._redis.get_node_from_key(client.keys.shard_of(h.id).statistics).port for h in handles}
            assert len(homes) > 1
            handle = await client.submit(**STORY | {"max_tokens": 300})
            async for _ in handle:
                assert await handle.cancel() == "requested"
                break
            try:
                await handle.result(timeout=60)
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
            async with asyncio.timeout(60):
                while True:
                    try:
                        after = await client.submit(**STORY, idempotency_key="after")
                        break
                    except QueueUnavailableError:
                        await asyncio.sleep(0.05)
            assert (await after.result(timeout=60)).token_ids == story
        async with aioredis.Redis(port=pair[1].port, protocol=2) as plain:
            assert (await plain.info("replication"))["role"] == "master"
            assert await plain.xlen("pm:{default.0}:in:1") == 0
            errors = await plain.info("errorstats")
            assert errors.get("errorstat_READONLY", {}).get("count", 0) < 50

    with servers.sentinels(tmp_path) as (pair, ports):
        play(scenario(pair, ports))


RIGHTS = "~pm:* &pm:* -@all +@read +@write +@stream +@pubsub +@scripting +@connection +info +time"


def test_tls_and_a_user_with_few_rights(play: Any, engine: AsyncEngine, story: list[int], tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None or not FLOOR_SERVER.exists():
        pytest.skip("needs the openssl program and a redis-server built with TLS")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = (openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost")
    names = ("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate))
    subprocess.run([*made, *names], check=True, capture_output=True)
    port = free_port()
    arguments = ["--tls-port", str(port), "--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
    arguments += ["--tls-ca-cert-file", str(certificate), "--tls-auth-clients", "no"]

    async def scenario(server: EmbeddedServer) -> None:
        async with aioredis.Redis.from_url(server.url, protocol=2) as plain:
            await plain.execute_command("ACL", "SETUSER", "mill", "on", ">p@ss/word", *RIGHTS.split())
        place = f"127.0.0.1:{port}/0?ssl_ca_certs={certificate}"
        config = QueueConfig(redis_url=f"rediss://mill:p%40ss%2Fword@{place}", **FAST)
        async with serving(engine, config), AsyncClient(config, watchdog_s=600) as client:
            handle = await client.submit(**STORY, flush_ms=0)
            assert [token for delta in [d async for d in handle] for token in delta.token_ids] == story
            other = await client.submit(**STORY | {"max_tokens": 300})
            async for _ in other:
                break
            assert await other.cancel() == "requested"
            with pytest.raises(RequestError, match="cancelled"):
                await other.result(timeout=60)
        wrong = QueueConfig(redis_url=f"rediss://mill:wrong@{place}", **FAST)
        with pytest.raises(ConfigError, match="refuses user or password") as refused:
            await Worker(engine, wrong).run()
        assert "wrong" not in str(refused.value)
        # A certificate that nobody vouches for is not accepted.
        async with AsyncClient(f"rediss://mill:p%40ss%2Fword@127.0.0.1:{port}/0") as careful:
            with pytest.raises(QueueUnavailableError, match="certificate"):
                await careful.submit(**STORY)

    with EmbeddedServer(program=FLOOR_SERVER, arguments=arguments) as server:
        play(scenario(server))
