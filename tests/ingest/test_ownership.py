"""Whose a request is: stale writers, releasing, adopting, dead engines and clocks that were set."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import ResponseError

from pagemill.ingest import scripts
from pagemill.ingest.keys import GROUP
from pagemill.ingest.redis import Client
from tests.ingest.bare_engine import SHARD, Engine, delta, one_at_work, outstanding, stored, submit


def test_a_writer_that_was_taken_over_can_write_nothing(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        zombie, heir, entry = await one_at_work(client, "zombie", "heir")
        await zombie.append(1, 0, [delta(1)])
        assert await heir.reap() == []
        await client.zadd(SHARD.heartbeats, {"zombie": 1})
        assert await heir.reap() == [entry]
        begun = await heir.begin(entry)
        assert isinstance(begun, scripts.BeginReply)
        assert (begun.attempt, begun.seq, begun.seed) == (2, 1, 7)

        assert (await zombie.append(1, 1, [delta(2)])).status == "stale"
        assert (await zombie.finish(entry, 1, 1)).status == "stale"
        assert await zombie.begin(entry) == "lost"
        await zombie.release(running=True)
        assert await client.hget(SHARD.record("a"), "state") == b"running"
        assert (await zombie.call(scripts.dead_letter(entry, "zombie", "x", "x")))[0] == b"lost"

        assert (await heir.append(2, 1, [delta(2, 2)])).seq == 2
        # The right owner with an old attempt is refused as well.
        assert (await heir.append(1, 2, [delta(3)])).status == "stale"
        assert (await heir.finish(entry, 2, 2)).status == "ok"
        assert (await zombie.finish(entry, 1, 2)).status == "stale"
        assert await stored(client) == [1, 2, 3]
        assert await outstanding(client) == (0, 0)

    on_queue(scenario)


def test_releasing_burns_no_attempt(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        engine, heir = Engine(client, "e1"), Engine(client, "e2")
        await engine.beat()
        await heir.beat()
        await submit(client)
        entry = await engine.take()
        await engine.begin(entry)
        await engine.append(1, 0, [delta(1)])
        await engine.release()
        assert await heir.reap() == [], "it still runs"
        await engine.release(running=True)
        assert (await engine.append(1, 1, [delta(2)])).status == "stale"
        adopted = await heir.reap()
        assert len(adopted) == 1
        begun = await heir.begin(entry)
        assert isinstance(begun, scripts.BeginReply)
        assert (begun.attempt, begun.released) == (2, 1)
        # A consumer that holds nothing goes with its engine; one that holds something never does.
        await engine.call(scripts.retire(SHARD, "e1"))
        await heir.call(scripts.retire(SHARD, "e2"))
        names = [info["name"] for info in await client.xinfo_consumers(SHARD.streams[1], GROUP)]
        assert b"e1" not in names and b"e2" in names
        third = Engine(client, "e3")
        assert await third.reap() == [entry]
        names = [info["name"] for info in await client.xinfo_consumers(SHARD.streams[1], GROUP)]
        assert names == [b"e3"]

    on_queue(scenario)


def test_who_leaves_gives_back_what_it_has_not_begun_and_is_brought_no_more(on_queue: Any) -> None:
    """Of every kind, also on more than a page; the others are told, and only when there is something to look for."""

    async def scenario(client: Client) -> None:
        leaves, heir, dead = (Engine(client, name) for name in ("leaves", "heir", "dead"))
        for engine in (leaves, heir, dead):
            await engine.beat()
            await engine.call(scripts.open_streams(SHARD, engine.owner))
        await submit(client, "runs")
        await leaves.begin(await leaves.take(), "runs")
        await leaves.release()
        assert await client.xlen(SHARD.told("heir")) == 0

        await submit(client, "suspect")
        suspect = await dead.take()
        await dead.begin(suspect, "suspect")
        await dead.call(scripts.retire(SHARD, "dead"))
        assert await leaves.reap(retry_delay_ms=0) == [suspect]
        assert await leaves.begin(suspect, "suspect") == "suspect"
        held = [b"suspect", b"raw", *(b"r%d" % number for number in range(120))]
        await client.xadd(SHARD.streams[0], {"v": 1, "id": "raw", "body": "{}"})
        await leaves.take()
        for name in held[2:]:
            await submit(client, name.decode())
            await leaves.take()
        await submit(client, "deleted")
        await client.xdel(SHARD.streams[1], (await leaves.take()).entry_id)
        await client.xtrim(SHARD.told("heir"), maxlen=0)
        for _ in range(2):
            await leaves.release()
        assert not await client.exists(SHARD.told("leaves"), SHARD.warm("leaves"))
        with pytest.raises(ResponseError, match="NOGROUP"):
            streams: Any = dict.fromkeys((*SHARD.streams, SHARD.told("leaves")), ">")
            await client.xreadgroup(GROUP, "leaves", streams, count=1)
        told = [fields for _, fields in await client.xrange(SHARD.told("heir"))]
        assert told and all(fields == {b"look": b"leaves"} for fields in told)
        assert await leaves.begin(suspect, "suspect", alone=True) == "lost"

        found: list[bytes] = []
        while entries := await heir.reap(count=50):
            found += [entry.fields[b"id"] for entry in entries]
        assert sorted(found) == sorted(held)
        assert await heir.begin(suspect, "suspect") == "suspect", "it is one for whoever has it"
        assert (await leaves.append(1, 0, [delta(1)], "runs")).status == "ok"
        pending = (await client.xpending(SHARD.streams[1], GROUP))["consumers"]
        assert pending == [{"name": b"heir", "pending": 121}, {"name": b"leaves", "pending": 1}]

    on_queue(scenario)


def test_adopting_is_bounded_and_passes_over_what_was_deleted(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        dead, heir = Engine(client, "dead"), Engine(client, "heir")
        await heir.beat()
        for number in range(4):
            await submit(client, f"r{number}")
            entry = await dead.take()
        await client.xdel(SHARD.streams[1], entry.entry_id)
        await dead.call(scripts.retire(SHARD, "dead"))
        first = await heir.reap(count=2)
        assert await client.zscore(SHARD.heartbeats, "dead") == 0
        rest = await heir.reap(count=2)
        assert (len(first), len(rest)) == (2, 1)
        assert await client.zscore(SHARD.heartbeats, "dead") is None, "nothing of it is left"
        pending = await client.xpending(SHARD.streams[1], GROUP)
        assert pending["consumers"] == [{"name": b"heir", "pending": 3}]

    on_queue(scenario)


@pytest.mark.parametrize("what", ["acknowledged", "consumer deleted", "group moved on"])
def test_what_somebody_has_taken_from_the_group_is_found(on_queue: Any, what: str) -> None:
    """What an engine runs stays its own; the rest is for whoever finds it."""

    async def scenario(client: Client) -> None:
        engine, finder = Engine(client, "e1"), Engine(client, "e2")
        stream, names = SHARD.streams[1], [f"r{number}" for number in range(24)]
        for name in names:
            await submit(client, name)
        runs = await engine.take()
        await engine.begin(runs, "r0")
        if what == "group moved on":
            await client.xgroup_setid(stream, GROUP, "$")
            lost = names[1:]
        else:
            lost = names[1:3]
            for _ in lost:
                entry = await engine.take()
                await client.xack(stream, GROUP, entry.entry_id)
            if what == "acknowledged":
                await client.xack(stream, GROUP, runs.entry_id)
            else:
                await client.xgroup_delconsumer(stream, GROUP, "e1")
        found: list[str] = []
        places: list[Any] = ["0-0"] * 3
        for _ in range(30):
            call = scripts.Call("passed_over", SHARD.streams, (GROUP, "e2", 2, SHARD.base, *places))
            given, places = await finder.call(call)
            assert len(given) <= 2
            found += [entry.fields[b"id"].decode() for entry in scripts.read_given(SHARD, given)]
        assert found == lost
        pending = (await client.xpending(stream, GROUP))["consumers"]
        assert pending == [{"name": b"e1", "pending": 1}, {"name": b"e2", "pending": len(lost)}]
        assert (await engine.finish(runs, 1, 0, request_id="r0")).status == "ok"

    on_queue(scenario)


def test_heartbeats_forget_engines_that_are_long_gone(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        engine = Engine(client, "e1")
        await client.zadd(SHARD.heartbeats, {"old": 1})
        await client.hset(SHARD.engines, "old", "{}")
        await engine.beat()
        await engine.beat()  # the first one cannot tell: perhaps the clock was set
        assert await client.zrange(SHARD.heartbeats, 0, -1) == [b"e1"]
        assert await client.hkeys(SHARD.engines) == [b"e1"]
        await engine.call(scripts.retire(SHARD, "e1"))
        assert await client.exists(SHARD.heartbeats, SHARD.engines) == 0

    on_queue(scenario)


@pytest.mark.parametrize("ahead_ms", [-3_600_000, 3_600_000])
def test_a_clock_that_was_set_makes_nobody_dead(on_queue: Any, ahead_ms: int) -> None:
    """All heartbeats are of another time, as after a sleep of the machine. Who beats again knows how far it is."""

    async def scenario(client: Client) -> None:
        _, heir, entry = await one_at_work(client, "living", "heir")
        for name in ("living", "heir"):
            await client.zincrby(SHARD.heartbeats, ahead_ms, name)
        assert await heir.reap() == []
        now, before = await heir.call(scripts.renew(SHARD, "heir", b"{}"))
        assert abs(float(before) - now - ahead_ms) < 60_000
        assert await heir.reap(old_beats_count=False) == [], "others need time to beat again"
        assert await heir.reap() == [entry], "it has not: it is dead"

    on_queue(scenario)


@pytest.mark.parametrize("name", ["heir", "newcomer"])
@pytest.mark.parametrize("lists", [[SHARD.heartbeats], [SHARD.heartbeats, SHARD.engines]], ids=["hb", "hb and engines"])
def test_deleted_heartbeats_make_nobody_dead(on_queue: Any, lists: list[str], name: str) -> None:
    """Neither to an engine that was there nor to one that comes now."""

    async def scenario(client: Client) -> None:
        _, other, entry = await one_at_work(client, "living", "heir")
        heir = other if name == "heir" else Engine(client, name)
        await client.delete(*lists)
        assert await heir.call(scripts.reap(SHARD, name, timeout_ms=60_000, count=9)) == []
        await heir.beat()
        assert await heir.reap() == [], "it has not had the time to beat again"
        await client.zincrby(SHARD.heartbeats, -120_000, "living")
        assert await heir.reap() == [entry], "it has not come back"

    on_queue(scenario)
