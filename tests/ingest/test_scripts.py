"""The scripts against real servers: a request's way, repeated calls, duplicates, cancels, deadlines."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.exceptions import ResponseError

from pagemill.ingest import scripts
from pagemill.ingest.keys import GROUP
from pagemill.ingest.redis import Client, is_unavailable
from tests.ingest.bare_engine import (
    SHARD,
    Engine,
    cancel,
    delta,
    outstanding,
    raw_add,
    record,
    stored,
    submit,
)

DAY_MS = 86_400_000


def test_a_request_goes_from_submission_to_its_end_and_leaves_only_answers(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        engine = Engine(client, "e1")
        assert (await submit(client)).status == "ok"
        entry = await engine.take()
        begun = await engine.begin(entry)
        assert isinstance(begun, scripts.BeginReply)
        assert (begun.attempt, begun.seq, begun.seed, begun.cancelled) == (1, 0, 7, False)
        assert begun.deadline == begun.created + 60_000
        assert (await engine.append(1, 0, [delta(1), delta(2)])).seq == 2
        assert 60_000 < await client.pttl(SHARD.events("a")) <= 60_000 + scripts.GRACE_MS
        assert (await engine.finish(entry, 1, 2)).status == "ok"
        assert await stored(client) == [1, 2, 3]
        assert await outstanding(client) == (0, 0)
        assert (await record(client))["state"] == "completed"
        assert 3_500_000 < await client.pttl(SHARD.record("a")) <= 3_600_000
        assert 500_000 < await client.pttl(SHARD.events("a")) <= 600_000

    on_queue(scenario)


def test_every_script_may_be_repeated(on_queue: Any) -> None:
    """A reply that got lost makes the client send the same call again."""

    async def scenario(client: Client) -> None:
        engine = Engine(client, "e1")
        assert (await submit(client)).status == "ok"
        assert (await submit(client)).status == "repeated"
        assert await client.xlen(SHARD.streams[1]) == 1
        entry = await engine.take()
        first, second = await engine.begin(entry), await engine.begin(entry, seed=8)
        assert isinstance(first, scripts.BeginReply) and isinstance(second, scripts.BeginReply)
        assert (second.attempt, second.seed) == (first.attempt, first.seed) == (1, 7)
        for _ in range(2):
            assert (await engine.append(1, 0, [delta(1), delta(2)])).seq == 2
        # The repeated call may have grown meanwhile: only what is new is written.
        assert (await engine.append(1, 1, [delta(2), delta(3)])).seq == 3
        for _ in range(2):
            assert await engine.finish(entry, 1, 3) == scripts.WriteReply("ok", 4)
        assert await stored(client) == [1, 2, 3, 4]
        assert (await record(client))["attempt"] == "1"
        counters: Any = await client.hgetall(SHARD.statistics)
        assert counters[b"completed"] == counters[b"submitted"] == b"1" and counters[b"tokens"] == b"3"

    on_queue(scenario)


def test_scripts_are_sent_again_after_the_server_forgot_them(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        engine = Engine(client, "e1")
        await submit(client)
        entry = await engine.take()
        await engine.begin(entry)
        await client.script_flush()
        calls = [scripts.append(SHARD, "a", "e1", 1, 0, [delta(1)]), engine.finish_call(entry, 1, 1, "completed")]
        replies = await scripts.run(client, calls)
        assert replies == [b"ok 1 0 0 0", b"ok 2"]
        assert await stored(client) == [1, 2]

    on_queue(scenario)


def test_one_look_at_many_says_of_each_whether_it_may_go_on(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        engine = Engine(client, "e1")
        names = [f"r{number}" for number in range(40)]
        for number, name in enumerate(names):
            await submit(client, name, watch_ms=60_000 if number in (7, 8) else None)
            await engine.begin(await engine.take(), name)
        await client.hset(SHARD.record("r1"), "cancel", 1)
        await client.hset(SHARD.record("r2"), "owner", "e2")
        await client.hset(SHARD.record("r3"), "attempt", 2)
        await client.delete(SHARD.record("r4"))
        await client.set(SHARD.record("r5"), "of another type", ex=60)
        await client.delete(SHARD.watch("r7"))
        replies = await scripts.run(client, [scripts.stand(SHARD, name, "e1", 1) for name in names])
        assert replies[:5] == [b"ok", b"cancelled", b"taken over", b"taken over", b"gone"]
        assert isinstance(replies[5], ResponseError) and "WRONGTYPE" in str(replies[5])
        assert replies[6:] == [b"ok", b"unwatched", *[b"ok"] * 32]

    on_queue(scenario)


def test_one_call_writes_for_many_and_one_requests_trouble_harms_no_other(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        engine = Engine(client, "e1")
        names = [f"r{number}" for number in range(70)]
        for name in names:
            await submit(client, name)
            await engine.begin(await engine.take(), name)
        await client.set(SHARD.events("r3"), "of another type", ex=60)
        await client.hset(SHARD.record("r4"), "owner", "e2")
        await client.hset(SHARD.record("r5"), "deadline", "no number")
        await client.config_resetstat()
        calls = [
            scripts.append(SHARD, name, "e1", 1, 0, [delta(1), delta(2)][: 1 + n % 2]) for n, name in enumerate(names)
        ]
        replies = await scripts.run(client, calls)
        used: Any = await client.info("commandstats")
        assert used["cmdstat_evalsha"]["calls"] in (3, 6), "as often again where the script was not known"
        assert isinstance(replies[3], ResponseError) and "WRONGTYPE" in str(replies[3])
        assert replies[4] == b"stale" and isinstance(replies[5], ResponseError)
        for number, (name, reply) in enumerate(zip(names, replies, strict=True)):
            if number not in (3, 4, 5):
                assert reply == b"ok %d 0 0 0" % (1 + number % 2)
                assert await stored(client, name) == [1, 2][: 1 + number % 2]

        # A full server refuses all of it, in a way that says: later.
        await client.config_set("maxmemory", 1)
        try:
            replies = await scripts.run(
                client, [scripts.append(SHARD, f"r{n}", "e1", 1, 1, [delta(2)]) for n in (0, 2)]
            )
            assert [is_unavailable(reply) for reply in replies] == [True, True]
            # An end makes room, and engines that cannot write their heartbeat would seem dead.
            await engine.beat()
            assert await cancel(client, "r0") == [b"requested"]
        finally:
            await client.config_set("maxmemory", 0)
        assert await stored(client, "r0") == [1]

    on_queue(scenario)


def test_lost_events_are_reported_as_a_gap(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        engine = Engine(client, "e1")
        await submit(client)
        entry = await engine.take()
        await engine.begin(entry)
        assert await engine.append(1, 2, [delta(3)]) == scripts.WriteReply("gap", 0)
        assert await engine.finish(entry, 1, 2) == scripts.WriteReply("gap", 0)
        assert await stored(client) == []
        await client.flushall()
        assert (await engine.append(1, 0, [delta(1)])).status == "gone"
        assert (await engine.finish(entry, 1, 0)).status == "gone"
        assert await client.keys("*") == []

    on_queue(scenario)


@pytest.mark.parametrize("first_has_ended", [False, True])
@pytest.mark.parametrize("stream", [1, 2])
def test_a_raw_duplicate_is_removed_without_harm(on_queue: Any, first_has_ended: bool, stream: int) -> None:
    async def scenario(client: Client) -> None:
        engine, other = Engine(client, "e1"), Engine(client, "e2")
        await raw_add(client)
        entry = await engine.take()
        await engine.begin(entry)
        await engine.append(1, 0, [delta(1)])
        if first_has_ended:
            await engine.finish(entry, 1, 1)
        await raw_add(client, stream=stream)
        assert await other.begin(await other.take()) == "duplicate"
        if not first_has_ended:
            assert (await engine.append(1, 1, [delta(2)])).seq == 2
            assert (await engine.finish(entry, 1, 2)).status == "ok"
        assert await outstanding(client) == (0, 0)
        letters: Any = await client.xrange(SHARD.dead_letters)
        ((_, letter),) = letters
        assert letter[b"reason"] == b"duplicate_id" and letter[b"id"] == b"a" and letter[b"body"] == b'{"prompt":"x"}'
        assert (await record(client))["attempt"] == "1"

    on_queue(scenario)


def test_the_greatest_entry_that_there_can_be_is_one_like_others(
    on_queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server refuses to look beyond it, which ended every engine."""
    monkeypatch.setattr("pagemill.ingest.scripts.RELEASE_PAGE", 1)

    async def scenario(client: Client) -> None:
        first, second = Engine(client, "e1"), Engine(client, "e2")
        greatest = f"{2**64 - 1}-{2**64 - 1}".encode()
        await client.xadd(SHARD.streams[2], {"v": 1, "id": "a", "body": "{}"}, id=greatest)
        entry = await first.take()
        assert await scripts.run_one(client, scripts.oldest(SHARD)) == [0, 0, 0]
        await client.zadd(SHARD.heartbeats, {"e1": 0})  # it has left
        assert await second.orphans(count=1) == ([], [entry])
        assert await second.reap() == [entry]
        await second.release()
        assert await first.reap() == [entry]
        await client.xack(SHARD.streams[2], GROUP, greatest)
        call = scripts.Call("passed_over", SHARD.streams, (GROUP, "e1", 1, SHARD.base, *[b"0-0"] * 3))
        found, places = await scripts.run_one(client, call)
        assert (scripts.read_given(SHARD, found), places) == ([entry], [b"0-0"] * 3)

    on_queue(scenario)


def test_submitting_an_id_twice_is_refused(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        await submit(client)
        again = await submit(client, submission="another")
        assert (again.status, again.state) == ("duplicate", "queued")
        assert await client.xlen(SHARD.streams[1]) == 1

    on_queue(scenario)


def test_idempotency_key(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        assert (await submit(client, "a", idempotency_key="order-991")).status == "ok"
        assert (await submit(client, "a", idempotency_key="order-991")).status == "repeated"
        attached = await submit(client, "b", idempotency_key="order-991")
        assert (attached.status, attached.request_id) == ("attached", "a")
        conflict = await submit(client, "c", idempotency_key="order-991", body=b'{"prompt":"y"}')
        assert (conflict.status, conflict.request_id) == ("conflict", "a")
        assert (await submit(client, "d", idempotency_key="order-991", tenant="other")).status == "ok"
        assert await client.xlen(SHARD.streams[1]) == 2
        ttl = await client.pttl(SHARD.idempotency("default", "order-991"))
        assert DAY_MS - 60_000 < ttl <= DAY_MS

    on_queue(scenario)


def test_cancelling_what_waits_ends_it_at_once(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        engine = Engine(client, "e1")
        await submit(client, as_blob=True)
        assert await client.exists(SHARD.blob("a"))
        assert await cancel(client) == [b"cancelled"]
        assert await cancel(client) == [b"ended", b"cancelled"]
        assert await stored(client) == [1]
        assert await outstanding(client) == (0, 0)
        assert not await client.exists(SHARD.blob("a"))

        # Delivered to an engine that has not begun it yet: the engine finds nothing to begin.
        await submit(client, "b")
        entry = await engine.take()
        assert await cancel(client, "b") == [b"cancelled"]
        assert await engine.begin(entry, "b") == "lost"
        assert await outstanding(client) == (0, 0)

    on_queue(scenario)


@pytest.mark.parametrize("by_hand", [False, True])
def test_an_acknowledged_cancel_is_never_followed_by_completed(on_queue: Any, by_hand: bool) -> None:
    async def scenario(client: Client) -> None:
        engine = Engine(client, "e1")
        await submit(client)
        entry = await engine.take()
        await engine.begin(entry)
        assert not (await engine.append(1, 0, [delta(1)])).cancel
        if by_hand:
            await client.hset(SHARD.record("a"), "cancel", "1")
        else:
            assert await cancel(client) == [b"requested"]
        assert (await engine.append(1, 1, [delta(2)])).cancel
        assert (await engine.finish(entry, 1, 2)).status == "cancelled"
        assert await stored(client) == [1, 2]
        assert (await engine.finish(entry, 1, 2, "cancelled")).status == "ok"
        assert await cancel(client) == [b"ended", b"cancelled"]

    on_queue(scenario)


def test_a_cancel_before_its_request_is_kept(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        engine = Engine(client, "e1")
        assert await cancel(client) == [b"noted"]
        assert 0 < await client.pttl(SHARD.record("a")) <= 3_600_000
        await raw_add(client)
        begun = await engine.begin(await engine.take())
        assert isinstance(begun, scripts.BeginReply) and begun.cancelled
        assert await cancel(client, "b") == [b"noted"]
        await submit(client, "b")
        begun = await engine.begin(await engine.take(), "b")
        assert isinstance(begun, scripts.BeginReply) and begun.cancelled

    on_queue(scenario)


def test_deadline_counts_from_acceptance_on_the_servers_clock(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        engine = Engine(client, "e1")
        seconds, _ = await client.time()
        await client.xadd(SHARD.streams[1], {"v": 1, "id": "a", "body": "{}"}, id=f"{seconds * 1000 - 50_000}-0")
        begun = await engine.begin(await engine.take())
        assert isinstance(begun, scripts.BeginReply)
        assert begun.created == seconds * 1000 - 50_000 and begun.deadline == begun.created + 60_000
        # An id made by hand says nothing about time.
        await client.xadd(SHARD.streams[0], {"v": 1, "id": "b", "body": "{}"}, id="1-1")
        begun = await engine.begin(await engine.take(), "b")
        assert isinstance(begun, scripts.BeginReply) and begun.created == begun.now

    on_queue(scenario)


def test_a_deadline_is_seen_by_every_script_that_goes_on_with_a_request(on_queue: Any) -> None:
    """By the server's clock: at begin, append and reap. `submit` starts it, and ends what has waited too long."""

    async def scenario(client: Client) -> None:
        engine, heir = Engine(client, "e1"), Engine(client, "e2")
        await engine.beat()
        for name in ("a", "b", "c"):
            await submit(client, name, ttl_ms=60_000)
        entries = [await engine.take() for _ in range(2)]
        begun = await engine.begin(entries[0], "a")
        assert isinstance(begun, scripts.BeginReply) and begun.now < begun.deadline
        assert not (await engine.append(1, 0, [delta(1)])).expired
        for name in ("a", "b", "c"):
            await client.hset(SHARD.record(name), "deadline", begun.now - 1)
        await client.zadd(SHARD.waiting, dict.fromkeys(await client.zrange(SHARD.waiting, 0, -1), begun.now - 1))
        assert (await engine.append(1, 1, [delta(2)])).expired
        late = await engine.begin(entries[1], "b")
        assert isinstance(late, scripts.BeginReply) and late.now > late.deadline
        # Nobody has taken `c`: the next submission tells its reader.
        await submit(client, "d")
        assert await client.hget(SHARD.record("c"), "state") == b"expired"
        # The engine dies. What it ran had no token since `b` was begun, and would wait for its retry; not past its end.
        await client.zadd(SHARD.heartbeats, {"e1": 1})
        assert await heir.orphans() == (entries, [])
        taken = await heir.begin(entries[0], "a")
        assert isinstance(taken, scripts.BeginReply) and taken.now > taken.deadline

    on_queue(scenario)


def test_dead_letters_keep_what_was_sent(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        engine = Engine(client, "e1")
        await client.xadd(SHARD.streams[1], {"v": 9, "x": b"\xff", "body": b"y" * 100_000})
        entry = await engine.take()
        for _ in range(2):
            await engine.call(scripts.dead_letter(entry, "e1", "unknown_version", "field v must be 1"))
        letters: Any = await client.xrange(SHARD.dead_letters)
        ((_, letter),) = letters
        assert letter[b"reason"] == b"unknown_version" and letter[b"x"] == b"\xff"
        assert letter[b"entry"] == entry.entry_id and len(letter[b"body"]) == 65536
        assert await outstanding(client) == (0, 0)

        await submit(client)
        entry = await engine.take()
        await engine.begin(entry)
        await engine.finish(entry, 1, 0, "failed", dead_letter="poison")
        letters = await client.xrange(SHARD.dead_letters)
        assert letters[1][1][b"reason"] == b"poison" and letters[1][1][b"attempts"] == b"1"

    on_queue(scenario)


def test_live_events_are_published_as_they_are_stored(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        engine = Engine(client, "e1")
        await submit(client)
        entry = await engine.take()
        await engine.begin(entry)
        pubsub: Any = client.pubsub()
        await pubsub.subscribe(SHARD.channel("a"))
        await pubsub.get_message(timeout=5)
        await engine.append(1, 0, [delta(1), delta(2)])
        await engine.finish(entry, 1, 2)
        live = []
        while len(live) < 3:
            async with asyncio.timeout(60):
                message = await pubsub.get_message(timeout=5)
            live.append(message["data"])
        entries: Any = await client.xrange(SHARD.events("a"))
        assert live == [b"%d %s" % (n + 1, fields[b"e"]) for n, (_, fields) in enumerate(entries)]
        assert [entry_id for entry_id, _ in entries] == [b"1-0", b"2-0", b"3-0"]
        await pubsub.aclose()

    on_queue(scenario)
