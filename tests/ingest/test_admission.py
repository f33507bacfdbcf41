"""Admission in the queue: what `submit` and `accept` refuse, and that the books of what waits are exact."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import orjson
import pytest

from pagemill.engine.acceptance import Acceptance, QueueCaps
from pagemill.engine.errors import RequestError
from pagemill.engine.forecast import Outlook
from pagemill.engine.policy import Backlog
from pagemill.ingest import scripts
from pagemill.ingest.entries import Entry
from pagemill.ingest.keys import GROUP
from pagemill.ingest.redis import Client
from tests.ingest.bare_engine import SHARD, Engine, cancel, outstanding, raw_add, record, stored, submit

KEEPING = scripts.Keeping()


async def describe(client: Client, owner: str = "e1", **description: Any) -> None:
    """An engine that lives and says so of itself."""
    await scripts.run_one(client, scripts.renew(SHARD, owner, orjson.dumps(description)))


async def accept(client: Client, entry_id: bytes, request_id: str = "a", **options: Any) -> str:
    stream = options.pop("stream", 1)
    defaults: dict[str, Any] = {"ttl_ms": 60_000, "tenant": "default", "tokens": 10, "admission": scripts.Admission()}
    call = scripts.accept(Entry(SHARD, stream, entry_id, {}), request_id, **{**defaults, **options, "keeping": KEEPING})
    reply: bytes = await scripts.run_one(client, call)
    return reply.decode()


async def sweep(client: Client, owner: str = "e1", first: int = 0, count: int = 100) -> list[Any]:
    call = scripts.sweep(SHARD, owner, first=first, count=count, keeping=KEEPING)
    reply: list[Any] = await scripts.run_one(client, call)
    return reply


async def load(client: Client) -> dict[str, int]:
    fields: Any = await client.hgetall(SHARD.load)
    return {name.decode(): int(value) for name, value in fields.items()}


async def make_overdue(client: Client, request_id: str = "a") -> None:
    await client.hset(SHARD.record(request_id), "deadline", "1")
    for member in await client.zrange(SHARD.waiting, 0, -1):
        if member.startswith(request_id.encode() + b" "):
            await client.zadd(SHARD.waiting, {member: 1})


def caps(*values: int | None) -> scripts.Admission:
    return scripts.Admission((*values, *(None,) * (4 - len(values))))


@pytest.mark.parametrize(
    ("admission", "second", "words"),
    [
        (caps(1), {}, "1 requests wait, max_queued_requests is 1"),
        (caps(None, 149), {}, "100 prompt tokens wait, max_queued_prompt_tokens is 149; this request has about 50"),
        (caps(None, None, 1), {}, "1 requests of the tenant wait, max_tenant_queued_requests is 1"),
        (
            caps(None, None, None, 120),
            {},
            "100 prompt tokens of the tenant wait, max_tenant_queued_prompt_tokens is 120",
        ),
    ],
)
def test_submit_refuses_past_the_caps(on_queue: Any, admission: scripts.Admission, second: Any, words: str) -> None:
    async def scenario(client: Client) -> None:
        assert (await submit(client, "a", admission=admission, tokens=100)).status == "ok"
        refused = await submit(client, "b", admission=admission, tokens=50)
        assert refused.status == "refused"
        error = orjson.loads(refused.error or b"")
        assert error["code"] == "queue_full" and words in error["message"] and error["retry_after_ms"] == 1000
        # Nothing but the answer is left, and it is the answer to a repeated call as well.
        assert await client.xlen(SHARD.streams[1]) == 1
        assert await load(client) == {"n1": 1, "t1": 100, "n@default": 1, "t@default": 100}
        assert await submit(client, "b", admission=admission, tokens=50) == refused
        ((_, fields),) = await client.xrange(SHARD.events("b"))
        done = orjson.loads(fields[b"e"])
        assert (done["type"], done["state"], done["seq"], done["error"]) == ("done", "rejected", 1, error)
        assert (await record(client, "b"))["state"] == "rejected"
        # A flood of refusals must not fill the server.
        assert 10_000 < await client.pttl(SHARD.record("b")) <= 60_000
        assert 10_000 < await client.pttl(SHARD.events("b")) <= 60_000
        # The same id may come again, when there is room, or be taken by another tenant.
        assert await cancel(client, "a") == [b"cancelled"]
        assert (await submit(client, "b", admission=admission, tokens=50, submission="later")).status == "ok"
        assert await stored(client, "b") == []
        assert await load(client) == {"n1": 1, "t1": 50, "n@default": 1, "t@default": 50}

    on_queue(scenario)


def test_an_idempotency_key_is_free_after_a_refusal(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        await submit(client, "a")
        assert (await submit(client, "b", admission=caps(1), idempotency_key="k")).status == "refused"
        assert (await submit(client, "c", idempotency_key="k")).status == "ok"

    on_queue(scenario)


def test_tenants_have_caps_of_their_own(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        admission = caps(None, None, 1)
        assert (await submit(client, "a", admission=admission, tenant="x")).status == "ok"
        assert (await submit(client, "b", admission=admission, tenant="x")).status == "refused"
        assert (await submit(client, "c", admission=admission, tenant="y")).status == "ok"

    on_queue(scenario)


def test_raw_entries_that_nobody_has_looked_at_count_as_waiting(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        for number in range(3):
            await raw_add(client, f"r{number}")
        assert (await submit(client, "a", admission=caps(3))).status == "refused"
        await Engine(client, "e1").take()  # delivered: it does not wait any more
        assert (await submit(client, "a", admission=caps(3), submission="2")).status == "ok"

    on_queue(scenario)


def test_without_an_engine(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        strict = scripts.Admission(heartbeat_timeout_ms=5_000, needs_engine=True)
        refused = await submit(client, "a", admission=strict)
        error = orjson.loads(refused.error or b"")
        assert (error["code"], error["retry_after_ms"]) == ("no_engine", 5_000)
        await describe(client)
        assert (await submit(client, "b", admission=strict)).status == "ok"
        await client.zadd(SHARD.heartbeats, {"e1": 1})
        assert (await submit(client, "c", admission=strict)).status == "refused"
        assert (await submit(client, "d")).status == "ok"  # the default keeps it until an engine comes

    on_queue(scenario)


def test_engines_say_what_may_wait_for_them(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        for owner, places in (("e1", 2), ("e2", 1)):
            await describe(client, owner, waiting_requests=1, caps={"places": places, "token_places": None})
        assert (await submit(client, "a")).status == "ok"  # three places, of which two are taken inside
        refused = await submit(client, "b")
        assert b"3 requests wait, max_waiting_requests of all engines is 3" in (refused.error or b"")
        # An engine without such a cap takes any number.
        await describe(client, "e2", waiting_requests=1, caps={"places": None})
        assert (await submit(client, "c")).status == "ok"
        # The queue's own caps hold for producers that do not know them.
        await describe(client, "e2", caps={"requests": 2})
        refused = await submit(client, "d")
        assert b"2 requests wait, max_queued_requests is 2" in (refused.error or b"")

    on_queue(scenario)


OUTLOOK = {"times": [0, 10, 20], "admitted": [0, 10, 20], "mean_tokens": 100}


def test_deadlines_that_cannot_be_met_are_refused(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        await describe(client, outlook=OUTLOOK, waiting_requests=2, waiting_tokens=200)
        for number in range(10):
            assert (await submit(client, f"r{number}", tokens=100)).status == "ok"
        # 12 before it, one a second: the 13th starts after 13 s, which counts as 9.25.
        assert (await submit(client, "late", tokens=100, ttl_ms=8_500)).status == "refused"
        error = orjson.loads((await record(client, "late"))["error"])
        assert (error["code"], error["param"]) == ("deadline_unreachable", "ttl_ms")
        assert 600 <= error["retry_after_ms"] <= 800
        assert (await submit(client, "patient", tokens=100, ttl_ms=9_500)).status == "ok"
        # Only what is at its priority and above stands before it.
        assert (await submit(client, "urgent", tokens=100, ttl_ms=3_000, priority=0)).status == "ok"
        # A second engine doubles what is admitted by then.
        await describe(client, "e2", outlook=OUTLOOK)
        assert (await submit(client, "late", tokens=100, ttl_ms=8_500, submission="2")).status == "ok"
        # An engine that does not know yet, or says what nobody understands, may be fast.
        for odd in ({"times": [0, None], "admitted": [0, 1], "mean_tokens": 1}, {"times": "x"}, [], 7):
            await describe(client, "e3", outlook=odd, waiting_requests="many", caps=[])
            assert (await submit(client, f"odd-{odd}".replace(" ", ""), tokens=100, ttl_ms=1_000)).status == "ok"
        await client.zrem(SHARD.heartbeats, "e3")
        await client.zrem(SHARD.heartbeats, "e1")
        assert (await submit(client, "x", tokens=100, ttl_ms=1_000)).status == "refused"
        await describe(client, "e2", outlook=None)
        assert (await submit(client, "y", tokens=100, ttl_ms=1_000)).status == "ok"

    on_queue(scenario)


def test_an_engine_that_leaves_starts_nothing_any_more(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        own = {"places": 5, "token_places": 10_000, "requests": 9}
        await describe(client, "e1", outlook=OUTLOOK, caps=own)
        await describe(client, "e2", outlook=OUTLOOK, caps=own)
        for number in range(5):
            assert (await submit(client, f"r{number}", tokens=100)).status == "ok"
        # The two of them start six within 3 s, one alone does not.
        assert (await submit(client, "both", tokens=100, ttl_ms=3_000)).status == "ok"
        await describe(client, "e2", outlook=OUTLOOK, caps=own, leaving=True)
        refused = await submit(client, "one", tokens=100, ttl_ms=3_000)
        assert b"max_waiting_requests of all engines is 5" in (refused.error or b"")
        own["places"] = own["token_places"] = None
        await describe(client, "e1", outlook=OUTLOOK, caps=own)
        refused = await submit(client, "late", tokens=100, ttl_ms=3_000)
        assert orjson.loads(refused.error or b"")["code"] == "deadline_unreachable"
        # Nobody can tell when an engine comes, but one that leaves lives, and the caps of the queue are still these.
        await describe(client, "e1", outlook=OUTLOOK, caps=own, leaving=True)
        strict = scripts.Admission(heartbeat_timeout_ms=5_000, needs_engine=True)
        for name in ("two", "three", "four"):
            assert (await submit(client, name, tokens=100, ttl_ms=3_000, admission=strict)).status == "ok"
        refused = await submit(client, "five", tokens=100, ttl_ms=3_000, admission=strict)
        assert b"9 requests wait, max_queued_requests is 9" in (refused.error or b"")

    on_queue(scenario)


def test_the_forecast_is_that_of_the_engines_own_door(on_queue: Any) -> None:
    """Random outlooks and backlogs: the script and `Acceptance` refuse the same, with the same hint."""
    random_ = random.Random(5)

    async def scenario(client: Client) -> None:
        refusals = 0
        for number in range(60):
            await client.flushall()
            times = sorted(random_.uniform(0.0, 20.0) for _ in range(random_.randint(2, 9)))
            admitted = sorted(random_.uniform(0.0, 20.0) for _ in times)
            admitted[0] = 0.0
            outlook = Outlook(tuple(times), tuple(admitted), random_.uniform(1.0, 200.0))
            told = {"times": times, "admitted": admitted, "mean_tokens": outlook.mean_tokens}
            sizes = [random_.randint(1, 300) for _ in range(random_.randint(1, 12))]
            inside = Backlog(random_.randint(0, 3), random_.randint(0, 300))
            await describe(client, outlook=told, waiting_requests=inside.requests, waiting_tokens=inside.tokens)
            await client.zincrby(SHARD.heartbeats, 60_000, "e1")  # what it tells does not age while this goes on
            for position, size in enumerate(sizes):
                # A deadline of a week: these are here to wait.
                await submit(client, f"r{position}", tokens=size, ttl_ms=604_800_000)
            accepted = [name for name in range(len(sizes)) if (await record(client, f"r{name}"))["state"] == "queued"]
            ahead = Backlog(inside.requests + len(accepted), inside.tokens + sum(sizes[name] for name in accepted))
            left_s = random_.uniform(0.2, 20.0)
            tokens = random_.randint(1, 300)
            door = Acceptance(QueueCaps())
            door.count(1)
            expected: RequestError | None = None
            try:
                door.accept(tokens, outlook=outlook, ahead=ahead, time_left_s=left_s)
            except RequestError as error:
                expected = error
            reply = await submit(client, "new", tokens=tokens, ttl_ms=int(left_s * 1000))
            assert reply.status == ("ok" if expected is None else "refused"), number
            if expected is not None:
                refusals += 1
                hint = orjson.loads(reply.error or b"")["retry_after_ms"]
                assert hint == pytest.approx(expected.retry_after_ms, rel=0.05, abs=30)
        assert 10 < refusals < 55

    on_queue(scenario)


def test_a_raw_entry_gets_its_record_or_its_answer(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        entries = [await raw_add(client, f"r{number}") for number in range(3)]
        assert await accept(client, entries[0], "r0", admission=caps(1)) == "ok"
        assert await accept(client, entries[0], "r0", admission=caps(1)) == "known"
        kept = await record(client, "r0")
        assert kept["state"] == "queued" and int(kept["deadline"]) == int(kept["created"]) + 60_000
        assert await accept(client, entries[1], "r1", admission=caps(1)) == "rejected"
        assert orjson.loads((await record(client, "r1"))["error"])["code"] == "queue_full"
        assert await stored(client, "r1") == [1]
        wrong = b'{"code":"invalid_request","message":"m"}'
        assert await accept(client, entries[2], "r2", error=wrong, dead_letter="unreadable") == "rejected"
        assert await client.xlen(SHARD.dead_letters) == 1
        assert await client.xlen(SHARD.streams[1]) == 1
        # The engine that takes it later finds the record, and the books are even again.
        engine = Engine(client, "e1")
        entry = await engine.take()
        begun = await engine.begin(entry, "r0")
        assert isinstance(begun, scripts.BeginReply) and begun.deadline == int(kept["deadline"])
        assert await load(client) == {} and not await client.exists(SHARD.waiting)
        assert await accept(client, entry.entry_id, "r0") == "known"

    on_queue(scenario)


def test_a_delivered_entry_is_its_engines_and_nobody_elses(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        entry_id = await raw_add(client)
        engine = Engine(client, "e1")
        entry = await engine.take()
        assert await accept(client, entry_id, admission=caps(1)) == "taken"
        assert (await scripts.run_one(client, scripts.dead_letter(entry, "", "x", "x")))[0] == b"lost"
        assert await outstanding(client) == (1, 1)
        assert not await client.exists(SHARD.record("a"))
        assert isinstance(await engine.begin(entry), scripts.BeginReply)
        await client.xdel(SHARD.streams[1], await raw_add(client, "b"))
        assert await accept(client, b"99999999999999-0", "b") == "taken"

    on_queue(scenario)


def test_a_raw_entry_that_was_given_back_is_one_that_waits(on_queue: Any) -> None:
    """It gets its record or its answer, is counted, and ends in time though nobody has room."""

    async def scenario(client: Client) -> None:
        leaves, heir = Engine(client, "leaves"), Engine(client, "heir")
        entries = {}
        for name in ("late", "full", "bad", "runs"):
            await raw_add(client, name)
            entries[name] = (await leaves.take()).entry_id
        await leaves.release()
        assert await accept(client, entries["late"], "late") == "ok"
        assert await accept(client, entries["late"], "late") == "known"
        assert (await load(client))["n1"] == 1
        assert await accept(client, entries["full"], "full", admission=caps(1)) == "rejected"
        bury = scripts.dead_letter(Entry(SHARD, 1, entries["bad"], {}), "", "no_id", "x")
        assert await scripts.run_one(client, bury) == [b"ok"]
        await make_overdue(client, "late")
        assert (await sweep(client))[:2] == [0, []]
        assert (await record(client, "late"))["state"] == "expired" and await load(client) == {}
        # Whoever has room takes what is left, and nothing is remembered of the others.
        assert await accept(client, entries["runs"], "runs") == "ok"
        (entry,) = await heir.reap()
        assert isinstance(await heir.begin(entry, "runs"), scripts.BeginReply)
        assert await accept(client, entries["runs"], "runs") == "known"
        assert await load(client) == {} and not await client.exists(SHARD.waiting, SHARD.delayed)
        assert await outstanding(client) == (1, 1)

    on_queue(scenario)


def test_a_raw_entry_that_was_cancelled_or_came_too_late_is_answered(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        await cancel(client, "a")
        assert await accept(client, await raw_add(client, "a"), "a") == "cancelled"
        seconds, _ = await client.time()
        old: Any = await client.xadd(SHARD.streams[0], {"v": 1, "id": "b"}, id=f"{seconds * 1000 - 90_000}-0")
        assert await accept(client, old, "b", stream=0) == "expired"
        first = await raw_add(client, "c")
        assert await accept(client, first, "c") == "ok"
        assert await accept(client, await raw_add(client, "c"), "c") == "duplicate"
        assert await client.xlen(SHARD.dead_letters) == 1
        assert await outstanding(client) == (1, 0)

    on_queue(scenario)


def test_what_waits_too_long_or_is_cancelled_by_hand_ends_without_an_engine(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        for name in ("a", "b", "c"):
            await submit(client, name, as_blob=name == "a")
        await make_overdue(client, "a")
        await client.hset(SHARD.record("b"), "cancel", "1")
        assert (await sweep(client))[:2] == [0, []]
        states = [(await record(client, name))["state"] for name in ("a", "b", "c")]
        assert states == ["expired", "cancelled", "queued"]
        assert not await client.exists(SHARD.blob("a"))
        assert await outstanding(client) == (1, 0)
        assert (await load(client))["n1"] == 1
        # A long list is looked at piece by piece.
        for number in range(4):
            await submit(client, f"r{number}")
        assert (await sweep(client, first=0, count=2))[0] == 2
        assert (await sweep(client, first=4, count=2))[0] == 0
        # Where no engine lives, the next request makes room of what is overdue.
        for number in range(4):
            await make_overdue(client, f"r{number}")
        assert (await submit(client, "d", admission=caps(2))).status == "ok"
        assert await client.xlen(SHARD.streams[1]) == 2

    on_queue(scenario)


def test_what_was_given_back_and_is_over_goes_to_an_engine_that_ends_it(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        engine = Engine(client, "e1")
        await submit(client, tokens=7)
        entry = await engine.take()
        await engine.begin(entry)
        await engine.append(1, 0, [b'{"seq":1}'])
        await engine.release(running=True)
        assert await load(client) == {"n1": 1, "t1": 7, "n@default": 1, "t@default": 7}
        await make_overdue(client)
        _, ((stream, entry_id, fields),), _ = await sweep(client, "e2")
        assert (stream, entry_id, fields[:2]) == (1, entry.entry_id, [b"v", b"1"])
        assert await load(client) == {}
        heir = Engine(client, "e2")
        begun = await heir.begin(entry)
        assert isinstance(begun, scripts.BeginReply) and begun.now > begun.deadline
        assert (await heir.finish(entry, 2, 1, "expired")).status == "ok"

    on_queue(scenario)


def test_the_books_are_even_whatever_happens(on_queue: Any) -> None:
    """Random operations of producers, engines and strangers; the sums always equal what is on the waiting list, and
    are nothing when nothing waits."""
    random_ = random.Random(11)

    async def check(client: Client) -> None:
        sums: dict[str, int] = {}
        for member in await client.zrange(SHARD.waiting, 0, -1):
            _, stream, _, tokens, tenant = member.decode().split()
            for name, by in ((f"n{stream}", 1), (f"t{stream}", int(tokens)), (f"n@{tenant}", 1)):
                sums[name] = sums.get(name, 0) + by
            sums[f"t@{tenant}"] = sums.get(f"t@{tenant}", 0) + int(tokens)
        assert await load(client) == {name: value for name, value in sums.items() if value}

    async def scenario(client: Client) -> None:
        engine = Engine(client, "e1")
        await engine.beat()
        running: list[tuple[Entry, str, int]] = []
        for number in range(300):
            name = f"r{random_.randrange(40)}"
            match random_.randrange(8):
                case 0 | 1:
                    options = {"tenant": random_.choice("xyz"), "tokens": random_.randint(0, 9)}
                    await submit(client, name, submission=str(number), priority=random_.randrange(3), **options)
                case 2:
                    stream = random_.randrange(3)
                    await accept(client, await raw_add(client, name, stream), name, stream=stream)
                case 3:
                    await cancel(client, name)
                case 4 if await client.xlen(SHARD.streams[1]):
                    reply: Any = await client.xreadgroup(GROUP, "e1", {SHARD.streams[1]: ">"}, count=1)
                    for _, ((entry_id, fields),) in reply:
                        entry = Entry(SHARD, 1, entry_id, fields)
                        request_id = fields[b"id"].decode()
                        begun = await engine.begin(entry, request_id)
                        if isinstance(begun, scripts.BeginReply):
                            running.append((entry, request_id, begun.attempt))
                case 5 if running:
                    await engine.release(running=True)
                    running.clear()
                case 6 if running:
                    entry, request_id, attempt = running.pop()
                    await engine.finish(entry, attempt, 0, "failed", request_id=request_id)
                case 7:
                    if random_.random() < 0.3:
                        await client.delete(SHARD.record(name))
                    else:
                        await make_overdue(client, name)
                    await sweep(client, first=random_.randrange(5), count=10)
            await check(client)
        for member in await client.zrange(SHARD.waiting, 0, -1):
            await make_overdue(client, member.split()[0].decode())
        await sweep(client)
        await check(client)
        assert await load(client) == {}
        await client.flushall()  # records that were deleted on purpose leave entries behind

    on_queue(scenario)


def test_concurrent_submissions_never_pass_a_cap(on_queue: Any) -> None:
    async def scenario(client: Client) -> None:
        replies = await asyncio.gather(*(submit(client, f"r{n}", admission=caps(5)) for n in range(40)))
        assert sum(reply.status == "ok" for reply in replies) == 5
        assert await client.xlen(SHARD.streams[1]) == 5

    on_queue(scenario)
