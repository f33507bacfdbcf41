"""A server that cannot serve for a while, or not this user: whatever it says, requests wait, and then run once each.

Every fault is imposed on a real server under an engine at work, and lifted once the server has refused something.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import redis.asyncio as aioredis
from redis.exceptions import ResponseError
from structlog.testing import capture_logs

from pagemill.engine.async_engine import AsyncEngine
from pagemill.engine.errors import ConfigError
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.embedded import EmbeddedServer
from pagemill.ingest.worker import Worker
from tests.contract.conftest import TAG, TINY, Outside, serving
from tests.redis_fixtures import FLOOR_SERVER

RIGHTS = ("~pm:*", "&pm:*", "-@all", "+@read", "+@write", "+@stream", "+@pubsub", "+@scripting", "+@connection")
RIGHTS += ("+info", "+time")
REQUESTS = 24  # more than run at once, so that some are begun meanwhile
MOST_LINES = 12  # of the log, for one fault


@dataclass
class Trouble:
    """A server with user `mill`, and who may change it."""

    server: EmbeddedServer
    admin: Any

    async def config(self, **settings: Any) -> None:
        for name, value in settings.items():
            await self.admin.config_set(name.replace("_", "-"), value)

    async def rights(self, *rules: str) -> None:
        await self.admin.execute_command("ACL", "SETUSER", "mill", "reset", "on", ">word", *RIGHTS, *rules)

    async def save(self) -> None:
        """Save in the background, whether it works or not."""
        await self.admin.bgsave()
        async with asyncio.timeout(60):
            while (await self.admin.info("persistence"))["rdb_bgsave_in_progress"]:
                await asyncio.sleep(0.01)

    async def refusals(self) -> int:
        """How often the server has refused something."""
        told = await self.admin.info("errorstats")
        return sum(item["count"] for item in told.values())


async def cannot_save(trouble: Trouble) -> None:
    (trouble.server.data_dir / "dump.rdb").unlink(missing_ok=True)
    (trouble.server.data_dir / "dump.rdb").mkdir()
    await trouble.config(save="3600 1000000")
    await trouble.save()


async def can_save(trouble: Trouble) -> None:
    (trouble.server.data_dir / "dump.rdb").rmdir()
    await trouble.save()
    await trouble.config(save="")


def settings(**values: Any) -> Callable[[Trouble], Awaitable[None]]:
    return lambda trouble: trouble.config(**values)


def rights(*rules: str) -> Callable[[Trouble], Awaitable[None]]:
    return lambda trouble: trouble.rights(*rules)


def replica_of(*master: str, stale: str = "yes") -> Callable[[Trouble], Awaitable[None]]:
    async def change(trouble: Trouble) -> None:
        await trouble.config(replica_serve_stale_data=stale)
        await trouble.admin.execute_command("REPLICAOF", *master)

    return change


def foreign_key(name: str) -> Callable[[Trouble], Awaitable[None]]:
    async def change(trouble: Trouble) -> None:
        key = f"{TAG}:{name}"
        if await trouble.admin.exists(key):
            await trouble.admin.rename(key, "aside")
        await trouble.admin.set(key, "mine")

    return change


def own_key(name: str) -> Callable[[Trouble], Awaitable[None]]:
    async def change(trouble: Trouble) -> None:
        key = f"{TAG}:{name}"
        await trouble.admin.delete(key)
        if await trouble.admin.exists("aside"):
            await trouble.admin.rename("aside", key)

    return change


Change = Callable[[Trouble], Awaitable[None]]
FAULTS: dict[str, tuple[Change, Change]] = {
    "memory is full": (settings(maxmemory=1), settings(maxmemory=0)),
    "too few replicas": (settings(min_replicas_to_write=1), settings(min_replicas_to_write=0)),
    "a replica": (replica_of("127.0.0.1", "1"), replica_of("NO", "ONE")),
    "a replica that is behind": (replica_of("127.0.0.1", "1", stale="no"), replica_of("NO", "ONE")),
    "cannot save": (cannot_save, can_save),
    "counters are another program's": (foreign_key("stat"), own_key("stat")),
    "sums are another program's": (foreign_key("load"), own_key("load")),
}
FAULTS |= {
    f"not allowed: {rule}": (rights(rule), rights())
    for rule in ("-xreadgroup", "-evalsha", "-xpending", "-hset", "-hincrby", "-xadd", "-xdel", "-pexpire")
}
FAULTS["not allowed: channels"] = (rights("resetchannels"), rights())
FAULTS["not allowed: anything"] = (rights("-@all"), rights())


@pytest.fixture(scope="module", params=["valkey", "redis 7.0"])
def server(request: pytest.FixtureRequest) -> Iterator[EmbeddedServer]:
    if request.param == "valkey":
        made = EmbeddedServer()
    elif FLOOR_SERVER.exists():
        made = EmbeddedServer(program=FLOOR_SERVER)
    else:
        pytest.skip("no redis-server installed")
    with made:
        yield made


def warnings(lines: list[Any]) -> list[Any]:
    return [line for line in lines if line["log_level"] in ("warning", "error")]


async def all_end_once(outside: Outside) -> None:
    told = set()
    for number in range(REQUESTS):
        done = await outside.done(f"r{number}")
        assert (done["state"], done["metrics"]["attempts"]) == ("completed", 1), done
        assert [item["type"] for item in await outside.events(f"r{number}")].count("done") == 1
        told.add(tuple(await outside.token_ids(f"r{number}")))
    (tokens,) = told
    assert len(tokens) == TINY["max_tokens"]


@pytest.mark.parametrize("name", FAULTS)
def test_requests_wait_out_what_is_wrong_with_the_server(
    play: Any, tiny: AsyncEngine, server: EmbeddedServer, name: str
) -> None:
    impose, lift = FAULTS[name]

    async def scenario() -> None:
        async with aioredis.Redis.from_url(server.url, protocol=2) as admin:
            await admin.flushall()
            trouble = Trouble(server, admin)
            await trouble.rights()
            url = server.url.replace("//", "//mill:word@")
            outside = Outside(server.url)
            config = QueueConfig(redis_url=url, block_ms=50, poll_ms=50)
            async with serving(tiny, config):
                for number in range(REQUESTS):
                    await outside.add(f"r{number}", TINY)
                await outside.first_delta("r0")
                before = await trouble.refusals()
                with capture_logs() as lines:
                    await impose(trouble)
                    async with asyncio.timeout(60):
                        while await trouble.refusals() < before + 4 or not warnings(lines):
                            await asyncio.sleep(0.02)
                    await lift(trouble)
                await all_end_once(outside)
            assert len(warnings(lines)) <= MOST_LINES, warnings(lines)
            assert await admin.exists(f"{TAG}:dlq") == 0
            await outside.assert_nothing_left()
            await outside.aclose()

    play(scenario())


@pytest.mark.parametrize("what", ["script", "pause"])
def test_requests_wait_for_a_server_that_is_busy(
    play: Any, tiny: AsyncEngine, server: EmbeddedServer, what: str
) -> None:
    async def scenario() -> None:
        async with aioredis.Redis.from_url(server.url, protocol=2) as admin:
            await admin.flushall()
            await admin.config_set("busy-reply-threshold", 10)
            outside = Outside(server.url)
            async with serving(tiny, QueueConfig(redis_url=server.url, block_ms=50, poll_ms=50)):
                for number in range(REQUESTS):
                    await outside.add(f"r{number}", TINY)
                await outside.first_delta("r0")
                before = (await admin.info("errorstats")).get("errorstat_BUSY", {"count": 0})["count"]
                if what == "pause":
                    await admin.execute_command("CLIENT", "PAUSE", 300, "ALL")
                else:
                    spinning = asyncio.create_task(outside.redis.eval("while true do end", 0))
                    killed = False
                    async with asyncio.timeout(60):
                        while not killed:
                            try:
                                killed = await admin.script_kill()
                            except ResponseError:  # not busy yet
                                await asyncio.sleep(0.2)
                    with pytest.raises(ResponseError, match="killed"):
                        await spinning
                await all_end_once(outside)
                after = (await admin.info("errorstats")).get("errorstat_BUSY", {"count": 0})["count"]
                assert what == "pause" or after >= before
            assert await admin.exists(f"{TAG}:dlq") == 0
            await outside.assert_nothing_left()
            await outside.aclose()

    play(scenario())


@pytest.mark.parametrize(
    "rule", ["-xpending", "-hincrby", "-evalsha", "-script|load", "resetchannels", "resetkeys", "-info"]
)
def test_an_engine_does_not_start_where_it_may_not_do_its_work(
    play: Any, tiny: AsyncEngine, server: EmbeddedServer, rule: str
) -> None:
    """And says what is missing, before it takes anything."""
    named = {"resetchannels": "PUBLISH", "resetkeys": "key"}.get(rule, rule[1:].partition("|")[0])

    async def scenario() -> None:
        async with aioredis.Redis.from_url(server.url, protocol=2) as admin:
            await admin.flushall()
            await admin.script_flush()
            outside = Outside(server.url)
            await outside.add("a", TINY)
            await Trouble(server, admin).rights(rule)
            worker = Worker(tiny, QueueConfig(redis_url=server.url.replace("//", "//mill:word@")))
            with pytest.raises(ConfigError) as refused:
                async with asyncio.timeout(60):
                    await worker.run()
            assert named.lower() in str(refused.value).lower() and "word" not in str(refused.value)
            assert await admin.keys("*") == [f"{TAG}:in:1".encode()] and await admin.xlen(f"{TAG}:in:1") == 1
            await outside.aclose()

    play(scenario())


def test_a_command_of_another_name_is_named(play: Any, tiny: AsyncEngine) -> None:
    async def scenario(server: EmbeddedServer) -> None:
        with pytest.raises(ConfigError, match="XPENDING is not allowed"):
            async with asyncio.timeout(60):
                await Worker(tiny, QueueConfig(redis_url=server.url)).run()

    with EmbeddedServer(arguments=["--rename-command", "XPENDING", "ASKED"]) as server:
        play(scenario(server))
