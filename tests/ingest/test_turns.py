"""Sharing an engine's attention: priorities, tenants, and requests that nobody watches, one script at a time."""

from __future__ import annotations

from typing import Any

import orjson

from pagemill.engine.policy import AGED_TURN, AGEING_S
from pagemill.ingest import scripts
from pagemill.ingest.redis import Client
from pagemill.ingest.stream_reader import Turns
from tests.ingest.bare_engine import SHARD, Engine, delta, outstanding, raw_add, record, submit
from tests.ingest.test_admission import accept, sweep


def shares(turns: Turns, filled: set[int], count: int) -> list[int]:
    """How many of `count` entries come from each stream, if those of `filled` never run dry."""
    taken = [0, 0, 0]
    for _ in range(count):
        stream = next(stream for stream in turns.order() if stream in filled)
        taken[stream] += 1
        turns.take()
    return taken


def test_priorities_share_by_weight_and_nobody_starves() -> None:
    assert shares(Turns(), {0, 1, 2}, 120) == [80, 30, 10]
    assert shares(Turns(), {1, 2}, 120) == [0, 110, 10]
    assert shares(Turns(), {2}, 12) == [0, 0, 12]
    assert all(sorted(Turns().order()) == [0, 1, 2] for _ in range(3))


def test_what_has_waited_long_gets_its_turn() -> None:
    turns = Turns()
    turns.waited_ms = [0, 0, int(AGEING_S * 1000)]
    assert shares(turns, {0, 1, 2}, 120)[2] >= 120 // AGED_TURN
    turns.waited_ms = [0, int(AGEING_S * 1000) + 1, int(AGEING_S * 1000)]
    assert shares(turns, {0, 1, 2}, 120)[1] >= 120 // AGED_TURN
    turns.waited_ms = [0, 0, int(AGEING_S * 1000) - 1]
    assert shares(turns, {0, 1, 2}, 120) == [80, 30, 10]


def test_how_long_the_oldest_has_waited(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        seconds, _ = await client.time()
        for age in (40, 20):
            await client.xadd(SHARD.streams[2], {"v": 1}, id=f"{(seconds - age) * 1000}-0")
        first, second, third = await scripts.run_one(client, scripts.oldest(SHARD))
        assert (first, second) == (0, 0) and 39_000 <= third <= 90_000
        await Engine(client, "e1").take()
        *_, third = await scripts.run_one(client, scripts.oldest(SHARD))
        assert 19_000 <= third <= 38_000

    on_queue(scenario)


def test_a_tenant_runs_as_many_as_it_may(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        engine, leaves = Engine(client, "e1"), Engine(client, "e2")
        entries = {}
        for name, tenant in (("a", "x"), ("b", "x"), ("c", "x"), ("d", "y")):
            await submit(client, name, tenant=tenant)
            entries[name] = await (leaves if name == "b" else engine).take()
        begun = await engine.begin(entries["a"], "a", tenant_cap=1)
        assert isinstance(begun, scripts.BeginReply)
        assert isinstance(await engine.begin(entries["a"], "a", tenant_cap=1), scripts.BeginReply)
        assert await leaves.begin(entries["b"], "b", tenant_cap=1) == "busy"
        assert (await record(client, "b"))["state"] == "queued"
        assert isinstance(await engine.begin(entries["d"], "d", tenant_cap=1), scripts.BeginReply)
        # An end makes room, and so does giving back; one that is to end at once needs none.
        await engine.finish(entries["a"], 1, 0)
        assert isinstance(await leaves.begin(entries["b"], "b", tenant_cap=1), scripts.BeginReply)
        await leaves.release(running=True)
        assert await engine.reap() == [entries["b"]]
        assert isinstance(await engine.begin(entries["c"], "c", tenant_cap=1), scripts.BeginReply)
        await client.hset(SHARD.record("b"), "cancel", "1")
        begun = await engine.begin(entries["b"], "b", tenant_cap=1)
        assert isinstance(begun, scripts.BeginReply) and begun.cancelled

    on_queue(scenario)


def test_a_raw_entry_whose_tenant_is_busy_waits_with_a_record(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        engine = Engine(client, "e1")
        for name in ("a", "b"):
            await raw_add(client, name)
        await engine.begin(await engine.take(), "a", tenant_cap=1)
        second = await engine.take()
        for _ in range(2):
            assert await engine.begin(second, "b", tenant_cap=1, tokens=5) == "busy"
        assert (await record(client, "b"))["state"] == "queued"
        assert await client.zcard(SHARD.waiting) == 1
        await client.hset(SHARD.record("b"), "cancel", "1")
        await sweep(client)
        assert (await record(client, "b"))["state"] == "cancelled"
        assert await engine.begin(second, "b", tenant_cap=1) == "lost"
        assert await outstanding(client) == (1, 1)

    on_queue(scenario)


def test_a_request_that_nobody_watches_is_known_as_such(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        engine = Engine(client, "e1")
        await submit(client, "a", watch_ms=30_000)
        await submit(client, "b")
        for name in ("a", "b"):
            await engine.begin(await engine.take(), name)
        assert 10_000 < await client.pttl(SHARD.watch("a")) <= 30_000
        assert not await client.exists(SHARD.watch("b"))
        assert not (await engine.append(1, 0, [delta(1)], "a")).unwatched
        await client.delete(SHARD.watch("a"))
        assert (await engine.append(1, 1, [delta(2)], "a")).unwatched
        assert not (await engine.append(1, 0, [delta(1)], "b")).unwatched
        await client.set(SHARD.watch("a"), "1", px=60_000)
        assert not (await engine.append(1, 2, [delta(3)], "a")).unwatched

        # What waits is watched too, however it came.
        await submit(client, "c", watch_ms=30_000)
        assert await accept(client, await raw_add(client, "d"), "d", watch_ms=30_000) == "ok"
        await sweep(client)
        assert [(await record(client, name))["state"] for name in ("c", "d")] == ["queued", "queued"]
        await client.delete(SHARD.watch("c"), SHARD.watch("d"))
        await sweep(client)
        for name in ("c", "d"):
            fields = await record(client, name)
            assert fields["state"] == "cancelled" and "nobody watches" in orjson.loads(fields["error"])["message"]

    on_queue(scenario)
