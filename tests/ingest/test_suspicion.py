"""Whose fault a dead engine is: attempts, suspects and delays, one script at a time."""

from __future__ import annotations

from typing import Any

import pytest

from pagemill.ingest import scripts
from pagemill.ingest.redis import Client
from tests.ingest.bare_engine import SHARD, Engine, cancel, delta, outstanding, raw_add, record, submit


async def now_ms(client: Client) -> int:
    """By the server's clock."""
    seconds, micros = await client.time()
    return int(seconds) * 1000 + int(micros) // 1000


async def start(client: Client, engine: Engine, request_id: str, progress: bool) -> None:
    """Submit a request and have an engine begin it, with a token or without."""
    await engine.beat()
    await submit(client, request_id)
    begun = await engine.begin(await engine.take(), request_id)
    assert isinstance(begun, scripts.BeginReply)
    if progress:
        await engine.append(begun.attempt, begun.seq, [delta(begun.seq + 1)], request_id)


async def die(client: Client, engine: Engine) -> None:
    await client.zadd(SHARD.heartbeats, {engine.owner: 1})


async def burnt(client: Client, request_id: str) -> int:
    """Attempts that count, the one under way included."""
    fields = await record(client, request_id)
    return int(fields["attempt"]) - int(fields["released"])


def test_who_had_a_token_burns_no_attempt_and_the_others_run_alone(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        dead, heir = Engine(client, "dead"), Engine(client, "heir")
        for name, progress in (("bystander", True), ("suspect", False)):
            await start(client, dead, name, progress)
        await heir.beat()
        await die(client, dead)
        first, second = await heir.reap()
        for _ in range(2):
            begun = await heir.begin(first, "bystander")
            assert isinstance(begun, scripts.BeginReply)
            assert (begun.attempt, begun.released, begun.alone) == (2, 1, 0)
            # Asking does not change anything.
            assert await heir.begin(second, "suspect") == "suspect"
        assert (await record(client, "suspect"))["attempt"] == "1"
        for _ in range(2):
            begun = await heir.begin(second, "suspect", alone=True)
            assert isinstance(begun, scripts.BeginReply)
            assert (begun.attempt, begun.released, begun.alone) == (2, 0, 1)
        assert (await burnt(client, "bystander"), await burnt(client, "suspect")) == (1, 2)
        # A token clears it: at the next death it is a bystander.
        assert (await heir.append(2, 0, [delta(1, 2)], "suspect")).status == "ok"
        third = Engine(client, "third")
        await die(client, heir)
        for entry in await third.reap():
            if entry == second:
                begun = await third.begin(entry, "suspect")
                assert isinstance(begun, scripts.BeginReply) and begun.alone == 0
        assert await burnt(client, "suspect") == 2

    on_queue(scenario)


def test_who_is_there_at_every_death_runs_alone_although_it_has_tokens(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        engine = Engine(client, "e0")
        await start(client, engine, "a", progress=True)
        seen = []
        for number in range(1, 5):
            await die(client, engine)
            engine = Engine(client, f"e{number}")
            await engine.beat()
            (entry,) = await engine.reap()
            begun = await engine.begin(entry)
            company = begun != "old suspect"
            begun = await engine.begin(entry, alone=True)
            assert isinstance(begun, scripts.BeginReply)
            await engine.append(begun.attempt, begun.seq, [delta(begun.seq + 1)])
            seen.append((company, begun.alone, await burnt(client, "a")))
        assert seen == [(True, 0, 1), (False, 2, 1), (False, 2, 2), (False, 2, 3)]
        # Then it has had its attempts; to be ended it needs nobody's absence.
        await die(client, engine)
        last = Engine(client, "last")
        await last.beat()
        (entry,) = await last.reap()
        begun = await last.begin(entry)
        assert isinstance(begun, scripts.BeginReply) and begun.attempt - begun.released == 4

    on_queue(scenario)


def test_what_may_have_ended_an_engine_waits_before_it_runs_again(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        dead, heir = Engine(client, "dead"), Engine(client, "heir")
        await start(client, dead, "suspect", progress=False)
        await start(client, dead, "bystander", progress=True)
        await heir.beat()
        await die(client, dead)
        before = await now_ms(client)
        (entry,) = await heir.reap(retry_delay_ms=20_000)
        assert entry.fields[b"id"] == b"bystander"
        ((member, due),) = await client.zrange(SHARD.delayed, 0, -1, withscores=True)
        assert before + 15_000 <= due <= await now_ms(client) + 25_000
        assert await heir.reap(retry_delay_ms=20_000) == [] and await outstanding(client) == (2, 2)
        await client.zadd(SHARD.delayed, {member: 1})
        (entry,) = await heir.reap(retry_delay_ms=20_000)
        assert entry.fields[b"id"] == b"suspect" and not await client.exists(SHARD.delayed)
        # Each further one waits twice as long, and none beyond its deadline.
        await heir.begin(entry, "suspect", alone=True)
        await die(client, heir)
        third = Engine(client, "third")
        before = await now_ms(client)
        assert [entry.fields[b"id"] for entry in await third.reap(retry_delay_ms=8000)] == [b"bystander"]
        ((member, due),) = await client.zrange(SHARD.delayed, 0, -1, withscores=True)
        assert before + 12_000 <= due <= await now_ms(client) + 20_000
        # What was put aside is found again without the list of what was put aside.
        await client.delete(SHARD.delayed)
        (entry,) = await third.reap()
        assert entry.fields[b"id"] == b"suspect"

    on_queue(scenario)


def test_an_old_heartbeat_counts_only_where_it_can_mean_death(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        dead, heir = Engine(client, "dead"), Engine(client, "heir")
        await start(client, dead, "a", progress=True)
        await die(client, dead)
        assert await heir.reap(old_beats_count=False) == []
        await dead.call(scripts.retire(SHARD, "dead"))
        assert len(await heir.reap(old_beats_count=False)) == 1, "it has left"

    on_queue(scenario)


@pytest.mark.parametrize("count", [1, 2, 16])
def test_an_engine_without_room_takes_only_what_is_to_be_ended(on_queue: Any, count: int) -> None:
    """Wherever it stands among what dead engines hold and what was given back, and however much that is."""

    async def scenario(client: Client) -> None:
        dead, leaves, heir = Engine(client, "dead"), Engine(client, "leaves"), Engine(client, "heir")
        await leaves.beat()
        # Begun by one, held and given back by another: it has a record, but is not counted among what waits.
        await start(client, dead, "suspect", progress=False)
        for number in range(3):
            for name in ("runs", "cancelled", "late"):
                await start(client, dead, f"{name}{number}", progress=True)
            assert await cancel(client, f"cancelled{number}") == [b"requested"]
            await client.hset(SHARD.record(f"late{number}"), "deadline", 1)
            for engine in (dead, leaves):
                await raw_add(client, f"unread-{engine.owner}{number}")
                await engine.take()
        await die(client, dead)
        await leaves.reap(count=1, retry_delay_ms=0)
        await client.hset(SHARD.record("suspect"), "deadline", 1)
        await leaves.release()
        to_end, unknown = await heir.orphans(count)
        assert {entry.fields[b"id"] for entry in to_end} == {
            b"suspect",
            *(b"%s%d" % (name, number) for name in (b"cancelled", b"late") for number in range(3)),
        }
        unread = {b"unread-%s%d" % (name, number) for name in (b"dead", b"leaves") for number in range(3)}
        assert {entry.fields[b"id"] for entry in unknown} == unread
        for entry in to_end:
            assert isinstance(await heir.begin(entry, entry.fields[b"id"].decode()), scripts.BeginReply)
        to_end, unknown = await heir.orphans(count)
        assert to_end == [] and {entry.fields[b"id"] for entry in unknown} == unread
        rest = {entry.fields[b"id"] for entry in await heir.reap(count=50)}
        assert rest == unread | {b"runs%d" % number for number in range(3)}

    on_queue(scenario)


def test_a_suspect_that_is_not_to_run_again_is_not_kept_waiting(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        for name, change in (("a", {"cancel": 1}), ("b", {"deadline": 1}), ("c", {"attempt": 3})):
            dead, heir = Engine(client, f"dead{name}"), Engine(client, f"heir{name}")
            await start(client, dead, name, progress=False)
            await client.hset(SHARD.record(name), mapping=change)
            await heir.beat()
            await die(client, dead)
            (entry,) = await heir.reap()
            assert isinstance(await heir.begin(entry, name), scripts.BeginReply), name

    on_queue(scenario)
